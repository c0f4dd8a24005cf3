"""cuDNN's workspaces on a real GPU beside the emulated ones: ``python benchmarks/gpu/workspace_table.py FOLDER``.

Reads workspaces.jsonl.xz (made by ``workspaces.py``) of FOLDER and of emulated/, there also workspaces_of_0.jsonl.xz of
an emulated cuDNN whose workspaces were 0; writes FOLDER/workspaces.md, or checks it with ``--check``.
"""

import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_table, filled, write_or_check

HERE = Path(__file__).resolve().parent
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ROUND = 512  # the allocator's
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The operators of a file, in the order of ``workspaces.py``."""
    return [json.loads(line) for line in lzma.open(path, "rt")]


def allocated_peak(row: Row) -> int:
    """Allocated peak of forward and backward, above what was there before, bytes."""
    now = highest = 0
    for event in row["forward"] + row["backward"]:
        now += math.copysign(-(-abs(event) // _ROUND) * _ROUND, event)
        highest = max(highest, now)
    return int(highest)


def convolution_workspaces(row: Row) -> dict[str, int]:
    """Bytes of workspace of the forward and of each gradient of a convolution that the history tells apart."""
    taps = row["kernel"] ** (len(row["shape"]) - 2)
    filter_bytes = row["in"] * row["out"] // row.get("groups", 1) * taps * BYTES[row["dtype"]]
    forward, backward = row["forward"], row["backward"]
    found = {"forward": _workspace_at(forward, 0)}
    if backward[0] == math.prod(row["shape"]) * BYTES[row["dtype"]] and filter_bytes in backward[1:]:
        found["data"] = _workspace_at(backward, 0)
        found["filter"] = _workspace_at(backward, backward.index(filter_bytes, 1))
    return found


def _workspace_at(history: Sequence[int], at: int) -> int:
    """The request behind the one at ``at``, where it is freed at once."""
    behind = history[at + 1 : at + 3]
    return behind[0] if len(behind) == 2 and behind[0] > 0 and behind[0] == -behind[1] else 0


def table_of(measured: Sequence[Row], before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """A line for each kind, dtype and layout, and one for all: how many operators agree, before and now."""
    groups: dict[tuple[str, ...], list[tuple[Row, Row, Row]]] = defaultdict(list)
    for rows in zip(measured, before, now, strict=True):
        layout = {True: "channels last", False: "contiguous", None: ""}[rows[0].get("last")]
        groups[rows[0]["kind"], rows[0]["dtype"], layout].append(rows)
    everything = [rows for group in groups.values() for rows in group]
    lines = [
        {"operator": kind, "dtype": dtype, "layout": layout, "operators": len(rows)} | _shares(rows)
        for (kind, dtype, layout), rows in [*sorted(groups.items()), (("all", "", ""), everything)]
    ]
    return as_table(lines, "lllrrrrr")


def _shares(rows: Sequence[tuple[Row, Row, Row]]) -> dict[str, str]:
    """``before → now`` of each column."""
    counts = []
    for side in (1, 2):
        off = [abs(allocated_peak(one[side]) / allocated_peak(one[0]) - 1) for one in rows]
        same = sum(all(one[0][way] == one[side][way] for way in ("forward", "backward")) for one in rows)
        counts.append((same, *(sum(share <= limit for share in off) for limit in (0, 0.01, 0.1))))
    names = ("every request equal", "peak equal", "within 1 %", "within 10 %")
    return {name: f"{old} → {new}" for name, old, new in zip(names, *counts, strict=True)}


def page(folder: Path) -> str:
    """The page of the folder."""
    emulated = HERE / "emulated"
    measured, now = (read_rows(path / "workspaces.jsonl.xz") for path in (folder, emulated))
    table = table_of(measured, read_rows(emulated / "workspaces_of_0.jsonl.xz"), now)
    return filled(HERE / "workspaces.md", number=len(measured), table=table)


def main() -> None:
    """Write the page, or check it."""
    folder = (HERE / sys.argv[1]).resolve()
    script = f"gpu/workspace_table.py {folder.name}"
    write_or_check({folder / "workspaces.md": page(folder)}, script, check="--check" in sys.argv)


if __name__ == "__main__":
    main()
