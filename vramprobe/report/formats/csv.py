"""A Table → CSV for programs: every column, bytes exactly, other numbers with the digits that are published.

In: a Table. Out: text.
"""

from __future__ import annotations

import csv
import io

from vramprobe.report.definition import Table


def text(table: Table) -> str:
    """A line of names, then a line per row; an unknown value is empty, true and false are words in lower case."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        values = (column.published(row) for column in table.columns)
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
    return buffer.getvalue()
