"""How long a user waits: ``python benchmarks/speed.py``. Prints medians; nothing is asserted, machines differ.

Commands are timed as processes. A cell's overhead is what remains of a tiny cell's wall time once its load and its
steps are taken away: process, allocator trace, record, journal.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vramprobe.measure import runner
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]
PREDICT = "predict --model llama-3.1-70b --method qlora --batch-size 1 --seq-len 4096 --gradient-checkpointing"


def seconds_of(command: str, *, times: int = 7) -> float:
    """Median wall seconds of one ``vramprobe`` command as a process."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "vramprobe", *command.split()], capture_output=True, check=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def tiny_cells(num: int) -> list[CellSpec]:
    """As many different cells of a tiny model."""
    model = str(ROOT / "tests" / "data" / "tiny-llama")
    return [
        resolve(model=model, method="lora", device="cpu", batch_size=1, seq_len=8, seed=seed, timing_steps=0)
        for seed in range(num)
    ]


def overheads(*, spawned: bool, num: int) -> list[float]:
    """Seconds of each cell beyond its load and steps; the first of a fork server's, which starts it, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        if spawned:
            timed = []
            for cell in tiny_cells(num):
                began = time.perf_counter()
                record = runner.measure(cell, log=Path(folder) / "log")
                timed.append((time.perf_counter() - began, record))
        else:
            ends: list[tuple[float, object]] = []
            marks: list[float] = []

            def note(event: runner.Progress) -> None:
                if event.kind == "started":
                    marks.append(time.perf_counter())
                else:
                    ends.append((time.perf_counter() - marks[-1], event.record))

            cells = tuple(tiny_cells(num + 1))
            sweep = Sweep(name="speed", description="", cells=cells, held_out=frozenset(), notes=())
            runner.run(sweep, Path(folder), on_event=note)
            timed = ends[1:]
    return [seconds - r.timing.load_seconds - r.timing.traced_seconds for seconds, r in timed]


def main() -> None:
    for command in ("--help", PREDICT, "models --json"):
        print(f"{seconds_of(command):8.3f} s  vramprobe {command}")
    print(f"{statistics.median(overheads(spawned=False, num=8)):8.3f} s  a cell's overhead, fork server")
    print(f"{statistics.median(overheads(spawned=True, num=3)):8.3f} s  a cell's overhead, spawned")


if __name__ == "__main__":
    main()
