"""A report's documents and plots, and the published verdicts on claims → the page's content.

In: what the report's other files show, and a claims.csv. Out: a Content. Never measures, fits or judges.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from vramprobe.claims import VERDICTS
from vramprobe.errors import StoreError
from vramprobe.report import claims
from vramprobe.report.definition import Column, Document, Table
from vramprobe.report.page import Content, Plot
from vramprobe.report.plots import PICTURES

#: A verdict and its figure, as one row of claims.csv.
ClaimRow = Mapping[str, str]


def content_of(
    documents: Sequence[Document],
    drawn: Mapping[str, Mapping[str, bytes]],
    claim_rows: Sequence[ClaimRow],
    *,
    engine: Mapping[str, Any],
    predictor: str,
    provenance: Sequence[str],
    command: str,
) -> Content:
    """Everything on the page; ``drawn`` are the report's plots: their files by name."""
    tables = [table for document in documents for table in tables_of(document)]
    tables += [claims_table(claim_rows)] if claim_rows else []
    plots = [
        Plot(title=name.replace("_", " ").capitalize(), svg=files[f"{name}.svg"].decode(), caption=PICTURES[name].says,
             alt=PICTURES[name].says)
        for name, files in drawn.items()
    ]  # fmt: skip
    return Content(
        engine=engine, predictor=predictor, tables=tables, plots=plots, provenance=provenance, command=command
    )


def tables_of(document: Document) -> list[Table]:
    """Those with rows; what the document says of itself stands before its first."""
    found = [table for table in document.tables if table.rows]
    several = len(found) > 1
    return [
        replace(
            table,
            title=f"{document.title}: {_lowered(table.title)}" if several else document.title,
            note=" ".join([*(document.about if index == 0 else ()), *([table.note] if table.note else [])]),
        )
        for index, table in enumerate(found)
    ]


def _lowered(title: str) -> str:
    return title[:1].lower() + title[1:]


def read_claims(path: Path) -> list[ClaimRow]:
    """The verdicts that ``vramprobe claims -o`` wrote, as claims.csv: to judge anew takes longer than the page.

    Raises StoreError where the file is missing, or is no claims.csv.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name the claims.csv in it: {path / 'claims.csv'}")
    remedy = f"vramprobe claims -o {path.parent} writes it"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise StoreError(f"cannot read the claims {path}: {error.strerror}; {remedy}") from error
    missing = [column.name for column in claims.COLUMNS if not rows or column.name not in rows[0]]
    if missing:
        raise StoreError(f"{path} is no claims.csv: it has no column {missing[0]}; {remedy}")
    return rows


def claims_table(rows: Sequence[ClaimRow]) -> Table:
    """A row per claim."""
    counts = Counter(row["verdict"] for row in rows)
    kinds = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    note = (
        "What guides print, each with a verdict worked out from this project's own figures. Nothing here was measured "
        f"unless the column from says cuda. {len(rows)} claims: {kinds}."
    )
    columns = [_read(column) for column in claims.COLUMNS if column.name != "source"]
    columns += [  # last: the same long texts in many rows
        replace(_read(column), heading="source", is_prose=True) for column in claims.COLUMNS if column.name == "source"
    ]
    return Table(title="Published claims, checked", columns=columns, rows=rows, note=note)


def _read(column: Column) -> Column:
    """The same column of a row that was read from the CSV, where all values are texts."""
    value: Any = itemgetter(column.name)
    return replace(column, value=value, text=str)
