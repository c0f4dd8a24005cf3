"""A Document → one file per format: NAME.md, NAME.csv, NAME.tex and NAME.html, the same bytes each time.

In: a Document (report/definition.py). Out: file name → content. Computes no number; stays this side of the torch line.
"""

from __future__ import annotations

from vramprobe.report.definition import Document
from vramprobe.report.formats import csv, html, latex, markdown


def files_of(document: Document) -> dict[str, bytes]:
    """The page for a README or a wiki, the exact values, the tables for a paper, and the page for a browser."""
    return {
        f"{document.name}.md": markdown.page(document).encode(),
        f"{document.name}.csv": csv.text(document.data).encode(),
        f"{document.name}.tex": latex.tables(document).encode(),
        f"{document.name}.html": html.page(document).encode(),
    }
