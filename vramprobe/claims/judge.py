"""Judge: a claim and its reading → a verdict, by the same rule for all.

In: a Claim and a Reading (the figures under each usual set of conditions, and what no recipe can beat). Out: a frozen
Judgement. Nothing here knows a claim by its id, and no verdict is stored anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vramprobe.catalog import Claim
from vramprobe.claims.figures import Figure, Source
from vramprobe.predict import TIGHT_SHARE

Verdict = Literal["holds", "understates", "overstates", "impossible", "depends", "not about memory"]

#: How far a printed number may be from ours, as a share of it, before the two disagree. Guides print two digits, whose
#: rounding is up to 2.5 % at 20 and takes 70.55 billion parameters for 70; more would let 0.5 B/param pass for NF4's
#: 0.516. Counts of GPUs and "fits" are not rounded, so it is not for them.
TOLERANCE = 0.025
#: Guides write GB and mean 10^9 bytes (weights) or what nvidia-smi and torch call GiB (peaks): either is accepted.
GIB_PER_GB = 2**30 / 1e9
_UNROUNDED = ("bool", "GPUs")
_TINY = 1e-9


@dataclass(frozen=True)
class Case:
    """The figure under one set of conditions: what varies → how it is here, in words."""

    conditions: dict[str, str]
    figure: Figure


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a claim is taken to mean.

    ``cases``: every usual set of conditions, the most usual first; none for what is no matter of memory. ``floor`` and
    ``ceiling``: what nothing can be below or above. ``others``: less usual conditions, tried where the claim fails.
    ``note``: why the figure is what it is. ``is_about_memory`` is no for times, costs and rates.
    """

    cases: tuple[Case, ...]
    note: str
    floor: Figure | None = None
    ceiling: Figure | None = None
    others: Callable[[], Sequence[Case]] = tuple


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One claim, judged; ``least`` and ``most`` are the ends over the usual conditions."""

    claim: Claim
    verdict: Verdict
    depends_on: tuple[str, ...]
    figure: Figure | None  # under the most usual conditions; the bound, where that decides or is all there is
    conditions: dict[str, str]  # of that figure
    least: Case | None
    most: Case | None
    num_agreeing: int
    num_cases: int
    holds_under: str | None
    reason: str
    sources: tuple[Source, ...]


def judge(claim: Claim, reading: Reading) -> Judgement:
    """The verdict. A case agrees where its interval meets the claim's, widened by what rounding and GB may hide."""
    low, high = bounds_of(claim)
    cases = reading.cases
    agreeing = [case for case in cases if case.figure.low <= high and case.figure.high >= low]
    beyond = _beyond(reading, low, high)
    verdict = _verdict(cases, agreeing, beyond, low, high)
    least = min(cases, key=lambda case: case.figure.value, default=None)
    most = max(cases, key=lambda case: case.figure.value, default=None)
    depends_on = _decisive(cases, agreeing) if verdict == "depends" else ()
    holds, fails = _examples(cases, agreeing, low, high)
    if verdict not in ("holds", "depends", "not about memory") or not agreeing:
        holds = next((case for case in reading.others() if case.figure.low <= high and case.figure.high >= low), None)
    shown = cases[0].figure if cases else reading.floor or reading.ceiling
    varying = _varying([*cases, *([holds] if holds else [])])
    told = [figure for figure in (shown, beyond, *(case.figure for case in (holds, fails, least, most) if case)) if figure]
    return Judgement(
        claim=claim, verdict=verdict, depends_on=depends_on, figure=shown,
        conditions=cases[0].conditions if cases else {}, least=least, most=most, num_agreeing=len(agreeing),
        num_cases=len(cases), holds_under=describe(holds, varying) if holds and verdict != "not about memory" else None,
        reason=_reason(verdict, reading, beyond, holds, fails, varying),
        sources=tuple(dict.fromkeys(source for figure in told for source in figure.sources)),
    )  # fmt: skip


