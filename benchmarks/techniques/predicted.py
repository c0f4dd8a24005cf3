"""Techniques by arithmetic beside their emulated runs: ``python benchmarks/techniques/predicted.py``.

Of the runs in techniques.jsonl, those whose base and techniques ``vramprobe predict`` knows as options of a cell,
predicted anew; ``--check`` compares. All are one training step on one GPU; nothing was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, write_or_check
from benchmarks.techniques.runs import fingerprint
from benchmarks.techniques.techniques import entries, todo
from vramprobe import api
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


def row_of(base: str, names: list[str], words: Row, emulated: Row) -> Row:
    """Peaks of one run: allocated, and as its tensors requested them, without what blocks are larger."""
    gpu = bases()[base].gpu
    counted = api.predict(gpu=gpu, engine="formula", fit="none", **words)
    return {
        "base": base,
        "techniques": " + ".join(names),
        "emulated_allocated_bytes": emulated["allocated_bytes"],
        "emulated_requested_bytes": emulated["requested_bytes"],
        "predicted_allocated_bytes": counted.peak_allocated_bytes.value,
        "predicted_requested_bytes": counted.peak_allocated_bytes.value - counted.terms.get("block_remainders", 0),
    }


def page(rows: list[Row]) -> str:
    """predicted.md."""
    lines, close = [], 0
    for row in rows:
        emulated = row["emulated_requested_bytes"]
        allocated = 100 * (row["predicted_allocated_bytes"] / row["emulated_allocated_bytes"] - 1)
        close += abs(allocated) <= 0.5
        what = [techniques()[name].name for name in row["techniques"].split(" + ") if name]
        cells = [
            f"{emulated / 2**30:.3f}",
            f"{row['predicted_requested_bytes'] - emulated:+,}",
            f"{round(allocated, 3) + 0:+.3f}",
        ]
        lines.append([f"`{row['base']}`", " + ".join(what) or "–", *cells])
    head = ["base", "technique", "emulated, GiB", "arithmetic, bytes", "arithmetic, allocated, %"]
    causes = [f"- {techniques()[name].name}: {why}." for name, why in CAUSES.items()]
    return "\n".join(
        [
            "# Techniques by arithmetic",
            "",
            f"{len(rows)} emulated runs of [techniques.md](techniques.md) that `vramprobe predict` knows as options of",
            f"a cell. Arithmetic's allocated peak is within 0.5 % in {close}. No GPU was measured.",
            "",
            "The first number is what tensors requested at the peak, the next how much more arithmetic says. The",
            "allocator's blocks are larger than the tensors in them: the last column counts blocks. How much larger",
            "differs, with quantized weights, by how a script loads them.",
            "",
            *as_markdown(head, "llrrr", lines),
            "",
            *causes,
            "",
        ]
    )


def main() -> None:
    """Write or compare."""
    rows = []
    for base, names, words, emulated in known():
        print(f"{base}: {' + '.join(names)}", file=sys.stderr, flush=True)
        rows.append(row_of(base, names, words, emulated))
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "techniques/predicted.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
