"""Cells with images: ``python benchmarks/truth/vision.py`` (rebuilds vision.csv and vision.md; resumable).

Vision-language models, their language model cut to two or three layers and their vision tower whole, run on an
emulated A100 (the real CUDA software over a driver that launches nothing), once more on fake tensors, and by
``predict``. None of these is a measurement. It needs ``vramprobe emulate setup`` and takes about 10 minutes on two
cores. The emulated records stay under ``--out`` and are not run again; ``--check`` says whether vision.md is what
vision.csv says, for the cells that are here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import yaml  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check  # noqa: E402
from vramprobe import api, catalog  # noqa: E402
from vramprobe.errors import VramprobeError  # noqa: E402
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


def simulated(cell: CellSpec, card: str = CARD) -> dict[str, int | str | None]:
    """The peaks, or why there are none."""
    from vramprobe.simulate.run import simulate

    try:
        peak = simulate(cell, gpu=catalog.find_gpu(card)).record.peak
    except VramprobeError as error:
        return {"simulated_bytes": str(error), "simulated_reserved_bytes": ""}
    return {"simulated_bytes": peak.allocated_bytes, "simulated_reserved_bytes": peak.reserved_bytes}


def rows(out: Path) -> list[Row]:
    """A row per cell."""
    records, made = emulate(out), []
    for words, cell in zip(CELLS, cells(), strict=True):
        record = records[cell.fingerprint]
        peak = record.peak
        predicted = api.predict(gpu=CARD, device="cuda", **DEFAULTS | words)
        made.append(
            {
                "cell": cell.cell_id,
                "image_tokens": cell.image.num_tokens,
                "row_tokens": cell.row_tokens,
                "outcome": record.outcome.kind,
                "emulated_bytes": peak.allocated_bytes if peak else "",
                "emulated_reserved_bytes": peak.reserved_bytes if peak else "",
                **simulated(cell),
                "engine": predicted.engine,
                "predicted_bytes": predicted.peak_allocated_bytes.value,
            }
        )
        print(made[-1], flush=True)
    return made


def percent(row: Row, name: str) -> float | None:
    """How far this one is from the emulated one of its kind; None where not all layers were simulated."""
    if not row[name]:
        return None
    of = "emulated_reserved_bytes" if "reserved" in name else "emulated_bytes"
    return 100 * (int(row[name]) / int(row[of]) - 1)


def worst_of(found: list[Row], name: str) -> float:
    """The largest of :func:`percent`, whatever its sign."""
    return max(abs(percent(row, name) or 0) for row in found)


def peaks_of(row: Row, names: Sequence[str]) -> list[str]:
    """The emulated peak, how far the others are from it, and by which engine ``predict`` came to its own."""
    errors = [percent(row, name) for name in names]
    shown = ["–" if error is None else f"{error:+.3f}" for error in errors]
    engine = {"trace": "simulation", "formula": "arithmetic"}[row["engine"]]
    return [f"{int(row['emulated_bytes']) / 2**30:.3f}", *shown, engine]


def summary(found: list[Row]) -> str:
    """The page."""
    names = ("simulated_bytes", "simulated_reserved_bytes", "predicted_bytes")
    worst = {name: worst_of(found, name) for name in names}
    lines = [
        "# Cells with images: simulated and predicted against emulated\n",
        f"{len(found)} cells on an emulated {CARD}: the language model cut to two or three layers, the vision tower",
        f"whole. Simulated peaks are off by {worst['simulated_bytes']:.3f} % at worst (allocated) and",
        f"{worst['simulated_reserved_bytes']:.3f} % (reserved), `predict` by {worst['predicted_bytes']:.3f} %.",
        "Emulated: the real CUDA software over a driver that launches nothing; no GPU was measured, and the workspaces",
        "of cuDNN's convolutions are left out of all of them.",
        "By `python benchmarks/truth/vision.py`.\n",
    ]
    head = [
        "cell",
        "tokens of an image",
        "of a row",
        "emulated, GiB",
        "simulated, %",
        "reserved, %",
        "predicted, %",
        "by",
    ]
    cells = [
        [
            row["cell"],
            row["image_tokens"],
            row["row_tokens"],
            *peaks_of(row, names),
        ]
        for row in found
    ]
    return "\n".join([*lines, *as_markdown(head, "lrrrrrrl", cells)]) + "\n"


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
