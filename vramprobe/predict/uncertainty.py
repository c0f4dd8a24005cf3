"""Uncertainty: how far a prediction may be off, and what lies outside of what a fit has seen.

In: a cell and a fit, or none. Out: factors of an interval's ends, warnings, reasons to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vramprobe.architecture import architecture
from vramprobe.model.memory_model import CHOICES, MemoryModel, Spread
from vramprobe.predict.prediction import ALONE, FitProvenance, Interval
from vramprobe.spec import CellSpec
from vramprobe.terms.step.versions import is_fourth

#: (low, high) of measured / predicted without a fit. CPU: the spread over this project's own cells. CUDA: rounding to
#: 512 bytes and most kernels' scratch are not in the arithmetic, so it may read low.
ARITHMETIC_SPREAD = {"cpu": (0.98, 1.02), "cuda": (0.95, 1.10)}
#: No fit is trusted to less than this, relative to the value: what the caching allocator does not split off depends on
#: all that ran before. The CPU's allocator hands out what was asked for.
MIN_HALF_WIDTH = {"cpu": 0.0, "cuda": 0.005}
#: A number beyond the fitted range by this factor is refused.
FAR = 30.0
#: The numbers that are refused so far out; others only widen.
LIMIT_NAMES = ("num_params", "num_tokens")
#: Each choice never seen widens the interval by this much of the value.
WIDENING = 0.02
#: Nor is a cell under transformers 4, of which no fit is made; emulated runs were within 0.3 %.
FOURTH_WIDENING = 0.005


def interval_around(value: int, ratios: tuple[float, float]) -> Interval:
    """Around a value, with ``ratios`` (low, high) of measured / said."""
    return Interval(value=value, low=round(value * ratios[0]), high=round(value * ratios[1]))


def times(value: int, ratio: Spread, growth: float, widening: float) -> Interval:
    """An interval that is nowhere narrower than MIN_HALF_WIDTH: the ratio's own is of emulated runs alone."""
    least = MIN_HALF_WIDTH["cuda"]
    low = ratio.value - max((ratio.value - ratio.low) * growth, least) - widening
    high = ratio.value + max((ratio.high - ratio.value) * growth, least) + widening
    return Interval(value=round(value * ratio.value), low=round(value * max(low, 0.0)), high=round(value * high))


#: Warnings, reasons to refuse, doublings beyond the fitted range, widening as a share of the value.
Outside = tuple[list[str], list[str], float, float]


def outside(spec: CellSpec, model: MemoryModel | None) -> Outside:
    """For what lies outside the fitted range."""
    if model is None:
        return [ALONE], [], 0.0, 0.0
    warnings, refusals, doublings, widening = [], [], 0.0, 0.0
    numbers = {
        "num_params": architecture(spec.architecture).num_params,
        "num_tokens": spec.num_tokens,
        "seq_len": spec.row_tokens,
        "batch_size": spec.batch_size,
    }
    for name, value in numbers.items():
        low, high = getattr(model.ranges, name)
        factor = max(low / value, value / high)
        if factor > 1:
            text = f"{name} {value:,} is outside the fitted range {low:,} to {high:,}"
            (refusals if factor > FAR and name in LIMIT_NAMES else warnings).append(text)
            doublings += math.log2(factor)
    if model.is_emulated:
        warnings.append(f"fitted to emulated runs{basis_of(model)}")
    unseen, refused = unseen_choices(spec, model)
    for name, text in unseen.items():
        (refusals if refused and name == "method" else warnings).append(text)
        widening += widening_of(name, model)
    if is_fourth(spec):
        warnings.append(
            "under transformers 4 by arithmetic: the fit is of transformers 5, and emulated runs were within 0.3 % "
            "(benchmarks/versions/versions.md)"
        )
        widening += FOURTH_WIDENING
    if spec.device != model.device:
        warnings.append(f"the fit comes from {model.device} ({model.device_name}), the cell is for {spec.device}")
        widening += ARITHMETIC_SPREAD[spec.device][1] - 1
    return warnings, refusals, doublings, widening


def basis_of(model: MemoryModel) -> str:
    """Return the basis of an emulated fit's runs, after a comma."""
    return f", {model.basis}" if model.basis else f": {model.device_name} itself was not measured"


def widening_of(choice: str, model: MemoryModel) -> float:
    """Share of the value that a value of ``choice`` that the fit has not seen adds to the half-width."""
    return model.interval.unseen_family if choice == "model_type" else WIDENING


def unseen_choices(spec: CellSpec, model: MemoryModel) -> tuple[dict[str, str], bool]:
    """(choice → what to say of it, for each that the fit has not seen; whether predict refuses over them)."""
    found = {}
    for name in CHOICES:
        value, seen = str(getattr(spec, name)), model.ranges.choices.get(name, [])
        if value not in seen:
            found[name] = f"{name} {value} was never seen; the fit knows {', '.join(seen)}"
    return found, "method" in found


def bounds(device: str, half_width: Any, widening: float, larger: Callable[..., Any] = max) -> tuple[Any, Any]:
    """(low, high) of measured / predicted; of arrays with ``larger`` NumPy's maximum. Without a fit ``half_width`` is
    None, and ARITHMETIC_SPREAD holds; ``widening`` is a share of the value.
    """
    if half_width is None:
        low, high = ARITHMETIC_SPREAD[device]
        return low - widening, high + widening
    half = larger(half_width, MIN_HALF_WIDTH[device]) + widening
    return 1 - half, 1 + half


def device_tier(reserved: Interval | None, gap: Spread | None) -> Interval | None:
    """Bytes that NVML would show: reserved memory and a fit's constant over it; None where one of them is not known."""
    if reserved is None or gap is None:
        return None
    return Interval(
        value=reserved.value + round(gap.value), low=reserved.low + round(gap.low), high=reserved.high + round(gap.high)
    )


def provenance(model: MemoryModel) -> FitProvenance:
    """Return the provenance of the fit for a prediction."""
    held_out = model.leave_one_model_out
    return FitProvenance(
        data_fingerprint=model.data_fingerprint,
        num_records=model.num_records,
        models=model.models,
        instrument=model.instrument,
        device_name=model.device_name,
        mean_absolute_error=held_out.overall.mean_absolute if held_out else None,
        vramprobe_version=model.vramprobe_version,
    )
