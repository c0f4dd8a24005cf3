"""Unknowns of a prediction: what nobody said of a run, and by how much each of them moves its memory.

In: a cell, its Prediction, the names of the options that were given. Out: Unknowns, and intervals that hold
them. A Prediction's own intervals hold for the loop and the releases that it names; an answer to a person is widened by
each of these that the person did not name. The shares are derived, and checked, by
benchmarks/truth/coverage.py. Imports no torch.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from vramprobe.catalog import Gpu, text_config
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.records.frozen import FrozenModel
from vramprobe.spec import CellSpec
from vramprobe.trainers import COMMONEST_OTHER, LOOPS, outputs_bytes
from vramprobe.units import format_bytes

#: What is taken off the lower end of an interval, and what is added to its upper end.
Ends = tuple[int, int]
Share = tuple[float, float]
Name = Literal["loop", "versions", "fragmentation"]
#: (below, above) a peak under today's libraries, as a share of it: 90 % of emulated runs under the eight older stacks
#: of benchmarks/versions (dense models, transformers' Trainer).
VERSIONS: Share = (0.014, 0.099)
#: Beyond both ends of a reserved interval, as a share of it: 90 % of real runs on one GPU, of the half of the published
#: ones that coverage.py sets apart.
FRAGMENTATION = 0.06
_TELLS: dict[Name, str] = {
    "loop": "--loop names yours",
    "versions": "--python records with your libraries",
    "fragmentation": "a real run's blocks are not all where the replay has them",
}
#: The same on several GPUs, where this option is not taken.
_TELLS_OF_RANKS: dict[Name, str] = {"loop": "as your loop keeps its outputs or not"}


class Unknown(FrozenModel):
    """Bytes by which one unknown moves the ends of allocated and of reserved memory's intervals."""

    name: Name
    allocated: Ends
    reserved: Ends
    tell: str


def unknowns(spec: CellSpec, found: Prediction, given: Collection[str]) -> list[Unknown]:
    """Return the unknowns of ``found``, the widest first; ``given``: names of the options that were given."""
    allocated, reserved = found.peak_allocated_bytes.value, (found.reserved_bytes or found.peak_allocated_bytes).value
    ends: dict[Name, tuple[Ends, Ends]] = {}
    if "loop" not in given:
        kept = other_loop_bytes(spec)
        ends["loop"] = (0, kept), (0, kept)
    if "versions" not in given and not spec.uses_trl and spec.other_head == "":
        ends["versions"] = _share(VERSIONS, allocated), _share(VERSIONS, reserved)
    if found.reserved_bytes is not None and not spec.is_sharded:
        ends["fragmentation"] = (0, 0), _share((FRAGMENTATION, FRAGMENTATION), reserved)
    tells = _TELLS | (_TELLS_OF_RANKS if spec.is_sharded else {})
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


def wide_verdict(found: Prediction, by: Sequence[Unknown], gpu: Gpu) -> Verdict:
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


def _share(share: Share, size: int) -> Ends:
    return round(size * share[0]), round(size * share[1])


def _widened(interval: Interval, ends: Sequence[Ends]) -> Interval:
    low, high = interval.low - sum(one for one, _ in ends), interval.high + sum(one for _, one in ends)
    return interval.model_copy(update={"low": max(low, 0), "high": high})
