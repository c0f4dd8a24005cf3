"""A report's documents and plots, and the published verdicts on claims → the page's content.

In: what the report's other files show, and a claims.csv. Out: a Content. Never measures, fits or judges.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vramprobe.errors import StoreError
from vramprobe.report import claims
from vramprobe.report.definition import Document, Table, worded
from vramprobe.report.page import Content, Plot
from vramprobe.report.page.tables import Chapter
from vramprobe.report.plots import PICTURES

#: A verdict and its figure, as one row of claims.csv.
ClaimRow = Mapping[str, str]


def content_of(
    documents: Sequence[Document],
    drawn: Mapping[str, Mapping[str, bytes]],
    claim_rows: Sequence[ClaimRow],
    provenance: Sequence[str],
    command: str,
    word: str = "measured",
) -> Content:
    """Everything on the page; ``drawn`` are the report's plots: their files by name; its records are ``word``."""
    chapters = []
    for document in documents:
        if tables := [table for table in document.tables if table.rows]:
            chapters.append(Chapter(title=document.title, about=" ".join(document.about), tables=tables))
    chapters += [claims_chapter(claim_rows)] if claim_rows else []
    plots = []
    for name, files in drawn.items():
        title, says = worded(name.replace("_", " ").capitalize(), word), PICTURES[name].about(word).says
        plots.append(Plot(title=title, svg=files[f"{name}.svg"].decode(), caption=says, alt=says))
    return Content(chapters=chapters, plots=plots, provenance=provenance, command=command, word=word)


def read_claims(path: Path) -> list[ClaimRow]:
    """The verdicts that ``vramprobe claims -o`` wrote, as claims.csv: to judge anew takes longer than the page.

    Raises StoreError where the file is missing, or is no claims.csv.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name the claims.csv in it: {path / 'claims.csv'}")
    remedy = f"vramprobe claims -o {path.parent} writes it"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[ClaimRow] = list(csv.DictReader(file))
    except OSError as error:
        raise StoreError(f"cannot read the claims {path}: {error.strerror}; {remedy}") from error
    missing = [column.name for column in claims.COLUMNS if not rows or column.name not in rows[0]]
    if missing:
        raise StoreError(f"{path} is no claims.csv: it has no column {missing[0]}; {remedy}")
    return rows


def claims_chapter(rows: Sequence[ClaimRow]) -> Chapter:
    """A row per claim."""
    title = "Published claims, checked"
    about = (
        "What guides print, each with a verdict worked out from this project's own figures. Nothing here was measured "
        f"unless the column from says cuda. {claims.in_words(row['verdict'] for row in rows)}."
    )
    if any(row["engine"].startswith("emulated") for row in rows):
        about += f" {claims.EMULATED_FIGURES}"
    sources = [  # last: the same long texts in many rows
        replace(column, heading="source", is_prose=True) for column in claims.COLUMNS if column.name == "source"
    ]
    columns = [*(column for column in claims.COLUMNS if column.name != "source"), *sources]
    return Chapter(title=title, about=about, tables=[Table(title=title, columns=columns, rows=rows)])
