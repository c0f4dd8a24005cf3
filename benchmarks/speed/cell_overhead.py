"""What a cell costs, side by side: ``python benchmarks/speed/cell_overhead.py``. Prints a table; asserts nothing.

One tiny CPU training cell, three ways: through the sweep engine (children of the fork server), each in a fresh
interpreter, and, with ``--optimum-python``, in optimum-benchmark, whose environment (it needs transformers 4) is set up
by these two commands, torch first and exactly as in constraints.txt:

    python3 -m venv out/optimum-env && out/optimum-env/bin/pip install torch==2.13.0
    out/optimum-env/bin/pip install torch==2.13.0 'transformers<5' optimum-benchmark==0.6.0

then ``python benchmarks/speed/cell_overhead.py --optimum-python out/optimum-env/bin/python``. Own overhead is what
remains of a cell's wall time once load and steps are taken away: process, allocator trace, record, journal. Every round
runs all ways one after the other, so that a busy machine slows them alike; the table is over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vramprobe.measure.environment import cpu_name
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep import runner
from vramprobe.sweep.definition import Sweep

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "tiny-llama"
BATCH_SIZE, SEQ_LEN, STEPS, OPTIM = 1, 8, 3, "adamw_torch_fused"


@dataclass(frozen=True)
class Row:
    """One way to run the cell. Seconds per cell; ``own_seconds`` where load and steps are known apart."""

    name: str
    seconds: list[float]
    own_seconds: list[float]

    def after(self, earlier: Row | None) -> Row:
        """This row with those of earlier rounds before it."""
        if earlier is None:
            return self
        return Row(self.name, earlier.seconds + self.seconds, earlier.own_seconds + self.own_seconds)


def tiny_cells(num: int) -> tuple[CellSpec, ...]:
    """As many different cells of a tiny model: full fine-tuning in fp32, as a Trainer does by default."""
    return tuple(
        resolve(
            model=str(MODEL),
            method="full",
            dtype="fp32",
            autocast="none",
            optim=OPTIM,
            device="cpu",
            seed=seed,
            batch_size=BATCH_SIZE,
            seq_len=SEQ_LEN,
            steps=STEPS,
            timing_steps=0,
        )
        for seed in range(num)
    )


def through_the_engine(num: int) -> tuple[Row, float]:
    """``num`` cells of one sweep, each from its start to its record on disk, and the seconds of the one before them.

    That one also starts the fork server, which a sweep pays once.
    """
    timed: list[tuple[float, RunRecord]] = []
    began = 0.0

    def note(event: runner.Progress) -> None:
        nonlocal began
        if event.kind == "started":
            began = time.perf_counter()
        elif event.kind == "finished":
            timed.append((time.perf_counter() - began, event.record))

    sweep = Sweep(name="overhead", description="", cells=tiny_cells(num + 1), held_out=frozenset(), notes=())
    with tempfile.TemporaryDirectory() as folder:
        runner.run(sweep, Path(folder), on_event=note)
    return _row("vramprobe, sweep engine", timed[1:]), timed[0][0]


def in_fresh_interpreters(num: int) -> Row:
    """Each cell in an interpreter that starts for it and imports everything anew."""
    timed = []
    with tempfile.TemporaryDirectory() as folder:
        for spec in tiny_cells(num):
            began = time.perf_counter()
            record = runner.measure(spec, log=Path(folder) / "log")
            timed.append((time.perf_counter() - began, record))
    return _row("vramprobe, fresh interpreter", timed)


def in_optimum_benchmark(python: Path, num: int, start_method: str) -> Row:
    """The same cell with memory tracking in optimum-benchmark's process launcher, one parent for all cells."""
    script = Path(__file__).with_name("optimum_benchmark") / "run.py"
    command = [python, script, MODEL, "--start-method", start_method]
    shape = {"batch-size": BATCH_SIZE, "seq-len": SEQ_LEN, "steps": STEPS, "optim": OPTIM, "cells": num}
    for name, value in shape.items():
        command += [f"--{name}", str(value)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"optimum-benchmark did not run:\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    versions = result["versions"]
    name = (
        f"optimum-benchmark {versions['optimum-benchmark']} on transformers {versions['transformers']}, {start_method}"
    )
    return Row(name, [cell["seconds"] for cell in result["cells"]], [])


def _row(name: str, timed: Iterable[tuple[float, RunRecord]]) -> Row:
    seconds, own_seconds = [], []
    for wall_seconds, record in timed:
        if record.outcome.kind != "ok":
            raise SystemExit(f"a cell of {name} did not run: {record.outcome}")
        timing = record.timing
        seconds.append(wall_seconds)
        own_seconds.append(wall_seconds - timing.load_seconds - timing.traced_seconds - sum(timing.step_seconds))
    return Row(name, seconds, own_seconds)


def table(rows: list[Row]) -> str:
    """Text; the first row is what the others are compared with, by their medians."""
    head = f"{'':56} {'cells':>5} {'s/cell':>8} {'worst':>8} {'× engine':>9}   {'own s':>6} {'worst':>6}"
    lines = [head, "-" * len(head)]
    reference_seconds = statistics.median(rows[0].seconds)
    for row in rows:
        median_seconds = statistics.median(row.seconds)
        line = f"{row.name:56} {len(row.seconds):5} {median_seconds:8.3f} {max(row.seconds):8.3f}"
        line += f" {median_seconds / reference_seconds:9.1f}"
        if row.own_seconds:
            line += f"   {statistics.median(row.own_seconds):6.3f} {max(row.own_seconds):6.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="times to run all ways in turn")
    parser.add_argument("--cells", type=int, default=15, help="cells through the engine, each round")
    parser.add_argument("--fresh-cells", type=int, default=3, help="cells each other way, each round")
    parser.add_argument("--optimum-python", type=Path, help="the interpreter that has optimum-benchmark")
    options = parser.parse_args()

    loads, first_seconds, rows = [os.getloadavg()[0]], [], {}
    for _ in range(options.rounds):
        engine, first = through_the_engine(options.cells)
        first_seconds.append(first)
        found = [engine, in_fresh_interpreters(options.fresh_cells)]
        if options.optimum_python:
            for start_method in ("spawn", "fork"):  # its default, and the fastest it offers
                found.append(in_optimum_benchmark(options.optimum_python, options.fresh_cells, start_method))
        rows = {row.name: row.after(rows.get(row.name)) for row in found}
        loads.append(os.getloadavg()[0])

    print(f"tiny-llama, full fine-tuning, fp32, batch {BATCH_SIZE} × length {SEQ_LEN}, {STEPS} steps, memory tracked")
    print(f"{cpu_name()}, {os.cpu_count()} cores, load average {min(loads):.1f} to {max(loads):.1f}\n")
    print(table(list(rows.values())))
    print(
        "\ns/cell is a median. own s, median and worst: a cell's wall time without its load and its steps.\n"
        f"Left out: a sweep's first cell, which starts the fork server ({statistics.median(first_seconds):.1f} s)."
    )


if __name__ == "__main__":
    main()
