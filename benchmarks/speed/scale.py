"""How planning and resuming scale: ``python benchmarks/speed/scale.py``. Prints seconds; nothing is asserted.

A plan of 1,000 different cells, from the YAML file to the last row, and a journal of 100,000 records (real ones, under
other names, about 0.8 GB in the temporary folder), opened and resumed for a sweep of 1,000 cells.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from vramprobe import api
from vramprobe.records import store
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep.resume import open_journal, resume

ROOT = Path(__file__).resolve().parents[2]
NUM_RECORDS = 100_000
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


def seconds_of(what: str, action: object, *words: object) -> object:
    """Run ``action(*words)``, print its seconds, give its result."""
    began = time.perf_counter()
    result = action(*words)
    print(f"{time.perf_counter() - began:8.2f} s  {what}", flush=True)
    return result


def thousand_cells() -> list[CellSpec]:
    """Cells of a tiny model, all different."""
    model = str(ROOT / "tests" / "data" / "tiny-llama")
    return [
        resolve(model=model, method="lora", device="cpu", batch_size=1, seq_len=8, seed=seed) for seed in range(1000)
    ]


def write_journal(path: Path, cells: list[CellSpec]) -> None:
    """Real records, each a hundred times or so under the fingerprint of one of ``cells`` or of none."""
    lines = [record.to_json_line() for record in store.read(ROOT / "results" / "cpu" / "quickstart").records]
    real = [(line, *(json.loads(line)[key] for key in ("attempt_id", "fingerprint"))) for line in lines]
    with path.open("w") as file:
        for number in range(NUM_RECORDS):
            line, attempt_id, fingerprint = real[number % len(real)]
            name = cells[number].fingerprint if number < len(cells) else f"{number:016x}"
            file.write(line.replace(attempt_id, f"{number:032x}").replace(f'"{fingerprint}"', f'"{name}"') + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "thousand.yaml").write_text(json.dumps(SWEEP))
        plan = seconds_of(
            "a plan of 1,000 cells", lambda: api.plan(folder / "thousand.yaml", gpu="H200", out=folder / "none")
        )
        assert len(plan.rows) == 1000
        cells = thousand_cells()
        path = folder / "records.jsonl"
        write_journal(path, cells)
        size_mb = path.stat().st_size / 1e6
        journal = seconds_of(f"a journal of {NUM_RECORDS:,} records ({size_mb:.0f} MB) opened", open_journal, path)
        assert sum(map(len, journal.attempts.values())) == NUM_RECORDS
        seconds_of("1,000 cells resumed from it", resume, cells, journal, lambda spec: None)


if __name__ == "__main__":
    main()
