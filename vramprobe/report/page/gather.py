"""Cells and the published verdicts on claims → the page's content.

In: what the report's other pages show, and claims.csv. Out: a Content, with captions that say what was measured and
what was predicted. Never measures, fits or judges.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from vramprobe.claims import VERDICTS
from vramprobe.errors import StoreError
from vramprobe.record import Composition, RunRecord
from vramprobe.report import claims, pages
from vramprobe.report.page import Content, Plot
from vramprobe.report.page.tables import Table, to_table
from vramprobe.report.render import Column
from vramprobe.report.rows import Cell, summaries

_SEEN = {True: "held out", False: "in the fit", None: None}
#: A verdict and its figure, as one row of claims.csv.
ClaimRow = Mapping[str, str]


def content_of(
    records: Sequence[RunRecord],
    cells: Sequence[Cell],
    claim_rows: Sequence[ClaimRow],
    files: Mapping[str, bytes],
    *,
    engine: Mapping[str, Any],
    predictor: str,
    command: str,
) -> Content:
    """Everything on the page; ``files`` are the report's others, whose plots it shows too."""
    return Content(
        engine=engine,
        predictor=predictor,
        tables=tables_of(cells, claim_rows),
        plots=plots_of(files),
        provenance=provenance_of(records),
        command=command,
    )


def tables_of(cells: Sequence[Cell], claim_rows: Sequence[ClaimRow]) -> list[Table]:
    """Errors, peaks, their terms, failures and claims; none that would be empty."""
    found = [_summary(cells), _measured(cells), _by_term(cells), _failures(cells), _claims(claim_rows)]
    return [table for table in found if table.rows]


def read_claims(path: Path) -> list[ClaimRow]:
    """The verdicts that ``vramprobe claims -o`` wrote, as claims.csv: to judge anew takes longer than the page.

    Raises StoreError where the file is missing, or is no claims.csv.
    """
    remedy = f"vramprobe claims -o {path.parent} writes it"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise StoreError(f"cannot read the claims {path}: {error.strerror}; {remedy}") from error
    missing = [column.name for column in claims._COLUMNS if not rows or column.name not in rows[0]]
    if missing:
        raise StoreError(f"{path} has no column {', '.join(missing)}; {remedy}")
    return rows


def plots_of(files: Mapping[str, bytes]) -> list[Plot]:
    """Those of the report's files that the page shows."""
    name = "predicted_vs_measured.svg"
    if name not in files:
        return []
    text = (
        "Each mark is a measured cell with the interval of its prediction: on the line both are equal. Filled marks "
        "were held out of the fit. Below, the same as error in percent."
    )
    return [Plot(title="Predicted against measured", svg=files[name].decode(), caption=text, alt=text)]


def provenance_of(records: Iterable[RunRecord]) -> list[str]:
    """Which instrument, device, versions and days the measured numbers come from, a line each."""
    measured = [record for record in records if record.is_measured]
    days = sorted({record.started_at[:10] for record in measured})
    devices = sorted({f"{record.environment.device_name} ({record.instrument} instrument)" for record in measured})
    return [
        f"measured on {', '.join(devices)}",
        pages._versions(measured),
        f"{len(measured)} records of {len({record.fingerprint for record in measured})} cells, "
        + (days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"),
    ]


def _where(cells: Sequence[Cell]) -> str:
    instruments = sorted({cell.record.instrument for cell in cells})
    devices = sorted({cell.record.environment.device_name for cell in cells})
    return f"Measured by the {' and '.join(instruments)} instrument on {' and '.join(devices)}."


def _summary(cells: Sequence[Cell]) -> Table:
    caption = "Errors of the prediction: predicted less measured allocated peak, in percent of measured. "
    return to_table("How far predictions are off", caption + _where(cells), pages._SUMMARY_COLUMNS, summaries(cells))


def _measured(cells: Sequence[Cell]) -> Table:
    believed = [cell for cell in cells if cell.measured_bytes is not None]
    is_predicted = any(cell.held_out is not None for cell in cells)
    columns = pages._measured_columns(pages._unit(cell.measured_bytes for cell in believed), is_predicted=is_predicted)
    caption = "Allocated by tensors at the highest moment of the training steps. "
    if is_predicted:
        columns = [*columns, Column("held_out", "seen by the fit", lambda cell: _SEEN[cell.held_out])]
        caption += "Columns headed measured were measured, the others predicted by the fit. "
    return to_table("Measured peak memory", caption + _where(cells), columns, believed)


def _by_term(cells: Sequence[Cell]) -> Table:
    known = [cell for cell in cells if cell.measured_bytes is not None and pages._at_peak(cell) is not None]
    unit = pages._unit(pages._at_peak(cell).total_bytes for cell in known)
    terms = [pages._term_column(name, unit) for name in Composition.model_fields]
    caption = "Bytes alive at the highest moment, by cause; the parts add up to the measured peak. "
    return to_table(
        "The measured peak by term", caption + _where(cells), [*pages._cell_columns(), pages._PEAK_PHASE, *terms], known
    )


def _failures(cells: Sequence[Cell]) -> Table:
    failed = [cell for cell in cells if cell.measured_bytes is None]
    return to_table("Cells without a result", _where(cells), pages._failure_columns(), failed)


def _claims(rows: Sequence[ClaimRow]) -> Table:
    counts = Counter(row["verdict"] for row in rows)
    kinds = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    caption = (
        "What guides print, each with a verdict worked out from this project's own figures. Nothing here was measured "
        f"unless the column from says cuda. {len(rows)} claims: {kinds}."
    )
    columns = [_read(column) for column in claims._COLUMNS if column.heading is not None]
    columns += [replace(_read(column), heading="source") for column in claims._COLUMNS if column.name == "source"]
    return to_table("Published claims, checked", caption, columns, rows)


def _read(column: Column) -> Column:
    """The same column of a row that was read from the CSV, where all values are texts."""
    value: Any = itemgetter(column.name)
    return replace(column, value=value, text=str)
