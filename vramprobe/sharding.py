"""Sharding: a cell on N GPUs under ZeRO or FSDP -> the memory of one rank, by arithmetic; and how many GPUs it takes.

In: a spec (its batch is one rank's), the kind of sharding, a fit or none. Out: a Prediction of the rank that holds the
most, and the smallest N that fits a GPU. The single GPU's moments are taken term by term: states are divided,
activations are not, and what is gathered for a moment comes back. Nothing here was measured. Never imports torch.
"""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel, ConfigDict

from vramprobe.errors import SpecError
from vramprobe.memory_model import MemoryModel
from vramprobe.predict import HasMemory, Prediction, Verdict, predict_moments, verdict
from vramprobe.spec import CellSpec
from vramprobe.terms.ranks import Sharding, rank_moments

#: Beyond this many GPUs no answer is sought.
MAX_GPUS = 4096


class MinGpus(BaseModel):
    """The fewest GPUs on which each rank fits; null where not even MAX_GPUS do, and ``verdict`` is then theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Sharding
    num_gpus: int | None
    verdict: Verdict  # of one rank


def predict_rank(
    spec: CellSpec,
    num_gpus: int,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``; ``spec`` has the batch of one rank.

    The interval reaches up to all buckets and prefetched layers at their defaults. On one GPU, nothing is sharded.

    Raises SpecError for a kind or number of GPUs that cannot be, and what predict raises.
    """
    if sharding not in get_args(Sharding):
        raise SpecError(f"sharding: {sharding!r} given; allowed: {', '.join(get_args(Sharding))}")
    if num_gpus < 1:
        raise SpecError(f"num_gpus: {num_gpus} given; must be at least 1")
    few, many = (rank_moments(spec, num_gpus, sharding, all_buffers=yes) for yes in (False, True))
    note = f"one rank of {num_gpus} under {sharding}, by arithmetic, per rank, not measured"
    notes = [note, *_doubts(spec, sharding)] if num_gpus > 1 else ["one GPU: nothing is sharded"]
    return predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, notes=notes, num_gpus=num_gpus,
        sharding=sharding,
    )  # fmt: skip


def min_gpus(
    spec: CellSpec,
    gpu: HasMemory,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
) -> MinGpus:
    """The fewest of ``gpu`` whose ranks have the verdict ``fits``, each with the batch of ``spec``."""

    def judged(num_gpus: int) -> Verdict:
        one = predict_rank(spec, num_gpus, sharding, model, allow_extrapolation=allow_extrapolation)
        return verdict(one, gpu)

    few, many, found = 0, 1, judged(1)
    while found.verdict != "fits" and many < MAX_GPUS:
        few, many = many, 2 * many
        found = judged(many)
    if found.verdict != "fits":
        return MinGpus(sharding=sharding, num_gpus=None, verdict=found)
    while many - few > 1:
        middle = (few + many) // 2
        at_middle = judged(middle)
        if at_middle.verdict == "fits":
            many, found = middle, at_middle
        else:
            few = middle
    return MinGpus(sharding=sharding, num_gpus=many, verdict=found)


def _doubts(spec: CellSpec, sharding: Sharding) -> list[str]:
    """What the arithmetic does not know of the libraries."""
    if spec.quant == "none" or sharding in ("zero1", "zero2"):
        return []
    return [f"whether your libraries can shard {spec.quant} weights under {sharding} is not checked here"]
