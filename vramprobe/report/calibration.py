"""A Calibration → the cells of its tables: scores by method, and constants beside what the formulas say.

In: a frozen Calibration. Out: (headings, rows of text). Never computes an error itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from vramprobe.calibrate import Calibration, Constant, Quantity, Score
from vramprobe.spec import Method

#: Beyond this mean error a formula is near in no recipe.
NEAR_SHARE = 0.10
_SMALLEST_PERCENT = 0.01
_QUANTITIES: dict[Quantity, str] = {
    "peak": "Allocated peak: (said − measured) / measured, mean and worst",
    "device": "Peak of the device, with the formulas' own overhead: (said − measured) / measured, mean and worst",
    "saved": "Kept for backward when forward ends: (said − measured) / measured, mean and worst",
}


@dataclass(frozen=True)
class Section:
    """One table: its first and its last column are words, the others numbers."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


def sections(calibration: Calibration) -> list[Section]:
    """A table of scores for each quantity, then one for each constant, with what the formulas say below it."""
    scored = {score.quantity for score in calibration.scores}
    scores = [_scores(calibration, quantity, title) for quantity, title in _QUANTITIES.items() if quantity in scored]
    names = dict.fromkeys(constant.name for constant in calibration.constants)
    return [*scores, *[_constants([one for one in calibration.constants if one.name == name]) for name in names]]


def _scores(calibration: Calibration, quantity: Quantity, title: str) -> Section:
    """One row per formula, ours first: errors by method, ours on the same rows, and the recipe where it is nearest.

    A formula that says nothing of any cell has a row of dashes among the peaks, so that none is missing.
    """
    found: dict[str, dict[str, Score]] = defaultdict(dict)
    for score in calibration.scores:
        if score.quantity == quantity:
            found[score.formula][score.group] = score
    methods = [name for name in get_args(Method) if any(f"method {name}" in groups for groups in found.values())]
    rows = [
        [name, str(groups["all"].num_rows), *[_errors(groups.get(f"method {method}")) for method in methods],
         _ours(groups["all"]), _nearest(groups)]
        for name, groups in found.items()
    ]  # fmt: skip
    if quantity == "peak":
        spoken = {score.formula for score in calibration.scores}
        silent = [one.name for one in calibration.formulas if one.name not in spoken]
        rows += [[name, "0", *["–" for _ in methods], "–", ""] for name in silent]
    return Section(title, ["formula", "cells", *methods, "ours on these", "nearest in"], rows)


def _constants(found: list[Constant]) -> Section:
    says: dict[str, tuple[float, float]] = {}
    for constant in found:
        for formula, (low, high) in constant.says.items():
            lowest, highest = says.get(formula, (low, high))
            says[formula] = min(low, lowest), max(high, highest)
    rows = [
        [one.group, str(one.num_rows), "–" if one.measured is None else f"{one.measured:.4f}",
         "–" if one.standard_error is None else f"± {one.standard_error:.4f}", one.problem or ""]
        for one in found
    ]  # fmt: skip
    title = f"Measured {found[0].name.replace('_', ' ')}: {found[0].unit}"
    return Section(
        title, ["in", "rows", "measured", "standard error", ""], rows, f"formulas say {said(says) or 'nothing'}"
    )


def percent(share: float, *, signed: bool = True) -> str:
    """``+12.3 %``; what is smaller than a hundredth is said to be."""
    value = 100 * share
    if abs(value) < _SMALLEST_PERCENT:
        return f"≤ {_SMALLEST_PERCENT} %"
    return f"{value:+.2f} %" if signed else f"{value:.2f} %"


def said(says: Mapping[str, tuple[float, float]]) -> str:
    """Formulas by the value they give: ``2: 8-bytes, 16-bytes; 4: 18-bytes``."""
    by_value: dict[tuple[float, float], list[str]] = defaultdict(list)
    for formula, (low, high) in says.items():
        by_value[round(low, 4), round(high, 4)].append(formula)
    return "; ".join(
        f"{f'{low:g}' if low == high else f'{low:g} to {high:g}'}: {', '.join(names)}"
        for (low, high), names in sorted(by_value.items())
    )


def _ours(score: Score) -> str:
    return "–" if score.ours_mean_absolute is None else percent(score.ours_mean_absolute, signed=False)


def _errors(score: Score | None) -> str:
    return "–" if score is None else f"{percent(score.mean_signed)}, {percent(score.worst_signed)}"


def _nearest(found: Mapping[str, Score]) -> str:
    """The recipe with the smallest mean error, where that is small."""
    recipes = [score for group, score in found.items() if group.startswith("recipe ")]
    best = min(recipes, key=lambda score: score.mean_absolute)
    if best.mean_absolute > NEAR_SHARE:
        return ""
    return f"{best.group.removeprefix('recipe ')} ({percent(best.mean_absolute, signed=False)})"
