"""Cells of every family, emulated: ``python benchmarks/truth/emulated.py`` adds to emulated.csv what it lacks.

Every family of the catalog, most cut to two layers, with each method, optimizer and option, runs on an emulated card
(the real CUDA software over a driver that launches nothing); nothing is measured. tests/oracles hold predictions and
recipes against these rows. Each card is one ``vramprobe run --emulate``, whose records stay under ``out/``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import yaml  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, read_csv  # noqa: E402
from vramprobe.errors import VramprobeError  # noqa: E402
from vramprobe.records import store  # noqa: E402
from vramprobe.records.record import RunRecord  # noqa: E402
from vramprobe.spec import CellSpec, resolve  # noqa: E402

TABLE = Path(__file__).with_suffix(".csv")
RECORDS = Path(__file__).parents[2] / "out" / "emulated"
Row = dict[str, Any]
Words = dict[str, Any]

#: One model of each family, and the depth it is cut to.
FAMILIES = {
    "llama-3.2-1b": 2,
    "qwen2.5-0.5b": 2,
    "qwen3-0.6b": 2,
    "mistral-7b-v0.3": 2,
    "gemma-2-2b": 2,
    "gemma-3-1b": 2,
    "phi-3-mini": 2,
    "olmo-2-7b": 2,
    "gpt2": 2,
    "opt-125m": 2,
    "pythia-160m": 2,
    "bloomz-560m": 2,
    "falcon-7b": 2,
    "t5-small": 2,
    "mixtral-8x7b": 2,
    "qwen3-30b-a3b": 2,
    "deepseek-v2-lite": 2,
    "gpt-oss-20b": 2,
    "llama-4-scout": 2,
}
FULL, LORA, QLORA = {"method": "full"}, {"method": "lora"}, {"method": "qlora"}
CKPT, INT8, DORA = {"gradient_checkpointing": True}, {"quant": "int8"}, {"dora": True}
EAGER, PADDED, FUSED = {"attn": "eager"}, {"padding": True}, {"fused_linear_cross_entropy": True}
MIXED, COMPILED = {"recipe": "mixed"}, {"torch_compile": True}
#: What each family runs on the first card, the most different first: a run that is cut short has something of all.
EACH: list[Words] = [
    FULL,
    LORA,
    QLORA | CKPT,
    QLORA | INT8,
    LORA | DORA,
    FULL | CKPT,
    FULL | EAGER,
    LORA | PADDED,
    FULL | FUSED,
    QLORA,
]
OPTIMS = (
    "adamw_torch",
    "adamw_bnb_8bit",
    "adamw_bnb_32bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "lion_32bit",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
)
#: What one model runs beside it.
ONE: list[Words] = [
    *[FULL | {"optim": optim} for optim in OPTIMS], FULL | MIXED, FULL | MIXED | CKPT, FULL | {"recipe": "fp32"},
    FULL | {"grad_accum": 2}, FULL | {"seq_len": 2048}, FULL | COMPILED, LORA | COMPILED, LORA | CKPT,
    LORA | {"lora_targets": "q_v"}, LORA | {"lora_dropout": 0.05}, LORA | {"lora_dtype": "bf16"}, LORA | EAGER,
    LORA | {"seq_len": 96, "batch_size": 1}, QLORA | DORA, QLORA | {"quant": "fp4"}, QLORA | {"quant": "nf4-single"},
    QLORA | {"kbit_prep": "trl"}, QLORA | {"kbit_prep": "none"}, QLORA | {"optim": "paged_adamw_8bit"},
    QLORA | PADDED, QLORA | FUSED, QLORA | EAGER, QLORA | INT8 | CKPT, FULL | {"optim": "sgd", "grad_accum": 2},
]  # fmt: skip
#: Models at their own depth.
WHOLE: list[Words] = [
    {"model": "smollm2-135m"} | FULL,
    {"model": "smollm2-135m"} | LORA,
    {"model": "smollm2-360m"} | QLORA | CKPT,
    {"model": "pythia-70m"} | FULL,
    {"model": "llama-3.2-1b"} | LORA | CKPT,
    {"model": "qwen2.5-1.5b"} | QLORA | CKPT,
    {"model": "llama-3.1-8b", "batch_size": 1, "seq_len": 4096} | QLORA | CKPT,
]
#: Of the other cards: an older and a newer architecture, and one without bf16 or flash attention.
OTHERS: list[Words] = [
    {"model": model} | options
    for options in (FULL, LORA | CKPT, QLORA | CKPT, FULL | EAGER, LORA | PADDED)
    for model in ("llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "pythia-160m")
]
FP16 = {"dtype": "fp16", "autocast": "fp16"}
T4: list[Words] = [
    {"model": model} | options
    for options in (LORA | FP16, QLORA | CKPT | FP16, FULL | {"dtype": "fp32"})
    for model in ("llama-3.2-1b", "qwen3-0.6b", "pythia-160m")
]
CARDS = ("H100-SXM", "RTX-4090", "A100-80GB-SXM", "T4")


def words_of(card: str) -> Iterator[Words]:
    """What is asked for on ``card``, as a sweep's blocks, in the order in which it runs."""
    usual = {"batch_size": 2, "seq_len": 512, "timing_steps": 0}
    if card != CARDS[0]:
        for one in T4 if card == "T4" else OTHERS:
            yield usual | {"num_layers": FAMILIES[one["model"]]} | one
        return
    for options in EACH[:4]:
        for model, num_layers in FAMILIES.items():
            yield usual | {"model": model, "num_layers": num_layers} | options
    for options in ONE:
        yield usual | {"model": "llama-3.2-1b", "num_layers": 2} | options
    for one in WHOLE:
        yield usual | one
    for options in EACH[4:]:
        for model, num_layers in FAMILIES.items():
            yield usual | {"model": model, "num_layers": num_layers} | options


