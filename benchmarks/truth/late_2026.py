"""What people fine-tune in late 2026, by recipe and by whole emulated runs: ``python benchmarks/truth/late_2026.py``.

Without an option it rebuilds late_2026.md from late_2026.csv. ``--run`` first runs the cells that the CSV lacks, each
twice on the same emulated GPU: by ``predict --engine recipe`` (shallow models, extended, or the whole model where its
layers do not repeat) and whole, as ``measure --emulate`` runs it. A row is written once both are done: a stopped run
goes on where it ended. ``--check`` says whether late_2026.md is what the CSV gives. No GPU was measured.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Container, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.journal import run_cell
from benchmarks.tables import append_csv, as_table, filled, read_csv, write_or_check
from vramprobe import catalog
from vramprobe.errors import VramprobeError
from vramprobe.predict import recorded
from vramprobe.recipe.recorder import close_recorders
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

PAGE, CSV = (Path(__file__).with_suffix(end) for end in (".md", ".csv"))
_USUAL = {"batch_size": 1, "seq_len": 1024, "gradient_checkpointing": True, "timing_steps": 0, "device": "cuda"}
_A100, _LARGE = "A100-80GB-SXM", "B300"
#: Cells whose recipe is not their run, and why.
DIFFERING = {
    "gemma-4-31b-it_qlora-nf4-peft-r16-all_bf16+bf16_adamw-fused_b1s1024_ckpt_1x640x480": (
        "unexplained: both are runs of the whole model, 1,676,288 bytes apart in allocated memory"
    )
}


def cells() -> Iterator[tuple[str, str, CellSpec]]:
    """Family, GPU and cell of each row."""
    for one in tomllib.loads(PAGE.with_suffix(".toml").read_text())["cell"]:
        asked = _USUAL | one.get("options", {})
        yield one["family"], one["gpu"], resolve(model=one["model"], method=one["method"], **asked)


def run() -> None:
    """Run what the CSV lacks, a cell on each GPU in turn, and append a row for each."""
    done = {(row["gpu"], row["cell"]) for row in read_csv(CSV)}
    of_gpus = [_rows_on(gpu, done) for gpu in (_A100, _LARGE)]
    for row in filter(None, chain.from_iterable(zip_longest(*of_gpus))):
        append_csv(CSV, row)
        print(row, flush=True)
    close_recorders()


def _rows_on(gpu: str, done: Container[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for family, its_gpu, spec in cells():
        if its_gpu != gpu or (gpu, spec.cell_id) in done:
            continue
        outcome, (allocated, reserved) = run_cell(gpu, spec.model_dump(mode="json"))
        row = {"family": family, "gpu": gpu, "cell": spec.cell_id, **_by_recipe(spec, gpu), "outcome": outcome}
        yield row | {"run_allocated_bytes": allocated, "run_reserved_bytes": reserved}


def _by_recipe(spec: CellSpec, gpu: str) -> dict[str, Any]:
    try:
        found = recorded.predict(spec, gpu=catalog.find_gpu(gpu))
    except VramprobeError as error:
        return {"recipe_allocated_bytes": "", "recipe_reserved_bytes": "", "how": str(error)[:200]}
    return {
        "recipe_allocated_bytes": found.peak_allocated_bytes.value,
        "recipe_reserved_bytes": found.reserved_bytes.value,
        "how": next(one for one in found.warnings if one.startswith("recorded")),
    }


def page(rows: list[dict[str, str]]) -> str:
    """late_2026.md."""
    both = [row for row in rows if row["recipe_allocated_bytes"] and row["run_allocated_bytes"]]
    extended = [row for row in both if "extended" in row["how"]]
    equal = [sum(row[f"recipe_{tier}_bytes"] == row[f"run_{tier}_bytes"] for row in both) for tier in _TIERS]
    return filled(
        PAGE,
        both=len(both),
        rows=len(rows),
        allocated=equal[0],
        reserved=equal[1],
        extended=len(extended),
        table=as_table(list(map(_line, rows)), "lllrrrl"),
        differing=[line for cell, why in DIFFERING.items() for line in ("", f"{cell}: {why}.")],
    )


_TIERS = ("allocated", "reserved")


def _line(row: dict[str, str]) -> dict[str, str]:
    took = [row[f"run_{tier}_bytes"] for tier in _TIERS]
    sizes = ", ".join(f"{int(size) / 2**30:.2f}" for size in took) if all(took) else row["outcome"]
    how = row["how"].removeprefix("recorded on the emulated GPU at ")
    how = how.removeprefix("recorded whole on the emulated GPU, ")
    layers = how.partition(" layers")[0] + ("" if "extended" in how else " (whole)")
    off = [_difference(row[f"recipe_{tier}_bytes"], row[f"run_{tier}_bytes"]) for tier in _TIERS]
    return {
        "family": row["family"],
        "cell": row["cell"],
        "GPU": row["gpu"],
        "run: allocated, reserved, GiB": sizes,
        "recipe: allocated": off[0],
        "reserved": off[1],
        "layers recorded": layers if row["recipe_allocated_bytes"] else row["how"],
    }


def _difference(recipe: str, took: str) -> str:
    if not recipe or not took:
        return "–"
    return "equal" if recipe == took else f"{100 * (int(recipe) / int(took) - 1):+.4f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if words.run:
        run()
    write_or_check({PAGE: page(read_csv(CSV))}, "truth/late_2026.py", check=words.check)


if __name__ == "__main__":
    main()
