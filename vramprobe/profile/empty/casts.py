"""Empty weights that are cast on the host while they are loaded: the copy takes no memory, as the files do not.

In: transformers' loader as it is imported. Out: its cast of a large tensor of zeros is fresh memory, which nobody has
written to: it is counted, reads as zeros and has no pages. Real weights are cast as ever.
"""

import functools
import math

#: glibc maps memory anew for more than this, whatever was freed before.
_FRESH_BYTES = 32 << 20
_SAMPLES = 1024


def serve(module):
    """transformers.core_model_loading, since 5."""
    plain = getattr(module, "_materialize_copy", None)
    if plain is None:
        return
    import torch

    @functools.wraps(plain)
    def materialize(tensor, device=None, dtype=None):
        on_host = device is None or torch.device(device).type == "cpu"
        if dtype is None or not on_host or math.prod(_shape(tensor)) * dtype.itemsize <= _FRESH_BYTES:
            return plain(tensor, device=device, dtype=dtype)
        whole = tensor[...]
        if whole.device.type != "cpu" or whole.dtype == dtype or not _is_empty(whole):
            return plain(whole, device=device, dtype=dtype)
        return torch.empty(whole.shape, dtype=dtype, device="cpu")

    module._materialize_copy = materialize


def _shape(tensor):
    return tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape  # a slice of safetensors'


def _is_empty(tensor):
    """Whether all of many values are 0: of trained weights some are not."""
    values = tensor.reshape(-1)
    return not values[:: max(1, values.numel() // _SAMPLES)].count_nonzero()
