"""Ranks of several by whichever way: in one group (sharding.py), in groups that each share one model among them, or
with a part of every sequence (context parallelism).

In: a spec (its batch is one rank's), how many ranks under which sharding, how many make a group, and how many share a
sequence. Out: a Prediction of the rank that holds the most, or UnsupportedArchitecture for what is run and not counted.
No torch here.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.choices import HYBRID, SHARD_SIZE
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, workspaces_bytes
from vramprobe.predict.host import in_words
from vramprobe.predict.prediction import HasKernels, Prediction, predict_moments, without_flash
from vramprobe.predict.sharding import _doubts, predict_rank, require_arithmetic, require_offload
from vramprobe.spec import CellSpec, cannot_group, cannot_rotate, cannot_shard, cannot_share_sequences
from vramprobe.terms import Moment
from vramprobe.terms.ranks import Sharding, host_bytes, rank_moments
from vramprobe.terms.ring import Ring, ring_moments


def predict_one_of(
    spec: CellSpec,
    num_gpus: int,
    sharding: str | None,
    model: MemoryModel | None = None,
    *,
    shard_size: int | None = None,
    cp_size: int = 1,
    cp_rotation: str = "allgather",
    offload: str = "none",
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``, as predict_rank has it; hybrids are counted, too.

    ``shard_size``: the ranks of a hybrid's group; ``cp_size``: those that share each sequence of ``spec``, with keys
    and values by ``cp_rotation`` (choices.CpRotation). ``offload``: what lies in host memory, of which the Prediction
    has a rank's bytes. Raises what predict_rank, require_offload and require_arithmetic raise, and SpecError where the
    ranks make no such groups.
    """
    require_offload(spec, str(sharding), offload)
    if offload != "none" and num_gpus == 1:
        raise SpecError(f"offload {offload} is for several GPUs; give num_gpus 2 or more, or leave it out")
    if reason := cannot_rotate(cp_size, cp_rotation):
        raise SpecError(reason)
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}
    shard_size = group_size(sharding, shard_size)
    if cp_size > 1:
        ranks = {"num_gpus": num_gpus, "sharding": sharding, "shard_size": shard_size, "cp_size": cp_size,
                 "cp_rotation": cp_rotation}  # fmt: skip
        require_arithmetic(str(sharding).removesuffix("-hybrid"))
        if offload != "none":
            raise UnsupportedArchitecture(
                f"there is no arithmetic for offload {offload} with cp_size; run it, on emulated GPUs say: vramprobe "
                "measure --emulate"
            )
        return _predict_part(spec, spec.model_copy(update=ranks), model, **words)
    if sharding not in HYBRID:
        if shard_size is not None and (reason := cannot_group(str(sharding), num_gpus, shard_size)):
            raise SpecError(reason)
        counted = require_arithmetic(sharding)
        found = predict_rank(spec, num_gpus, counted, model, offload=offload, **words)
        return _offloaded(found, spec, num_gpus, counted, offload)
    assert shard_size is not None
    size, base = shard_size, require_arithmetic(sharding.removesuffix("-hybrid"))
    if reason := cannot_group(sharding, num_gpus, size) or cannot_shard(spec, sharding):
        raise SpecError(reason)
    has_flash = gpu is None or gpu.has_flash
    few, many = (
        hybrid_moments(spec, size, base, all_buffers=in_one_unit, has_flash=has_flash, offload=offload)
        for in_one_unit in (False, True)
    )
    note = f"one rank of {num_gpus} under {sharding}, {size} to a group, by arithmetic, per rank, not measured"
    found = predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, num_gpus=num_gpus, sharding=sharding,
        notes=[note, *_doubts(spec, size, base, has_flash), *without_flash(spec, gpu)],
        workspaces=workspaces_bytes(spec, gpu),
    )  # fmt: skip
    return _offloaded(found, spec, size, base, offload)


