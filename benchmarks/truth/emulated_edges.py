"""Verdicts at a card's end: ``python benchmarks/truth/emulated_edges.py`` (rebuilds emulated_edges.csv and its .md).

Cells that are predicted to need between 95 and 105 % of a card, run on the emulated card: does each fit? ``--write``
chooses the cells by arithmetic, lengths in multiples of 64, into data/sweeps/emulated-edges-*.yaml, to be run by
 ``vramprobe run emulated-edges-l4 --emulate L4 --no-skip --out FOLDER/l4``; ``--records FOLDER`` judges what ran there.
Without it the table is made from the csv; ``--check`` says whether it is so. Emulated, not measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv
from tests.oracles import oracles
from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import shipped_fit
from vramprobe.predict.predict import predict
from vramprobe.predict.replay import with_retries
from vramprobe.predict.verdict import usable_bytes, verdict
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.replayed import num_alloc_retries, replayed

TABLE = Path(__file__).with_suffix(".csv")
SWEEPS = Path(__file__).parents[2] / "vramprobe" / "data" / "sweeps"
CARDS = ("RTX-4090", "L4", "RTX-5090", "A100-80GB-SXM")
CKPT = {"gradient_checkpointing": True}
MODELS = (
    "smollm2-360m",
    "qwen2.5-0.5b",
    "gemma-3-1b",
    "llama-3.2-1b",
    "qwen2.5-1.5b",
    "llama-3.2-3b",
    "qwen3-4b",
    "mistral-7b-v0.3",
    "llama-3.1-8b",
    "qwen2.5-14b",
    "qwen2.5-32b",
)
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "full"} | CKPT,
    {"method": "full"},
    {"method": "lora"} | CKPT,
    {"method": "lora"},
    {"method": "qlora"} | CKPT,
)
#: Of what the card has beside the CUDA context, by the arithmetic's replay.
SHARES = (0.96, 0.985, 1.01, 1.035)
_STEP, _MOST = 64, 65536
_FIELDS = (
    "gpu",
    "cell",
    "predicted_bytes",
    "usable_bytes",
    "verdict",
    "emulated",
    "reserved_bytes",
    "retries",
    "replayed",
    "replayed_retries",
)


def cells_of(gpu: Gpu) -> list[dict[str, Any]]:
    """The cells at this card's end, as a sweep's blocks."""
    usable = usable_bytes(gpu, device_is_known=False)
    found = []
    for model in MODELS:
        for words in METHODS:
            given = {"model": model, "batch_size": 1, "timing_steps": 0} | words

            def needed(seq_len: int, given: dict[str, Any] = given) -> int:
                return replayed(resolve(device="cuda", seq_len=seq_len, **given), gpu).reserved_bytes

            try:
                low, high = needed(512), needed(4096)
            except VramprobeError:
                continue
            lengths = []
            for share in SHARES:
                at, slope = 512.0, (high - low) / (4096 - 512)
                at += (share * usable - low) / slope
                if _STEP * 4 <= at <= _MOST:
                    length = _STEP * round(at / _STEP)
                    more = needed(length)  # memory is not quite linear: once more from there
                    length = _STEP * round((length + (share * usable - more) / slope) / _STEP)
                    if 4 * _STEP <= length <= _MOST and 0.95 <= needed(length) / usable <= 1.05:
                        lengths.append(length)
            if lengths:
                found.append(words | {"model": model, "seq_len": sorted(set(lengths)), "hold_out": True})
    return found


def write_sweep(card: str) -> None:
    """The sweep of one card's end."""
    blocks = cells_of(catalog.find_gpu(card))
    head = (
        "# At the end of one card, chosen by arithmetic:\n"
        f"# vramprobe run emulated-edges-{card.lower()} --emulate {card} --no-skip\n"
        "# Written by python benchmarks/truth/emulated_edges.py --write, which judges what ran.\n"
    )
    content = {
        "name": f"emulated-edges-{card.lower()}",
        "description": f"Cells that need 95 to 105 % of a {card}.",
        "defaults": {"batch_size": 1, "timing_steps": 0},
        "cells": blocks,
    }
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118)
    (SWEEPS / f"emulated-edges-{card.lower()}.yaml").write_text(head + text)
    print(card, sum(len(block["seq_len"]) for block in blocks), flush=True)


