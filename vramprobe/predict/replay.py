"""Replay: a prediction by arithmetic -> the same with both tiers as the caching allocator's replay has them.

In: a prediction, its cell, a fit and the GPU. Out: a Prediction; unchanged where the fit does not know how far the
replay is off.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.model.memory_model import MemoryModel, peak_moment
from vramprobe.predict.prediction import HasKernels, Prediction, Within
from vramprobe.predict.uncertainty import device_tier, outside, provenance, times
from vramprobe.predict.verdict import usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.replayed import num_alloc_retries, replayed
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes


def with_replay(
    found: Prediction, spec: CellSpec, moments: Sequence[Moment], model: MemoryModel | None, gpu: HasKernels | None
) -> Prediction:
    """``found`` with allocated and reserved memory by replay; ``moments`` are those that it was made of.

    The terms are then the arithmetic's own, and what is left over is the blocks'.
    """
    if spec.device != "cuda" or model is None:
        return found
    ratios = model.allocated_over_replayed, model.reserved_over_replayed
    if ratios[0] is None or ratios[1] is None:
        return found
    *_, doublings, widening = outside(spec, model)
    growth, played = 1 + model.interval.growth_per_doubling * doublings, replayed(spec, gpu)
    allocated = times(played.allocated_bytes, ratios[0], growth, widening)
    reserved = times(played.reserved_bytes, ratios[1], growth, widening)
    moment = peak_moment(with_workspaces(moments, workspaces_bytes(spec, gpu)), {})
    left = allocated.value - moment.total_bytes + moment.terms.get("block_remainders", 0)
    terms = {cause: size for cause, size in (moment.terms | {"block_remainders": max(left, 0)}).items() if size}
    return found.model_copy(
        update={
            "peak_allocated_bytes": allocated,
            "peak_phase": moment.phase,
            "peak_label": moment.label,
            "terms": terms,
            "constant_bytes": min(left, 0),
            "reserved_bytes": reserved,
            "device_bytes": device_tier(reserved, model.device_over_reserved_bytes),
            "fit": provenance(model).model_copy(update={"mean_absolute_error": None}),  # it is of the terms alone
        }
    )


def with_retries(found: Prediction, spec: CellSpec, gpu: HasKernels | None) -> Prediction:
    """A replayed prediction with what becomes of it where ``gpu`` can hold its tensors, but not all that the allocator
    would keep: one more replay, on a card of that size.
    """
    allocated, reserved, device = found.peak_allocated_bytes, found.reserved_bytes, found.device_bytes
    if reserved is None or gpu is None or gpu.total_bytes is None or spec.device != "cuda":
        return found
    beside = device.value - reserved.value if device is not None else 0
    limit = usable_bytes(gpu, device_is_known=device is not None) - beside
    if not allocated.value <= limit < reserved.value:
        return found
    retries = num_alloc_retries(spec, gpu, limit)
    if retries is None:
        return found
    return found.model_copy(update={"within": Within(limit_bytes=limit, num_alloc_retries=retries)})
