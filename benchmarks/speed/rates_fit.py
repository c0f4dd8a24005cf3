"""Fit: published steps -> Rates, and how far they are off on sources and cards that the fit has not seen.

In: Steps (counted_fit.py). Out: a SpeedFit. Least squares on the logarithm
of a step's seconds, a large error counted by its size and not its square, and each rate held to what is known of such
kernels anywhere, so that few rows move it little. What it leaves behind ships as numbers in data/rates/.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from vramprobe.catalog import Gpu
from vramprobe.errors import FitError
from vramprobe.speed.rates import Condition, Rates, SpeedFit

#: What was expected of each rate before any counted row was looked at, and how sure that is (one standard deviation of
#: its logarithm). A long step's clock is some 5 to 10 % below that of a short run of one kernel; simple kernels reach
#: 0.8 of the bandwidth; a launch takes Python and autograd some 8 µs.
EXPECTED = {
    "product": (0.93, 0.07),
    "attention": (0.9, 0.15),
    "stream": (0.8, 0.15),
    "dequantise": (0.5, 0.5),
    "link": (0.8, 0.3),
    "kernel_seconds": (8e-6, 0.4),
    "step_seconds": (0.01, 1.0),
}
#: Errors beyond this count by their size (soft L1).
_USUAL_ERROR = 0.05
#: Where the card decides every step, a slower host changes nothing, and its rate stays as it was: then the fit starts
#: from hosts this much apart, too.
_SLOWER_HOST, _UNMOVED = math.log(2), 0.01
#: Of what was left out, an interval holds so much.
SHARE = 0.8
#: No interval is narrower: repeats of one run on other vendors' machines and versions differ by so much.
LEAST_HALF_WIDTH = 0.05


class Step(Protocol):
    """A published step; one set aside is not fitted to."""

    @property
    def source(self) -> str: ...
    @property
    def gpu(self) -> Gpu: ...
    @property
    def is_aside(self) -> bool: ...
    @property
    def published_seconds(self) -> float: ...
    def seconds(self, rates: Rates) -> float:
        """By any rates."""
        ...

    def condition(self, fit: SpeedFit) -> Condition:
        """Return the condition of its interval."""
        ...


S = TypeVar("S", bound=Step)


def log_error(one: Step, rates: Rates) -> float:
    """log(predicted / published) of tokens per second."""
    return math.log(one.published_seconds / one.seconds(rates))


def fit_rates(steps: Sequence[Step]) -> Rates:
    """Rates by least squares. A source of n steps counts as √n of them: they share its conditions."""
    import numpy as np
    from scipy.optimize import least_squares

    steps = [one for one in steps if not one.is_aside]
    if not steps:
        raise FitError("no published step is left to fit rates to")
    names = list(EXPECTED)
    expected = np.log([value for value, _ in EXPECTED.values()])
    scale = np.array([width for _, width in EXPECTED.values()])
    sizes = Counter(one.source for one in steps)
    weights = np.array([sizes[one.source] ** -0.25 for one in steps])

    def residuals(point: np.ndarray) -> np.ndarray:
        rates = rates_of(point, names)
        errors = weights * np.array([log_error(one, rates) for one in steps]) / _USUAL_ERROR
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (point - expected) / scale])

    is_host = np.array(names) == "kernel_seconds"
    found = least_squares(residuals, expected)
    if abs(found.x - expected)[is_host] < _UNMOVED:
        others = [least_squares(residuals, expected + _SLOWER_HOST * times * is_host) for times in (1, 2)]
        found = min([found, *others], key=lambda one: one.cost)
    return Rates(**{name: short(math.exp(value)) for name, value in zip(names, found.x, strict=True)})


def rates_of(point: Sequence[float], names: Iterable[str] = EXPECTED) -> Rates:
    """Rates from their logarithms."""
    return Rates(**{name: math.exp(value) for name, value in zip(names, point, strict=True)})


def short(value: float) -> float:
    """Three digits: a solver's steps differ between processors in the sixth, and the rows carry no more than two."""
    return float(f"{value:.3g}")


def source_of(one: Step) -> str:
    return one.source


def card_of(one: Step) -> str:
    """The chip, by its architecture and peak: A100s of 40 and 80 GB say nothing new of each other."""
    return f"{one.gpu.arch}, {one.gpu.half_dense_tflops} TFLOP/s"


