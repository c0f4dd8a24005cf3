"""Counted fit: counted published steps -> levels of the rates, and how far they are off on what the fit has not seen.

In: CountedSteps. Out: a SpeedFit whose product, attention and link multiply measured kernels' shares (shapes.py): what
a training step reaches of what a kernel reaches alone. As fit.py: least squares on logarithms, large errors by their
size, each rate held to what was expected of it. Loads numpy and scipy; what it leaves behind is read without them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vramprobe.catalog import Gpu
from vramprobe.errors import FitError
from vramprobe.speed.counted import FULL_RATES, KERNELS, PHASES, Count, ideal_rows, replayed, time_of
from vramprobe.speed.fit import LEAST_HALF_WIDTH, rounded, short, weighted_quantile
from vramprobe.speed.rates import Condition, Rates, SpeedFit, generation_of

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
#: PyTorch's attention on Hopper and later is slower than what was measured there (FlashAttention-3, TensorRT-LLM).
ATTENTION_OF = {"Hopper": 0.75, "Blackwell": 0.75, "Blackwell Ultra": 0.75}
_USUAL_ERROR = 0.05
#: Where the card decides every step, a slower host changes nothing: the fit starts from hosts this much apart, too.
_SLOWER_HOST = math.log(2)
_CONDITIONS: tuple[Condition, ...] = ("usual", "short steps")


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """A published step and what it launches; ``tokens`` of a whole step, ``tokens_per_second`` of one GPU."""

    source: str
    count: Count
    gpu: Gpu
    tokens: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_second


def log_error(one: CountedStep, fit: SpeedFit) -> float:
    """log(predicted / published) of tokens per second."""
    return math.log(one.seconds / time_of(one.count, one.gpu, fit=fit).seconds)


class Ideal:
    """A step at full rates; ``seconds`` by any rates are those of :func:`~vramprobe.speed.counted.time_of`, without a
    walk over its rows.
    """

    def __init__(self, one: CountedStep) -> None:
        import numpy as np

        rows = ideal_rows(one.count, one.gpu)
        num_unclaimed = max(0, one.count.num_launches - one.count.num_claimed)
        launches = [sum(row[4] for row in rows if row[0] == at) for at in range(len(PHASES))]
        self._launches = [launches[0] + num_unclaimed, *launches[1:]]
        self._rows = [
            {
                kind: np.array([row[2:4] for row in rows if (row[0], row[1]) == (at, kind)] or [(0.0, 0.0)]).T
                for kind in KERNELS
            }
            for at in range(len(PHASES))
        ]
        self._copies = sum(row[3] for row in rows if row[1] == "copies")
        full = unproven(FULL_RATES, [one])
        self._link = time_of(one.count, one.gpu, fit=full).by_class.get("collectives", 0.0)
        self._attention_of = ATTENTION_OF.get(generation_of(one.gpu), 1.0)

    def seconds(self, rates: Rates) -> float:
        import numpy as np

        phases = []
        for launches, by_kind in zip(self._launches, self._rows, strict=True):
            card = 0.0
            for kind, (flops, moved) in by_kind.items():
                level = {"products": rates.product, "attention": rates.attention * self._attention_of}.get(kind, 1.0)
                stream = rates.dequantise if kind == "dequantize" else rates.stream
                card += float(np.maximum(flops / level, moved / stream).sum())
            phases.append((launches * rates.kernel_seconds, card))
        return math.hypot(replayed(phases), self._link / rates.link) + self._copies + rates.step_seconds


def fit_rates(steps: Sequence[CountedStep]) -> Rates:
    """Rates by least squares. A source of n steps counts as √n of them: they share its conditions."""
    import numpy as np
    from scipy.optimize import least_squares

    if not steps:
        raise FitError("no counted step is left to fit rates to")
    expected = np.log([value for value, _ in EXPECTED.values()])
    scale = np.array([width for _, width in EXPECTED.values()])
    sizes = Counter(one.source for one in steps)
    weights = np.array([sizes[one.source] ** -0.25 for one in steps])

    ideal = [Ideal(one) for one in steps]
    published = np.log([one.seconds for one in steps])

    def residuals(point: np.ndarray) -> np.ndarray:
        rates = rates_of(point)
        errors = weights * (published - np.log([one.seconds(rates) for one in ideal])) / _USUAL_ERROR
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (point - expected) / scale])

    starts = [expected + _SLOWER_HOST * times * (np.array(list(EXPECTED)) == "kernel_seconds") for times in range(3)]
    found = min((least_squares(residuals, start) for start in starts), key=lambda one: one.cost)
    return rounded(rates_of(found.x))


def rates_of(point: Sequence[float]) -> Rates:
    """Rates from the logarithms of :data:`EXPECTED`'s."""
    values = {name: math.exp(value) for name, value in zip(EXPECTED, point, strict=True)}
    return Rates(**values, dequantise_gptq=values["dequantise"], generations={}, attention_of=ATTENTION_OF)