def possible(card: str) -> Iterator[Words]:
    """Those that a cell can be made of: a family without a fused loss, say, has none."""
    for words in words_of(card):
        try:
            resolve(device="cuda", **words)
        except VramprobeError as error:
            print(f"left out: {words}: {error}"[:200], file=sys.stderr)
        else:
            yield words


def run_sweep(card: str) -> None:
    """Run what ``card`` has no record of yet, in one fork server."""
    folder = RECORDS / card.lower()
    folder.mkdir(parents=True, exist_ok=True)
    sweep = folder.parent / f"{card.lower()}.yaml"
    sweep.write_text(yaml.safe_dump({"name": f"emulated-{card.lower()}", "cells": list(possible(card))}))
    words = ["run", str(sweep), "--emulate", card, "--out", str(folder), "--no-skip"]
    subprocess.run([sys.executable, "-m", "vramprobe", *words], check=False)  # a cell that failed has its record


def records_of(card: str) -> list[RunRecord]:
    """The latest record of each cell, in the order of the sweep."""
    folder = RECORDS / card.lower()
    if not folder.exists():
        return []
    found = store.latest_by_fingerprint(store.read(folder, allow_empty=True).records)
    order = [resolve(device="cuda", **words).fingerprint for words in possible(card)]
    return [found[one] for one in dict.fromkeys(order) if one in found]


def row_of(card: str, emulated: RunRecord) -> Row:
    """One row: allocated and reserved bytes, or why the cell did not run."""
    spec: CellSpec = emulated.spec
    row: Row = {
        "fingerprint": spec.fingerprint,
        "gpu": card,
        "cell": spec.cell_id,
        "family": spec.model_type,
        "emulated": emulated.outcome.kind,
    }
    if emulated.outcome.kind != "ok" or emulated.peak is None:
        return row | {"why": why_not(emulated.outcome)[:300]}
    peak = emulated.peak
    return row | {
        "phase": peak.phase,
        "step": peak.step or "",
        "emulated_allocated_bytes": peak.allocated_bytes,
        "emulated_reserved_bytes": peak.reserved_bytes,
    }


def why_not(outcome: Any) -> str:
    """What was said, and the library's line that raised it: a refusal that a card would meet, too."""
    raised = re.findall(r'site-packages/([^"]+)", line (\d+)', getattr(outcome, "traceback", None) or "")
    where = f" (raised by {raised[-1][0]}:{raised[-1][1]})" if raised else ""
    return getattr(outcome, "message", outcome.kind).partition("\n")[0] + where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", action="append", choices=CARDS, help="these alone")
    words = parser.parse_args()
    rows = {(row["gpu"], row["fingerprint"]): row for row in read_csv(TABLE)}
    for card in words.card or CARDS:
        run_sweep(card)
        for record in records_of(card):
            rows.setdefault((card, record.spec.fingerprint), row_of(card, record))
    TABLE.write_text(as_csv(list(rows.values())))


if __name__ == "__main__":
    main()