def judged(record: RunRecord) -> dict[str, Any]:
    """What was said of the cell, and what happened."""
    gpu = catalog.find_gpu(record.environment.device_name)
    spec: CellSpec = record.spec
    found = predict(spec, shipped_fit("cuda", gpu), gpu=gpu, replays=True)
    said = verdict(with_retries(found, spec, gpu), gpu)
    outcome = {"ok": "fits", "oom": "out of memory"}.get(record.outcome.kind, record.outcome.kind)
    total, emulation = record.environment.device_total_bytes, record.emulation
    assert total is not None
    assert emulation is not None
    retries = num_alloc_retries(spec, gpu, total - emulation.context_bytes)
    return {
        "gpu": gpu.short_name,
        "cell": record.cell_id,
        "predicted_bytes": said.needed_bytes.value,
        "usable_bytes": said.usable_bytes,
        "verdict": said.verdict,
        "emulated": outcome,
        "reserved_bytes": record.peak.reserved_bytes if record.peak else "",
        "retries": record.num_alloc_retries or 0,
        "replayed": "out of memory" if retries is None else "fits",
        "replayed_retries": "" if retries is None else retries,
    }


_AGAIN = """Asked again (tests/oracles, which keep 593 of them), a verdict sets aside what the driver and this card's
own context take at most (contexts.md): 0.7 GiB of the L4, 1.1 of the RTX 4090, 1.3 of the A100 and the RTX 5090. The
runs are the same ones, in which each card had a context of 480 MiB: more than an L4's (247 at most), so that some ran
out that are *tight* beside its own."""


def asked_again() -> list[dict[str, str]]:
    """Verdicts on the same runs as tests/oracles froze them last, with the card's own context set aside."""
    said = {"ok": "fits", "oom": "out of memory"}
    return [
        {"gpu": one.gpu or "", "verdict": one.today.verdict or "", "emulated": said[one.run.outcome]}
        for one in oracles.cells()
        if one.kind == "boundary" and one.run is not None and one.run.outcome in said
    ]


def by_card(rows: list[dict[str, str]]) -> list[str]:
    """A line a card: the verdicts, and how the runs ended."""
    head = ["card", "cells"]
    head += [f"said {said}, {was}" for said in ("fits", "tight", "does not fit") for was in ("did", "ran out")]
    lines = []
    for card in (*dict.fromkeys(row["gpu"] for row in rows), "all"):
        group = [row for row in rows if card in ("all", row["gpu"]) and row["emulated"] in ("fits", "out of memory")]
        counts = [
            sum(row["verdict"] == said and row["emulated"] == was for row in group)
            for said in ("fits", "tight", "does not fit")
            for was in ("fits", "out of memory")
        ]
        lines.append([card, len(group), *counts])
    return as_markdown(head, "l" + "r" * 7, lines)


def summary(rows: list[dict[str, str]]) -> str:
    """What was said against what happened, by card."""
    lines = [
        "# Verdicts at a card's end\n",
        "Cells that were predicted to need 95 to 105 % of what a card has beside the CUDA context, run on the emulated",
        "card. Neither was measured on a GPU. *Said*: `vramprobe predict --gpu` of 2026-11, which set 1 GiB of each",
        "card aside for the CUDA context. A plan calls `tight` risky.\n",
    ]
    lines += by_card(rows)
    ended = [row for row in rows if row["emulated"] in ("fits", "out of memory")]
    retried = [row for row in ended if row["emulated"] == "fits" and int(row["retries"])]
    outcomes = [row for row in ended if row["replayed"] == row["emulated"]]
    counts = [row for row in retried if row["replayed_retries"] == row["retries"]]
    lines.append(
        f"\nOf those that fit, {len(retried)} did so only because the allocator gave cached blocks back, which takes "
        "time. A verdict\nplays that, too, in what is left beside the 1 GiB. With the room "
        "that the emulated card\nhas, the arithmetic's replay ends as the run did in "
        f"{len(outcomes)} of {len(ended)}, and gives blocks back as often in {len(counts)} of these {len(retried)}."
    )
    lines += ["", _AGAIN, "", *by_card(asked_again())]
    if wrong := [row for row in rows if row["verdict"] == "fits" and row["emulated"] == "out of memory"]:
        cells = [[row[name] for name in ("cell", "gpu", "predicted_bytes", "usable_bytes")] for row in wrong]
        lines += ["", *as_markdown(["said fits, ran out", "card", "predicted, bytes", "usable, bytes"], "llrr", cells)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--card", action="append", choices=CARDS)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if words.write:
        for card in words.card or CARDS:
            write_sweep(card)
        return
    if words.records:
        folders = sorted(path.parent for path in words.records.rglob("records.jsonl"))
        rows = [
            judged(record)
            for folder in folders
            for record in store.latest_by_fingerprint(store.read(folder).records).values()
        ]
        TABLE.write_text(as_csv(rows, _FIELDS))
    text = summary(read_csv(TABLE))
    page = TABLE.with_suffix(".md")
    if words.check:
        raise SystemExit(f"{page.name} is not what {TABLE.name} says" if page.read_text() != text else 0)
    page.write_text(text)


if __name__ == "__main__":
    main()
