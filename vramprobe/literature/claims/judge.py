"""Judge: a claim and its reading → a verdict, by the same rule for all.

In: a Claim and a Reading (the figures under each usual set of conditions, and what no recipe can beat). Out: a frozen
Judgement. Nothing here knows a claim by its id, and no verdict is stored anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vramprobe.catalog import Claim
from vramprobe.literature.claims.cells import Source
from vramprobe.literature.claims.rules import ClaimCase, ClaimFigure, Reading
from vramprobe.predict.verdict import TIGHT_SHARE

Verdict = Literal["holds", "understates", "overstates", "impossible", "depends", "not about memory"]

#: How far a printed number may be from ours, as a share of it, before the two disagree. Guides print two digits, whose
#: rounding is 3 % at 16 or 17 and takes 70.55 billion parameters for 70; more would let 0.5 B/param pass for NF4's
#: 0.516. Counts of GPUs and "fits" are not rounded, so it is not for them.
TOLERANCE = 0.03
#: Guides write GB and mean 10^9 bytes (weights) or what nvidia-smi and torch call GiB (peaks): either is accepted.
GIB_PER_GB = 2**30 / 1e9
_UNROUNDED = ("bool", "GPUs")
_TINY = 1e-9


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One claim, judged; ``least`` and ``most`` are the ends over the usual conditions."""

    claim: Claim
    verdict: Verdict
    depends_on: tuple[str, ...]
    figure: ClaimFigure | None  # under the most usual conditions; the bound, where that decides or is all there is
    conditions: dict[str, str]  # of that figure
    least: ClaimCase | None
    most: ClaimCase | None
    num_agreeing: int
    num_above: int  # usual conditions whose figure is above the claim's
    num_below: int
    holds_under: str | None
    note: str
    reason: str
    sources: tuple[Source, ...]


def judge(claim: Claim, reading: Reading) -> Judgement:
    """The verdict. A case agrees where its interval meets the claim's, widened by what rounding and GB may hide."""
    low, high = bounds_of(claim)
    cases = reading.cases
    agreeing = [case for case in cases if case.figure.low <= high and case.figure.high >= low]
    beyond = _beyond(claim, reading, low, high)
    verdict = _verdict(cases, agreeing, beyond, low, high)
    least = min(cases, key=lambda case: case.figure.value, default=None)
    most = max(cases, key=lambda case: case.figure.value, default=None)
    holds, fails = _examples(cases, agreeing, low, high)
    if verdict == "not about memory":
        holds = None
    elif verdict == "impossible" or not agreeing:
        limit = _most_claimed(claim, high)
        tried = (case for case in reading.others() if case.figure.low <= limit and case.figure.high >= low)
        holds = next(tried, None)
    varying = _varying([*cases, *([holds] if holds else [])])
    shown = cases[0].figure if cases else reading.ruled_out or reading.ceiling
    told = [shown, beyond, *(case.figure for case in (holds, fails, least, most) if case)]
    return Judgement(
        claim=claim,
        verdict=verdict,
        depends_on=_decisive(cases, agreeing) if verdict == "depends" else (),
        figure=shown,
        conditions=cases[0].conditions if cases else {},
        least=least,
        most=most,
        num_agreeing=len(agreeing),
        num_above=sum(case.figure.low > high for case in cases),
        num_below=sum(case.figure.high < low for case in cases),
        holds_under=describe(holds, varying) if holds else None,
        reason=_reason(verdict, reading, beyond, (holds, fails), (least, most), varying),
        note=reading.note,
        sources=tuple(dict.fromkeys(source for one in told if one for source in one.sources)),
    )


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


def describe(case: ClaimCase, keys: Sequence[str]) -> str:
    """The conditions that vary, and the figure they give: ``checkpointing on, 2,048 tokens: 15.1 GB``."""
    words = ", ".join(case.conditions[key] for key in keys if key in case.conditions)
    return f"{words}: {amount(case.figure)}" if words else amount(case.figure)


def amount(figure: ClaimFigure) -> str:
    """The value with its unit, in three digits (four from a thousand on)."""
    return text_of(figure.value, figure.unit)


