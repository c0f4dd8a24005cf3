"""vramprobe: how much GPU memory does this fine-tuning run need, and why?

One call per stage is in :mod:`vramprobe.api`; the command line is ``vramprobe --help``. Each folder is a room on the
data's way, and says in its first lines what comes in and what goes out. Three lines nobody crosses, and a test says so:
the torch line (only workload/ and parts of measure/ load torch; importing this does not), the process line
(runner and worker exchange a spec and a record as JSON, nothing else), the independence line (terms/, arithmetic, and
workload/, tensors, never import each other: a shared helper would let errors cancel).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"


def load(path: str | Path = "results", of: Literal["records", "phases", "ranks"] = "records") -> pd.DataFrame:
    """Return the results in a .jsonl file or folder, or an exported .parquet file, as a pandas DataFrame.

    ``of="records"``: one row per record of a cell, failures included. ``of="phases"``: one row per
    record, rank and phase. ``of="ranks"``: one row per rank. Phases and ranks of profiled commands are rows, too.

    Bytes are Int64 in columns that end in ``_bytes``, seconds Float64 in ``_seconds``; unknown values are NA, never 0.
    docs/dataframes.md lists every column, and so does ``vramprobe.records.columns``. Raises StoreError for a place
    without records.
    """
    from vramprobe.errors import require_extra

    require_extra("report", "a DataFrame")
    from vramprobe.records import frames, parquet

    return parquet.load(Path(path), of) if Path(path).suffix == parquet.SUFFIX else frames.load(path, of)


def load_ipython_extension(shell):
    """``%load_ext vramprobe`` in a notebook: its kernel is profiled from now on, and ``%vramprobe`` shows it so far."""
    from vramprobe.cli.notebook import load

    load(shell)
