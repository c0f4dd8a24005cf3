"""A table, defined once by its columns → HTML that a person can sort and filter, and read without scripts.

In: columns of render.py and rows. Out: a frozen Table, and its HTML with everything escaped. Never rounds: columns do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vramprobe.report.render import Column

#: Fewer rows are seen at a glance and get no filter.
_MIN_FILTERED_ROWS = 9
#: A column with a longer text wraps; the others stay on one line, so that rows compare.
_LONGEST_LINE = 44
#: One with a longer text than this gets a wide column, or its rows would be too tall to compare.
_LONGEST_NOTE = 120


@dataclass(frozen=True, kw_only=True)
class Heading:
    """Over a column; numbers stand right and are sorted by their value."""

    text: str
    is_number: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``sort`` is the exact value behind a rounded text; null sorts last."""

    text: str
    sort: str | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table; ``caption`` says what its numbers are and where they come from."""

    title: str
    caption: str
    headings: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]


def to_table(title: str, caption: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    """The columns that have a heading; what is unknown is a dash."""
    shown = [column for column in columns if column.heading is not None]
    return Table(
        title=title,
        caption=caption,
        headings=[Heading(text=column.heading or "", is_number=column.is_number) for column in shown],
        rows=[[_cell(column, row) for column in shown] for row in rows],
    )


def table_html(table: Table, number: int) -> str:
    """A section ``table-<number>``: title, caption, a filter where there are many rows, and the table itself."""
    name = f"table-{number}"
    kinds = [_kind(table, column) for column in range(len(table.headings))]
    head = "".join(map(_head, table.headings, kinds))
    body = "\n".join("<tr>" + "".join(map(_data, row, kinds, range(len(row)))) + "</tr>" for row in table.rows)
    tools = ""
    if len(table.rows) >= _MIN_FILTERED_ROWS:
        tools = (
            f'<div class="tools"><label>Filter <input type="search" data-filters="{name}-rows"></label>'
            f'<output data-counts="{name}-rows">{len(table.rows)} rows</output></div>'
        )
    return (
        f'<section class="sheet" id="{name}"><h3 id="{name}-title">{escape(table.title)}</h3>'
        f'<p class="caption">{escape(table.caption)}</p>{tools}'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-title">'
        f'<table class="sortable" id="{name}-rows"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
        "</div></section>"
    )


def _cell(column: Column, row: Any) -> Cell:
    value = column.value(row)
    if value is None or value == "":
        return Cell(text="–", sort=None)
    text = column.text(value)
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(text=text, sort=value if is_plain else text)


def _kind(table: Table, column: int) -> str:
    """The class attribute of a column's cells: numbers stand right, long texts wrap."""
    if table.headings[column].is_number:
        return ' class="number"'
    longest = max((len(row[column].text) for row in table.rows), default=0)
    return ' class="prose"' if longest > _LONGEST_NOTE else ' class="long"' if longest > _LONGEST_LINE else ""


def _head(heading: Heading, kind: str) -> str:
    return f'<th scope="col"{kind}>{escape(heading.text)}</th>'


def _data(cell: Cell, kind: str, position: int) -> str:
    sort = "" if cell.sort is None or str(cell.sort) == cell.text else f' data-sort="{escape(str(cell.sort))}"'
    if position == 0:
        return f'<th scope="row"{kind}{sort}>{escape(cell.text)}</th>'
    return f"<td{kind}{sort}>{escape(cell.text)}</td>"
