"""Every architecture of the catalog once: ``python benchmarks/truth/catalog.py`` (rebuilds catalog.csv and catalog.md).

Each is cut to its first layers, as many as have one layer of each kind, and trained by LoRA on an emulated H100 (the
real CUDA software over a driver that launches nothing): not a measurement. The emulated records stay under ``--out``
and are not run again; ``--check`` says whether catalog.md is what catalog.csv says and whether every architecture has a
row.
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import yaml  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check  # noqa: E402
from vramprobe import catalog  # noqa: E402
from vramprobe.records import store  # noqa: E402
from vramprobe.records.table import describe_outcome  # noqa: E402
from vramprobe.resolve import resolve  # noqa: E402
from vramprobe.spec import CellSpec  # noqa: E402

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".csv")
CARD = "H100-SXM"
CELL = {"method": "lora", "lora_targets": "q_v", "batch_size": 1, "seq_len": 256, "timing_steps": 0}
Row = dict[str, Any]


def depth_of_each_kind(config: dict[str, Any]) -> int:
    """The fewest layers, from the first on and at least two, among which is one of each kind."""
    kinds = list(config.get("layer_types") or config.get("hybrid_override_pattern") or [])
    if not kinds and (period := config.get("full_attention_interval")):
        kinds = [index % period == period - 1 for index in range(period)]
    depth = max([2, *(kinds.index(kind) + 1 for kind in set(kinds)), (config.get("first_k_dense_replace") or 0) + 1])
    return min(depth, catalog.depth_of(config) or depth)


def cells() -> dict[str, CellSpec]:
    """By architecture."""
    return {
        entry.name: resolve(model=entry.name, device="cuda", num_layers=depth_of_each_kind(entry.config), **CELL)
        for entry in catalog.list_models()
    }


def emulate(asked: dict[str, CellSpec], out: Path) -> dict[str, Any]:
    """Fingerprint → record, of an emulated card."""
    sweep = out / "catalog.yaml"
    out.mkdir(parents=True, exist_ok=True)
    blocks = [{"model": name, "num_layers": cell.num_layers} for name, cell in asked.items()]
    sweep.write_text(yaml.safe_dump({"name": "catalog", "defaults": CELL, "cells": blocks}))
    words = ["run", str(sweep), "--emulate", CARD, "--out", str(out / "records")]
    subprocess.run([sys.executable, "-m", "vramprobe", *words], cwd=ROOT, check=False)
    return store.latest_by_fingerprint(store.read(out / "records").records)


def rows(out: Path) -> list[Row]:
    """A row per architecture, in the catalog's order."""
    asked = cells()
    records = emulate(asked, out)
    made = []
    for entry in catalog.list_models():
        cell = asked[entry.name]
        record = records[cell.fingerprint]
        made.append(
            {
                "model": entry.name,
                "model_type": entry.model_type,
                "num_params": entry.n_params,
                "num_layers": cell.num_layers,
                "outcome": record.outcome.kind,
                "detail": describe_outcome(record.outcome),
                "emulated_bytes": record.peak.allocated_bytes if record.peak else "",
            }
        )
    return made


def summary(found: list[Row]) -> str:
    """The page."""
    ok = [row for row in found if row["outcome"] == "ok"]
    head = ["architecture", "family", "parameters", "layers run", "allocated, GiB"]
    cells = []
    for row in found:
        emulated = f"{int(row['emulated_bytes']) / 2**30:.3f}" if row["emulated_bytes"] else row["outcome"]
        size = f"{int(row['num_params']) / 1e9:.3g}B"
        cells.append([row["model"], row["model_type"], size, row["num_layers"], emulated])
    return filled(
        Path(__file__).with_suffix(".md"),
        number=len(found),
        batch=f"{CELL['batch_size']} × {CELL['seq_len']}",
        ran=len(ok),
        card=CARD,
        table=as_markdown(head, "llrrr", cells),
    )


def read_rows() -> list[Row]:
    """Return the rows of catalog.csv."""
    return read_csv(TABLE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "catalog")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if not words.check:
        TABLE.write_text(as_csv(rows(words.out)))
    found = read_rows()
    if [row["model"] for row in found] != [entry.name for entry in catalog.list_models()]:
        sys.exit("catalog.csv has other architectures than the catalog; run python benchmarks/truth/catalog.py")
    write_or_check({TABLE.with_suffix(".md"): summary(found)}, "truth/catalog.py", check=words.check)


if __name__ == "__main__":
    main()