def group_size(sharding: str | None, shard_size: int | None) -> int | None:
    """As given; of a hybrid where nobody says, as many as a machine's cards."""
    return SHARD_SIZE if shard_size is None and sharding in HYBRID else shard_size


def hybrid_moments(
    spec: CellSpec, shard_size: int, within: Sharding, *, all_buffers: bool, has_flash: bool = True,
    offload: str = "none",
) -> list[Moment]:  # fmt: skip
    """Of a rank whose group shares the model by ``within``: how many groups there are does not matter."""
    return rank_moments(
        spec, shard_size, within, all_buffers=all_buffers, has_flash=has_flash, is_replicated=True, offload=offload
    )


def _predict_part(
    spec: CellSpec, ranks: CellSpec, model: MemoryModel | None, *, allow_extrapolation: bool, gpu: HasKernels | None
) -> Prediction:
    """Of a rank that has a part of each sequence; ``ranks``: the same cell on all of them."""
    if reason := (
        (cannot_group(str(ranks.sharding), ranks.num_gpus, ranks.shard_size) if ranks.shard_size else None)
        or cannot_shard(spec, str(ranks.sharding))
        or cannot_share_sequences(ranks)
    ):
        raise SpecError(reason)
    has_flash = gpu is None or gpu.has_flash
    few, many = (
        max((part_moments(ranks, index, all_buffers=in_one_unit, has_flash=has_flash) for index in _to_ask(ranks)),
            key=lambda moments: max(moment.total_bytes for moment in moments))
        for in_one_unit in (False, True)
    )  # fmt: skip
    sharing = ranks.shard_size or ranks.num_gpus
    by_turns = "" if ranks.cp_rotation == "allgather" else f" by {ranks.cp_rotation}"
    note = (
        f"one rank of {ranks.num_gpus} under {ranks.sharding}, {ranks.cp_size} to a sequence{by_turns}, by arithmetic, "
        "per rank, not measured"
    )
    base = require_arithmetic(str(ranks.sharding).removesuffix("-hybrid"))
    return predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, num_gpus=ranks.num_gpus,
        sharding=ranks.sharding, notes=[note, *_doubts(spec, sharing, base, has_flash), *without_flash(spec, gpu)],
        workspaces=workspaces_bytes(spec, gpu),
    )  # fmt: skip


def _to_ask(ranks: CellSpec) -> list[int]:
    """Of those that share a sequence, the first and the last, and one between: the others are like one of these."""
    return sorted({0, ranks.cp_size - 2, ranks.cp_size - 1})


def part_moments(ranks: CellSpec, index: int, *, all_buffers: bool, has_flash: bool = True) -> list[Moment]:
    """Of the rank at this place of those that share a sequence; ``ranks`` is the cell on all of them."""
    one_gpu = {"num_gpus": 1, "sharding": None, "shard_size": None, "cp_size": 1, "cp_rotation": "allgather",
               "only_rank": None}  # fmt: skip
    return ring_moments(
        ranks.model_copy(update=one_gpu), ranks.shard_size or ranks.num_gpus,
        Ring(ranks.cp_size, index, ranks.cp_rotation == "allgather"), reshards=ranks.sharding != "fsdp-shard-grad-op",
        is_replicated=ranks.sharding in HYBRID, all_buffers=all_buffers, has_flash=has_flash,
    )  # fmt: skip


def _offloaded(found: Prediction, spec: CellSpec, num_gpus: int, within: Sharding, offload: str) -> Prediction:
    """With what lies on the host, of ranks of which so many share a model."""
    if offload == "none":
        return found
    return found.model_copy(update={
        "cell_id": found.cell_id if spec.sharding else f"{found.cell_id}_offload-{offload}",
        "warnings": [*found.warnings, in_words(spec, num_gpus, within, offload)],
        "host_bytes": host_bytes(spec, num_gpus, within, offload),
    })  # fmt: skip
