"""What an emulated cell costs here: ``python benchmarks/speed/emulated_speed.py``. Prints a table; asserts nothing.

Cells of one ``vramprobe run --emulate H100-SXM``, as the fork server serves them: 8B and 70B QLoRA, and a mix of 1B to
8B, full, LoRA and QLoRA, for the cells of an hour. A warm cell's wall time runs from its start to the next one's; load
and steps are the record's own; overhead is the rest: process, record, journal, prediction. Emulated, not measured: none
of it says how long anything takes on a GPU.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

from vramprobe.records import store
from vramprobe.records.record import RunRecord

CARD = "H100-SXM"
QLORA = {"method": "qlora", "batch_size": 1, "seq_len": 2048, "gradient_checkpointing": True}
MIX = [
    {"model": ["llama-3.2-1b", "qwen2.5-1.5b"], "method": "full", "gradient_checkpointing": [False, True]},
    {"model": ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"], "method": "lora", "gradient_checkpointing": True},
    {"model": ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"], "method": "qlora", "gradient_checkpointing": True},
]
MIB = 2**20


class Cost(NamedTuple):
    """One cell's seconds; what its process held of the host's memory."""

    wall_seconds: float
    load_seconds: float
    step_seconds: float  # all traced steps
    peak_rss_bytes: int


def run(name: str, cells: list[dict]) -> list[Cost]:
    """The cells but the first, which starts the fork server."""
    with tempfile.TemporaryDirectory() as home:
        sweep, out = Path(home, "sweep.yaml"), Path(home, "out")
        sweep.write_text(yaml.safe_dump({"name": "speed", "description": name, "cells": cells}))
        command = [sys.executable, "-m", "vramprobe", "run", str(sweep), "--emulate", CARD, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [record for record in store.read(out).records if record.outcome.kind == "ok"]
    ended = [datetime.fromisoformat(record.started_at).timestamp() for record in records]
    costs = [_cost(record, wall) for record, wall in zip(records[1:], _between(ended, records), strict=True)]
    assert costs
    return costs


def _between(started: list[float], records: list[RunRecord]) -> list[float]:
    ends = [at + record.timing.total_seconds for at, record in zip(started, records, strict=True)]
    return [after - before for before, after in pairwise(ends)]


def _cost(record: RunRecord, wall_seconds: float) -> Cost:
    timing = record.timing
    steps = (timing.traced_seconds or 0) + (timing.history_seconds or 0)
    rss = max(phase.rss_end_bytes or 0 for phase in record.phases)
    return Cost(wall_seconds, timing.load_seconds or 0, steps, rss)


def main() -> None:
    print(f"{'':24}{'wall':>9}{'load':>9}{'steps':>9}{'overhead':>10}{'host memory':>13}")
    for name, cells in (
        ("8B QLoRA", [{"model": "llama-3.1-8b", **QLORA, "seed": [0, 1, 2, 3, 4]}]),
        ("70B QLoRA", [{"model": "llama-3.1-70b", **QLORA, "seed": [0, 1, 2]}]),
    ):
        costs = run(name, cells)
        wall, load, steps = (statistics.median(cost[k] for cost in costs) for k in range(3))
        rss = max(cost.peak_rss_bytes for cost in costs) / MIB
        print(
            f"{name:24}{wall:7.2f} s{load:7.2f} s{steps:7.2f} s{wall - load - steps:8.2f} s{rss:9.0f} MiB", flush=True
        )
    costs = run("mix", [cell | {"batch_size": 1, "seq_len": 1024} for cell in MIX])
    seconds = sum(cost.wall_seconds for cost in costs)
    print(f"{len(costs)} cells of 1B to 8B in {seconds:.0f} s: {3600 * len(costs) / seconds:,.0f} an hour")


if __name__ == "__main__":
    main()
