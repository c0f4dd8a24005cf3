"""Ranks of several by whichever way: in one group (sharding.py), or in groups that each share one model among them.

In: a spec (its batch is one rank's), how many ranks under which sharding, and how many make a group. Out: a Prediction
of the rank that holds the most, or UnsupportedArchitecture for what is run and not counted. No torch here.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.choices import HYBRID, SHARD_SIZE
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, workspaces_bytes
from vramprobe.predict.prediction import HasKernels, Prediction, predict_moments, without_flash
from vramprobe.predict.sharding import _doubts, predict_rank, require_arithmetic
from vramprobe.spec import CellSpec, cannot_group, cannot_shard
from vramprobe.terms import Moment
from vramprobe.terms.ranks import Sharding, rank_moments


def predict_one_of(
    spec: CellSpec,
    num_gpus: int,
    sharding: str | None,
    model: MemoryModel | None = None,
    *,
    shard_size: int | None = None,
    cp_size: int = 1,
    offload: str = "none",
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``, as predict_rank has it; hybrids are counted, too.

    ``shard_size``: the ranks of a hybrid's group (choices.SHARD_SIZE). Raises what predict_rank and require_arithmetic
    raise, and SpecError where the ranks make no such groups.
    """
    if cp_size > 1:
        raise UnsupportedArchitecture(
            f"there is no arithmetic for cp_size {cp_size}; run it, on an emulated GPU say: vramprobe measure "
            "--emulate H100-SXM … --only-rank 0"
        )
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}
    if sharding not in HYBRID:
        if shard_size is not None and (reason := cannot_group(str(sharding), num_gpus, shard_size)):
            raise SpecError(reason)
        return predict_rank(spec, num_gpus, require_arithmetic(sharding, offload), model, **words)
    size, base = shard_size or SHARD_SIZE, require_arithmetic(sharding.removesuffix("-hybrid"), offload)
    if reason := cannot_group(sharding, num_gpus, size) or cannot_shard(spec, sharding):
        raise SpecError(reason)
    has_flash = gpu is None or gpu.has_flash
    few, many = (
        hybrid_moments(spec, size, base, all_buffers=in_one_unit, has_flash=has_flash) for in_one_unit in (False, True)
    )
    note = f"one rank of {num_gpus} under {sharding}, {size} to a group, by arithmetic, per rank, not measured"
    return predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, num_gpus=num_gpus, sharding=sharding,
        notes=[note, *_doubts(spec, size, base, has_flash), *without_flash(spec, gpu)],
        workspaces=workspaces_bytes(spec, gpu),
    )  # fmt: skip


def hybrid_moments(
    spec: CellSpec, shard_size: int, within: Sharding, *, all_buffers: bool, has_flash: bool = True
) -> list[Moment]:
    """Of a rank whose group shares the model by ``within``: how many groups there are does not matter."""
    return rank_moments(spec, shard_size, within, all_buffers=all_buffers, has_flash=has_flash, is_replicated=True)
