"""Reserved memory of a rank: the allocator's replay against emulated: ``python benchmarks/ranks/ranks_replayed.py``.

Of the cells of benchmarks/ranks/ranks.yaml that ``python benchmarks/ranks/ranks.py`` has left records of in out/ranks,
those whose requests are known in their order (terms/sharding/ranks.py), beside those that the table has. Written:
benchmarks/ranks/ranks_replayed.csv, with what was emulated and what is replayed, and .md. ``--check`` replays anew what
the table has, and fails where table or page are stale.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from vramprobe.catalog import find_gpu
from vramprobe.model.replayed import replayed
from vramprobe.records import store
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.terms.sharding.ranks import is_logged

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
TABLE, RESULTS, GPU = FOLDER / "ranks_replayed.csv", FOLDER.parents[1] / "out" / "ranks", "H100-SXM"
TIERS = ("allocated", "reserved")
FIELDS = ("cell", "sharding", *(f"{tier}_{by}_bytes" for tier in TIERS for by in ("emulated", "replayed")))
Row = dict[str, str]
HEAD = """# One rank of several: the allocator's replay beside emulated

What rank 0 asks of its allocator, request by request and on which stream, is written down by arithmetic and played
through the allocator's own rules, as `predict --sharding` and `--min-gpus` do. Beside it the same rank by the real
libraries on an emulated H100-SXM: the peaks of its steps; nothing here was measured on a GPU. On the emulated card a
stream is done as soon as something is launched on it, so that what FSDP1 and DeepSpeed free while another stream uses
it is there again at once, as the replay takes it to be; on a real one it may come later.

Under ZeRO-3 what is gathered has a stream, and so blocks, of its own. It is played by the layer, which leaves open what
stands at one moment with the layer's activations: `predict` takes allocated memory from the arithmetic there
([ranks.md](ranks.md)).

Of 33 whole models under DDP, FSDP1 and FSDP2 the replay was made before they ran: 24 to the byte of reserved memory,
0.02 % off on average and 0.33 % at worst. Of 26 under ZeRO: 15 to the byte; 0.17 % and 3.3 % at worst, but for those
with adapters under ZeRO-3, where peft's reading of an adapter's dtype was not known: one of 8B was 8.9 % too high. The
table has it as it is counted since.

Rebuild: `python benchmarks/ranks/ranks_replayed.py`.

## By sharding

"""


def emulated(cells: Iterable[CellSpec]) -> list[Row]:
    """A row for each cell that has run and is replayed."""
    records = {one.fingerprint: one for one in store.latest_by_fingerprint(store.read(RESULTS).records).values()}
    found = []
    for spec in cells:
        record = records.get(spec.fingerprint)
        if record is not None and record.peak is not None and record.outcome.kind == "ok" and is_logged(spec):
            found.append(
                {
                    "cell": spec.cell_id,
                    "sharding": str(spec.sharding),
                    "allocated_emulated_bytes": str(record.peak.allocated_bytes),
                    "reserved_emulated_bytes": str(record.peak.reserved_bytes),
                }
            )
    return found


def with_replay(rows: Iterable[Row], cells: dict[str, CellSpec]) -> list[Row]:
    """The same, each with what is replayed."""
    found = []
    for row in rows:
        played = replayed(cells[row["cell"]], find_gpu(GPU))
        found.append(
            row
            | {
                "allocated_replayed_bytes": str(played.allocated_bytes),
                "reserved_replayed_bytes": str(played.reserved_bytes),
            }
        )
    return sorted(found, key=lambda row: (row["sharding"], row["cell"]))


def off_percent(row: Row, tier: str) -> float:
    """How far the replay is off."""
    return 100 * (int(row[f"{tier}_replayed_bytes"]) / int(row[f"{tier}_emulated_bytes"]) - 1)


def page(rows: Sequence[Row]) -> str:
    """How far off by kind of sharding, then cell by cell."""
    shown = []
    for sharding in [*sorted({row["sharding"] for row in rows}), None]:
        own = [row for row in rows if sharding in (None, row["sharding"])]
        off = {tier: [off_percent(row, tier) for row in own] for tier in TIERS}
        exact = len([one for one in off["reserved"] if one == 0])
        allocated = _shown(off["allocated"]) if sharding != "zero3" else "by arithmetic"
        if sharding is None:
            allocated = _shown([off_percent(row, "allocated") for row in own if row["sharding"] != "zero3"])
        name = sharding or "**all**"
        shown.append([name, len(own), exact, _shown(off["reserved"]), allocated])
    head = ["sharding", "ranks", "reserved: to the byte", "mean, worst", "allocated: mean, worst"]
    cells = [
        [row["cell"], f"{int(row['reserved_emulated_bytes']):,}", f"{off_percent(row, 'reserved'):+.3f} %"]
        for row in rows
    ]
    lines = [*as_markdown(head, "lrrrr", shown), "", "## Rank by rank", ""]
    lines += as_markdown(["cell", "reserved, emulated", "replayed"], "lrr", cells)
    return HEAD + "\n".join(lines) + "\n"


def _shown(off: Sequence[float]) -> str:
    return f"{statistics.fmean(map(abs, off)):.3f} %, {max(off, key=abs):+.3f} %"


def main() -> None:
    cells = {spec.cell_id: spec for spec in load_sweep(FOLDER / "ranks.yaml", device="cuda").cells}
    words = set(sys.argv[1:])
    anew = [] if "--check" in words else emulated(cells.values())
    rows = [row for row in read_csv(TABLE) if row["cell"] not in {row["cell"] for row in anew}]
    rows = with_replay(rows + anew, cells)
    made = {TABLE: as_csv(rows, FIELDS), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "ranks/ranks_replayed.py", check="--check" in words)


if __name__ == "__main__":
    main()
