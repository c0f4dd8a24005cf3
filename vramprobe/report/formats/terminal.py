"""Tables → the terminal, by rich, and what they do not show.

In: Tables, remarks and a Console. Out: lines on it. Others' words are shown, never taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from vramprobe.report.definition import Table


def show(tables: Iterable[Table], remarks: Iterable[str], console: Console) -> None:
    """Every table that has rows, titled where there are several, then the remarks."""
    full = [table for table in tables if table.rows]
    for number, table in enumerate(full):
        if len(full) > 1:
            console.print(f"{chr(10) if number else ''}[bold]{escape(table.title)}[/]", soft_wrap=True)
        console.print(grid(table))
        if table.caption:
            console.print(escape(table.caption), soft_wrap=True)
    for text in remarks:
        console.print(escape(text), soft_wrap=True)


def grid(table: Table) -> RichTable:
    """The table alone; beside sentences, which wrap, the first column never does."""
    shown, wraps = RichTable(box=None, pad_edge=False), any(column.is_prose for column in table.shown)
    for number, column in enumerate(table.shown):
        shown.add_column(
            escape(column.heading or ""), justify="right" if column.is_number else "left", overflow="fold",
            no_wrap=wraps and number == 0, ratio=2 if column.is_prose else None,
        )  # fmt: skip
    for row in table.texts():
        shown.add_row(*map(escape, row))
    return shown
