"""How fast predicting is: ``python benchmarks/speed/predict_speed.py`` prints a table beside the limits.

A cold ``vramprobe predict`` as a process, inverse questions as processes, a million cells as arrays (one walk, and many
different cells), and a fit of 10,000 synthetic records. Wall and CPU seconds: on a busy machine look at the second.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from vramprobe.model.fit import fit
from vramprobe.model.memory_model import peak_moment
from vramprobe.predict.grid import predict_cells, predict_grid
from vramprobe.records.record import Environment, Ok, Peak, RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import moments

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.speed import PREDICT, cost_of

MODELS = ("pythia-70m", "smollm2-135m", "opt-125m", "qwen2.5-0.5b", "gpt2", "llama-3.2-1b")
NUM_RECORDS, NUM_CELLS, TIMES = 10_000, 1_000_000, 5
TRUE = {"logits": 1.06, "saved_activations": 1.1}
CONSTANT_BYTES = 20_000_000
MAX_BATCH = "predict --model gpt2 --method lora --seq-len 512 --gpu RTX-4090 --max-batch"
LARGEST = "predict --method qlora --batch-size 1 --seq-len 1024 --gpu RTX-4090 --largest-model"


def specs(count: int) -> Iterator[CellSpec]:
    """Different cells of six models, three methods, with and without checkpointing."""
    rng = random.Random(0)
    setups = [
        resolve(model=model, method=method, device="cpu", batch_size=2, seq_len=8, gradient_checkpointing=on)
        for model in MODELS
        for method in ("full", "lora", "qlora")
        for on in (False, True)
    ]
    for number in range(count):
        sizes = {"batch_size": rng.randint(1, 16), "seq_len": rng.randint(8, 1024), "seed": number}
        yield setups[number % len(setups)].model_copy(update=sizes)


def records(count: int) -> list[RunRecord]:
    """Measurements made up from known coefficients, with half a percent of noise."""
    rng = random.Random(0)
    machine = Environment(
        device_name="Made-up CPU",
        isolation="forkserver",
        num_threads=1,
        platform="Linux",
        python="3.11",
        versions={"torch": "2.13.0"},
    )
    made = []
    for number, spec in enumerate(specs(count)):
        moment = peak_moment(moments(spec), TRUE)
        size = round((moment.total_bytes + CONSTANT_BYTES) * (1 + rng.gauss(0, 0.005)))
        made.append(
            RunRecord(
                attempt_id=f"{number:032x}",
                cell_id=spec.cell_id,
                fingerprint=f"{number:016x}",
                instrument="cpu",
                started_at="2026-03-01T12:00:00Z",
                spec=spec,
                environment=machine,
                outcome=Ok(),
                peak=Peak(phase=moment.phase, step=2, allocated_bytes=size, load_allocated_bytes=1),
            )
        )
    return made


def timed(action: Callable[[], object], times: int = TIMES) -> tuple[float, float]:
    """(wall, CPU) seconds, medians of several calls after a first one."""
    action()
    wall, cpu = [], []
    for _ in range(times):
        began, spent = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - spent)
    return statistics.median(wall), statistics.median(cpu)


def as_process(command: str) -> tuple[float, float]:
    """(median wall, mean CPU) seconds of a command in a process of its own."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = cost_of(command, times=TIMES).wall_seconds
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, (now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime) / TIMES


def main() -> None:
    rows = [
        (f"vramprobe {command}", as_process(command), limit)
        for command, limit in ((PREDICT, 0.4), (MAX_BATCH, None), (LARGEST, None))
    ]
    side = round(NUM_CELLS**0.5)
    batch_sizes, seq_lens = np.arange(1, side + 1)[:, None], 8 * np.arange(1, side + 1)
    one = resolve(model="llama-3.1-8b", method="qlora", device="cuda", batch_size=1, seq_len=8)
    plain = resolve(model="pythia-410m", method="full", device="cpu", batch_size=1, seq_len=8)
    measured, many = records(NUM_RECORDS), list(specs(NUM_RECORDS))
    model = fit(measured)
    rows += [
        (f"{NUM_CELLS:,} cells of llama-3.1-8b qlora", timed(lambda: predict_grid(one, batch_sizes, seq_lens)), 2.0),
        (f"{NUM_CELLS:,} cells of it with a fit", timed(lambda: predict_grid(one, batch_sizes, seq_lens, model)), 2.0),
        (f"{NUM_CELLS:,} cells of pythia-410m full", timed(lambda: predict_grid(plain, batch_sizes, seq_lens)), 2.0),
        (f"{NUM_RECORDS:,} different cells with a fit", timed(lambda: predict_cells(many, model)), None),
        (f"a fit of {NUM_RECORDS:,} records", timed(lambda: fit(measured)), 5.0),
    ]
    table = Table("what", "wall s", "CPU s", "limit s")
    for what, (wall, cpu), limit in rows:
        table.add_row(what, f"{wall:.3f}", f"{cpu:.3f}", "" if limit is None else f"{limit:g}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
