"""One process over several cards by device_map="auto", whole models: ``python benchmarks/ranks/device_map.py``.

Each cell of benchmarks/ranks/device_map.yaml on emulated RTX 4090s and A100s; what has a record in out/device_map is
not run again, and ``--kept`` runs none. Written: benchmarks/ranks/device_map.csv, a row for each card of each cell with
the arithmetic beside it, and .md; ``--compare`` counts the arithmetic anew beside the runs that the table has,
``--check`` does and fails where table or page are stale.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from vramprobe.catalog import find_gpu
from vramprobe.predict.predict import predict
from vramprobe.records import store
from vramprobe.records.record import RankRecord, RunRecord
from vramprobe.sweep.definition import load_sweep
from vramprobe.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
SWEEP, TABLE, RESULTS = FOLDER / "device_map.yaml", FOLDER / "device_map.csv", FOLDER.parents[1] / "out" / "device_map"
GPUS = ("RTX-4090", "A100-40GB-SXM")
NUM_GPUS = 4
FIELDS = (
    "gpu",
    "num_gpus",
    "model",
    "method",
    "kbit_prep",
    "gradient_checkpointing",
    "seq_len",
    "outcome",
    "phase",
    "full_card",
    "card",
    "num_layers",
    "allocated_bytes",
    "reserved_bytes",
    "load_bytes",
    "cell",
    "arithmetic_bytes",
)
SIZES = ("allocated_bytes", "reserved_bytes", "load_bytes")
Row = dict[str, str]
HEAD = """# One process over several cards: `device_map="auto"`

Whole models on emulated cards by the real libraries; nothing here was measured on a GPU. One sequence, bf16 autocast,
fused AdamW, rank 16 on all linear layers; *prep*: `prepare_model_for_kbit_training` (peft), which raises what is not
quantised to fp32, or none; *again*: layers are computed again in backward. By card: layers that transformers put there,
allocated and reserved at the peak of a step; the fullest card in bold. The emulated CUDA context was 519 MiB a card.
*Arithmetic*: how far what `predict` counts is off what is allocated, by card;
{summary}.
Rebuild: `python benchmarks/ranks/device_map.py`.

"""
COLUMNS = (
    "cards",
    "model",
    "recipe",
    "prep",
    "tokens",
    "again",
    "so",
    "by card: layers, allocated (reserved)",
    "arithmetic",
)


def run() -> None:
    """Every cell that has no record yet, on each kind of card."""
    for gpu in GPUS:
        words = ["run", str(SWEEP), "--emulate", f"{gpu} x{NUM_GPUS}", "--out", str(RESULTS / gpu), "--no-skip"]
        subprocess.run([sys.executable, "-m", "vramprobe", *words], check=True)


def rows_of(record: RunRecord, gpu: str) -> list[Row]:
    """A row for each card; of a cell that ran out of memory, what the cards had held until then."""
    spec, outcome = record.spec, record.outcome
    named = re.search(r"\bGPU (\d+) has\b", getattr(outcome, "message", ""))
    common = {
        "gpu": gpu,
        "num_gpus": spec.num_gpus,
        "model": spec.model,
        "method": spec.method,
        "kbit_prep": spec.kbit_prep,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "seq_len": spec.seq_len,
        "outcome": outcome.kind,
        "phase": getattr(outcome, "phase", record.peak and record.peak.phase),
        "cell": record.cell_id,
        "full_card": named.group(1) if named else "",
    }
    return [{name: str(value) for name, value in (common | _of_card(card)).items()} for card in record.ranks]


def _of_card(card: RankRecord) -> dict[str, object]:
    row: dict[str, object] = {"card": card.rank} | dict.fromkeys(("num_layers", *SIZES), "")
    if card.modules is not None:
        row["num_layers"] = sum(bool(re.search(r"\.layers\.\d+$", name)) for name in card.modules)
    if card.peak is not None:
        row |= {
            "allocated_bytes": card.peak.allocated_bytes,
            "reserved_bytes": card.peak.reserved_bytes,
            "load_bytes": card.peak.load_allocated_bytes,
        }
    return row


def with_arithmetic(rows: Iterable[Row]) -> list[Row]:
    """The same, each card of a cell that fits with what is counted for it."""
    cells = {spec.cell_id: spec for spec in load_sweep(SWEEP, device="cuda").cells}
    found = []
    for (gpu, cell), group in groupby(rows, key=lambda row: (row["gpu"], row["cell"])):
        peaks = predict(cells[cell], gpu=find_gpu(gpu)).cards or []
        for row in group:
            size = str(peaks[int(row["card"])].peak_allocated_bytes) if row["outcome"] == "ok" else ""
            found.append(row | {"arithmetic_bytes": size})
    return found


def off_percent(row: Row) -> float:
    """How far the arithmetic is off."""
    return 100 * (int(row["arithmetic_bytes"]) / int(row["allocated_bytes"]) - 1)


def page_of(rows: Sequence[Row]) -> str:
    """A line for each cell, or for those alike on several kinds of card."""
    off = [off_percent(row) for row in rows if row["arithmetic_bytes"]]
    summary = (
        f"over {len(off)} cards {statistics.fmean(map(abs, off)):.2f} % on average, {max(off, key=abs):+.2f} % at worst"
    )
    gpus: dict[tuple[str, ...], list[str]] = {}
    for _, group in groupby(rows, key=lambda row: (row["gpu"], row["cell"])):
        cards = list(group)
        one = cards[0]
        so = "fits" if one["outcome"] == "ok" else f"{one['outcome']} in {one['phase']}"
        so += f", card {one['full_card']}" if one["full_card"] else ""
        said = (
            one["num_gpus"],
            one["model"],
            {"lora": "LoRA", "qlora": "QLoRA"}[one["method"]],
            one["kbit_prep"],
            f"{int(one['seq_len']):,}",
            "yes" if one["gradient_checkpointing"] == "True" else "no",
            so,
            _by_card(cards),
            ", ".join(f"{off_percent(card):+.2f} %" for card in cards) if cards[0]["arithmetic_bytes"] else "-",
        )
        gpus.setdefault(said, []).append(one["gpu"])
    cells = [[f"{said[0]} × {' or '.join(on)}", *said[1:]] for said, on in gpus.items()]
    return HEAD.format(summary=summary) + "\n".join(as_markdown(COLUMNS, "llllrllll", cells)) + "\n"


def _by_card(cards: list[Row]) -> str:
    if not cards[0]["allocated_bytes"]:
        return "-"
    top = max(int(card["allocated_bytes"]) for card in cards)
    said = []
    for card in cards:
        allocated, reserved = (format_bytes(int(card[name])) for name in SIZES[:2])
        text = f"{card['num_layers']}: {allocated} ({reserved})"
        said.append(f"**{text}**" if int(card["allocated_bytes"]) == top else text)
    return ", ".join(said)


def main() -> None:
    page = TABLE.with_suffix(".md")
    if "--check" in sys.argv or "--compare" in sys.argv:
        rows = read_csv(TABLE)
    else:
        if "--kept" not in sys.argv:
            run()
        rows = []
        for gpu in GPUS:
            latest = store.latest_by_fingerprint(store.read(RESULTS / gpu).records).values()
            order = sorted(
                latest, key=lambda one: (one.spec.num_params, one.spec.num_gpus, one.spec.method, one.cell_id)
            )
            rows += [row for record in order for row in rows_of(record, gpu)]
    rows = with_arithmetic(rows)
    made = {TABLE: as_csv(rows, FIELDS), page: page_of(rows)}
    write_or_check(made, "ranks/device_map.py --compare", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
