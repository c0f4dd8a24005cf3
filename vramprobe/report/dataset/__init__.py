"""Results → a data set for the Hugging Face hub: one Parquet file of all records, and a card that explains it.

In: a results file or folder. Out: file name → content, the same bytes each time. Drops no record: failures are rows,
and what was simulated says so in its instrument. Nothing is lost: the last column holds each whole record as JSON.
Stays this side of the torch line.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vramprobe.errors import MissingDependency
from vramprobe.records import store, table
from vramprobe.records.record import RunRecord
from vramprobe.report.dataset.card import card
from vramprobe.report.dataset.columns import RECORD, type_of

PARQUET = "records.parquet"


def build(results_path: str | Path, out_dir: str | Path) -> dict[str, bytes]:
    """README.md and records.parquet; ``out_dir`` is for the command in the card. Raises StoreError without records."""
    contents = store.read(results_path)
    rows = rows_of(contents.records)
    command = shlex.join(["vramprobe", "report", str(results_path), "--dataset", str(out_dir)])
    return {"README.md": card(contents, list(rows[0]), command).encode(), PARQUET: parquet(rows)}


def rows_of(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A row per attempt, in order, all with the same columns: records/table.py's, then sweep and whole record."""
    rows = [
        table.to_row(record) | {"sweep": record.sweep, "held_out": record.held_out, RECORD: record.to_json_line()}
        for record in records
    ]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != RECORD]
    return [{name: row.get(name) for name in (*names, RECORD)} for row in rows]


def parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """The rows as Parquet; every column has the type that its name stands for. Raises MissingDependency."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("a data set needs pyarrow: pip install 'vramprobe[hub]'") from error
    types = {"integer": pa.int64(), "number": pa.float64(), "flag": pa.bool_(), "text": pa.string()}
    schema = pa.schema([(name, types[type_of(name)]) for name in rows[0]])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows), schema=schema), buffer, compression="zstd")
    return buffer.getvalue()
