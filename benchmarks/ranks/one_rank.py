"""One rank of many, or a single card, on an emulated card: each cell run once and kept; for fewest_cards.py and others.

In: a card, a cell's words. Out: its record, from a journal where it has been run before; its row in a table. A row is
all that the tables are made of, so that they can be made anew without a run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import read_csv
from vramprobe.catalog import find_gpu
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.records import store
from vramprobe.records.record import Composition, RunRecord
from vramprobe.spec import CellSpec, resolve

FOLDER = Path(__file__).resolve().parent
#: Whoever is short of memory: one sequence, layers computed again.
COMMON: dict[str, Any] = {"batch_size": 1, "seq_len": 2048, "gradient_checkpointing": True, "device": "cuda"}
RECIPES: dict[str, dict[str, Any]] = {
    "full, mixed": {"method": "full", "recipe": "mixed"},
    "full, all bf16": {"method": "full", "recipe": "all-bf16"},
    "LoRA": {"method": "lora"},
    "QLoRA": {"method": "qlora", "kbit_prep": "none"},
}
PARTS = tuple(name for name in Composition.model_fields if name != "total_bytes")
NUMBERS = (
    "num_gpus",
    "predicted_bytes",
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "load_bytes",
    "host_bytes",
    "link_bytes",
    "retries",
    "seconds",
    *PARTS,
)
FIELDS = (
    "card",
    "model",
    "recipe",
    "sharding",
    "num_gpus",
    "said",
    "predicted_bytes",
    "outcome",
    "phase",
    *NUMBERS[2:],
    "cell",
)
Row = dict[str, Any]
_RESULTS = ("ok", "oom", "oom_host", "invalid")


def cell_of(model: str, recipe: str, sharding: str | None, num_gpus: int, **more: Any) -> CellSpec:
    """Rank 0 of so many, or the single card where there is one."""
    ranks = {"num_gpus": num_gpus, "sharding": sharding, "only_rank": 0} if num_gpus > 1 else {}
    return resolve(model=model, **COMMON, **RECIPES[recipe], **ranks, **more)


def alone(spec: CellSpec) -> CellSpec:
    """The same without ranks, which is what arithmetic is asked about."""
    return spec.model_copy(update={"num_gpus": 1, "sharding": None, "only_rank": None})


def predicted(spec: CellSpec, card: str) -> Prediction:
    """By arithmetic alone."""
    gpu = find_gpu(card)
    return predict(spec, gpu=gpu)


def run(specs: Iterable[CellSpec], card: str, kept: Path, *, runs: bool = True) -> list[RunRecord]:
    """Their records from ``kept``, a folder; those that have none there are run first, as one sweep, unless told."""
    wanted, folder = {spec.fingerprint: spec for spec in specs}, kept / card
    missing = [spec for key, spec in wanted.items() if key not in _ran(folder)]
    if missing and runs:
        folder.mkdir(parents=True, exist_ok=True)
        sweep = {"name": "one-rank", "defaults": {"device": "cuda"}, "cells": [_words(spec) for spec in missing]}
        (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
        words = ["run", str(folder / "sweep.yaml"), "--emulate", card, "--out", str(folder), "--no-skip"]
        subprocess.run([sys.executable, "-m", "vramprobe", *words])
    found = _ran(folder)
    return [found[key] for key in wanted if key in found]


def _ran(folder: Path) -> dict[str, RunRecord]:
    if not list(folder.glob("*.jsonl")):
        return {}
    records = store.read(folder).records
    return {key: one for key, one in store.latest_by_fingerprint(records).items() if one.outcome.kind in _RESULTS}


def _words(spec: CellSpec) -> dict[str, Any]:
    names = ("model", "method", "batch_size", "seq_len", "gradient_checkpointing", "dtype", "autocast", "only_rank")
    names += ("num_gpus", "sharding") if spec.num_gpus > 1 else ()
    names += ("lora_r",) if spec.method != "full" else ()
    names += ("kbit_prep",) if spec.method == "qlora" else ()
    return {name: value for name in names if (value := getattr(spec, name)) is not None}


def row_of(record: RunRecord, card: str, recipe: str) -> Row:
    """What tables have of it; what is predicted stands in columns of its own."""
    spec = record.spec
    said = predicted(spec, card)
    row: Row = dict.fromkeys(FIELDS, "")
    row |= {
        "card": card,
        "cell": record.cell_id,
        "model": spec.model,
        "recipe": recipe,
        "sharding": spec.sharding or "",
        "num_gpus": spec.num_gpus,
        "outcome": record.outcome.kind,
        "phase": getattr(record.outcome, "phase", ""),
        "seconds": round(record.timing.total_seconds) if record.timing else "",
    } | said_of(said, card)
    if record.peak is None or record.outcome.kind == "oom":
        return row
    last = max(phase.step or 0 for phase in record.phases)
    steady = [phase for phase in record.phases if phase.step == last]
    row |= {
        "phase": record.peak.phase,
        "requested_bytes": max(phase.requested_peak_bytes or 0 for phase in steady),
        "allocated_bytes": record.peak.allocated_bytes,
        "reserved_bytes": record.peak.reserved_bytes,
        "load_bytes": record.peak.load_allocated_bytes,
        "retries": record.num_alloc_retries,
    }
    if record.ranks:
        row["host_bytes"] = record.ranks[0].host_tensors_bytes
        row["link_bytes"] = sum(one.link_bytes for one in record.ranks[0].traffic or ())
    if record.ledger is not None and record.ledger.at_peak is not None:
        row |= record.ledger.at_peak.parts()
    return row


def anew(row: Row, **more: Any) -> Row:
    """A row with what is predicted now in place of what was; ``more`` is what its recipe does not say."""
    spec = cell_of(row["model"], row["recipe"], row["sharding"] or None, row["num_gpus"], **more)
    return row | said_of(predicted(spec, row["card"]), row["card"])


def said_of(prediction: Prediction, card: str) -> Row:
    """What arithmetic says."""
    return {
        "said": verdict(prediction, find_gpu(card)).verdict,
        "predicted_bytes": prediction.peak_allocated_bytes.value,
    }


def read(path: Path) -> list[Row]:
    """A table as it was written; what is not known is an empty text."""
    return [row | {name: int(row[name]) for name in NUMBERS if row[name]} for row in read_csv(path)]
