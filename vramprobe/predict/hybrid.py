"""Ranks of several by whichever way: in one group (sharding.py), or in groups that each share one model among them.

In: a spec (its batch is one rank's), how many ranks under which sharding, and how many make a group. Out: a Prediction
of the rank that holds the most, or UnsupportedArchitecture for what is run and not counted. No torch here.
"""

from __future__ import annotations

from vramprobe.choices import HYBRID, SHARD_SIZE
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, workspaces_bytes
from vramprobe.predict.host import in_words
from vramprobe.predict.prediction import HasKernels, Prediction, predict_moments, without_flash
from vramprobe.predict.sharding import _doubts, predict_rank, require_arithmetic, require_offload
from vramprobe.spec import CellSpec, cannot_group, cannot_shard
from vramprobe.terms import Moment
from vramprobe.terms.ranks import Sharding, host_bytes, rank_moments


def predict_one_of(
    spec: CellSpec,
    num_gpus: int,
    sharding: str | None,
    model: MemoryModel | None = None,
    *,
    shard_size: int | None = None,
    offload: str = "none",
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``, as predict_rank has it; hybrids are counted, too.

    ``shard_size``: the ranks of a hybrid's group (choices.SHARD_SIZE). ``offload``: what lies in host memory, of which
    the Prediction has a rank's bytes. Raises what predict_rank, require_offload and require_arithmetic raise, and
    SpecError where the ranks make no such groups.
    """
    require_offload(spec, str(sharding), offload)
    if offload != "none" and num_gpus == 1:
        raise SpecError(f"offload {offload} is for several GPUs; give num_gpus 2 or more, or leave it out")
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}
    if sharding not in HYBRID:
        if shard_size is not None and (reason := cannot_group(str(sharding), num_gpus, shard_size)):
            raise SpecError(reason)
        counted = require_arithmetic(sharding)
        found = predict_rank(spec, num_gpus, counted, model, offload=offload, **words)
        return _offloaded(found, spec, num_gpus, counted, offload)
    size, base = shard_size or SHARD_SIZE, require_arithmetic(sharding.removesuffix("-hybrid"))
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


def hybrid_moments(
    spec: CellSpec, shard_size: int, within: Sharding, *, all_buffers: bool, has_flash: bool = True,
    offload: str = "none",
) -> list[Moment]:  # fmt: skip
    """Of a rank whose group shares the model by ``within``: how many groups there are does not matter."""
    return rank_moments(
        spec, shard_size, within, all_buffers=all_buffers, has_flash=has_flash, is_replicated=True, offload=offload
    )


def _offloaded(found: Prediction, spec: CellSpec, num_gpus: int, within: Sharding, offload: str) -> Prediction:
    """With what lies on the host, of ranks of which so many share a model."""
    if offload == "none":
        return found
    return found.model_copy(update={
        "cell_id": found.cell_id if spec.sharding else f"{found.cell_id}_offload-{offload}",
        "warnings": [*found.warnings, in_words(spec, num_gpus, within, offload)],
        "host_bytes": host_bytes(spec, num_gpus, within, offload),
    })  # fmt: skip
