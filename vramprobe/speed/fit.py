"""Fit: published steps -> Rates, and how far they are off on sources and cards that the fit has not seen.

In: Observations. Out: a SpeedFit. Least squares on the logarithm of tokens per second, a large error counted by its
size and not its square, and each rate held to what is known of such kernels anywhere, so that few rows move it little.
Loads numpy and scipy, as model/fit.py does; what it leaves behind is read without them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.errors import FitError
from vramprobe.speed.rates import Condition, Rates, SpeedFit
from vramprobe.speed.step import Kernel, condition_of, parts_of
from vramprobe.speed.work import Work

#: What was expected of each rate before any row was looked at, and how sure that is (one standard deviation of its
#: logarithm). cuBLAS reaches about 0.8 of an A100's peak in large products and 0.68 of an H100's, whose clock falls;
#: FlashAttention-2 half of an A100's peak (its paper) and 0.35 of an H100's (FlashAttention-3's paper); simple kernels
#: 0.8 of the bandwidth; a launch from Python takes some 6 µs.
EXPECTED = {
    "product": (0.8, 0.15),
    "attention": (0.5, 0.3),
    "stream": (0.8, 0.2),
    "dequantise": (0.5, 0.5),
    "dequantise_gptq": (0.15, 1.0),
    "link": (0.6, 0.5),
    "kernel_seconds": (6e-6, 0.5),
    "step_seconds": (0.01, 1.0),
}
EXPECTED_GENERATIONS = {
    "Ampere": (1.0, 0.05),
    "Ada Lovelace": (1.0, 0.15),
    "Hopper": (0.85, 0.15),
    "GeForce": (1.0, 0.15),
}
EXPECTED_ATTENTION = {
    "Ampere": (1.0, 0.05),
    "Ada Lovelace": (1.0, 0.15),
    "Hopper": (0.7, 0.2),
    "GeForce": (1.0, 0.15),
}
#: Errors beyond this count by their size (soft L1).
_USUAL_ERROR = 0.1
#: Of what was left out, an interval holds so much.
SHARE = 0.8
#: No interval is narrower: repeats of one run on other vendors' machines and versions differ by so much.
LEAST_HALF_WIDTH = 0.05


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One published configuration: its work, on what it ran, and tokens per second of one GPU."""

    source: str
    work: Work
    grad_accum: int
    gpu: Gpu
    num_gpus: int
    sharding: Sharding
    kernel: Kernel
    tokens_per_second: float


def predicted(one: Observation, rates: Rates) -> float:
    """Tokens per second of one GPU."""
    parts = parts_of(one.work, one.gpu, one.num_gpus, one.sharding, rates, one.kernel)
    return one.grad_accum * one.work.num_tokens / parts.step_seconds(one.grad_accum)


def log_error(one: Observation, rates: Rates) -> float:
    """log(predicted / published)."""
    return math.log(predicted(one, rates) / one.tokens_per_second)


def fit_rates(observations: Sequence[Observation]) -> Rates:
    """Rates by least squares. A source of n configurations counts as √n of them: they share its conditions."""
    import numpy as np
    from scipy.optimize import least_squares

    if not observations:
        raise FitError("no published step is left to fit rates to")
    expected, scale = np.array(_flat(0)), np.array(_flat(1))
    sizes = Counter(one.source for one in observations)
    weights = np.array([sizes[one.source] ** -0.25 for one in observations])

    def residuals(point: np.ndarray) -> np.ndarray:
        rates = _rates(point)
        errors = weights * np.array([log_error(one, rates) for one in observations]) / _USUAL_ERROR
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (point - np.log(expected)) / scale])

    return rounded(_rates(least_squares(residuals, np.log(expected)).x))


def rounded(rates: Rates) -> Rates:
    """Three digits: a solver's steps differ between processors in the sixth, and the rows carry no more than two."""
    return Rates.model_validate(
        {
            name: {key: short(number) for key, number in value.items()} if isinstance(value, dict) else short(value)
            for name, value in rates.model_dump().items()
        }
    )


def short(value: float) -> float:
    """The digits with which a rate is kept."""
    return float(f"{value:.3g}")


def _flat(which: int) -> list[float]:
    groups = (EXPECTED, EXPECTED_GENERATIONS, EXPECTED_ATTENTION)
    return [pair[which] for group in groups for pair in group.values()]


def _rates(point: Sequence[float]) -> Rates:
    values = iter(math.exp(value) for value in point)
    named = {name: next(values) for name in EXPECTED}
    generations = {name: next(values) for name in EXPECTED_GENERATIONS}
    return Rates(**named, generations=generations, attention_of={name: next(values) for name in EXPECTED_ATTENTION})


def left_out_errors(observations: Sequence[Observation], by: str) -> dict[str, list[tuple[Observation, float]]]:
    """By source or card (``by``: ``source`` or ``gpu``): its observations and log errors of a fit without them."""
    groups: dict[str, list[Observation]] = {}
    for one in observations:
        groups.setdefault(one.source if by == "source" else one.gpu.short_name, []).append(one)
    found = {}
    for name, group in sorted(groups.items()):
        rates = fit_rates([one for one in observations if all(one is not other for other in group)])
        found[name] = [(one, log_error(one, rates)) for one in group]
    return found


def half_widths(
    by_source: dict[str, list[tuple[Observation, float]]], by_card: dict[str, list[tuple[Observation, float]]]
) -> dict[Condition, float]:
    """By condition, what :data:`SHARE` of the errors on what was left out stay below; a source's share is √n."""
    cards = sorted({one.gpu.short_name for pairs in by_source.values() for one, _ in pairs})
    sized: dict[Condition, list[tuple[float, float]]] = {}
    for pairs in by_source.values():
        for one, error in pairs:
            condition = condition_of(one.work, one.gpu, one.num_gpus, cards)
            sized.setdefault(condition, []).append((abs(error), len(pairs) ** -0.5))
    unseen = [(abs(error), len(pairs) ** -0.5) for pairs in by_card.values() for _, error in pairs]
    widths = {condition: weighted_quantile(pairs) for condition, pairs in sized.items()}
    usual = widths.get("usual", LEAST_HALF_WIDTH)
    found: dict[Condition, float] = {"usual": usual}
    conditions: tuple[Condition, ...] = ("short steps", "several machines")
    for condition in conditions:
        found[condition] = max(usual, widths.get(condition, 2 * usual))
    found["card never seen"] = max(*found.values(), weighted_quantile(unseen))
    return found


def weighted_quantile(pairs: list[tuple[float, float]]) -> float:
    """The weighted quantile of (error, weight)."""
    reached, whole = 0.0, sum(weight for _, weight in pairs)
    for error, weight in sorted(pairs):
        reached += weight
        if reached >= SHARE * whole:
            return max(error, LEAST_HALF_WIDTH)
    return LEAST_HALF_WIDTH


def fit_speed(observations: Sequence[Observation], data: str, median_error: float) -> SpeedFit:
    """All of it, as it ships; ``median_error`` is of sources left out, in good conditions."""
    rates = fit_rates(observations)
    widths = half_widths(left_out_errors(observations, "source"), left_out_errors(observations, "gpu"))
    sources = Counter(one.source for one in observations)
    return SpeedFit(
        rates=rates,
        half_widths={name: short(width) for name, width in widths.items()},
        cards=sorted({one.gpu.short_name for one in observations}),
        sources=dict(sorted(sources.items())),
        num_configurations=len(observations),
        median_error=short(median_error),
        data=data,
    )
