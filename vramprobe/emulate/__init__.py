"""A GPU without a GPU: NVIDIA's real software stack above, a CUDA driver of our own below.

In: an installation of torch's CUDA build, a card of the catalog. Out: environment variables under which any process
sees that card: memory, streams, errors and NVML are true, kernels compute nothing. Lines it may not cross: it needs no
NVIDIA library, header or device, changes nothing of theirs, imports torch in ``values`` alone, and ends a run at a
function that it does not know rather than answer with garbage.
"""
