"""The files that ship under data/, as text and rows.

In: a path below data/. Out: its rows, and their cells as numbers or null. Reads nothing at import.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_DATA = Path(__file__).parents[1] / "data"

Number = TypeVar("Number", int, float)


def number(text: str, kind: Callable[[str], Number]) -> Number | None:
    """A cell's number; null where it is empty."""
    return kind(text) if text else None


def split(text: str, separator: str) -> tuple[str, ...]:
    """A cell's parts, without empty ones."""
    return tuple(part for part in text.split(separator) if part)


def data_file(relative: str) -> Path:
    """The file's place in the package."""
    return _DATA / relative


def csv_rows(relative: str) -> list[dict[str, str]]:
    """A CSV file's rows by their columns' names."""
    with data_file(relative).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