def unproven(rates: Rates, steps: Sequence[CountedStep]) -> SpeedFit:
    """These rates with intervals of no width: for predicting what they were not fitted to."""
    return SpeedFit(
        rates=rates,
        half_widths=dict.fromkeys(("usual", "short steps", "several machines", "card never seen"), 0.0),
        cards=known_cards(steps),
        sources={},
        num_configurations=len(steps),
        median_error=0.0,
        data="",
    )


def left_out_errors(
    steps: Sequence[CountedStep], by: Callable[[CountedStep], str]
) -> dict[str, list[tuple[CountedStep, float]]]:
    """By source or card: its steps and their log errors by a fit without them."""
    groups: dict[str, list[CountedStep]] = {}
    for one in steps:
        groups.setdefault(by(one), []).append(one)
    found = {}
    for name, group in sorted(groups.items()):
        others = [one for one in steps if by(one) != name]
        if others:
            fit = unproven(fit_rates(others), others)
            found[name] = [(one, log_error(one, fit)) for one in group]
    return found


def source_of(one: CountedStep) -> str:
    return one.source


def card_of(one: CountedStep) -> str:
    """The chip, by its architecture and peak: A100s of 40 and 80 GB say nothing new of each other."""
    return f"{one.gpu.arch}, {one.gpu.half_dense_tflops} TFLOP/s"


def known_cards(steps: Sequence[CountedStep]) -> list[str]:
    """Cards whose chip two sources have steps of: of one alone it cannot be told from its source."""
    sources: dict[str, set[str]] = {}
    for one in steps:
        sources.setdefault(card_of(one), set()).add(one.source)
    return sorted({one.gpu.short_name for one in steps if len(sources[card_of(one)]) > 1})


def half_widths(steps: Sequence[CountedStep], rates: Rates) -> dict[Condition, float]:
    """By condition, what 80 % of the errors on sources left out stay below; on cards left out, for one never seen."""
    fit = unproven(rates, steps)
    sized: dict[Condition, list[tuple[float, float]]] = {}
    for pairs in left_out_errors(steps, source_of).values():
        for one, error in pairs:
            condition = time_of(one.count, one.gpu, fit=fit).condition
            sized.setdefault(condition, []).append((abs(error), len(pairs) ** -0.5))
    unseen = [  # a card counts as one, however many steps it has: one never seen is like any of them
        (abs(error), 1 / len(pairs)) for pairs in left_out_errors(steps, card_of).values() for _, error in pairs
    ]
    usual = weighted_quantile(sized["usual"]) if "usual" in sized else LEAST_HALF_WIDTH
    hasty = weighted_quantile(sized["short steps"]) if "short steps" in sized else 2 * usual
    widest = max(usual, hasty, weighted_quantile(unseen) if unseen else 2 * usual)
    return {"usual": usual, "short steps": max(usual, hasty), "several machines": widest, "card never seen": widest}


def fit_counted(steps: Sequence[CountedStep], data: str, median_error: float) -> SpeedFit:
    """All of it, as it ships; ``median_error`` is of sources left out."""
    rates = fit_rates(steps)
    return SpeedFit(
        rates=rates,
        half_widths={name: short(width) for name, width in half_widths(steps, rates).items()},
        cards=known_cards(steps),
        sources=dict(sorted(Counter(one.source for one in steps).items())),
        num_configurations=len(steps),
        median_error=short(median_error),
        data=data,
    )
