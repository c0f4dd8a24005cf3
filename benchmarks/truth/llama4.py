"""Llama 4's cells: ``python benchmarks/truth/llama4.py`` (rebuilds llama4.csv and llama4.md; resumable).

Scout and Maverick, whole or cut to their first layers, text alone or with images, run on emulated cards (the real CUDA
software over a driver that launches nothing), and by arithmetic where there is one. Neither is a measurement. It
needs ``vramprobe emulate setup`` and takes about 10 minutes on two cores and 10 GiB. The emulated
records stay under ``--out`` and are not run again; ``--check`` says whether llama4.md is what llama4.csv says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check
from benchmarks.truth.vision import ROOT, Row, counted_bytes, peaks_of, worst_of  # its settings of the process, too
from vramprobe.records import store
from vramprobe.spec import resolve

TABLE = Path(__file__).with_suffix(".csv")
SCOUT, MAVERICK, WITH_IMAGES = {"model": "llama-4-scout"}, {"model": "llama-4-maverick"}, {"model": "llama-4-scout-it"}
FULL, CKPT = {"method": "full"}, {"gradient_checkpointing": True}
LORA = {"method": "lora", "lora_targets": "q_proj,k_proj,v_proj,o_proj"}
#: By card, what each cell has beside a batch and a length.
CELLS: dict[str, list[dict[str, Any]]] = {
    "H100-SXM": [
        {**SCOUT, "num_layers": 2, "batch_size": 2, "seq_len": 512} | FULL,
        {**SCOUT, "num_layers": 2, "batch_size": 2, "seq_len": 512, "attn": "eager"} | FULL,
        {**SCOUT, "num_layers": 8, "batch_size": 2, "seq_len": 512} | LORA,
        {**SCOUT, "num_layers": 8, "batch_size": 2, "seq_len": 512, "method": "qlora", "lora_targets": "q_v"} | CKPT,
        {**SCOUT, "num_layers": 4, "batch_size": 1, "seq_len": 12288} | LORA | CKPT,  # beyond a chunk
        {**MAVERICK, "num_layers": 2, "batch_size": 2, "seq_len": 512}
        | {"method": "lora", "lora_targets": "q_proj,v_proj,gate_proj,up_proj,down_proj"},
        {**WITH_IMAGES, "num_layers": 2, "batch_size": 1, "seq_len": 256, "images": 1, "freeze_vision": True} | FULL,
        {**WITH_IMAGES, "num_layers": 4, "batch_size": 1, "seq_len": 256, "images": 2, "image_size": "336x500"}
        | LORA
        | CKPT,
    ],
    "B300": [
        {**SCOUT, "batch_size": 1, "seq_len": 4096} | LORA | CKPT,
        {**WITH_IMAGES, "batch_size": 1, "seq_len": 1024, "images": 1, "freeze_vision": True} | LORA | CKPT,
    ],
}


def emulate(card: str, out: Path) -> dict[str, Any]:
    """Fingerprint → record, of this card."""
    sweep, records = out / f"{card.lower()}.yaml", out / card.lower()
    out.mkdir(parents=True, exist_ok=True)
    sweep.write_text(yaml.safe_dump({"name": "llama4", "defaults": {"timing_steps": 0}, "cells": CELLS[card]}))
    words = ["run", str(sweep), "--emulate", card, "--out", str(records), "--no-skip"]
    subprocess.run([sys.executable, "-m", "vramprobe", *words], cwd=ROOT, check=False)
    return store.latest_by_fingerprint(store.read(records).records)


def row_of(card: str, words: dict[str, Any], records: dict[str, Any]) -> Row:
    """The peaks of one cell."""
    cell = resolve(device="cuda", timing_steps=0, **words)
    emulated = records[cell.fingerprint].peak
    return {
        "card": card,
        "cell": cell.cell_id,
        "emulated_bytes": emulated.allocated_bytes,
        "emulated_reserved_bytes": emulated.reserved_bytes,
        "predicted_bytes": counted_bytes({"timing_steps": 0} | words, card),
    }


def rows(out: Path) -> list[Row]:
    """A row per cell."""
    made = []
    for card, cells in CELLS.items():
        records = emulate(card, out)
        for words in cells:
            made.append(row_of(card, words, records))
            print(made[-1], flush=True)
    return made


def summary(found: list[Row]) -> str:
    """The page."""
    lines = [
        "# Llama 4: arithmetic against emulated\n",
        f"{len(found)} cells of Scout and Maverick, whole or cut to their first layers. Arithmetic is off by",
        f"{worst_of(found):.3f} % at worst; a dash: there is none, and `predict` records. Emulated: the real CUDA",
        "software over a driver that launches nothing; no GPU was measured.",
        "transformers runs every expert on every token; a library that sends tokens to their experts has another peak.",
        "By `python benchmarks/truth/llama4.py`.\n",
    ]
    head = ["cell", "card", "emulated, GiB", "arithmetic, %"]
    cells = [[row["cell"], row["card"], *peaks_of(row)] for row in found]
    return "\n".join([*lines, *as_markdown(head, "llrr", cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "llama4")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if not words.check:
        TABLE.write_text(as_csv(rows(words.out)))
    write_or_check({TABLE.with_suffix(".md"): summary(read_csv(TABLE))}, "truth/llama4.py", check=words.check)


if __name__ == "__main__":
    main()
