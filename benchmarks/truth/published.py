"""Estimates beside what others measured: ``python benchmarks/truth/published.py`` writes published.csv and .md.

The rows of vramprobe/data/published.csv that are a cell of ours (one A100, plain transformers, allocated peak): the
published run repeated by its own libraries (reproduce.csv), every published formula, and what two other estimators said
(fitcheck-llm 0.3.1, canifinetune 0.4.1; published_verdicts.py asks them). The published metric is allocated memory, so
a peer's tensors are compared, without what it adds for the CUDA context, fragmentation and safety; the CSV has its
total too. ``--check`` writes nothing and fails where the table is stale.
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from benchmarks.truth.published_rows import PublishedRow, cell_of, list_published
from vramprobe.literature.formulas import FORMULAS, Formula, FormulaEstimate, facts_of
from vramprobe.spec import CellSpec

TABLE = Path(__file__).with_suffix(".csv")
REPRODUCED = Path(__file__).with_name("reproduce.csv")
Row = dict[str, Any]


def compare(row: PublishedRow, spec: CellSpec, emulated_bytes: str) -> Row:
    """One row: measured bytes, and the run by its own libraries on an emulated GPU, with its error."""
    table: Row = {
        "line": row.line,
        "source": row.source,
        "url_or_path": row.url_or_path,
        "gpu": row.gpu,
        "metric": row.metric,
        "cell": spec.cell_id,
        "run": run_in_words(row, spec),
        "method": spec.method,
        "kbit_prep": spec.kbit_prep,
        "lora_dtype": spec.lora_dtype,
        "library": "; ".join(f"{name} {'.'.join(map(str, version))}" for name, version in row.versions.items()),
        "measured_bytes": row.memory_bytes,
        "emulated_bytes": int(emulated_bytes),
    }
    return with_errors(table, ("emulated",))


def with_errors(row: Row, names: Iterable[str]) -> Row:
    """The row with a signed error in percent of the measured bytes for each estimate it has."""
    for name in names:
        found = row.get(f"{name}_bytes")
        row[f"{name}_error_percent"] = None if found is None else round(100 * (found / row["measured_bytes"] - 1), 3)
    return row


def kept_of_peers(rows: list[Row]) -> None:
    """Add to the rows what the peers said when they were last asked of the same rows."""
    said = {row["line"]: row for row in read_csv(TABLE)}
    for row in rows:
        for key, text in said[str(row["line"])].items():
            if key.startswith(("fitcheck_", "canifinetune_")):
                row[key] = float(text) if text and key.endswith("_percent") else text or None


def predictors(rows: list[Row]) -> list[str]:
    return [key.removesuffix("_error_percent") for key in rows[0] if key.endswith("_error_percent")]


def formula_errors(rows: list[Row], cells: list[CellSpec]) -> list[tuple[Formula, list[float]]]:
    """Each formula of a peak with its errors in percent on the rows that it applies to."""
    found = []
    for formula in FORMULAS:
        said = [formula.apply(facts_of(spec)) for spec in cells]
        errors = [
            100 * (one.allocated_bytes / row["measured_bytes"] - 1)
            for row, one in zip(rows, said, strict=True)
            if isinstance(one, FormulaEstimate)
        ]
        if formula.predicts == "peak":
            found.append((formula, errors))
    return found


def markdown(rows: list[Row], cells: list[CellSpec]) -> str:
    """Every row, their mean and worst, and the formulas on the same rows."""
    names = predictors(rows)
    heads = [name.replace("_", " ") for name in names]
    lines = [
        [row["line"], row["run"], f"{row['measured_bytes'] / 2**30:.3f}"]
        + [shown(row[f"{name}_error_percent"]) for name in names]
        for row in rows
    ]
    lines.append(
        ["", "mean, worst", "", *(mean_and_worst([row[f"{name}_error_percent"] for row in rows]) for name in names)]
    )
    formulas = [
        [formula.name, len(errors), mean_and_worst(errors), formula.says]
        for formula, errors in formula_errors(rows, cells)
    ]
    return filled(
        TABLE.with_suffix(".md"),
        rows=as_markdown(["row", "run", "measured, GiB", *heads], "llr" + "r" * len(heads), lines),
        formulas=as_markdown(["formula people use", "rows", "mean, worst", "says"], "lrrl", formulas),
    )


def run_in_words(row: PublishedRow, spec: CellSpec) -> str:
    """The published run, short enough for a table."""
    prepared = f" {spec.quant}, {spec.kbit_prep} prep" if spec.quant != "none" else ""
    release = ".".join(map(str, row.versions["transformers"]))
    return f"{spec.model_label} {spec.method}{prepared}, {spec.dtype}, {spec.batch_size} × {spec.seq_len}, {release}"


def shown(error: float | None) -> str:
    return "–" if error is None else f"{error:+.2f} %"


def mean_and_worst(errors: list[float | None]) -> str:
    """The mean of the absolute errors, and the signed one that is furthest from 0."""
    known = [error for error in errors if error is not None]
    return f"{statistics.mean(map(abs, known)):.1f} %, {max(known, key=abs):+.1f} %" if known else "–"


def main() -> None:
    emulated = {int(row["line"]): row["emulated_bytes"] for row in read_csv(REPRODUCED)}
    found = [(row, cell) for row in list_published() if (cell := cell_of(row)) is not None]
    rows, cells = [compare(row, cell, emulated[row.line]) for row, cell in found], [cell for _, cell in found]
    kept_of_peers(rows)
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): markdown(rows, cells)}
    write_or_check(made, "truth/published.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
