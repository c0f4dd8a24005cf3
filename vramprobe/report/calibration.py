"""A Calibration → its tables: formulas scored by method, and their constants as measured beside what they say.

In: a frozen Calibration. Out: a Document. Never computes an error itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from vramprobe.choices import Method
from vramprobe.literature.calibrate import Calibration, Constant, FormulaScore, Quantity
from vramprobe.report.columns import signed_percent, unsigned_percent
from vramprobe.report.definition import Column, Document, Table, rows_of

if TYPE_CHECKING:
    import pandas as pd

#: Beyond this mean error a formula is near in no recipe.
NEAR_SHARE = 0.10
_QUANTITIES: dict[Quantity, str] = {
    "peak": "Allocated peak",
    "device": "Peak of the device, with the formulas' own overhead",
    "saved": "Kept for backward when forward ends",
}
_ERRORS = "(said − measured) / measured, mean and worst."
_MORE = (
    "vramprobe calibrate --json has each formula's source, the recipe it stands for, what it leaves out, more groups."
)


def calibration_document(calibration: Calibration, origin: Sequence[str] = (), command: str = "") -> Document:
    """formulas: a table of scores for each quantity, then one for each constant; the CSV has every score."""
    import pandas as pd

    names = list(FormulaScore.model_fields)
    scores = pd.DataFrame([score.model_dump() for score in calibration.scores], columns=names)
    by_quantity = dict(list(scores.groupby("quantity")))
    tables = []
    for quantity, title in _QUANTITIES.items():
        if quantity in by_quantity:
            found = by_quantity[quantity]
            said_nothing = [one.name for one in calibration.formulas if one.name not in set(scores.formula)]
            formulas = [*found.formula.unique(), *(said_nothing if quantity == "peak" else [])]
            tables.append(_scores(found, formulas, title))
    constants = dict.fromkeys(constant.name for constant in calibration.constants)
    tables += [_constants([one for one in calibration.constants if one.name == name]) for name in constants]
    about = (
        f"Published formulas and ours on the same {calibration.num_rows} measured cells. A formula is scored where it "
        "says something of the cell; ours stands beside it on those alone."
    )
    document = Document(
        name="formulas",
        title="Formulas that everybody quotes, scored",
        about=[about],
        tables=tables,
        data=Table(title="Scores", columns=[Column(name) for name in names], rows=rows_of(scores)),
        origin=origin,
        command=command,
        remarks=[*(f"Left out: {count}, {reason}." for reason, count in calibration.left_out.items()), _MORE],
    )
    return document.of(calibration.instrument)


def _scores(found: pd.DataFrame, formulas: Sequence[str], title: str) -> Table:
    """One row per formula, ours first: errors by method, ours on the same rows, and the recipe where it is nearest.

    A formula that says nothing of any cell has a row of dashes among the peaks, so that none is missing.
    """
    errors = found.mean_signed.map(percent) + ", " + found.worst_signed.map(percent)
    by_group = found.assign(errors=errors).pivot(index="formula", columns="group", values="errors")
    by_method = by_group.rename(columns=lambda group: group.removeprefix("method ")).filter(get_args(Method))
    everything = found[found.group == "all"].set_index("formula")
    rows = by_method.assign(
        cells=everything.num_rows, ours=everything.ours_mean_absolute, nearest=_nearest(found)
    ).reindex(list(formulas))
    rows["cells"] = rows.cells.fillna(0).astype(int)
    columns = [
        Column("formula", "formula"),
        Column("cells", "cells", is_number=True),
        *(Column(method, method, is_number=True) for method in map(str, by_method)),
        Column("ours", "ours on these", text=lambda share: percent(share, signed=False), is_number=True),
        Column("nearest", "nearest in"),
    ]
    return Table(title=title, columns=columns, rows=rows_of(rows.rename_axis("formula").reset_index()), note=_ERRORS)


def _nearest(found: pd.DataFrame) -> pd.Series:
    """Return by formula the recipe with the smallest mean error, if that is small."""
    recipes = found[found.group.str.startswith("recipe ")].sort_values("mean_absolute", kind="stable")
    near = recipes[recipes.mean_absolute <= NEAR_SHARE].drop_duplicates("formula").set_index("formula")
    errors = near.mean_absolute.map(lambda share: percent(share, signed=False)).astype(str)
    return near.group.str.removeprefix("recipe ") + " (" + errors + ")"


def _constants(found: list[Constant]) -> Table:
    import pandas as pd

    frame = pd.DataFrame([one.model_dump() for one in found])
    says: dict[str, tuple[float, float]] = {}
    for formula, (low, high) in (pair for one in found for pair in one.says.items()):
        least, most = says.get(formula, (low, high))
        says[formula] = min(least, low), max(most, high)
    columns = [
        Column("group", "in"),
        Column("num_rows", "rows", is_number=True),
        Column("measured", "measured", text="{:.4f}".format, is_number=True),
        Column("standard_error", "standard error", text="± {:.4f}".format, is_number=True),
        Column("problem", "remark"),
    ]
    title = f"Measured {found[0].name.replace('_', ' ')}: {found[0].unit}"
    return Table(title=title, columns=columns, rows=rows_of(frame), note=f"Formulas say {said(says) or 'nothing'}.")


def percent(share: float, *, signed: bool = True) -> str:
    """``+12.3 %``; what is smaller than a hundredth is said to be."""
    return f"{(signed_percent if signed else unsigned_percent)(100 * share)} %"


def said(says: Mapping[str, tuple[float, float]]) -> str:
    """Formulas by the value they give: ``2: 8-bytes, 16-bytes; 4: 18-bytes``."""
    by_value: dict[tuple[float, float], list[str]] = defaultdict(list)
    for formula, (low, high) in says.items():
        by_value[round(low, 4), round(high, 4)].append(formula)
    return "; ".join(
        f"{f'{low:g}' if low == high else f'{low:g} to {high:g}'}: {', '.join(names)}"
        for (low, high), names in sorted(by_value.items())
    )
