"""Claims: each published figure of data/claims.csv → a verdict with our figure, its conditions and its commands.

In: the claims asked for, and records where there are some. Out: one Judgement each, in file order, by the same rule
for all: a reading's figures against the claim's range. A comparable record goes before a prediction. Stays this side of
the torch line; nothing here knows a claim by its id, and no verdict is stored.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vramprobe import catalog
from vramprobe.catalog.claims import Claim, list_claims
from vramprobe.errors import UnknownName
from vramprobe.literature.figures import Cells, ClaimFigure, Source
from vramprobe.literature.readings import ClaimCase, Reading, reading_of
from vramprobe.predict.at_hand import shipped_alone
from vramprobe.predict.verdict import TIGHT_SHARE
from vramprobe.records.record import RunRecord

Verdict = Literal["holds", "understates", "overstates", "impossible", "depends", "not about memory"]
VERDICTS = get_args(Verdict)
#: Verdict of a claim where every figure of ours lies on the same side of it.
_WHERE_ALL_ARE: dict[str, Verdict] = {"in": "holds", "above": "understates", "below": "overstates"}

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


@shipped_alone()
def judge_claims(
    ids: Sequence[str] = (), *, topics: Sequence[str] = (), gpu: str | None = None, records: Iterable[RunRecord] = ()
) -> list[Judgement]:
    """The claims with these ids, of these topics, on this GPU (all by default), judged by records and what ships.

    Raises UnknownName for an id, a topic or a GPU that there is not.
    """
    claims = list_claims()
    known, all_topics = {claim.id.lower() for claim in claims}, {claim.topic for claim in claims}
    for given in ids:
        if given.lower() not in known:
            raise UnknownName("claim", given, [claim.id for claim in claims], "`vramprobe claims` lists all of them.")
    for given in topics:
        if given not in all_topics:
            raise UnknownName("topic", given, all_topics, f"There are {', '.join(sorted(all_topics))}.")
    wanted, card, cells = {given.lower() for given in ids}, catalog.find_gpu(gpu) if gpu else None, Cells(records)
    return [
        judge(claim, reading_of(claim, claims, cells))
        for claim in claims
        if (not wanted or claim.id.lower() in wanted)
        and (not topics or claim.topic in topics)
        and (card is None or card in claim.gpus)
    ]


def judge(claim: Claim, reading: Reading) -> Judgement:
    """The verdict. A case agrees where its interval meets the claim's, widened by what rounding and GB may hide."""
    low, high = bounds_of(claim)
    cases, most_claimed = reading.cases, high
    if "minimum" in claim.statement and claim.unit == "GB" and claim.low is not None:
        most_claimed = claim.low * GIB_PER_GB * (1 + TOLERANCE)  # a minimum must do, whatever more is recommended
    sides = ["above" if one.figure.low > high else "below" if one.figure.high < low else "in" for one in cases]
    beyond = reading.ruled_out
    if beyond is None and reading.floor is not None and reading.floor.low > most_claimed:
        beyond = reading.floor
    if beyond is None and reading.ceiling is not None and reading.ceiling.high < low:
        beyond = reading.ceiling
    alike = _WHERE_ALL_ARE[sides[0]] if len(set(sides)) == 1 else "depends"
    verdict: Verdict = "impossible" if beyond is not None else alike if cases else "not about memory"
    agreeing = [case for case, side in zip(cases, sides, strict=True) if side == "in"]
    holds = agreeing[0] if agreeing else None
    if verdict == "impossible" or (cases and not agreeing):
        tried = (case for case in reading.others() if case.figure.low <= most_claimed and case.figure.high >= low)
        holds = next(tried, None)
    failing = [case for case, side in zip(cases, sides, strict=True) if side != "in"]
    fails = max(failing, key=lambda case: max(case.figure.low - high, low - case.figure.high), default=None)
    least = min(cases, key=lambda case: case.figure.value, default=None)
    most = max(cases, key=lambda case: case.figure.value, default=None)
    shown = cases[0].figure if cases else reading.ruled_out or reading.ceiling
    told = [shown, beyond, *(case.figure for case in (holds, fails, least, most) if case)]
    varying = _varying([*cases, *([holds] if holds else [])])
    ends = [one and describe(one, varying) for one in (holds, fails, least, most)]
    return Judgement(
        claim=claim,
        verdict=verdict,
        depends_on=_decisive(cases, agreeing) if verdict == "depends" else (),
        figure=shown,
        conditions=cases[0].conditions if cases else {},
        least=least,
        most=most,
        num_agreeing=len(agreeing),
        num_above=sides.count("above"),
        num_below=sides.count("below"),
        holds_under=ends[0],
        reason=_reason(verdict, reading, beyond, ends, {amount(case.figure) for case in cases}) or reading.note,
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


def _reason(
    verdict: Verdict, reading: Reading, beyond: ClaimFigure | None, ends: Sequence[str | None], amounts: set[str]
) -> str | None:
    """One sentence: what decided, with the figures at both ends where it depends; None where the note says it."""
    holds, fails, least, most = ends
    right = f"; right with {holds}" if holds else ""
    if beyond is not None:
        what = f"{reading.floor_is} at least" if beyond is reading.floor else "At most"
        return None if beyond is reading.ruled_out else f"{what} {amount(beyond)}, {beyond.arithmetic}{right}."
    if verdict == "depends" and holds and fails:
        return f"Agrees with {holds}; not with {fails}."
    if verdict in ("depends", "understates", "overstates"):
        return f"None agrees, from {least} to {most}{right}."
    return f"From {least} to {most}." if verdict == "holds" and len(amounts) > 1 else None
