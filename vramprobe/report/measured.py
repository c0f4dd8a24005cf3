"""Cells → the page of what was measured, and predicted where there is a fit: held-out cells apart, and failures.

In: cells, where they come from and the command. Out: a Document. Hides nothing that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vramprobe.records.table import describe_outcome
from vramprobe.report.cells import Cell, Summary, summaries
from vramprobe.report.columns import (
    Unit,
    cell_columns,
    of_row,
    shortened,
    signed_percent,
    unit_for,
    unsigned_percent,
)
from vramprobe.report.definition import Column, Document, Table


def measured(cells: Sequence[Cell], origin: Sequence[str], command: str) -> Document:
    """measured: the peak of every cell, the prediction and its error beside it where there is a fit."""
    believed = [cell for cell in cells if cell.measured_bytes is not None]
    failed = [cell for cell in cells if cell.measured_bytes is None]
    is_predicted = any(cell.held_out is not None for cell in cells)
    columns = _columns(unit_for(cell.measured_bytes for cell in believed), is_predicted=is_predicted)
    tables = []
    if quality := summaries(cells):
        tables.append(Table(title="Summary", columns=_SUMMARY_COLUMNS, rows=quality))
    if is_predicted:
        for title, held_out, otherwise in (
            ("Held out of the fit", True, "No cell: the fit has seen every one."),
            ("In the fit", False, "No cell: the fit was made from other records."),
        ):
            rows = [cell for cell in believed if cell.held_out is held_out]
            tables.append(Table(title=title, columns=columns, rows=rows, otherwise=otherwise))
    else:
        otherwise = "No cell finished; see below."
        tables.append(Table(title="Cells", columns=columns, rows=believed, otherwise=otherwise))
    if remarks := [cell for cell in believed if cell.remark]:
        tables.append(Table(title="About the predictions", columns=_REMARK_COLUMNS, rows=remarks))
    if failed:
        tables.append(Table(title="Cells without a result", columns=_failure_columns(), rows=failed))
    return Document(
        name="measured", title="Measured peak memory", about=[_ABOUT], tables=tables,
        data=Table(title="Measured peak memory", columns=columns, rows=cells), origin=origin, command=command,
    )  # fmt: skip


_ABOUT = (
    "Allocated by tensors at the highest moment of the training steps (loading apart). Precision is the dtype the "
    "weights are loaded in, + autocast; adapters' own dtype in brackets."
)


def _columns(unit: Unit, *, is_predicted: bool) -> list[Column]:
    columns = [
        *cell_columns(),
        Column("outcome", None, of_row("outcome")),
        Column("outcome_detail", None, of_row("outcome_detail")),
        Column("peak_phase", "peak phase", of_row("peak_phase")),
        unit.amount("measured_bytes", "measured", lambda cell: cell.measured_bytes),
        unit.amount("reserved_bytes", None, of_row("peak_reserved_bytes")),
        unit.amount("device_bytes", None, of_row("peak_device_bytes")),
        Column("step_seconds", None, of_row("step_seconds")),
    ]
    if not is_predicted:
        return columns
    return [
        *columns,
        Column("held_out", None, lambda cell: cell.held_out),
        unit.amount("predicted_bytes", "predicted", lambda cell: cell.predicted_bytes),
        unit.amount("low_bytes", "at least", lambda cell: cell.low_bytes),
        unit.amount("high_bytes", "at most", lambda cell: cell.high_bytes),
        Column("error_percent", "error, %", lambda cell: cell.error_percent, signed_percent, is_number=True),
        Column("remark", None, lambda cell: cell.remark),
    ]


def _failure_columns() -> list[Column]:
    def detail(cell: Cell) -> str:
        return describe_outcome(cell.record.outcome)

    return [
        *cell_columns(),
        Column("outcome", "outcome", of_row("outcome")),
        Column("outcome_detail", "detail", detail, shortened, is_prose=True),
    ]


_REMARK_COLUMNS = [
    Column("cell_id", "cell", of_row("cell_id")),
    Column("remark", "remark", lambda cell: cell.remark, shortened, is_prose=True),
]


def _summary_column(name: str, heading: str, text: Callable[[float], str]) -> Column:
    def value(summary: Summary) -> float | None:
        return getattr(summary, name)

    return Column(name, heading, value, text, is_number=True)


_SUMMARY_COLUMNS = [
    Column("group", "cells", lambda summary: summary.group),
    _summary_column("num_cells", "n", str),
    _summary_column("mean_abs_error_percent", "mean absolute error, %", unsigned_percent),
    _summary_column("worst_abs_error_percent", "worst absolute error, %", unsigned_percent),
    _summary_column("worst_under_prediction_percent", "worst under-prediction, %", signed_percent),
    _summary_column("inside_interval_percent", "measured inside the interval, %", "{:.0f}".format),
]
