"""Chapters of Tables → HTML that a person can sort and filter, and read without scripts.

In: Tables of report/definition.py under one title. Out: HTML with everything escaped; the value of the CSV stands
behind each number that is rounded for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from vramprobe.report.definition import Column, Table

#: Fewer rows are seen at a glance and get no filter.
_MIN_FILTERED_ROWS = 9
#: A column with a longer text wraps; the others stay on one line, so that rows compare.
_LONGEST_LINE = 44


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """Tables under one title; ``about`` is said before the first. A table of the same title gets no second heading."""

    title: str
    about: str
    tables: Sequence[Table]

    def cut(self, most: int) -> Chapter:
        """Its first rows, at most ``most``, and a sentence that says so."""
        count, tables, left = sum(len(one.rows) for one in self.tables), [], most
        if count <= most:
            return self
        for one in self.tables:
            tables += [replace(one, rows=one.rows[:left])] if left else []
            left -= min(left, len(one.rows))
        cut = f"The first {most:,} of {count:,} rows; the files beside this page have all."
        return replace(self, tables=tables, about=f"{self.about} {cut}".strip())


def chapter_html(chapter: Chapter, number: int) -> str:
    """A section ``chapter-<number>`` with one heading, and a smaller one for each table with another title."""
    name, tables = f"chapter-{number}", chapter.tables
    about = f'<p class="caption">{escape(chapter.about)}</p>' if chapter.about else ""
    head = f'<section class="chapter" id="{name}"><h3 id="{name}-title">{escape(chapter.title)}</h3>{about}'
    if [one.title for one in tables] == [chapter.title]:
        return f"{head}{table_html(tables[0], name, is_titled=False)}</section>"
    parts = [table_html(table, f"{name}-{part}") for part, table in enumerate(tables, start=1)]
    return f"{head}{''.join(parts)}</section>"


def table_html(table: Table, name: str, *, is_titled: bool = True) -> str:
    """A table ``<name>-rows`` with its title ``<name>-title``, caption, and a filter where there are many rows."""
    columns = table.shown
    kinds = [_kind(table, column) for column in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(column.heading or "")}</th>'
        for column, kind in zip(columns, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(map(_data, columns, [row] * len(columns), kinds, range(len(columns)))) + "</tr>"
        for row in table.rows
    )
    tools = ""
    if len(table.rows) >= _MIN_FILTERED_ROWS:
        tools = (
            f'<div class="tools"><label>Filter <input type="search" data-filters="{name}-rows"'
            f' aria-describedby="{name}-title"></label>'
            f'<output data-counts="{name}-rows">{len(table.rows)} rows</output></div>'
        )
    title = f'<h4 id="{name}-title">{escape(table.title)}</h4>' if is_titled else ""
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f"{title}{caption}{tools}"
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-title">'
        f'<table class="sortable" id="{name}-rows"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
        "</div>"
    )


def _kind(table: Table, column: Column) -> str:
    """The class attribute of a column's cells: numbers stand right, long texts wrap."""
    if column.is_number:
        return ' class="number"'
    if column.is_prose:
        return ' class="prose"'
    return ' class="long"' if max((len(column.shown(row)) for row in table.rows), default=0) > _LONGEST_LINE else ""


def _data(column: Column, row: Any, kind: str, position: int) -> str:
    text, value = column.shown(row), column.published(row)
    is_amount = isinstance(value, int | float) and not isinstance(value, bool)
    sort = f' data-sort="{escape(str(value))}"' if is_amount and str(value) != text else ""
    if position == 0:
        return f'<th scope="row"{kind}{sort}>{escape(text)}</th>'
    return f"<td{kind}{sort}>{escape(text)}</td>"
