"""Replay: a prediction by arithmetic -> the same with both tiers as the caching allocator's replay has them.

In: a prediction, its cell with the ranks, a fit (of one GPU) and the GPU. Out: a Prediction; unchanged where the fit
does not know how far the replay is off, or the requests of a rank are not known in their order (terms/replayed.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.model.memory_model import MemoryModel, peak_moment
from vramprobe.predict.prediction import ALONE, HasKernels, Prediction, Within
from vramprobe.predict.uncertainty import device_tier, interval_around, outside, provenance, times
from vramprobe.predict.verdict import usable_bytes
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.replayed import num_alloc_retries, replayed
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes
from vramprobe.units import format_bytes

#: (low, high) of emulated / replayed, beyond the worst of the ranks in benchmarks/truth/recipes.md.
ALLOCATED_RATIOS, RESERVED_RATIOS = (0.995, 1.005), (0.965, 1.035)
#: What ZeRO-3 gathers is replayed by itself, as it has a stream of its own: what stands at once is the arithmetic's.
ZERO3_ALLOCATED_RATIOS, ZERO3_RESERVED_RATIOS = (0.98, 1.035), (0.95, 1.045)


def with_replay(
    found: Prediction, spec: CellSpec, moments: Sequence[Moment], model: MemoryModel | None, gpu: HasKernels | None
) -> Prediction:
    """``found`` with allocated and reserved memory by replay; ``moments`` are those that it was made of."""
    if spec.device != "cuda":
        return found
    if spec.num_gpus == 1:
        return found if model is None else _of_one_gpu(found, spec, moments, model, gpu)
    return _of_rank(found, spec, gpu) if _is_logged(spec) else found


def with_retries(found: Prediction, spec: CellSpec, gpu: HasKernels | None) -> Prediction:
    """A replayed prediction with what becomes of it where ``gpu`` can hold its tensors, but not all that the allocator
    would keep: one more replay, on a card of that size.
    """
    allocated, reserved, device = found.peak_allocated_bytes, found.reserved_bytes, found.device_bytes
    if reserved is None or gpu is None or gpu.total_bytes is None or spec.device != "cuda" or not _is_logged(spec):
        return found
    beside = device.value - reserved.value if device is not None else 0
    limit = usable_bytes(gpu, device_is_known=device is not None, num_gpus=spec.num_gpus) - beside
    if not allocated.value <= limit < reserved.value:
        return found
    retries = num_alloc_retries(spec, gpu, limit)
    if retries is None:
        return found
    return found.model_copy(update={"within": Within(limit_bytes=limit, num_alloc_retries=retries)})


def _is_logged(spec: CellSpec) -> bool:
    if spec.num_gpus == 1:
        return True
    from vramprobe.terms.sharding.ranks import is_logged

    return is_logged(spec)


def _of_one_gpu(
    found: Prediction, spec: CellSpec, moments: Sequence[Moment], model: MemoryModel, gpu: HasKernels | None
) -> Prediction:
    """The terms are then the arithmetic's own, and what is left over is the blocks'."""
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


def _of_rank(found: Prediction, spec: CellSpec, gpu: HasKernels | None) -> Prediction:
    played = replayed(spec, gpu)
    if spec.sharding == "zero3":
        allocated = interval_around(found.peak_allocated_bytes.value, ZERO3_ALLOCATED_RATIOS)
        reserved = interval_around(max(played.reserved_bytes, allocated.value), ZERO3_RESERVED_RATIOS)
    else:
        allocated = interval_around(played.allocated_bytes, ALLOCATED_RATIOS)
        reserved = interval_around(played.reserved_bytes, RESERVED_RATIOS)
    notes = _notes(spec)
    if played.load_bytes > reserved.value:  # and the card has to hold it
        reserved = interval_around(played.load_bytes, RESERVED_RATIOS)
        notes.append(load_note(played.load_bytes))
    terms = {cause: size for cause, size in found.terms.items() if cause != "block_remainders"}
    left = allocated.value - sum(terms.values())
    return found.model_copy(
        update={
            "peak_allocated_bytes": allocated,
            "terms": terms | ({"block_remainders": left} if left > 0 else {}),
            "constant_bytes": min(left, 0),
            "reserved_bytes": reserved,
            "warnings": [*notes, *(one for one in found.warnings if one != ALONE)],
        }
    )


def load_note(load_bytes: int) -> str:
    """Return the note for a rank whose load needs more than its steps."""
    return f"its load needs the most, {format_bytes(load_bytes)} before anything is divided"


def _notes(spec: CellSpec) -> list[str]:
    notes = ["reserved memory by the allocator's replay, held against emulated ranks (benchmarks/truth/recipes.md)"]
    if rules_of(spec.sharding).module in ("fsdp1", "zero3"):
        notes.append(
            "what other streams use is free again as soon as they are done, which the replay takes to be at once: a "
            "real card may reserve more"
        )
    return notes
