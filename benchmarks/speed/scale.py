"""How planning, resuming and reporting scale: ``python benchmarks/speed/scale.py`` (an hour, 9 GB of temporary disk).

A plan of 1,000 different cells, a report of 10,000, and journals of 100,000 and a million records (the committed ones
of a CPU, under other names): opened, resumed for a sweep of 1,000 cells, read as JSON lines, exported to Parquet, and a
table of peaks by model and method from each. Each row is measured in a process of its own. Needs pyarrow, and duckdb
for its rows. Writes scale.csv and scale.md; ``--check`` only compares the page with the rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import as_csv, as_markdown, read_csv, write_or_check

import vramprobe
from vramprobe import api
from vramprobe.records import store
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep.resume import open_journal, resume

ROOT = Path(__file__).resolve().parents[2]
NUM_RECORDS = (100_000, 1_000_000)
#: JSON lines are read into records that take more memory than this machine has, where there are more.
MOST_READ_AS_JSON = 100_000
ROWS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")
#: 10 models × 2 methods × 10 lengths × 5 batch sizes, half of it checkpointed.
SWEEP = {
    "name": "thousand",
    "cells": [
        {
            "model": ["smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "pythia-410m", "llama-3.2-1b"],
            "method": ["full", "lora", "qlora"][number : number + 2],
            "gradient_checkpointing": [True, False][number % 2],
            "batch_size": [1, 2, 4, 8, 16],
            "seq_len": [128 * step for step in range(1, 11)],
        }
        for number in (0, 1)
    ],
}
_PEAKS = "max({peak}) AS peak, count(*) AS records FROM {source} GROUP BY ALL ORDER BY ALL"


def thousand_cells() -> list[CellSpec]:
    """Cells of a tiny model, all different."""
    model = str(ROOT / "tests" / "data" / "tiny-llama")
    return [
        resolve(model=model, method="lora", device="cpu", batch_size=1, seq_len=8, seed=seed) for seed in range(1000)
    ]


def write_journal(folder: Path, count: int) -> None:
    """Real records, each many times under the fingerprint of one of the thousand cells or of none."""
    folder.mkdir()
    cells = thousand_cells()
    lines = [record.to_json_line() for record in store.read(ROOT / "results" / "cpu" / "quickstart").records]
    real = [(line, *(json.loads(line)[key] for key in ("attempt_id", "fingerprint"))) for line in lines]
    with (folder / "records.jsonl").open("w") as file:
        for number in range(count):
            line, attempt_id, fingerprint = real[number % len(real)]
            name = cells[number].fingerprint if number < len(cells) else f"{number:016x}"
            file.write(line.replace(attempt_id, f"{number:032x}").replace(f'"{fingerprint}"', f'"{name}"') + "\n")


def plan(folder: Path) -> int:
    (folder / "thousand.yaml").write_text(json.dumps(SWEEP))
    return len(api.plan(folder / "thousand.yaml", gpu="H200", out=folder / "none").rows)


def reported(folder: Path) -> int:
    """Each of its records is a row of the pages, and so of this CSV."""
    api.report(folder, folder / "report")
    return (folder / "report" / "measured.csv").read_text().count("\n") - 1


def opened(folder: Path) -> int:
    return sum(map(len, open_journal(folder / "records.jsonl").attempts.values()))


def resumed(folder: Path) -> int:
    journal = open_journal(folder / "records.jsonl")
    return sum(cell.action == "kept" for cell in resume(thousand_cells(), journal, lambda spec: None))


def _peaks(frame: Any) -> int:
    return int(frame.groupby(["model_label", "method"]).agg(records=("attempt_id", "size")).records.sum())


def from_json_lines(folder: Path) -> int:
    return _peaks(vramprobe.load(folder))


def exported(folder: Path) -> int:
    return api.export(folder, folder / "records.parquet")


def from_parquet(folder: Path) -> int:
    return _peaks(vramprobe.load(folder / "records.parquet"))


def _by_duckdb(query: str) -> int:
    import duckdb

    duckdb.sql("SET memory_limit = '4GB'")
    return sum(row[-1] for row in duckdb.sql(query).fetchall())


def by_duckdb_from_parquet(folder: Path) -> int:
    source = _PEAKS.format(peak="peak_allocated_bytes", source=f"'{folder / 'records.parquet'}'")
    return _by_duckdb(f"SELECT model_label, method, {source}")


def by_duckdb_from_json_lines(folder: Path) -> int:
    kinds = "{spec: 'STRUCT(model VARCHAR, method VARCHAR)', peak: 'STRUCT(allocated_bytes BIGINT)'}"
    lines = f"read_ndjson('{folder / 'records.jsonl'}', columns={kinds})"
    return _by_duckdb(f"SELECT spec.model, spec.method, {_PEAKS.format(peak='peak.allocated_bytes', source=lines)}")


ACTIONS: dict[str, Callable[[Path], int]] = {
    "journal opened": opened,
    "1,000 cells resumed from it": resumed,
    "table of peaks from JSON lines (DuckDB)": by_duckdb_from_json_lines,
    "table of peaks from JSON lines (`vramprobe.load`)": from_json_lines,
    "exported to Parquet (`vramprobe export`)": exported,
    "table of peaks from Parquet (`vramprobe.load`)": from_parquet,
    "table of peaks from Parquet (DuckDB)": by_duckdb_from_parquet,
}
PLAN, REPORT = "plan of 1,000 cells", "report of 10,000 cells (`vramprobe report`)"
NUM_REPORTED = 10_000


def measured(what: str, folder: Path, records: int) -> dict[str, Any]:
    """One row, by a process that does nothing else."""
    words = [sys.executable, __file__, "--one", what, "--folder", str(folder)]
    said = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
    expected = 1000 if what in (PLAN, "1,000 cells resumed from it") else records
    assert said.pop("answer") == expected, (what, said)
    row = {"what": what, "records": records} | said
    print(row, flush=True)
    return row


def one(what: str, folder: Path) -> None:
    """In such a process: what it took."""
    began, cpu_began = time.perf_counter(), time.process_time()
    answer = ({PLAN: plan, REPORT: reported} | ACTIONS)[what](folder)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    said = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2), "memory_mb": round(memory_mb)}
    print(json.dumps(said | {"answer": answer}))


def page(rows: list[dict[str, str]]) -> str:
    """The rows as a table: what each takes by the number of records."""
    by_name = {(row["what"], int(row["records"])): row for row in rows}
    sizes = {int(row["records"]): row["file_mb"] for row in rows if row["file_mb"]}

    def cells(what: str, count: int) -> tuple[str, str]:
        row = by_name.get((what, count))
        return ("-", "-") if row is None else (f"{row['seconds']} ({row['cpu_seconds']})", row["memory_mb"])

    table = [(what, *(cell for count in NUM_RECORDS for cell in cells(what, count))) for what in ACTIONS]
    head = ("", *(f"{name}, {count:,}" for count in NUM_RECORDS for name in ("seconds (of the CPU)", "memory, MB")))
    resume_row, report_row = by_name["1,000 cells resumed from it", NUM_RECORDS[1]], by_name[REPORT, NUM_REPORTED]
    return "\n".join(
        [
            "# A journal of a million records",
            "",
            f"**Result:** a sweep resumes from a million records in {resume_row['cpu_seconds']} s of CPU time and "
            f"{resume_row['memory_mb']} MB.",
            "",
            "Measured on two cores that other work shared, so CPU seconds stand beside wall time; journals of "
            f"{sizes[NUM_RECORDS[0]]} and {sizes[NUM_RECORDS[1]]} MB. Each row is a process of its own. The plan "
            f"of 1,000 cells took {by_name[PLAN, 0]['seconds']} s ({by_name[PLAN, 0]['cpu_seconds']} of the CPU).",
            f"A report of 10,000 cells took {report_row['seconds']} s ({report_row['cpu_seconds']}) and "
            f"{report_row['memory_mb']} MB, and both grow with the cells: each is a row of its tables. Its page shows "
            "the first rows of a long table; Markdown, CSV, LaTeX and HTML have all.",
            "",
            *as_markdown(head, "lrrrr", table),
            "",
            "`-`: not run. A million records as Python objects would take ten times the memory of 100,000. Rebuild: "
            "`python benchmarks/speed/scale.py`",
            "",
        ]
    )


def measure_all() -> None:
    """Each row that is not there yet, written as it is measured."""
    rows: list[dict[str, Any]] = list(read_csv(ROWS))
    known = {(row["what"], int(row["records"])) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        folders = {0: Path(name)} | {count: Path(name) / str(count) for count in (NUM_REPORTED, *NUM_RECORDS)}
        wanted = [(PLAN, 0), (REPORT, NUM_REPORTED), *((what, count) for what in ACTIONS for count in NUM_RECORDS)]
        for what, count in wanted:
            if (what, count) in known or (ACTIONS.get(what) is from_json_lines and count > MOST_READ_AS_JSON):
                continue
            if count and not folders[count].exists():
                write_journal(folders[count], count)
            journal = folders[count] / "records.jsonl"
            size = round(journal.stat().st_size / 1e6) if count else ""
            rows.append(measured(what, folders[count], count) | {"file_mb": size})
            ROWS.write_text(as_csv(rows))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--check", action="store_true")
    words.add_argument("--one", choices=(PLAN, REPORT, *ACTIONS), help=argparse.SUPPRESS)
    words.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.one is not None:
        one(given.one, given.folder)
        return
    if not given.check:
        measure_all()
    write_or_check({PAGE: page(read_csv(ROWS))}, "speed/scale.py", check=given.check)


if __name__ == "__main__":
    main()
