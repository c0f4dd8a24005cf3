"""Simulated against emulated: ``python benchmarks/truth/emulated.py`` rebuilds emulated.csv and .md; resumable.

Every family of the catalog, most cut to two layers, with each method, optimizer and option, runs on an emulated card
(the real CUDA software over a driver that launches nothing) and once more on fake tensors; the peaks are compared.
Neither is a measurement on a GPU. Each card is one ``vramprobe run --emulate``, whose records stay under ``out/``;
``--compare`` runs none and compares those there are; ``--anew`` simulates also what the table has; ``--only WORD``
writes nothing; ``--check`` says whether emulated.md is what emulated.csv says.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import yaml  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv  # noqa: E402
from vramprobe import catalog  # noqa: E402
from vramprobe.errors import VramprobeError  # noqa: E402
from vramprobe.records import store  # noqa: E402
from vramprobe.records.record import RunRecord  # noqa: E402
from vramprobe.spec import CellSpec, resolve  # noqa: E402
from vramprobe.units import published  # noqa: E402

TABLE = Path(__file__).with_suffix(".csv")
NUM_PROCESSES = 2
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


def compare(card: str, emulated: RunRecord) -> Row:
    """One row: allocated and reserved bytes, emulated and simulated, and the errors in percent."""
    from vramprobe.predict.predict import predict
    from vramprobe.simulate.run import simulate

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
    row |= {
        "phase": peak.phase,
        "step": peak.step or "",
        "emulated_allocated_bytes": peak.allocated_bytes,
        "emulated_reserved_bytes": peak.reserved_bytes,
    }
    try:
        row["arithmetic_bytes"] = predict(spec).peak_allocated_bytes.value
        row["arithmetic_error_percent"] = percent(row["arithmetic_bytes"], peak.allocated_bytes)
    except VramprobeError:
        pass  # a family without arithmetic
    gc.collect()
    try:
        simulated = simulate(spec, gpu=catalog.find_gpu(card)).record
    except VramprobeError as error:
        return row | {"why": f"{type(error).__name__}: {error}"[:300]}
    assert simulated.peak is not None
    row |= {
        "simulated_allocated_bytes": simulated.peak.allocated_bytes,
        "simulated_reserved_bytes": simulated.peak.reserved_bytes,
        "allocated_error_percent": percent(simulated.peak.allocated_bytes, peak.allocated_bytes),
        "reserved_error_percent": percent(simulated.peak.reserved_bytes, peak.reserved_bytes),
    }
    errors = {
        f"{one.name} of step {one.step}" if one.step else one.name: percent(
            two.allocated_peak_bytes, one.allocated_peak_bytes
        )
        for one, two in zip(emulated.phases, simulated.phases, strict=False)
        if one.allocated_peak_bytes and two.allocated_peak_bytes and (one.name, one.step) == (two.name, two.step)
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    return row | {"worst_phase": worst, "worst_phase_error_percent": errors[worst]}


def why_not(outcome: Any) -> str:
    """What was said, and the library's line that raised it: a refusal that a card would meet, too."""
    raised = re.findall(r'site-packages/([^"]+)", line (\d+)', getattr(outcome, "traceback", None) or "")
    where = f" (raised by {raised[-1][0]}:{raised[-1][1]})" if raised else ""
    return getattr(outcome, "message", outcome.kind).partition("\n")[0] + where


