"""Results → a data set for the Hugging Face hub: one Parquet file of all records, and a card that explains it.

In: a results file or folder. Out: file name → content, the same bytes each time. Drops no record: failures are rows.
Nothing is lost: the last column holds each whole record as JSON. Stays this side of the torch line.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vramprobe.errors import require_extra
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.dataset.card import RECORD, card

if TYPE_CHECKING:
    import pandas as pd


def build(results_path: str | Path, out_dir: str | Path) -> dict[str, bytes]:
    """README.md and records.parquet; ``out_dir`` is for the command in the card. Raises StoreError without records,
    MissingDependency without pandas and pyarrow.
    """
    require_extra("report", "a data set", "hub")
    contents = store.read(results_path)
    frame = frame_of(contents.records)
    command = shlex.join(["vramprobe", "report", str(results_path), "--dataset", str(out_dir)])
    return {"README.md": card(contents, list(map(str, frame)), command).encode(), "records.parquet": parquet(frame)}


def frame_of(records: Sequence[RunRecord]) -> pd.DataFrame:
    """One row per attempt, in order: the columns of ``vramprobe.load``, then the whole record."""
    from vramprobe.records.frames import records_frame

    return records_frame(records).assign(**{RECORD: [record.to_json_line() for record in records]})


def parquet(frame: pd.DataFrame) -> bytes:
    """The rows as Parquet."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()
