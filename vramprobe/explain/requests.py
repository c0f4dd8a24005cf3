"""A request's bytes → the tensors of a model that have this size, and the shape that the failing line itself names.

In: the bytes as a message prints them, the dimensions of a model that the user or the log has named, and the phase.
Out: names, most likely first. An equal size is a hint and no proof, and counts only for tensors that the phase makes;
without a model there is none.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vramprobe.allocator.config import AllocatorConfig
from vramprobe.architecture.parts import Architecture
from vramprobe.catalog import list_models
from vramprobe.explain.phases import KINDS, Phase

_BYTES = {4: "fp32", 2: "bf16 or fp16"}
_MAX_NAMES = 3
_ROLES = "a weight, its gradient or a copy"
_MOST_ADDED = 1.05  # of a vocabulary: more tokens are rarely added to a trained model's
_VOCABULARY = 30_000  # fewer tokens are rarely a language model's vocabulary
Kind = Literal["logits", "scores", "parameters"]
_ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}
_SHAPE = re.compile(
    r"(?:empty_strided\w*|empty\w*|zeros|ones|full|randn?|new_\w+)\(\s*[(\[]?\s*(\d{1,12}(?:\s*,\s*\d{1,12})*)"
)
_DTYPE = re.compile(r"torch\.(?:b?float|u?int)(64|32|16|8)|torch\.(half)\b")


@dataclass(frozen=True)
class Factors:
    """Facts about the run; None where one is not known."""

    model: str  # the catalog's name
    architecture: Architecture | None = None
    vocab_size: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    num_gpus: int | None = None
    hidden_size: int | None = None


def tensors_of_size(requested: int, half_unit: int, factors: Factors, phase: Phase) -> list[str]:
    """At most three names of tensors whose request has ``requested`` bytes, which is printed to ±``half_unit``."""
    kinds = KINDS.get(phase.detail, KINDS.get(phase.name))
    found = [
        name
        for kind, name, size in _candidates(factors)
        if (kinds is None or kind in kinds) and _is_size(requested, size, half_unit)
    ]
    if not found and kinds == ["logits"] and factors.vocab_size:
        found = list(_logits_of_some_tokens(requested, half_unit, factors.vocab_size))
    if not found and (kinds is None or "parameters" in kinds):
        found = list(_resized_head(requested, half_unit, factors))
    return list(dict.fromkeys(found))[:_MAX_NAMES]


def shape_in(source: str, requested: int, half_unit: int) -> str:
    """The tensor that a line of code makes, where its size is the request; empty where it is not."""
    shape = _SHAPE.search(source)
    if shape is None:
        return ""
    sides = [int(side) for side in shape[1].split(",")]
    dtype = _DTYPE.search(source)
    widths = [2 if dtype[2] else _ITEM_BYTES[dtype[1]]] if dtype else [4, 2]
    for width in widths:
        if _is_size(requested, math.prod(sides) * width, half_unit):
            return f"{' × '.join(map(str, sides))} of {width} bytes each{_guess(sides)}"
    return ""


def _guess(sides: list[int]) -> str:
    """Name what has such sides, where a vocabulary's length shows it."""
    if len(sides) == 2 and sides[0] >= _VOCABULARY > sides[1]:  # tokens × hidden size else: a model's own sides tell
        owner = next((one.name for one in list_models() if vocabulary_sides(one.config) == tuple(sides)), None)
        return f", the shape of {owner}'s embedding or head: {_ROLES}" if owner else ""
    return ", perhaps logits (tokens × vocabulary)" if len(sides) <= 3 and sides[-1] >= _VOCABULARY else ""


def vocabulary_sides(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Tokens of the vocabulary and the hidden size by a model's config, None for what it lacks."""
    text = {**config.get("text_config", {}), **config}
    return text.get("vocab_size"), text.get("hidden_size", text.get("n_embd"))


def _is_size(requested: int, size: int, half_unit: int) -> bool:
    config = AllocatorConfig()
    asked = (size, config.allocation_size(config.round_size(size)))
    return min(abs(requested - one) for one in asked) <= half_unit


def _logits_of_some_tokens(requested: int, half_unit: int, vocab_size: int) -> Iterator[str]:
    """Logits of a number of tokens that nobody named."""
    for width, dtype in _BYTES.items():
        least, most = ((requested - half_unit) / (vocab_size * width), (requested + half_unit) / (vocab_size * width))
        tokens = f"{round(least):,}" if round(least) == round(most) else f"{math.ceil(least):,} to {math.floor(most):,}"
        yield f"logits: {tokens} tokens × {vocab_size} vocabulary in {dtype}"


def _resized_head(requested: int, half_unit: int, factors: Factors) -> Iterator[str]:
    """An embedding or head with a few more tokens than the config's vocabulary: they were added, or it is padded."""
    if not factors.vocab_size or not factors.hidden_size:
        return
    for width, dtype in _BYTES.items():
        row = factors.hidden_size * width
        least, most = math.ceil((requested - half_unit) / row), math.floor((requested + half_unit) / row)
        if factors.vocab_size < most <= _MOST_ADDED * factors.vocab_size:
            rows = f"{most:,}" if least >= most else f"{max(least, factors.vocab_size + 1):,} to {most:,}"
            yield (
                f"an embedding or head of {rows} tokens × {factors.hidden_size} in {dtype} (the config has "
                f"{factors.vocab_size:,} tokens; more were added, or padded): {_ROLES}"
            )


def _candidates(factors: Factors) -> Iterator[tuple[Kind, str, int]]:
    it, batch, seq = factors.architecture, factors.batch_size, factors.seq_len
    for width, dtype in _BYTES.items():
        if batch and seq and factors.vocab_size:
            yield (
                "logits",
                f"logits: {batch} × {seq} tokens × {factors.vocab_size} vocabulary in {dtype}",
                batch * seq * factors.vocab_size * width,
            )
        if it is None:
            if factors.vocab_size and factors.hidden_size:
                shape = f"{factors.vocab_size} × {factors.hidden_size}"
                size = factors.vocab_size * factors.hidden_size * width
                yield "parameters", f"an embedding or head ({shape}) in {dtype}: {_ROLES}", size
            continue
        if batch and seq:
            scores = batch * it.num_heads * seq * seq
            yield (
                "scores",
                f"eager attention scores: {batch} × {it.num_heads} heads × {seq}² in {dtype}",
                scores * width,
            )
        for num_ranks in dict.fromkeys((1, factors.num_gpus or 1)):
            share = "" if num_ranks == 1 else f" / {num_ranks} GPUs"
            size = -(-it.num_params // num_ranks) * width
            yield "parameters", f"all {it.num_params:,} parameters{share} in {dtype}", size
        layer = sum(parameter.numel for parameter in it.parameters if parameter.per_layer and parameter.only != "dense")
        yield "parameters", f"one layer's {layer:,} parameters in {dtype}", layer * width
        for parameter in it.parameters:
            if parameter.numel * width >= 2**20:
                shape = " × ".join(map(str, parameter.shape))
                name = f"{parameter.module} ({shape}) in {dtype}: {_ROLES}"
                yield "parameters", name, parameter.numel * width