def left_out_errors(steps: Sequence[S], by: Callable[[S], str]) -> dict[str, list[tuple[S, float]]]:
    """By source or card: its steps and their log errors by a fit without them."""
    groups: dict[str, list[S]] = {}
    for one in steps:
        groups.setdefault(by(one), []).append(one)
    found = {}
    for name, group in sorted(groups.items()):
        others = [one for one in steps if by(one) != name]
        if others:
            rates = fit_rates(others)
            found[name] = [(one, log_error(one, rates)) for one in group]
    return found


def known_cards(steps: Sequence[Step]) -> list[str]:
    """Cards whose chip two sources have steps of: of one alone it cannot be told from its source."""
    sources: dict[str, set[str]] = {}
    for one in steps:
        sources.setdefault(card_of(one), set()).add(one.source)
    return sorted({one.gpu.short_name for one in steps if len(sources[card_of(one)]) > 1})


def unproven(rates: Rates, steps: Sequence[Step]) -> SpeedFit:
    """These rates with intervals of no width: for predicting what they were not fitted to."""
    return SpeedFit(
        rates=rates,
        half_widths=dict.fromkeys(("usual", "short steps", "card never seen"), 0.0),
        cards=known_cards(steps),
        sources={},
        num_configurations=sum(not one.is_aside for one in steps),
        median_error=0.0,
        data="",
    )


def half_widths(steps: Sequence[S], fit: SpeedFit) -> dict[Condition, float]:
    """By condition, what :data:`SHARE` of the errors on sources left out stay below, each step counted once; for a card
    never seen, of those on cards left out, where a card of n steps counts as √n: a new one is like any of them.
    """
    sized: dict[Condition, list[tuple[float, float]]] = {}
    for pairs in left_out_errors(steps, source_of).values():
        for one, error in pairs:
            sized.setdefault(one.condition(fit), []).append((abs(error), 1.0))
    by_card = left_out_errors(steps, card_of).values()
    unseen = [(abs(error), len(pairs) ** -0.5) for pairs in by_card for _, error in pairs]
    usual = _quantile(sized.get("usual", []), LEAST_HALF_WIDTH)
    found: dict[Condition, float] = {"usual": usual}
    found["short steps"] = max(usual, _quantile(sized.get("short steps", []), 2 * usual))
    found["card never seen"] = max(usual, _quantile(unseen, 2 * usual))
    return found


def _quantile(pairs: list[tuple[float, float]], otherwise: float) -> float:
    """The weighted quantile of (error, weight), of nothing ``otherwise``."""
    reached, whole = 0.0, sum(weight for _, weight in pairs)
    for error, weight in sorted(pairs):
        reached += weight
        if reached >= SHARE * whole:
            return max(error, LEAST_HALF_WIDTH)
    return otherwise


def with_widths(rates: Rates, steps: Sequence[S]) -> SpeedFit:
    """These rates, which were fitted to ``steps``, with the intervals that these give."""
    fit = unproven(rates, steps)
    return fit.model_copy(update={"half_widths": {name: short(w) for name, w in half_widths(steps, fit).items()}})


def inside_intervals(steps: Sequence[S]) -> list[tuple[S, Condition, bool]]:
    """Return for each step its condition, and True if it lies in the interval of a fit, and of widths, that have not
    seen its source; no steps of a source without which less than two are left.
    """
    found = []
    for source in sorted({one.source for one in steps}):
        others = [one for one in steps if one.source != source]
        if len({one.source for one in others}) < 2:
            continue
        fit = with_widths(fit_rates(others), others)
        for one in (one for one in steps if one.source == source):
            condition = one.condition(fit)
            found.append((one, condition, abs(log_error(one, fit.rates)) <= fit.half_widths[condition]))
    return found


def fit_speed(steps: Sequence[S], data: str, median_error: float) -> SpeedFit:
    """All of it, as it ships; ``median_error`` is of sources left out."""
    sources = dict(sorted(Counter(one.source for one in steps if not one.is_aside).items()))
    told = {"sources": sources, "median_error": short(median_error), "data": data}
    return with_widths(fit_rates(steps), steps).model_copy(update=told)
