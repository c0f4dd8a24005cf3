"""Rows of a benchmark → the text of its CSV file, one column for each name. Imports nothing of vramprobe."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def as_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """The whole table; without ``columns`` they are the first row's."""
    table, text = list(rows), io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if columns is None else columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
