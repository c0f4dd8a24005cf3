"""Results, and a fit when there is one → tables (Markdown and CSV) and a plot, the same bytes each time.

In: a results file or folder, and a MemoryModel. Out: files in a folder, each with the command that rebuilds it.
Never measures or fits, needs no GPU and no torch, and hides nothing measured: failures have their own table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vramprobe import store, table
from vramprobe.errors import StoreError

if TYPE_CHECKING:
    from vramprobe.memory_model import MemoryModel


def report(
    results_path: str | Path,
    out_dir: str | Path,
    *,
    model: MemoryModel | None = None,
    fit_path: str | Path | None = None,
) -> list[Path]:
    """Write the tables and, with a ``model``, predictions beside the measurements; the files written, in order.

    ``fit_path`` is where ``model`` came from, for the command in the footer. Raises StoreError (no results, or a folder
    that cannot be written) and IncomparableRecords (results of several devices or instruments).
    """
    from vramprobe.report import pages, plot, rows

    contents = store.read(results_path)
    table.require_comparable(contents.records)
    cells = rows.cells_of(contents.records, model)
    command = ["vramprobe", "report", str(results_path), "-o", str(out_dir)]
    command += ["--fit", str(fit_path or "FIT.json")] if model is not None else []
    footer = pages.footer(contents, shlex.join(command))
    files: dict[str, bytes] = pages.measured(cells, footer) | pages.by_term(cells, footer)
    if any(cell.error_percent is not None for cell in cells):
        files |= plot.predicted_against_measured(cells)
    return write(out_dir, files)


def write(out_dir: str | Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write these files; their paths, in order. Raises StoreError where the folder cannot be written."""
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out_dir / name).write_bytes(content)
    except OSError as error:
        raise StoreError(f"cannot write the report to {out_dir}: {error.strerror}; choose another folder") from error
    return [out_dir / name for name in files]
