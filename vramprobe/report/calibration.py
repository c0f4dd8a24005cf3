"""A Calibration → its tables: formulas scored by method, and their constants as measured beside what they say.

In: a frozen Calibration. Out: a Document. Never computes an error itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from vramprobe.literature.calibrate import Calibration, Constant, Quantity, Score
from vramprobe.report.definition import Column, Document, Table
from vramprobe.spec import Method

#: Beyond this mean error a formula is near in no recipe.
NEAR_SHARE = 0.10
_SMALLEST_PERCENT = 0.01
_QUANTITIES: dict[Quantity, str] = {
    "peak": "Allocated peak",
    "device": "Peak of the device, with the formulas' own overhead",
    "saved": "Kept for backward when forward ends",
}
_ERRORS = "(said − measured) / measured, mean and worst."
_MORE = (
    "vramprobe calibrate --json has each formula's source, the recipe it stands for, what it leaves out, more groups."
)

_Groups = Mapping[str, Score]  # of one formula: group → score


def calibration_document(calibration: Calibration, origin: Sequence[str] = (), command: str = "") -> Document:
    """formulas: a table of scores for each quantity, then one for each constant; the CSV has every score."""
    scored = {score.quantity for score in calibration.scores}
    tables = [_scores(calibration, quantity, title) for quantity, title in _QUANTITIES.items() if quantity in scored]
    names = dict.fromkeys(constant.name for constant in calibration.constants)
    tables += [_constants([one for one in calibration.constants if one.name == name]) for name in names]
    about = (
        f"Published formulas and ours on the same {calibration.num_rows} measured cells. A formula is scored where it "
        "says something of the cell; ours stands beside it on those alone."
    )
    document = Document(
        name="formulas",
        title="Formulas that everybody quotes, scored",
        about=[about],
        tables=tables,
        data=Table(title="Scores", columns=_SCORE_COLUMNS, rows=calibration.scores),
        origin=origin,
        command=command,
        remarks=[*(f"Left out: {count}, {reason}." for reason, count in calibration.left_out.items()), _MORE],
    )
    return document.of(calibration.instrument)


def _scores(calibration: Calibration, quantity: Quantity, title: str) -> Table:
    """One row per formula, ours first: errors by method, ours on the same rows, and the recipe where it is nearest.

    A formula that says nothing of any cell has a row of dashes among the peaks, so that none is missing.
    """
    found: dict[str, dict[str, Score]] = defaultdict(dict)
    for score in calibration.scores:
        if score.quantity == quantity:
            found[score.formula][score.group] = score
    methods = [name for name in get_args(Method) if any(f"method {name}" in groups for groups in found.values())]
    if quantity == "peak":
        spoken = {score.formula for score in calibration.scores}
        found |= {one.name: {} for one in calibration.formulas if one.name not in spoken}
    columns = [
        Column("formula", "formula", lambda row: row[0]),
        Column("cells", "cells", lambda row: row[1]["all"].num_rows if row[1] else 0, is_number=True),
        *(
            Column(method, method, lambda row, name=f"method {method}": row[1].get(name), _errors, is_number=True)
            for method in methods
        ),
        Column("ours", "ours on these", _ours, lambda share: percent(share, signed=False), is_number=True),
        Column("nearest", "nearest in", lambda row: _nearest(row[1])),
    ]
    return Table(title=title, columns=columns, rows=list(found.items()), note=_ERRORS)


def _constants(found: list[Constant]) -> Table:
    says: dict[str, tuple[float, float]] = {}
    for constant in found:
        for formula, (low, high) in constant.says.items():
            lowest, highest = says.get(formula, (low, high))
            says[formula] = min(low, lowest), max(high, highest)
    columns = [
        Column("group", "in", lambda one: one.group),
        Column("num_rows", "rows", lambda one: one.num_rows, is_number=True),
        Column("measured", "measured", lambda one: one.measured, "{:.4f}".format, is_number=True),
        Column("standard_error", "standard error", lambda one: one.standard_error, "± {:.4f}".format, is_number=True),
        Column("problem", "remark", lambda one: one.problem),
    ]
    title = f"Measured {found[0].name.replace('_', ' ')}: {found[0].unit}"
    return Table(title=title, columns=columns, rows=found, note=f"Formulas say {said(says) or 'nothing'}.")


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


def _ours(row: tuple[str, _Groups]) -> float | None:
    return row[1]["all"].ours_mean_absolute if row[1] else None


def _errors(score: Score) -> str:
    return f"{percent(score.mean_signed)}, {percent(score.worst_signed)}"


def _nearest(found: _Groups) -> str | None:
    """The recipe with the smallest mean error, where that is small."""
    recipes = [score for group, score in found.items() if group.startswith("recipe ")]
    best = min(recipes, key=lambda score: score.mean_absolute, default=None)
    if best is None or best.mean_absolute > NEAR_SHARE:
        return None
    return f"{best.group.removeprefix('recipe ')} ({percent(best.mean_absolute, signed=False)})"


def _of(name: str) -> Any:
    return lambda score: getattr(score, name)


_SCORE_COLUMNS = [Column(name, None, _of(name)) for name in Score.model_fields]