def text_of(value: float, unit: str) -> str:
    """A value with its unit."""
    if unit == "bool":
        return f"{value:.0%} of the card"
    if unit == "fraction":
        return f"{100 * value:.3g} %"
    if unit == "GPUs":
        return f"{value:.0f} GPU{'s' if value != 1 else ''}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits}×" if unit == "x" else digits if unit in ("exponent", "ratio") else f"{digits} {unit}"


def _beyond(claim: Claim, reading: Reading, low: float, high: float) -> ClaimFigure | None:
    """The bound that rules the claim out; a minimum must not be below the floor, whatever is recommended."""
    if reading.ruled_out is not None:
        return reading.ruled_out
    if reading.floor is not None and reading.floor.low > _most_claimed(claim, high):
        return reading.floor
    if reading.ceiling is not None and reading.ceiling.high < low:
        return reading.ceiling
    return None


def _most_claimed(claim: Claim, high: float) -> float:
    """The most that may be needed for the claim to be possible: a minimum must do, whatever more is recommended."""
    if "minimum" in claim.statement and claim.unit == "GB" and claim.low is not None:
        return claim.low * GIB_PER_GB * (1 + TOLERANCE)
    return high


def _verdict(
    cases: Sequence[ClaimCase], agreeing: Sequence[ClaimCase], beyond: ClaimFigure | None, low: float, high: float
) -> Verdict:
    if beyond is not None:
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


def _varying(cases: Sequence[ClaimCase]) -> list[str]:
    keys = dict.fromkeys(key for case in cases for key in case.conditions)
    return [key for key in keys if len({case.conditions.get(key) for case in cases}) > 1]


def _decisive(cases: Sequence[ClaimCase], agreeing: Sequence[ClaimCase]) -> tuple[str, ...]:
    """The conditions that decide, most decisive first: by how often changing one alone turns yes into no."""
    flips: dict[str, list[bool]] = {}
    for one, other in itertools.combinations(cases, 2):
        differing = [key for key in one.conditions if one.conditions[key] != other.conditions.get(key)]
        if len(differing) == 1:
            flips.setdefault(differing[0], []).append((one in agreeing) != (other in agreeing))
    shares = {key: sum(found) / len(found) for key, found in flips.items() if any(found)}
    return tuple(sorted(shares, key=lambda key: -shares[key])) or tuple(_varying(cases))


def _examples(
    cases: Sequence[ClaimCase], agreeing: Sequence[ClaimCase], low: float, high: float
) -> tuple[ClaimCase | None, ClaimCase | None]:
    """(the most usual case that agrees, the one farthest outside)."""
    failing = [case for case in cases if case not in agreeing]
    farthest = max(failing, key=lambda case: max(case.figure.low - high, low - case.figure.high), default=None)
    return (agreeing[0] if agreeing else None), farthest


def _reason(
    verdict: Verdict,
    reading: Reading,
    beyond: ClaimFigure | None,
    examples: tuple[ClaimCase | None, ClaimCase | None],
    ends: tuple[ClaimCase | None, ClaimCase | None],
    varying: Sequence[str],
) -> str:
    """One sentence: what decided, with the figures at both ends where it depends."""
    (holds, fails), (least, most) = examples, ends
    right = f"; right with {describe(holds, varying)}" if holds is not None else ""
    match verdict:
        case "impossible":
            assert beyond is not None
            if beyond is reading.ruled_out:
                return reading.note
            what = f"{reading.floor_is} at least" if beyond is reading.floor else "At most"
            return f"{what} {amount(beyond)}, {beyond.arithmetic}{right}."
        case "depends" if holds is not None and fails is not None:
            return f"Agrees with {describe(holds, varying)}; not with {describe(fails, varying)}."
        case "depends" | "understates" | "overstates" if least is not None and most is not None:
            return f"None agrees, from {describe(least, varying)} to {describe(most, varying)}{right}."
        case "holds" if least is not None and most is not None and amount(least.figure) != amount(most.figure):
            return f"From {describe(least, varying)} to {describe(most, varying)}."
    return reading.note