def percent(value: int | None, reference: int | None) -> float | str:
    """How far ``value`` is from ``reference``; empty where one of them is not known."""
    if value is None or not reference:
        return ""
    return published(round(100 * (value / reference - 1), 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", action="append", choices=CARDS, help="these alone")
    parser.add_argument("--only", default="")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    rows = {(row["gpu"], row["fingerprint"]): row for row in read_rows()}
    if words.check:
        stale = TABLE.with_suffix(".md").read_text() != summary(list(rows.values()))
        raise SystemExit(f"{TABLE.stem}.md is not what {TABLE.name} says" if stale else 0)
    wanted: list[tuple[str, RunRecord]] = []
    for card in words.card or CARDS:
        if not words.compare:
            run_sweep(card)
        wanted += [
            (card, record)
            for record in records_of(card)
            if words.only in f"{record.cell_id} {record.spec.optim}"
            and (words.anew or (card, record.spec.fingerprint) not in rows)
        ]
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        for row in pool.map(compare, *zip(*wanted, strict=True)) if wanted else ():
            print(
                f"{row['gpu']:14} {row['cell']:70} {row.get('allocated_error_percent', '-'):>9} "
                f"{row.get('reserved_error_percent', '-'):>9} {row.get('worst_phase_error_percent', '-'):>9} "
                f"{row.get('worst_phase', '')} {row.get('why', '')}",
                flush=True,
            )
            rows[row["gpu"], row["fingerprint"]] = {name: str(value) for name, value in row.items()}
            if not words.only:
                write(list(rows.values()))


_IN_LOAD = "the norms' weights stand from the start of the load; on the card they are moved there in its end"
_MAPS = "bitsandbytes' two maps of 8 bits, 1 KiB each, stand from the start; on the card those in use do from step 1 on"
_GROUPED = "what the experts' grouped product takes while it runs, 66 KiB and its arguments (CUTLASS), is left out"
#: Why a cell's simulation is not the emulated run to the byte: a part of its name, and the cause that a comparison of
#: the two histories showed. First match wins.
CAUSES: tuple[tuple[str, str], ...] = (
    ("gemma-", "the embedding's scale, one number that is copied to the card while it loads, is left out"),
    ("_rmsprop_", "the steps' counters, 4 B a parameter, are taken to be on the card"),
    ("_lion_8bit_", _MAPS),
    ("_paged_adamw_8bit_", _MAPS),
    ("llama-3.2-1b@2layers_qlora-nf4-none-", _IN_LOAD),
    ("smollm2-360m_qlora-nf4-peft-", _IN_LOAD),
    ("mixtral-8x7b@2layers_lora-", _GROUPED),
    ("falcon-7b@2layers_full_bf16_adamw-fused_b2s512_ckpt", "the peak is the third step's, taken to be the second's"),
)


def cause_of(row: Row) -> str:
    """The named cause of a row that differs; empty for one that is the same to the byte."""
    if all(row[f"simulated_{tier}_bytes"] == row[f"emulated_{tier}_bytes"] for tier in ("allocated", "reserved")):
        return ""
    return next((why for part, why in CAUSES if part in row["cell"]), "unexplained")


def summary(rows: list[Row]) -> str:
    """The errors by card and over all, then each cell that is not the same to the byte, and why."""
    done = [row for row in rows if row.get("simulated_allocated_bytes")]
    lines = [
        "# Simulated against emulated\n",
        "Neither was measured on a GPU: the emulated run is the real CUDA software over a driver that launches",
        "nothing, the simulated one the workload on fake tensors. Errors of the run's peak, in percent.\n",
    ]
    head = [
        "card",
        "cells",
        *(f"{what}: mean, worst" for what in ("allocated", "reserved", "arithmetic without a fit")),
    ]
    by_card = []
    for card in (*CARDS, "all"):
        group = [row for row in done if card in ("all", row["gpu"])]
        if group:
            names = ("allocated_error_percent", "reserved_error_percent", "arithmetic_error_percent")
            by_card.append([card, len(group), *(_mean_and_worst(group, name) for name in names)])
    lines += as_markdown(head, "lrrrr", by_card)
    same = [row for row in done if not cause_of(row)]
    lines.append(f"\nThe same to the byte, allocated and reserved: {len(same)} of {len(done)} cells.")
    if rest := [row for row in done if cause_of(row)]:
        cells = [
            [row["cell"], row["gpu"], _difference(row, "allocated"), _difference(row, "reserved"), cause_of(row)]
            for row in rest
        ]
        lines += ["", *as_markdown(["not the same", "card", "allocated", "reserved", "why"], "llrrl", cells)]
    if missing := [row for row in rows if not row.get("simulated_allocated_bytes")]:
        cells = [[row["cell"], row["gpu"], row["emulated"], row["why"].partition("\n")[0]] for row in missing]
        lines += ["", *as_markdown(["not compared", "card", "emulated", "why"], "llll", cells)]
    return "\n".join(lines) + "\n"


def _difference(row: Row, tier: str) -> str:
    """Simulated less emulated, in bytes and percent."""
    num_bytes = int(row[f"simulated_{tier}_bytes"]) - int(row[f"emulated_{tier}_bytes"])
    return f"{num_bytes:+,} B, {float(row[f'{tier}_error_percent']):+.4f} %" if num_bytes else "0"


def _mean_and_worst(rows: list[Row], name: str) -> str:
    errors = [abs(float(row[name])) for row in rows if row.get(name)]
    return f"{statistics.mean(errors):.4f}, {max(errors):.3f}" if errors else "-"


def read_rows() -> list[Row]:
    """The table as it is."""
    return read_csv(TABLE)


def write(rows: list[Row]) -> None:
    """The table so far, whole, and its summary."""
    TABLE.write_text(as_csv(rows))
    TABLE.with_suffix(".md").write_text(summary(read_rows()))


if __name__ == "__main__":
    main()
