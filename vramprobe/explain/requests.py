"""A request's bytes → the tensors of a model that have this size.

In: the bytes as a message prints them, and the dimensions of a model that the user or the log has named. Out: names,
most likely first. An equal size is a hint and no proof; without a model there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vramprobe.allocator.config import AllocatorConfig
from vramprobe.architecture.parts import Architecture

_BYTES = {4: "fp32", 2: "bf16 or fp16"}
_MAX_NAMES = 3


@dataclass(frozen=True)
class Factors:
    """What is known of the run; None where it is not."""

    model: str  # the catalog's name
    architecture: Architecture
    batch_size: int | None = None
    seq_len: int | None = None
    num_gpus: int | None = None


def tensors_of_size(requested: int, half_unit: int, factors: Factors) -> list[str]:
    """At most three names of tensors whose request has ``requested`` bytes, which is printed to ±``half_unit``."""
    config = AllocatorConfig()
    found = [
        name
        for name, size in _candidates(factors)
        if min(abs(requested - size), abs(requested - config.allocation_size(config.round_size(size)))) <= half_unit
    ]
    return list(dict.fromkeys(found))[:_MAX_NAMES]


def _candidates(factors: Factors) -> Iterator[tuple[str, int]]:
    it, batch, seq = factors.architecture, factors.batch_size, factors.seq_len
    for width, dtype in _BYTES.items():
        if batch and seq:
            yield (
                f"logits: {batch} × {seq} tokens × {it.vocab_size} vocabulary in {dtype}",
                batch * seq * it.vocab_size * width,
            )
            scores = batch * it.num_heads * seq * seq
            yield f"eager attention scores: {batch} × {it.num_heads} heads × {seq}² in {dtype}", scores * width
        for num_ranks in dict.fromkeys((1, factors.num_gpus or 1)):
            share = "" if num_ranks == 1 else f" / {num_ranks} GPUs"
            yield f"all {it.num_params:,} parameters{share} in {dtype}", -(-it.num_params // num_ranks) * width
        layer = sum(parameter.numel for parameter in it.parameters if parameter.per_layer and parameter.only != "dense")
        yield f"one layer's {layer:,} parameters in {dtype}", layer * width
        for parameter in it.parameters:
            if parameter.numel * width >= 2**20:
                shape = " × ".join(map(str, parameter.shape))
                yield (
                    f"{parameter.module} ({shape}) in {dtype}: a weight, its gradient or a copy",
                    parameter.numel * width,
                )
