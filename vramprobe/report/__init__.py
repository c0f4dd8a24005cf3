"""Results, and a fit when there is one → tables (Markdown and CSV) and a plot, the same bytes each time.

In: a results file or folder, and a MemoryModel. Out: files in a folder, each with the command that rebuilds it.
Never measures or fits, needs no GPU and no torch, and hides nothing measured: failures have their own table. What was
simulated is no measurement and is left out, with a count.
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

    ``fit_path`` is where ``model`` came from, for the command in the footer. Raises StoreError (nothing measured, or a
    folder that cannot be written) and IncomparableRecords (results of several devices or instruments).
    """
    from vramprobe.report import pages, plot, rows

    contents = store.read(results_path)
    measured = [record for record in contents.records if record.is_measured]
    if not measured:
        raise StoreError(
            f"nothing was measured in {results_path}: its {len(contents.records)} records are simulated, and a report "
            "is of measurements; run the cells first"
        )
    table.require_comparable(measured)
    cells = rows.cells_of(contents.records, model)
    command = ["vramprobe", "report", str(results_path), "-o", str(out_dir)]
    command += ["--fit", str(fit_path or "FIT.json")] if model is not None else []
    footer = pages.footer(contents, shlex.join(command))
    files: dict[str, bytes] = pages.measured(cells, footer) | pages.by_term(cells, footer)
    if any(cell.error_percent is not None for cell in cells):
        files |= plot.predicted_against_measured(cells)
    return write_files(Path(out_dir), files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write file name → content into ``folder``, made where it is missing. Raises StoreError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise StoreError(f"cannot write the report to {folder}: {error.strerror}; choose another folder") from error
    return [folder / name for name in files]
