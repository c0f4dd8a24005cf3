"""Uncertainty: how far a prediction may be off, by itself and by a fit.

In: a Prediction of a cell, and a fit. Out: the same with what the fit says of its card: ratios, intervals, the device's
memory. What no record of the fit is like makes the intervals wider, and says so in one warning.
"""

from collections.abc import Sequence

from vramprobe.catalog import Gpu
from vramprobe.model.card_fit import CardFit, Ratio, Spread
from vramprobe.predict.prediction import FitProvenance, Interval, Prediction
from vramprobe.spec import CellSpec

#: No fit is trusted to less than this, relative to the value: what the caching allocator does not split off depends on
#: all that ran before.
MIN_HALF_WIDTH = 0.005
#: Outside of what was fitted an interval reaches so many times as far from its value, and so far at least, relative to
#: it: no record can say more.
OUTSIDE_TIMES, OUTSIDE_HALF_WIDTH = 2, 0.01


def interval_around(value: int, ratios: tuple[float, float]) -> Interval:
    """Around a value, with ``ratios`` (low, high) of measured / said."""
    return Interval(value=value, low=round(value * ratios[0]), high=round(value * ratios[1]))


def with_fit(
    found: Prediction, spec: CellSpec, model: CardFit, gpu: Gpu | None, *, num_params: int | None
) -> Prediction:
    """Return ``found``, which rests on no fit, with what ``model`` learnt of the card.

    Allocated and reserved memory are multiplied by the fit's ratios. Of several GPUs, of which no fit is made, only the
    device's memory is added.
    """
    gaps = model.gaps
    if spec.is_sharded:
        return found.model_copy(
            update={"device_bytes": _device_tier(found.reserved_bytes, gaps.device_over_reserved_bytes)}
        )
    card = gpu.short_name if gpu is not None and not gpu.is_size else None
    beyond, ratio = model.outside(spec, num_params, card), gaps.allocated_of(spec.method)
    allocated, reserved = _times(found.peak_allocated_bytes.value, ratio, is_outside=bool(beyond)), found.reserved_bytes
    if reserved is not None:
        reserved = _times(reserved.value, gaps.reserved, is_outside=bool(beyond)) if gaps.reserved else None
    return found.model_copy(
        update={
            "peak_allocated_bytes": allocated,
            "constant_bytes": found.constant_bytes + allocated.value - found.peak_allocated_bytes.value,
            "reserved_bytes": reserved,
            "device_bytes": _device_tier(reserved, gaps.device_over_reserved_bytes),
            "fit": _provenance(model, ratio),
            "warnings": [*_notes(beyond), *found.warnings],
        }
    )


def _times(value: int, ratio: Ratio, *, is_outside: bool) -> Interval:
    """An interval around value times ratio, nowhere narrower than MIN_HALF_WIDTH; wider outside of what was fitted."""
    sides = [max(side, MIN_HALF_WIDTH) for side in (ratio.value - ratio.low, ratio.high - ratio.value)]
    if is_outside:
        sides = [max(OUTSIDE_TIMES * side, OUTSIDE_HALF_WIDTH) for side in sides]
    return Interval(
        value=round(value * ratio.value),
        low=round(value * max(ratio.value - sides[0], 0.0)),
        high=round(value * (ratio.value + sides[1])),
    )


def _device_tier(reserved: Interval | None, gap: Spread | None) -> Interval | None:
    """Bytes that NVML would show: reserved memory and what a card adds; None where one of them is not known."""
    if reserved is None or gap is None:
        return None
    return Interval(
        value=reserved.value + round(gap.value), low=reserved.low + round(gap.low), high=reserved.high + round(gap.high)
    )


def _notes(outside: Sequence[str]) -> list[str]:
    if not outside:
        return []
    return [
        f"outside of what was fitted: {', '.join(outside)}; intervals are {OUTSIDE_TIMES} times as wide, and "
        f"{100 * OUTSIDE_HALF_WIDTH:g} % to each side at least"
    ]


def _provenance(model: CardFit, allocated: Ratio) -> FitProvenance:
    return FitProvenance(
        data_fingerprint=model.data_fingerprint,
        num_records=model.num_records,
        models=model.models,
        card=model.card,
        allocated_over_predicted=allocated,
        vramprobe_version=model.vramprobe_version,
    )