def bounds_of(claim: Claim) -> tuple[float, float]:
    """(low, high) of what the claim may mean, in its own unit; of "fits", as a share of the usable memory."""
    low = -math.inf if claim.low is None else claim.low
    high = math.inf if claim.high is None else claim.high
    if claim.unit == "bool":  # what is said not to fit may be tight
        return (-math.inf, 1.0) if low else (TIGHT_SHARE, math.inf)
    if claim.unit in _UNROUNDED:
        return low, high
    high *= GIB_PER_GB if claim.unit == "GB" else 1
    return low - TOLERANCE * abs(low) - _TINY, high + TOLERANCE * abs(high) + _TINY


def describe(case: Case, keys: Sequence[str]) -> str:
    """The conditions that vary, and the figure they give: ``checkpointing on, 2,048 tokens: 15.1 GB``."""
    words = ", ".join(case.conditions[key] for key in keys if key in case.conditions)
    return f"{words}: {amount(case.figure)}" if words else amount(case.figure)


def amount(figure: Figure) -> str:
    """The value with its unit, in three digits (four from a thousand on)."""
    return text_of(figure.value, figure.unit)


def text_of(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "bool":
        return f"{value:.0%} of the usable memory"
    if unit == "fraction":
        return f"{value:.1%}"
    if unit == "GPUs":
        return f"{value:.0f} GPUs"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}"


def _beyond(reading: Reading, low: float, high: float) -> Figure | None:
    """The bound that rules the claim out."""
    if reading.floor is not None and reading.floor.low > high:
        return reading.floor
    if reading.ceiling is not None and reading.ceiling.high < low:
        return reading.ceiling
    return None


def _verdict(
    cases: Sequence[Case], agreeing: Sequence[Case], beyond: Figure | None, low: float, high: float
) -> Verdict:
    if beyond is not None and not agreeing:
        return "impossible"
    if not cases:
        return "not about memory"
    if len(agreeing) == len(cases):
        return "holds"
    if agreeing:
        return "depends"
    if all(case.figure.low > high for case in cases):
        return "understates"
    if all(case.figure.high < low for case in cases):
        return "overstates"
    return "depends"  # too much under some conditions, too little under the others


def _varying(cases: Sequence[Case]) -> list[str]:
    keys = dict.fromkeys(key for case in cases for key in case.conditions)
    return [key for key in keys if len({case.conditions.get(key) for case in cases}) > 1]


def _decisive(cases: Sequence[Case], agreeing: Sequence[Case]) -> tuple[str, ...]:
    """The conditions that decide, most decisive first: by how often changing one alone turns yes into no."""
    flips: dict[str, list[bool]] = {}
    for one, other in itertools.combinations(cases, 2):
        differing = [key for key in one.conditions if one.conditions[key] != other.conditions.get(key)]
        if len(differing) == 1:
            flips.setdefault(differing[0], []).append((one in agreeing) != (other in agreeing))
    shares = {key: sum(found) / len(found) for key, found in flips.items() if any(found)}
    return tuple(sorted(shares, key=lambda key: -shares[key])) or tuple(_varying(cases))


def _examples(
    cases: Sequence[Case], agreeing: Sequence[Case], low: float, high: float
) -> tuple[Case | None, Case | None]:
    """(the most usual case that agrees, the one farthest outside)."""
    failing = [case for case in cases if case not in agreeing]
    farthest = max(failing, key=lambda case: max(case.figure.low - high, low - case.figure.high), default=None)
    return (agreeing[0] if agreeing else None), farthest


def _reason(
    verdict: Verdict, reading: Reading, beyond: Figure | None, holds: Case | None, fails: Case | None,
    varying: Sequence[str],
) -> str:  # fmt: skip
    match verdict:
        case "impossible":
            word = "less" if beyond is reading.floor else "more"
            return f"{reading.note} Nothing can be {word} than {amount(beyond)}."
        case "depends" if holds is not None and fails is not None:
            return f"{reading.note} Agrees with {describe(holds, varying)}; not with {describe(fails, varying)}."
        case "depends":
            return f"{reading.note} Too much under some conditions, too little under others."
        case "understates" | "overstates" if fails is not None:
            return f"{reading.note} No usual conditions give it; the farthest: {describe(fails, varying)}."
    return reading.note
