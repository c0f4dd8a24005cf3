"""A table, defined once → Markdown for people and CSV for programs.

In: columns and rows. Out: text. Markdown rounds and escapes; CSV has exact values and the same columns and more.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_SPECIAL = re.compile(r"[\\`*\[\]|]")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


@dataclass(frozen=True)
class Column:
    """``value`` gives the exact value (CSV, under ``name``); ``text`` writes it for Markdown, under ``heading``."""

    name: str  # the unit is its last word
    heading: str | None  # null: in the CSV only
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = str
    is_number: bool = False


def to_markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """A GitHub-flavoured table; an unknown value is a dash, numbers stand right."""
    shown = [column for column in columns if column.heading is not None]
    lines = [
        [_escaped(column.heading) for column in shown],
        ["---:" if column.is_number else "---" for column in shown],
        *([_cell_text(column, row) for column in shown] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_csv(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """All columns with exact values; an unknown value is empty, true and false are words in lower case."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    for row in rows:
        values = (column.value(row) for column in columns)
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
    return buffer.getvalue()


def _cell_text(column: Column, row: Any) -> str:
    value = column.value(row)
    return "–" if value is None or value == "" else _escaped(column.text(value))


def _escaped(text: str) -> str:
    text = re.sub("[&<>]", lambda sign: _HTML[sign.group()], " ".join(text.split()))
    return _SPECIAL.sub(r"\\\g<0>", text)
