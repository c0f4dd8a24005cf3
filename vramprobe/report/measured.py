"""Cells → the page of what was measured, and predicted by a recipe at hand: cells held out of a fit apart, failures.

In: cells, where they come from and the command. Out: a Document. Hides nothing that was measured.
"""

from collections.abc import Sequence

from vramprobe.report.cells import Cell, summaries
from vramprobe.report.columns import (
    ByteUnit,
    cell_columns,
    cell_row,
    shortened,
    signed_percent,
    unit_for,
    unsigned_percent,
)
from vramprobe.report.definition import Column, Document, Table


def measured(cells: Sequence[Cell], origin: Sequence[str], command: str) -> Document:
    """measured: the peak of every cell, the prediction and its error beside it where there is one."""
    rows = [cell_row(cell) for cell in cells]
    believed = [row for row in rows if row["measured_bytes"] is not None]
    failed = [row for row in rows if row["measured_bytes"] is None]
    is_fitted = any(row["held_out"] is not None for row in rows)
    is_predicted = is_fitted or any(row["predicted_bytes"] is not None for row in rows)
    columns = _columns(
        unit_for(row["measured_bytes"] for row in believed), is_predicted=is_predicted, is_fitted=is_fitted
    )
    tables = []
    if quality := summaries(cells):
        tables.append(Table(title="Summary", columns=_SUMMARY_COLUMNS, rows=quality))
    if is_fitted:
        for title, held_out, otherwise in (
            ("Held out of the fit", True, "No cell: the fit has seen every one."),
            ("In the fit", False, "No cell: the fit was made from other records."),
        ):
            found = [row for row in believed if row["held_out"] is held_out]
            tables.append(Table(title=title, columns=columns, rows=found, otherwise=otherwise))
    else:
        otherwise = "No cell finished; see below."
        tables.append(Table(title="Cells", columns=columns, rows=believed, otherwise=otherwise))
    if remarks := [row for row in believed if row["remark"]]:
        tables.append(Table(title="About the predictions", columns=_REMARK_COLUMNS, rows=remarks))
    if failed:
        tables.append(Table(title="Cells without a result", columns=_FAILURE_COLUMNS, rows=failed))
    return Document(
        name="measured",
        title="Measured peak memory",
        about=[_ABOUT, *([_PREDICTED] if is_predicted else [])],
        tables=tables,
        data=Table(title="Measured peak memory", columns=columns, rows=rows),
        origin=origin,
        command=command,
    )


_ABOUT = (
    "Allocated by tensors at the highest moment of the training steps (loading apart). Precision is the dtype the "
    "weights are loaded in, + autocast; adapters' own dtype in brackets."
)


_PREDICTED = "Predicted by a recipe at hand; a dash where there is none, which vramprobe predict would record."


def _columns(unit: ByteUnit, *, is_predicted: bool, is_fitted: bool) -> list[Column]:
    columns = [
        *cell_columns(),
        Column("outcome"),
        Column("outcome_detail"),
        Column("peak_phase", "peak phase"),
        unit.amount("measured_bytes", "measured"),
        unit.amount("reserved_bytes", None),
        unit.amount("device_bytes", None),
        Column("step_seconds"),
    ]
    if not is_predicted:
        return columns
    return [
        *columns,
        *([Column("held_out")] if is_fitted else []),
        unit.amount("predicted_bytes", "predicted"),
        unit.amount("low_bytes", "at least"),
        unit.amount("high_bytes", "at most"),
        Column("error_percent", "error, %", text=signed_percent, is_number=True),
        Column("remark"),
    ]


_FAILURE_COLUMNS = [
    *cell_columns(),
    Column("outcome", "outcome"),
    Column("outcome_detail", "detail", text=shortened, is_prose=True),
]
_REMARK_COLUMNS = [Column("cell_id", "cell"), Column("remark", "remark", text=shortened, is_prose=True)]
_SUMMARY_COLUMNS = [
    Column("group", "cells"),
    Column("num_cells", "n", is_number=True),
    Column("mean_abs_error_percent", "mean absolute error, %", text=unsigned_percent, is_number=True),
    Column("worst_abs_error_percent", "worst absolute error, %", text=unsigned_percent, is_number=True),
    Column("worst_under_prediction_percent", "worst under-prediction, %", text=signed_percent, is_number=True),
    Column("inside_interval_percent", "measured inside the interval, %", text="{:.0f}".format, is_number=True),
]
