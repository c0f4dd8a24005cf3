"""405B, full fine-tuning on 64 and 128 cards, one rank each: ``python benchmarks/ranks/ranks_405b.py``.

By torch's FSDP2 and DeepSpeed's ZeRO-3 through accelerate on an emulated H100, which must have DeepSpeed in its
environment (docs/ranks.md). A cell that has a record in out/ranks_405b is not run again; ``--predict`` runs none and
predicts anew what the table has. Written: benchmarks/ranks/ranks_405b.csv and .md, emulated beside predicted;
``--check`` predicts anew and fails where these are stale.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from vramprobe.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ranks import one_rank
from benchmarks.tables import as_csv, as_markdown, write_or_check

TABLE, KEPT = one_rank.FOLDER / "ranks_405b.csv", one_rank.FOLDER.parents[1] / "out" / "ranks_405b"
MODEL, CARD = "llama-3.1-405b", "H100-SXM"
RECIPES = ("full, mixed", "full, all bf16")
HEAD = f"""# 405B: full fine-tuning on 64 and 128 cards

Rank 0 alone of {MODEL}, 126 layers, one sequence of 2,048 tokens, layers computed again, by the real libraries on one
emulated card: nothing here was measured on a GPU. *Mixed*: fp32 weights and AdamW, bf16 in the step. Predicted: what
`vramprobe predict --sharding` says of the same rank, held against what tensors asked for. *Sent*: over the rank's link
in a step by a ring, from the collectives that it issued. *Host*: tensors that rank 0 loads for all, which nobody wrote.
An *oom_host* is this machine's of 24 GiB, which refused DeepSpeed's one buffer of 25.4 GB in host memory (it gathers a
rank's parts there to put them in one piece); whether the card holds the cell was not seen. Seconds are of two cores
that others used, too. Rebuild: `python benchmarks/ranks/ranks_405b.py`.

"""
COLUMNS = (
    "cards",
    "recipe",
    "sharding",
    "said",
    "outcome",
    "predicted",
    "requested",
    "differs",
    "allocated",
    "reserved",
    "load",
    "host",
    "sent",
    "seconds",
)


def rows() -> list[one_rank.Row]:
    """Every cell, run where it has no record."""
    asked = list(product((64, 128), RECIPES, ("fsdp", "zero3")))
    specs = [one_rank.cell_of(MODEL, recipe, sharding, num_gpus) for num_gpus, recipe, sharding in asked]
    recipes = {spec.fingerprint: recipe for spec, (_, recipe, _) in zip(specs, asked, strict=True)}
    records = one_rank.run(specs, CARD, KEPT)
    return [one_rank.row_of(record, CARD, recipes[record.fingerprint]) for record in records]


def page(found: list[one_rank.Row]) -> str:
    """Emulated beside predicted, then what is alive at the peak by cause."""
    ran = []
    for row in found:
        sizes = [_size(row[f"{name}_bytes"]) for name in ("allocated", "reserved", "load", "host", "link")]
        differs = f"{row['predicted_bytes'] / row['requested_bytes'] - 1:+.3%}" if row["requested_bytes"] else "-"
        outcome = "fits" if row["outcome"] == "ok" else f"{row['outcome']} in {row['phase']}"
        cells = [
            row["num_gpus"],
            row["recipe"],
            row["sharding"],
            row["said"],
            outcome,
            _size(row["predicted_bytes"]),
            _size(row["requested_bytes"]),
            differs,
            *sizes,
            row["seconds"],
        ]
        ran.append(cells)
    parts = [name for name in one_rank.PARTS if any(row[name] for row in found)]
    alive = [
        [row["num_gpus"], row["recipe"], row["sharding"], row["phase"], *(_size(row[one]) for one in parts)]
        for row in found
        if row["requested_bytes"]
    ]
    head = ["cards", "recipe", "sharding", "phase", *map(_words, parts)]
    lines = as_markdown(COLUMNS, "rllll" + "r" * (len(COLUMNS) - 5), ran)
    lines += ["", "## Alive at the peak", "", "Emulated, by cause, of the cells that ran:", ""]
    return HEAD + "\n".join([*lines, *as_markdown(head, "rlll" + "r" * len(parts), alive)]) + "\n"


def _size(num_bytes: int | str) -> str:
    return "-" if num_bytes == "" else format_bytes(int(num_bytes))


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def main() -> None:
    check = "--check" in sys.argv
    is_read = check or "--predict" in sys.argv
    found = [one_rank.anew(row) for row in one_rank.read(TABLE)] if is_read else rows()
    made = {TABLE: as_csv(found, one_rank.FIELDS), TABLE.with_suffix(".md"): page(found)}
    write_or_check(made, "ranks/ranks_405b.py", check=check)


if __name__ == "__main__":
    main()
