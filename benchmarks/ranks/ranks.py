"""One rank of several: arithmetic against real libraries on an emulated GPU: ``python benchmarks/ranks/ranks.py``.

Each cell of benchmarks/ranks/ranks.yaml is rank 0 of a world that is not there, under DDP, accelerate's FSDP1 and
FSDP2, transformers' ``tp_plan``, or DeepSpeed, which must be in the emulated environment (docs/ranks.md). What has a
record in out/ranks is not run again. Written: benchmarks/ranks/ranks.csv and .md, arithmetic beside emulated by phase;
``--compare`` runs nothing and takes the records that there are, and of other cells what the table has; ``--check``
counts the arithmetic anew beside what the table has of the runs, and fails where a table is stale.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from vramprobe.catalog import find_gpu
from vramprobe.choices import TENSOR_PARALLEL
from vramprobe.model.memory_model import workspaces_bytes
from vramprobe.predict.host_memory import loaded_bytes
from vramprobe.predict.ranks import part_moments
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.terms import Moment
from vramprobe.terms.sharding.ranks import host_bytes, rank_moments
from vramprobe.terms.sharding.tensor_parallel import part_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
SWEEP, RESULTS, GPU = FOLDER / "ranks.yaml", FOLDER.parents[1] / "out" / "ranks", "H100-SXM"
PHASES = ("forward", "backward", "optimizer_step")
HOST = "host"
NUMBERS = ("requested_bytes", "allocated_bytes", "arithmetic_bytes")


def counted(spec: CellSpec) -> dict[str, int]:
    """By phase, the highest moment by arithmetic of what tensors ask for, with cuBLAS's workspaces."""
    alone = spec.model_copy(
        update={
            "num_gpus": 1,
            "sharding": None,
            "shard_size": None,
            "cp_size": 1,
            "cp_rotation": "allgather",
            "only_rank": None,
            "offload": "none",
        }
    )
    moments = _moments(alone, spec)
    extra = workspaces_bytes(alone, find_gpu(GPU))
    asked = [(one.phase, one.total_bytes - one.terms.get("block_remainders", 0)) for one in moments]
    found = {name: max(size for phase, size in asked if phase == name) + extra for name in PHASES}
    if spec.offload == "none":
        return found
    within, size = _group(spec)
    return found | {HOST: max(host_bytes(alone, size, within, spec.offload), loaded_bytes(spec))}


def _group(spec: CellSpec) -> tuple[Any, int]:
    """Of those that share a model: by which kind, how many."""
    assert spec.sharding is not None
    return spec.sharding.removesuffix("-hybrid"), spec.shard_size or spec.num_gpus


def _moments(alone: CellSpec, spec: CellSpec) -> list[Moment]:
    if spec.cp_size > 1:
        return part_moments(spec, (spec.only_rank or 0) % spec.cp_size, all_buffers=False)
    within, size = _group(spec)
    if within == TENSOR_PARALLEL:
        return part_of(alone, size).moments(alone)
    return rank_moments(
        alone, size, within, all_buffers=False, is_replicated=spec.shard_size is not None, offload=spec.offload
    )


def seen(record: RunRecord) -> list[dict[str, Any]]:
    """A row for each phase of the steady step, of several micro-steps the highest; of offloaded ones one for the host,
    tensors and pinned blocks."""
    away = "" if record.spec.offload == "none" else f", {record.spec.offload} on the host"
    named = {"cell": record.cell_id, "sharding": f"{_kind(record.spec)}{away}"}
    last = max(phase.step or 0 for phase in record.phases)
    found = []
    for name in PHASES:
        phases = [phase for phase in record.phases if phase.step == last and phase.name == name]
        found.append(
            {
                **named,
                "phase": name,
                "requested_bytes": max(phase.requested_peak_bytes or 0 for phase in phases),
                "allocated_bytes": max(phase.allocated_peak_bytes or 0 for phase in phases),
            }
        )
    if away and record.ranks:
        host = record.ranks[0]
        found.append(
            {
                **named,
                "phase": HOST,
                "requested_bytes": host.host_tensors_bytes,
                "allocated_bytes": host.host_pinned_bytes,
            }
        )
    return found


def _kind(spec: CellSpec) -> str:
    """The sharding, and whether each sequence is shared, too."""
    return f"{spec.sharding} with cp" if spec.cp_size > 1 else f"{spec.sharding}"


