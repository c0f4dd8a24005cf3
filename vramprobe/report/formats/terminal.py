"""Tables → the terminal, by rich, and what they do not show.

In: Tables, remarks and a Console. Out: lines on it, none wider than it is: cells fold between words, and after the
hyphens of a name; where even that is too wide, a row is a block of lines. Others' words are shown, never taken for
markup.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from vramprobe.report.definition import Column, Table

#: Where a cell may be folded: after a space; if need be, within a name after what joins its parts, too.
_SPACES = re.compile(r"(?<= )(?=\S)")
_JOINTS = re.compile(r"(?<= )(?=\S)|(?<=\w[-_+/])(?=\w)")
#: Of amounts, between one and the next.
_BETWEEN_AMOUNTS = re.compile(r"(?<=, )")
_GAPS = (2, 1)  # between two columns, the wider first
_INDENT = "  "
_NO_WIDTH = 10_000


def show(tables: Iterable[Table], remarks: Iterable[str], console: Console) -> None:
    """Every table that has rows, titled where there are several, then the remarks."""
    full = [table for table in tables if table.rows]
    for number, table in enumerate(full):
        if len(full) > 1:
            console.print(f"{chr(10) if number else ''}[bold]{escape(table.title)}[/]")
        _show_table(table, console)
        if table.caption:
            console.print(escape(table.caption))
    for text in remarks:
        console.print(escape(text))


def show_whole(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str]) -> None:
    """A table as wide as its longest cells, these columns to the left: ids are there to be copied, and a terminal wraps
    better than a table folds.
    """
    shown = RichTable(box=None, pad_edge=False)
    for title in titles:
        shown.add_column(title, justify="left" if title in left else "right")
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, width=_NO_WIDTH).print(shown, markup=False)


def _show_table(table: Table, console: Console) -> None:
    columns, texts = table.shown, table.texts()
    for breaks, gap in itertools.product((_SPACES, _JOINTS), _GAPS):
        widths = _widths(columns, texts, console.width - gap * (len(columns) - 1), breaks)
        if widths is not None:
            console.print(_grid(columns, texts, widths, gap, breaks), soft_wrap=True)
            return
    for row in texts:
        console.print(escape(row[0]))
        for column, text in zip(columns[1:], row[1:], strict=True):
            for line in _folded(f"{column.heading}: {text}", console.width - len(_INDENT), _SPACES):
                console.print(_INDENT + escape(line))


def _grid(
    columns: Sequence[Column], texts: list[list[str]], widths: list[int], gap: int, breaks: re.Pattern[str]
) -> RichTable:
    shown = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        heading = "\n".join(_folded(column.heading or "", width, breaks))
        shown.add_column(escape(heading), justify="right" if column.is_number else "left", width=width, no_wrap=True)
    for row in texts:
        cells = zip(columns, row, widths, strict=True)
        shown.add_row(
            *(escape("\n".join(_folded(text, width, _breaks(column, breaks)))) for column, text, width in cells)
        )
    return shown


def _widths(columns: Sequence[Column], texts: list[list[str]], room: int, breaks: re.Pattern[str]) -> list[int] | None:
    """A width for each column, so that all have ``room``; None where they cannot.

    What is left over goes, one by one, to the column that is furthest from one line a cell: words first, since amounts
    are already on a line each; then amounts, then headings.
    """
    headings = [column.heading or "" for column in columns]
    whole = [max(len(row[number]) for row in texts) for number in range(len(columns))]
    widths = [
        max(_longest(heading, breaks), *(_longest(row[number], _breaks(column, breaks)) for row in texts))
        for number, (column, heading) in enumerate(zip(columns, headings, strict=True))
    ]
    if sum(widths) > room:
        return None
    words = [width if column.is_number else one for column, one, width in zip(columns, whole, widths, strict=True)]
    for wanted in (words, whole, [max(one, len(heading)) for one, heading in zip(whole, headings, strict=True)]):
        while sum(widths) < room and any(width < most for width, most in zip(widths, wanted, strict=True)):
            widths[max(range(len(widths)), key=lambda number: (wanted[number] / widths[number], number))] += 1
    return widths


def _breaks(column: Column, breaks: re.Pattern[str]) -> re.Pattern[str]:
    return _BETWEEN_AMOUNTS if column.is_number else breaks


def _longest(text: str, breaks: re.Pattern[str]) -> int:
    return max((len(part.rstrip()) for part in breaks.split(text)), default=0)


def _folded(text: str, width: int, breaks: re.Pattern[str]) -> list[str]:
    """Lines of at most ``width``, but for a part that is longer by itself."""
    return [line.rstrip() for line in _lines(text, width, breaks)] or [""]


def _lines(text: str, width: int, breaks: re.Pattern[str]) -> Iterator[str]:
    line = ""
    for part in breaks.split(text):
        if line and len((line + part).rstrip()) > width:
            yield line
            line = ""
        line += part
    if line:
        yield line
