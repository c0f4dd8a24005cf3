"""Simulated against measured, on the CPU: ``python benchmarks/truth/simulate_cpu.py`` (rebuilds simulate_cpu.csv).

Real models of the catalog, cut to two layers and a vocabulary of 8192 so that a cell takes seconds; each is run
for real under the CPU allocator's events and once more on fake tensors, and every phase is compared. ``--only
WORD`` keeps the cells whose name holds it; nothing is written then. ``--resume`` keeps the rows that the table has.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv  # noqa: E402
from vramprobe.measure.worker import run_cell  # noqa: E402
from vramprobe.simulate.run import simulate  # noqa: E402
from vramprobe.spec import CellSpec, checked, resolve  # noqa: E402

TABLE = Path(__file__).with_suffix(".csv")
NUM_LAYERS, VOCAB_SIZE = 2, 8192
MODELS = ("smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "pythia-160m", "gpt2", "opt-125m")
CKPT, LORA, QLORA = {"gradient_checkpointing": True}, {"method": "lora"}, {"method": "qlora"}
FP32, MIXED, PLAIN = {"dtype": "fp32"}, {"dtype": "fp32", "autocast": "bf16"}, {"autocast": "none"}
OPTIONS: list[dict[str, Any]] = [
    {}, FP32, MIXED, CKPT, FP32 | CKPT, MIXED | CKPT, FP32 | {"attn": "eager"}, CKPT | {"attn": "eager"},
    {"batch_size": 1, "seq_len": 96, "grad_accum": 2},
    *[FP32 | {"optim": optim, "batch_size": 1, "seq_len": 8} for optim in
      ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_bnb_8bit", "adamw_bnb_32bit", "lion_32bit")],
    {"optim": "lion_8bit"},
    LORA, LORA | CKPT, LORA | FP32 | PLAIN, LORA | PLAIN | {"lora_dtype": "bf16"}, LORA | {"lora_dropout": 0.05},
    LORA | {"dora": True}, LORA | {"attn": "eager", "lora_targets": "q_v"}, LORA | FP32 | CKPT | {"grad_accum": 2},
    QLORA, QLORA | CKPT, QLORA | {"kbit_prep": "trl", "lora_dtype": "bf16"}, QLORA | FP32 | {"quant": "nf4-single"},
    QLORA | FP32 | PLAIN | {"quant": "fp4"}, QLORA | {"quant": "int8"}, QLORA | CKPT | {"quant": "int8"},
    QLORA | PLAIN | {"kbit_prep": "none"}, QLORA | {"dora": True},
]  # fmt: skip


def cells() -> Iterator[CellSpec]:
    """The grid, model by model."""
    for model in MODELS:
        for options in OPTIONS:
            words = {"method": "full", "device": "cpu", "batch_size": 2, "seq_len": 64, "timing_steps": 0} | options
            spec = resolve(model=model, num_layers=NUM_LAYERS, **words)
            architecture = spec.architecture | {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
            architecture |= {"pad_token_id": 0} if "pad_token_id" in architecture else {}
            yield checked(CellSpec, spec.model_dump() | {"architecture": architecture})


def compare(spec: CellSpec) -> dict[str, Any]:
    """One row: the measured and simulated bytes of each phase's peak in the steady step, and the largest error."""
    gc.collect()
    measured = run_cell(spec, isolation="spawn")
    row: dict[str, Any] = {
        "fingerprint": spec.fingerprint,
        "cell": spec.cell_id,
        "dropout": spec.lora_dropout,
        "measured": measured.outcome.kind,
    }
    if measured.outcome.kind != "ok":
        return row | {"why": str(measured.outcome)[:300]}
    try:
        simulated = simulate(spec).record
    except Exception as error:
        return row | {"why": f"{type(error).__name__}: {error}"[:300]}
    pairs = list(zip(measured.phases, simulated.phases, strict=True))
    if any((one.name, one.step, one.micro_step) != (two.name, two.step, two.micro_step) for one, two in pairs):
        return row | {"why": "phases differ"}
    for real, fake in pairs:
        if real.step == 2:
            row[f"{real.name}_measured_bytes"] = real.allocated_peak_bytes
            row[f"{real.name}_simulated_bytes"] = fake.allocated_peak_bytes
    errors = {real.name: fake.allocated_peak_bytes / real.allocated_peak_bytes - 1 for real, fake in pairs}
    worst = max(errors, key=lambda name: abs(errors[name]))
    peak_error = simulated.peak.allocated_bytes / measured.peak.allocated_bytes - 1
    seconds = round(simulated.timing.total_seconds, 2)
    return row | {
        "simulated_seconds": seconds,
        "peak_error_percent": round(100 * peak_error, 4),
        "worst_phase": worst,
        "worst_error_percent": round(100 * errors[worst], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true")
    words = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if words.resume:
        rows = [{key: value for key, value in row.items() if value != ""} for row in read_csv(TABLE)]
    known = {row["fingerprint"] for row in rows}
    for spec in cells():
        if words.only not in f"{spec.cell_id} {spec.optim}" or spec.fingerprint in known:
            continue
        row = compare(spec)
        rows.append(row)
        print(
            f"{row['cell']:75} {row.get('peak_error_percent', '-'):>9} {row.get('worst_error_percent', '-'):>9}",
            row.get("worst_phase", ""),
            row.get("simulated_seconds", ""),
            row.get("why", ""),
            flush=True,
        )
        if not words.only:
            write(rows)
    text = summary(rows)
    if not words.only:
        TABLE.with_suffix(".md").write_text(text)
    print(text, file=sys.stderr)


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each model and for all: the error of the run's peak, and of the worst of each cell's phases."""
    compared = [row for row in rows if row.get("worst_error_percent") not in (None, "")]
    head = ["model", "cells", "peak of the run: mean, worst, %", "worst phase of each: mean, worst, %"]
    shown = []
    for name in [*MODELS, "all"]:
        group = [row for row in compared if name in ("all", row["cell"].split("@")[0])]
        if group:
            both = [[abs(float(row[f"{what}_error_percent"])) for row in group] for what in ("peak", "worst")]
            cells = [f"{statistics.mean(errors):.4f}, {max(errors):.2f}" for errors in both]
            shown.append([name, len(group), *cells])
    lines = ["# Simulated against measured, on the CPU", "", *as_markdown(head, "lrrr", shown)]
    missing = len(rows) - len(compared)
    return "\n".join([*lines, f"\n{missing} cells could not be compared." if missing else ""]).rstrip() + "\n"


def write(rows: list[dict[str, Any]]) -> None:
    """The table so far, whole."""
    TABLE.write_text(as_csv(rows))


if __name__ == "__main__":
    main()
