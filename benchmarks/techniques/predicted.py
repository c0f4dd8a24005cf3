"""Techniques by arithmetic and by simulation beside their emulated runs: ``python benchmarks/techniques/predicted.py``.

Of the runs in techniques.jsonl, those whose base and techniques ``vramprobe predict`` knows as options of a cell. It
simulates what predicted.csv lacks (20 s each) and predicts all anew; ``--check`` compares. All are one training step on
one GPU; nothing was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check
from benchmarks.techniques.runs import fingerprint
from benchmarks.techniques.techniques import entries, todo
from vramprobe import api
from vramprobe.simulate.run import NotSimulated
from vramprobe.techniques.registry import bases, techniques

TABLE = Path(__file__).with_suffix(".csv")
#: (technique, what is known of its difference).
CAUSES = {
    "adafactor": "`Trainer` puts norms into a group of parameters of their own. The parameter before the head is then "
    "an MLP's, and its fp32 copy lives until the head's is made: 235 MB. A cell has one group",
}
Row = dict[str, Any]


def known() -> list[tuple[str, list[str], Row, Row]]:
    """(base, techniques, words of the cell, its peak) of each run that ended well and that arithmetic knows."""
    done, found = entries(), []
    for base, several in todo():
        entry = done.get(fingerprint(bases()[base], several))
        changes = [one.changes for one in several]
        if entry is None or entry["outcome"] != "ok" or not bases()[base].cell or None in changes:
            continue
        words = dict(bases()[base].cell)
        for change in changes:
            words |= change
        found.append((base, [one.id for one in several], words, entry["peak"]))
    return found


def row_of(base: str, names: list[str], words: Row, emulated: Row, before: Row | None) -> Row:
    """Peaks of one run: allocated, and as its tensors requested them, without what blocks are larger."""
    gpu = bases()[base].gpu
    counted = api.predict(gpu=gpu, engine="formula", fit="none", **words)
    row = {
        "base": base,
        "techniques": " + ".join(names),
        "emulated_allocated_bytes": emulated["allocated_bytes"],
        "emulated_requested_bytes": emulated["requested_bytes"],
        "predicted_allocated_bytes": counted.peak_allocated_bytes.value,
        "predicted_requested_bytes": counted.peak_allocated_bytes.value - counted.terms.get("block_remainders", 0),
    }
    simulated = ("simulated_allocated_bytes", "simulated_requested_bytes")
    if before is not None:
        return row | {name: before[name] and int(before[name]) for name in simulated}
    try:
        phases = api.simulate(gpu=gpu, **words).phases
    except NotSimulated:
        return row | dict.fromkeys(simulated, "")
    peaks = (max(one.allocated_peak_bytes for one in phases), max(one.requested_peak_bytes for one in phases))
    return row | dict(zip(simulated, peaks, strict=True))


def page(rows: list[Row]) -> str:
    """predicted.md."""
    lines, close = [], 0
    for row in rows:
        emulated = row["emulated_requested_bytes"]
        sizes = [row[f"{how}_requested_bytes"] for how in ("predicted", "simulated")]
        allocated = 100 * (row["predicted_allocated_bytes"] / row["emulated_allocated_bytes"] - 1)
        close += abs(allocated) <= 0.5
        what = [techniques()[name].name for name in row["techniques"].split(" + ") if name]
        cells = [
            f"{emulated / 2**30:.3f}",
            *("–" if size == "" else f"{size - emulated:+,}" for size in sizes),
            f"{round(allocated, 3) + 0:+.3f}",
        ]
        lines.append([f"`{row['base']}`", " + ".join(what) or "–", *cells])
    head = ["base", "technique", "emulated, GiB", "arithmetic, bytes", "simulation, bytes", "arithmetic, allocated, %"]
    causes = [f"- {techniques()[name].name}: {why}." for name, why in CAUSES.items()]
    return "\n".join(
        [
            "# Techniques by arithmetic and by simulation",
            "",
            f"{len(rows)} emulated runs of [techniques.md](techniques.md) that `vramprobe predict` and `simulate` know",
            f"as options of a cell. Arithmetic's allocated peak is within 0.5 % in {close}. No GPU was measured.",
            "",
            "The first number is what tensors requested at the peak, the next two how much more arithmetic and",
            "simulation say (–: fake tensors do not reach TRL's losses). The allocator's blocks are larger than the",
            "tensors in them: the last column counts blocks. How much larger differs, with quantized weights, by how a",
            "script loads them.",
            "",
            *as_markdown(head, "llrrrr", lines),
            "",
            *causes,
            "",
        ]
    )


def main() -> None:
    """Simulate what is missing, and write or compare."""
    before = {(row["base"], row["techniques"]): row for row in read_csv(TABLE)}
    rows = []
    for base, names, words, emulated in known():
        print(f"{base}: {' + '.join(names)}", file=sys.stderr, flush=True)
        rows.append(row_of(base, names, words, emulated, before.get((base, " + ".join(names)))))
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "techniques/predicted.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
