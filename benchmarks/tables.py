"""A benchmark's tables: rows to the text of CSV and Markdown files, written or compared with the files that are there.

In: rows, one dict or sequence each, and a page's template. Out: text with LF line ends, or files beside the script.
Imports no vramprobe.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def as_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """The whole table; without ``columns`` it has every name of every row, in the order of first appearance."""
    table, text = list(rows), io.StringIO()
    names = list(dict.fromkeys(name for row in table for name in row)) if columns is None else columns
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def append_csv(path: Path, row: Mapping[str, Any]) -> None:
    """One row more, behind a head where the file is new."""
    text = as_csv([row])
    with path.open("a", newline="") as file:
        file.write(text if file.tell() == 0 else text.partition("\n")[2])


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table as text; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def as_markdown(head: Sequence[str], align: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; ``align`` has an l or an r for each column."""
    rule = ["---" if side == "l" else "---:" for side in align]
    assert len(rule) == len(head), head
    return [f"| {' | '.join(map(str, line))} |" for line in (head, rule, *rows)]


def as_table(rows: Sequence[Mapping[str, Any]], align: str) -> list[str]:
    """Return the lines of a Markdown table of rows by the name of their column, all with the same names."""
    return as_markdown(list(rows[0]), align, (list(row.values()) for row in rows))


def filled(page: Path, **parts: object) -> str:
    """The template beside a page (``NAME.in.md``), a text, a number or a list of lines in place of each ``{part}``."""
    text = page.with_suffix(".in.md").read_text(encoding="utf-8")
    texts = {name: "\n".join(part) if isinstance(part, list) else str(part) for name, part in parts.items()}
    assert texts.keys() == set(re.findall(r"\{(\w+)\}", text)), page
    return re.sub(r"\{(\w+)\}", lambda name: texts[name[1]], text)


def write_or_check(made: Mapping[Path, str | bytes], script: str, *, check: bool) -> None:
    """Write these files; with ``check`` write none, and exit naming those that have other content."""
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in made.items()}
    if check:
        stale = [path.name for path, content in contents.items() if not path.exists() or path.read_bytes() != content]
        sys.exit(f"stale: {', '.join(stale)}; rebuild them: python benchmarks/{script}" if stale else 0)
    for path, content in contents.items():
        path.write_bytes(content)
