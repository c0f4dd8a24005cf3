"""A Document → one file per format: NAME.md, NAME.csv, NAME.tex and NAME.html, by pandas, always the same bytes.

In: a Document (report/definition.py). Out: file name → content. Computes no number; stays this side of the torch line.
"""

from typing import Any

from vramprobe.report.definition import Document, Table


def files_of(document: Document) -> dict[str, bytes]:
    """The page for a README or a wiki, the exact values, the tables for a paper, and the page for a browser."""
    from vramprobe.report.formats import html, latex, markdown  # not for what is printed

    return {
        f"{document.name}.md": markdown.page(document).encode(),
        f"{document.name}.csv": csv(document.data).encode(),
        f"{document.name}.tex": latex.tables(document).encode(),
        f"{document.name}.html": html.page(document).encode(),
    }


def csv(table: Table) -> str:
    """Every column with exact values; an unknown value is empty, true and false are in lower case."""
    import pandas as pd

    rows = [[_plain(column.published(row)) for column in table.columns] for row in table.rows]
    frame = pd.DataFrame(rows, columns=[column.name for column in table.columns], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
