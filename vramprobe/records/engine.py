"""EngineMemory: where an inference engine says that its GPU memory goes; ServedOn: what of it fits on a GPU;
RequestAnswer: its answer to a request.

In: an engine's own figures. Out: frozen values in a profile's record. Those of EngineMemory are the engine's, rounded
as it prints them.
"""

from typing import Literal

from vramprobe.records.frozen import FrozenModel


class EngineMemory(FrozenModel):
    """One engine's figures; null where its release does not say so."""

    engine: Literal["vllm"]
    version: str | None = None
    worker: int | None = None  # of an account of one of several workers: its rank
    utilization: float | None = None  # gpu_memory_utilization
    requested_gib: float | None = None  # that share of the GPU: weights, activations and cache together
    weights_gib: float | None = None
    non_torch_gib: float | None = None  # the driver's part while profiling: kernels, NCCL
    consumed_gib: float | None = None  # of the GPU once it has profiled itself: weights, buffers, the driver's part
    activation_peak_gib: float | None = None  # torch's peak above the weights, by a run on dummy tokens
    graph_gib: float | None = None  # CUDA graphs, as captured
    graph_estimated_gib: float | None = None
    kv_cache_gib: float | None = None
    needed_gib: float | None = None  # cache of one request of length_tokens, where the engine refuses to start
    longest_tokens: int | None = None  # the request that it says would fit then
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    length_tokens: int | None = None  # of a request, for max_concurrency
    max_concurrency: float | None = None  # requests of that length at once


class ServedOn(FrozenModel):
    """Capacity of the same engine with the same settings on a GPU, computed from its account (profile/served.py)."""

    gpu: str
    verdict: Literal["fits", "does not fit"]  # one request of length_tokens
    kv_cache_gib: float  # below 0: weights and activations alone are too much
    length_tokens: int
    max_concurrency: float
    longest_request_tokens: int | None  # null with sliding windows or state spaces
    settings: tuple[str, ...] = ()  # of which each would make it fit


class RequestAnswer(FrozenModel):
    """Answer of a server under --requests to one request; one of the two is null."""

    completion_tokens: int | None
    error: str | None
