"""EngineMemory: where an inference engine says that its GPU memory goes; Answer: what it answered to a request.

In: an engine's own figures. Out: a frozen value in a profile's record. They are the engine's, rounded as it prints
them; nothing is computed from them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class EngineMemory(BaseModel):
    """One engine's figures; null where its release does not say so."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    engine: Literal["vllm"]
    version: str | None = None
    weights_gib: float | None = None
    non_torch_gib: float | None = None  # the driver's part while profiling: kernels, NCCL
    activation_peak_gib: float | None = None  # torch's peak above the weights, by a run on dummy tokens
    graph_gib: float | None = None  # CUDA graphs, as captured
    graph_estimated_gib: float | None = None
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    length_tokens: int | None = None  # of a request, for max_concurrency
    max_concurrency: float | None = None  # requests of that length at once


class Answer(BaseModel):
    """What a server under --requests answered to one request; one of both is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    completion_tokens: int | None
    error: str | None