def with_arithmetic(rows: Iterable[dict[str, Any]], cells: dict[str, CellSpec]) -> list[dict[str, Any]]:
    """The same, each with what is counted for it."""
    found = []
    for cell, group in groupby(rows, lambda row: row["cell"]):
        by_phase = counted(cells[cell])
        found += [row | {"arithmetic_bytes": by_phase[row["phase"]]} for row in group]
    return found


def off_percent(row: dict[str, Any], tier: str) -> float:
    """How far the arithmetic is off."""
    return 100 * (row["arithmetic_bytes"] / row[tier] - 1)


def page(rows: list[dict[str, Any]]) -> str:
    """How far off by kind of sharding, then cell by cell."""
    cells = [(cell, list(group)) for cell, group in groupby(rows, lambda row: row["cell"])]
    lines = [
        "# One rank of several: arithmetic beside emulated",
        "",
        f"Rank 0, or the one named, of {len(cells)} cells by the real libraries on an emulated {GPU}: the peak of each",
        "phase of the steady step. *Requested* is what tensors asked for, which arithmetic counts; *allocated* has",
        "what the caching allocator rounded up or did not split off a block, which it does not. Under FSDP1 requested",
        "has also what was freed and is still used by another stream. Of accumulated micro-steps the highest counts,",
        "phase by phase. *With cp*: ranks that share each sequence.",
        "Rebuild: `python benchmarks/ranks/ranks.py`.",
        "",
        "## By sharding",
        "",
    ]
    by_sharding = []
    for sharding in dict.fromkeys(row["sharding"] for row in rows):
        own = [group for _, group in cells if group[0]["sharding"] == sharding]
        tops = [max(_on_card(group), key=lambda row: row["allocated_bytes"]) for group in own]
        shown = []
        for tier in ("requested_bytes", "allocated_bytes"):
            off = [off_percent(row, tier) for row in tops]
            shown.append(f"{statistics.fmean(map(abs, off)):.3f} %, {max(off, key=abs):+.3f} %")
        by_sharding.append([sharding, len(tops), *shown])
    lines += [
        *as_markdown(
            ["sharding", "cells", "of requested: mean, worst", "of allocated: mean, worst"], "lrrr", by_sharding
        ),
        "",
        "## Cell by cell",
        "",
        "Emulated, requested bytes, with arithmetic less emulated behind them:",
        "",
    ]
    by_phase = []
    for cell, group in cells:
        shown = [
            f"{row['requested_bytes']:,} ({off_percent(row, 'requested_bytes'):+.3f} %)" for row in _on_card(group)
        ]
        by_phase.append([cell, *shown])
    lines += [
        *as_markdown(["cell", "forward", "backward", "optimizer step"], "lrrr", by_phase),
        "",
        "## On the host",
        "",
        "Of rank 0, emulated, at most: its tensors, with arithmetic less emulated behind them (under FSDP the whole",
        "model, as it is loaded, where that is more than its part of the states), and what torch took for those that",
        "are pinned.",
        "",
    ]
    on_host = []
    for row in rows:
        if row["phase"] == HOST:
            shown = f"{row['requested_bytes']:,} ({off_percent(row, 'requested_bytes'):+.4f} %)"
            on_host.append([row["cell"], shown, f"{row['allocated_bytes']:,}"])
    return "\n".join([*lines, *as_markdown(["cell", "tensors", "pinned blocks"], "lrr", on_host)]) + "\n"


def _on_card(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in group if row["phase"] != HOST]


def main() -> None:
    cells = {spec.cell_id: spec for spec in load_sweep(SWEEP, device="cuda").cells}
    rows = [row | {name: int(row[name]) for name in NUMBERS} for row in read_csv(FOLDER / "ranks.csv")]
    if "--check" not in sys.argv:
        words = ["run", str(SWEEP), "--emulate", f"{GPU} x8", "--out", str(RESULTS), "--no-skip"]
        if "--compare" not in sys.argv:
            subprocess.run([sys.executable, "-m", "vramprobe", *words], check=True)
        records = store.latest_by_fingerprint(store.read(RESULTS).records).values()
        anew = [row for record in records if record.outcome.kind == "ok" for row in seen(record)]
        rows = [row for row in rows if row["cell"] not in {row["cell"] for row in anew}] + anew
    rows = with_arithmetic(sorted(rows, key=lambda row: (row["sharding"], row["cell"])), cells)
    made = {FOLDER / "ranks.csv": as_csv(rows), FOLDER / "ranks.md": page(rows)}
    write_or_check(made, "ranks/ranks.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
