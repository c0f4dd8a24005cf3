"""The columns of the DataFrames that ``vramprobe.load`` returns: the dtype and the meaning of each.

In: data/columns.csv, and the options of a cell where a row is named ``*``. Out: one mapping per DataFrame, column →
dtype and meaning, in order. Units are the last word of a name; what is not known is NA, never 0. docs/dataframes.md
shows these lists, and a test holds both together.
"""

from typing import NamedTuple

from vramprobe.catalog.shipped import csv_rows
from vramprobe.options import OPTIONS, CellOption
from vramprobe.spec import CellSpec


class RecordColumn(NamedTuple):
    """``dtype`` is pandas' name: string, Int64, Float64, boolean, or datetime64[ms, UTC]."""

    dtype: str
    meaning: str


def _of_option(option: CellOption) -> RecordColumn:
    """The column of an option of a cell."""
    assert option.meaning is not None
    return RecordColumn({str: "string", int: "Int64", float: "Float64", bool: "boolean"}[option.kind], option.meaning)


def _columns(of: str) -> dict[str, RecordColumn]:
    """The columns of one DataFrame."""
    found: dict[str, RecordColumn] = {}
    for row in csv_rows("columns.csv"):
        if of in row["of"].split() and row["name"] == "*":
            found |= {name: _of_option(OPTIONS[name]) for name in CellSpec.model_fields if name in OPTIONS}
        elif of in row["of"].split():
            found[row["name"]] = RecordColumn(row["dtype"], row["meaning"])
    return found


#: What ``load(of=…)`` returns → its columns; ``records`` has one ``version_PACKAGE`` (string) per library, too.
COLUMNS = {of: _columns(of) for of in ("records", "phases", "ranks")}
RECORDS, PHASES, RANKS = COLUMNS.values()


def of_records(name: str) -> RecordColumn:
    """A column of ``records``, also ``version_PACKAGE``. Raises KeyError for a column without documentation."""
    if name.startswith("version_"):
        return RecordColumn("string", f"installed release of {name.removeprefix('version_')}")
    return RECORDS[name]
