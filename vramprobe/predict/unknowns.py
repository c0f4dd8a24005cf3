"""Unknowns of a prediction: what nobody said of a run, and by how much each of them moves its memory.

In: a cell, its Prediction, the GPU, the names of the options that were given. Out: Unknowns, and intervals that hold
them. A Prediction's own intervals hold for the loop, the releases and the kernels that it names; an answer to a person
is widened by each of these that the person did not name. The shares are derived, and checked, by
benchmarks/truth/coverage.py. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Literal

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import text_config
from vramprobe.kernels.chip import A100, chip_like
from vramprobe.predict.prediction import Frozen, HasKernels, HasMemory, Interval, Prediction
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.spec import CellSpec
from vramprobe.trainers import COMMONEST_OTHER, LOOPS, outputs_bytes
from vramprobe.units import format_bytes

#: What is taken off the lower end of an interval, and what is added to its upper end.
Ends = tuple[int, int]
Share = tuple[float, float]
Name = Literal["loop", "versions", "kernel", "fragmentation"]
#: (below, above) a peak under today's libraries, as a share of it: 90 % of emulated runs under the eight older stacks
#: of benchmarks/versions (dense models, transformers' Trainer).
VERSIONS: Share = (0.014, 0.099)
#: Beyond both ends of a reserved interval, as a share of it: 90 % of real runs on one GPU, of the half of the published
#: ones that coverage.py sets apart.
FRAGMENTATION = 0.067
_TELLS: dict[Name, str] = {
    "loop": "--loop names yours",
    "versions": "--python records with your libraries",
    "kernel": "sdpa takes another attention kernel where keys are repeated, as for batches with a mask",
    "fragmentation": "a real run's blocks are not all where the replay has them",
}
#: The same on several GPUs, where this option is not taken.
_TELLS_OF_RANKS: dict[Name, str] = {
    "loop": "as your loop keeps its outputs or not",
}
#: Terms of a peak that no attention kernel changes.
_STATES = ("weights", "gradients", "optimizer_state")


class Unknown(Frozen):
    """Bytes by which one unknown moves the ends of allocated and of reserved memory's intervals."""

    name: Name
    allocated: Ends
    reserved: Ends
    tell: str


def unknowns(
    spec: CellSpec,
    found: Prediction,
    gpu: HasKernels | None,
    given: Collection[str],
    again: Callable[[CellSpec], Prediction] | None = None,
) -> list[Unknown]:
    """Return the unknowns of ``found``, the widest first; ``given``: names of the options that were given.

    ``again`` predicts a cell on the same GPU by arithmetic, for the attention kernel; None leaves that unknown out.
    """
    if spec.device != "cuda":
        return []
    allocated, reserved = found.peak_allocated_bytes.value, (found.reserved_bytes or found.peak_allocated_bytes).value
    ends: dict[Name, tuple[Ends, Ends]] = {}
    if "loop" not in given:
        kept = other_loop_bytes(spec)
        ends["loop"] = (0, kept), (0, kept)
    if "versions" not in given and not spec.uses_trl and spec.other_head == "":
        ends["versions"] = _share(VERSIONS, allocated), _share(VERSIONS, reserved)
    if again is not None and found.num_gpus == 1 and _may_repeat_keys(spec, gpu):
        with suppress(UnsupportedArchitecture):
            ends["kernel"] = _of_kernel(again(spec), again(with_repeated_keys(spec)))
    if found.reserved_bytes is not None and spec.num_gpus == 1:
        ends["fragmentation"] = (0, 0), _share((FRAGMENTATION, FRAGMENTATION), reserved)
    tells = _TELLS | (_TELLS_OF_RANKS if spec.num_gpus > 1 else {})
    listed = [
        Unknown(name=name, allocated=first, reserved=second, tell=tells[name])
        for name, (first, second) in ends.items()
        if any(first) or any(second)
    ]
    return sorted(listed, key=lambda one: -sum(one.allocated) - sum(one.reserved))


def other_loop_bytes(spec: CellSpec) -> int:
    """Bytes that the commonest other loop keeps."""
    text = text_config(spec.architecture)
    return outputs_bytes(spec, LOOPS[COMMONEST_OTHER], text.get("vocab_size") or 0)


def with_unknowns(found: Prediction, by: Sequence[Unknown]) -> Prediction:
    """Return the prediction with every tier's interval widened; device memory is widened as reserved memory is."""
    tiers = {"peak_allocated_bytes": "allocated", "reserved_bytes": "reserved", "device_bytes": "reserved"}
    return found.model_copy(
        update={
            name: _widened(interval, [getattr(one, tier) for one in by])
            for name, tier in tiers.items()
            if (interval := getattr(found, name)) is not None
        }
    )


def wide_verdict(found: Prediction, by: Sequence[Unknown], gpu: HasMemory) -> Verdict:
    """Return the verdict of a prediction that leaves room for the unknowns which a verdict holds."""
    return verdict(with_unknowns(found, deciding(by)), gpu)


def deciding(by: Sequence[Unknown]) -> list[Unknown]:
    """Return the unknowns that a verdict holds: not fragmentation, as a full card gets its cached blocks back."""
    return [one for one in by if one.name != "fragmentation"]


def in_words(one: Unknown) -> str:
    """Return the unknown with its bytes of allocated memory (of reserved memory where it moves that alone)."""
    tier, (below, above) = ("allocated", one.allocated) if any(one.allocated) else ("reserved", one.reserved)
    parts = [f"{sign}{format_bytes(size)}" for sign, size in (("-", below), ("+", above)) if size]
    return f"{one.name}, {' and '.join(parts)} {tier}: {one.tell}"


def with_repeated_keys(spec: CellSpec) -> CellSpec:
    """Return the cell with as many heads of keys as of queries."""
    text = text_config(spec.architecture)
    text = {**text, "num_key_value_heads": text["num_attention_heads"]}
    whole = {**spec.architecture, "text_config": text} if "text_config" in spec.architecture else text
    return spec.model_copy(update={"architecture": whole})


def _of_kernel(found: Prediction, other: Prediction) -> tuple[Ends, Ends]:
    """The other kernel's peaks beside these; weights of heads that are not there do not count."""
    more = sum(other.terms.get(name, 0) - found.terms.get(name, 0) for name in _STATES)
    ends = []
    for one, two in (
        (found.peak_allocated_bytes, other.peak_allocated_bytes),
        (found.reserved_bytes, other.reserved_bytes),
    ):
        less = 0 if one is None or two is None else one.value - (two.value - more)
        ends.append((max(less, 0), 0))
    return ends[0], ends[1]


def _may_repeat_keys(spec: CellSpec, gpu: HasKernels | None) -> bool:
    """Return True where the GPU runs no flash attention for this cell, and its heads share keys."""
    text = text_config(spec.architecture)
    shares = text.get("num_key_value_heads") not in (None, text.get("num_attention_heads"))
    return shares and gpu is not None and spec.attn == "sdpa" and chip_like(gpu) != A100


def _share(share: Share, size: int) -> Ends:
    return round(size * share[0]), round(size * share[1])


def _widened(interval: Interval, ends: Sequence[Ends]) -> Interval:
    low, high = interval.low - sum(one for one, _ in ends), interval.high + sum(one for _, one in ends)
    return interval.model_copy(update={"low": max(low, 0), "high": high})
