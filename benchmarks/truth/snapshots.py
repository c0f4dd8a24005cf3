"""Memory snapshots of real GPUs from public repositories: ``python benchmarks/truth/snapshots.py`` writes snapshots.md.

The files are not kept here: they are large, and most of their repositories have no licence. The script reads them from
clones in the folder that is its argument: ``git clone https://github.com/OWNER/NAME FOLDER/OWNER+NAME`` for each.
``explain`` and the viewer of PyTorch (``torch.cuda._memory_viz``) read each; their totals are compared. It needs torch,
no GPU. Without an argument it rebuilds the page from snapshots.csv; ``--check`` writes nothing.
"""

import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_table, filled, read_csv, write_or_check
from vramprobe.explain.report import report_of
from vramprobe.explain.snapshot import load_plain, states_of
from vramprobe.units import format_bytes

TABLE = Path(__file__).with_suffix(".csv")


class Source(NamedTuple):
    """One file of a public repository: a row of snapshots.csv, where a new one needs its other columns empty."""

    repository: str
    commit: str
    licence: str  # as its LICENSE says; empty without one: not to be copied
    path: str


def sources() -> list[Source]:
    """The files that snapshots.csv has."""
    return [Source(*(row[name] for name in Source._fields)) for row in read_csv(TABLE)]


def contents(source: Source, clones: Path) -> bytes:
    """The file at its commit."""
    folder = clones / source.repository.replace("/", "+")
    found = next((one for one in (folder / "repo", folder) if one.is_dir()), folder)  # a mirror, or a clone
    shown = ["git", "-C", str(found), "show", f"{source.commit}:{source.path}"]
    return subprocess.run(shown, capture_output=True, check=True).stdout


def torch_totals(snapshot: Mapping[str, Any]) -> tuple[int, int]:
    """Reserved and allocated bytes of the first GPU, as PyTorch's viewer counts them."""
    from torch.cuda import _memory_viz as viewer

    device = min(segment.get("device", 0) for segment in snapshot["segments"])
    segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
    return sum(segment["total_size"] for segment in segments), sum(map(viewer.calc_active, segments))


def compared(source: Source, content: bytes) -> dict[str, Any]:
    """One snapshot by ``explain`` and by torch."""
    snapshot = load_plain(io.BytesIO(content))  # runs no code of the file
    state = states_of(snapshot)[0]
    reserved, allocated = torch_totals({"segments": snapshot} if isinstance(snapshot, list) else snapshot)
    report = report_of(io.BytesIO(content))
    return {
        **source._asdict(),
        "file_bytes": len(content),
        "num_entries": state.peak.num_entries if state.peak else 0,
        "num_live_blocks": state.num_blocks,
        "allocated_bytes": state.oom.allocated,
        "torch_allocated_bytes": allocated,
        "reserved_bytes": state.oom.reserved,
        "torch_reserved_bytes": reserved,
        "highest_requested_bytes": state.peak.requested if state.peak else "",
        "failed_request_bytes": "" if state.oom.requested is None else state.oom.requested,
        "largest_line": report.lines[0][0] if report.lines else "",
        "largest_line_bytes": report.lines[0][1] if report.lines else "",
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    equal = [
        row
        for row in rows
        if all(str(row[f"{tier}_bytes"]) == str(row[f"torch_{tier}_bytes"]) for tier in ("allocated", "reserved"))
    ]
    table = [
        {
            "snapshot": f"{row['repository']} {row['path']}",
            "licence": row["licence"] or "none",
            "size, kB": f"{int(row['file_bytes']) / 1000:,.0f}",
            "entries": f"{int(row['num_entries']):,}",
            "live blocks": f"{int(row['num_live_blocks']):,}",
            "allocated": _shown(row["allocated_bytes"]),
            "reserved": _shown(row["reserved_bytes"]),
            "highest": _shown(row["highest_requested_bytes"]),
            "line": f"{_shown(row['largest_line_bytes'])} {row['largest_line']}",
        }
        for row in rows
    ]
    return filled(
        TABLE.with_suffix(".md"),
        rows=len(rows),
        repositories=len({row["repository"] for row in rows}),
        equal=len(equal),
        failed=sum(row["failed_request_bytes"] != "" for row in rows) or "None",
        table=as_table(table, "llrrrrrrl"),
    )


def _shown(size: Any) -> str:
    return "–" if size == "" else format_bytes(int(size))


def main() -> None:
    given = [word for word in sys.argv[1:] if word != "--check"]
    rows = [compared(one, contents(one, Path(given[0]))) for one in sources()] if given else read_csv(TABLE)
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): markdown(rows)}
    write_or_check(made, "truth/snapshots.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
