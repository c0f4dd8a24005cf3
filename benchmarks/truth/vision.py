"""Cells with images: ``python benchmarks/truth/vision.py`` (rebuilds vision.csv and vision.md; resumable).

Vision-language models, their language model cut to two or three layers and their vision tower whole, run on an
emulated A100 (the real CUDA software over a driver that launches nothing), and by ``predict``'s arithmetic where there
is one. Neither is a measurement. It needs ``vramprobe emulate setup`` and takes about 10 minutes on two
cores. The emulated records stay under ``--out`` and are not run again; ``--check`` says whether vision.md is what
vision.csv says, for the cells that are here.
"""

from __future__ import annotations

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

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check  # noqa: E402
from vramprobe import api  # noqa: E402
from vramprobe.architecture import UnsupportedArchitecture  # noqa: E402
from vramprobe.records import store  # noqa: E402
from vramprobe.spec import CellSpec, resolve  # noqa: E402

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".csv")
CARD = "A100-80GB-SXM"
DEFAULTS = {"batch_size": 1, "seq_len": 256, "images": 1, "image_size": "640x480", "num_layers": 2, "timing_steps": 0}
FULL, LORA, QLORA = {"method": "full"}, {"method": "lora"}, {"method": "qlora"}
THREE = {"num_layers": 3}  # as many as get features of single blocks
CKPT, FROZEN = {"gradient_checkpointing": True}, {"freeze_vision": True}
#: What each cell has beside DEFAULTS.
CELLS: list[dict[str, Any]] = [
    {"model": model} | options
    for model, several in {
        "qwen2.5-vl-3b": [
            LORA,
            LORA | FROZEN | {"batch_size": 2},
            QLORA | CKPT | {"image_size": "1024x1024"},
            FULL | {"images": 2, "image_size": "336x500"},
        ],
        "qwen3-vl-2b": [
            THREE | LORA,
            THREE | LORA | FROZEN | {"batch_size": 2},
            THREE | QLORA | CKPT | {"image_size": "1024x1024"},
            THREE | FULL | {"images": 2, "image_size": "336x500"},
        ],
        "gemma-3-4b-it": [LORA, QLORA | CKPT, FULL | FROZEN | {"batch_size": 2}],
        "smolvlm2-500m": [LORA, QLORA | CKPT | {"images": 2}, FULL | FROZEN | {"batch_size": 2}],
        "smolvlm-instruct": [LORA | CKPT],
    }.items()
    for options in several
]
Row = dict[str, Any]


def cells() -> list[CellSpec]:
    """Each of CELLS, resolved."""
    return [resolve(device="cuda", **DEFAULTS | cell) for cell in CELLS]


def emulate(out: Path) -> dict[str, Any]:
    """Fingerprint → record, of an emulated card."""
    sweep = out / "vision.yaml"
    out.mkdir(parents=True, exist_ok=True)
    sweep.write_text(yaml.safe_dump({"name": "vision", "defaults": DEFAULTS, "cells": CELLS}))
    words = ["run", str(sweep), "--emulate", CARD, "--out", str(out / "records")]
    subprocess.run([sys.executable, "-m", "vramprobe", *words], cwd=ROOT, check=False)
    return store.latest_by_fingerprint(store.read(out / "records").records)


def counted_bytes(words: Row, card: str = CARD) -> int | str:
    """Allocated memory by arithmetic; empty where there is none."""
    try:
        return api.predict(gpu=card, device="cuda", engine="formula", **words).peak_allocated_bytes.value
    except UnsupportedArchitecture:
        return ""


def rows(out: Path) -> list[Row]:
    """A row per cell."""
    records, made = emulate(out), []
    for words, cell in zip(CELLS, cells(), strict=True):
        record = records[cell.fingerprint]
        peak = record.peak
        made.append(
            {
                "cell": cell.cell_id,
                "image_tokens": cell.image.num_tokens,
                "row_tokens": cell.row_tokens,
                "outcome": record.outcome.kind,
                "emulated_bytes": peak.allocated_bytes if peak else "",
                "emulated_reserved_bytes": peak.reserved_bytes if peak else "",
                "predicted_bytes": counted_bytes(DEFAULTS | words),
            }
        )
        print(made[-1], flush=True)
    return made


def percent(row: Row) -> float | None:
    """How far arithmetic is from the emulated peak; None where there is none."""
    return 100 * (int(row["predicted_bytes"]) / int(row["emulated_bytes"]) - 1) if row["predicted_bytes"] else None


def worst_of(found: list[Row]) -> float:
    """The largest of :func:`percent`, whatever its sign."""
    return max(abs(percent(row) or 0) for row in found)


def peaks_of(row: Row) -> list[str]:
    """The emulated peak, and how far arithmetic is from it."""
    error = percent(row)
    return [f"{int(row['emulated_bytes']) / 2**30:.3f}", "–" if error is None else f"{error:+.3f}"]


def summary(found: list[Row]) -> str:
    """The page."""
    lines = [
        "# Cells with images: arithmetic against emulated\n",
        f"{len(found)} cells on an emulated {CARD}: the language model cut to two or three layers, the vision tower",
        f"whole. Arithmetic is off by {worst_of(found):.3f} % at worst; a dash: there is none, and `predict` records.",
        "Emulated: the real CUDA software over a driver that launches nothing; no GPU was measured, and the workspaces",
        "of cuDNN's convolutions are left out of all of them.",
        "By `python benchmarks/truth/vision.py`.\n",
    ]
    head = ["cell", "tokens of an image", "of a row", "emulated, GiB", "arithmetic, %"]
    cells = [
        [
            row["cell"],
            row["image_tokens"],
            row["row_tokens"],
            *peaks_of(row),
        ]
        for row in found
    ]
    return "\n".join([*lines, *as_markdown(head, "lrrrr", cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "vision")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if not words.check:
        TABLE.write_text(as_csv(rows(words.out)))
    found = read_csv(TABLE)
    if [row["cell"] for row in found] != [cell.cell_id for cell in cells()]:
        sys.exit("vision.csv has other cells than vision.py; run python benchmarks/truth/vision.py")
    write_or_check({TABLE.with_suffix(".md"): summary(found)}, "truth/vision.py", check=words.check)


if __name__ == "__main__":
    main()
