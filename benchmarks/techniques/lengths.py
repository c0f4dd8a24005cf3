"""What each technique saves at 16k and 128k tokens and for 70B: ``python benchmarks/techniques/lengths.py``.

Beside each base whose cell ``vramprobe predict`` knows: every technique that is an option of a cell, by arithmetic, and
beside it the emulated run where techniques.jsonl has one. Writes lengths.md in half a minute; ``--check`` compares. No
GPU was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_markdown, write_or_check
from benchmarks.techniques import tables
from benchmarks.techniques.techniques import entries, todo
from vramprobe.recommend.ranking import rank
from vramprobe.techniques.registry import bases, techniques
from vramprobe.units import GIB

PAGE = Path(__file__).with_suffix(".md")
BASES = ("qlora-8b-16k", "qlora-8b-128k", "qlora-70b")
Row = dict[str, Any]


def section(base: str) -> list[str]:
    """One base: what saves, the largest first, predicted or emulated."""
    of = bases()[base]
    found = rank(gpu=of.gpu, **of.cell or {})
    predicted = {one.technique: one for one in found.ranked}
    ran = {
        row["technique"]: row
        for name, several in todo()
        if name == base and len(several) == 1
        and (row := tables.row_of(entries(), base, several)) is not None and row["outcome"] == "ok"
    }  # fmt: skip
    saved: dict[str, tuple[int | None, int | None]] = {
        name: (
            predicted[name].saved_bytes if name in predicted else None,
            ran[name]["base_bytes"] - ran[name]["peak_bytes"] if name in ran else None,
        )
        for name in {*predicted, *ran}
    }
    order = sorted(saved, key=lambda name: (-max(size for size in saved[name] if size is not None), name))
    rows = [
        [
            techniques()[name].name,
            *("–" if size is None else f"{size / GIB:.2f}" for size in saved[name]),
            _slower(predicted[name].slower_share if name in predicted else None, ran.get(name)),
            predicted[name].verdict if name in predicted else "–",
        ]
        for name in order
    ]
    head = ["technique", "saved, predicted, GiB", "saved, emulated, GiB", "step, predicted", "then"]
    own = tables.peak_of(entries(), base)
    emulated = f", emulated {own / GIB:.2f} GiB" if own else ""
    return [
        "",
        f"## {of.text}, {of.gpu}",
        "",
        f"Without it: predicted {found.peak_bytes / GIB:.2f} GiB{emulated}.",
        "",
        *as_markdown(head, "lrrrl", rows),
    ]


def _slower(share: float | None, row: Row | None) -> str:
    """By how much the predicted step is longer: by arithmetic, else by the emulated run's count."""
    if share is None and row is not None and row["seconds"] != "" and row["base_seconds"] != "":
        share = row["seconds"] / row["base_seconds"] - 1
    return "–" if share is None else f"{share:+.0%}"


def page() -> str:
    """lengths.md."""
    lines = [
        "# Techniques at 16k and 128k tokens, and for 70B",
        "",
        "What each saves by itself on an 80 GB card. *Predicted* is arithmetic, *emulated* a run of",
        "[techniques.md](techniques.md); – is where there is none. No GPU was measured.",
    ]
    for base in BASES:
        lines += section(base)
    return "\n".join([*lines, ""])


def main() -> None:
    """Write or compare."""
    write_or_check({PAGE: page()}, "techniques/lengths.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
