"""Write vramprobe/data/roles.csv: what every published row is used for. ``--check`` says whether it is current.

A row of a table of published figures is *fitted to* by a model of ours, *held out* from it, or *shown*: compared on a
page, fitted to by nothing that the comparison tests. A row with no such use is *listed*. The lines are those of the
file, whose header is line 1. Read from the benchmarks' own tables, so that a page and the manifest cannot differ.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import as_csv, read_csv, write_or_check

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "vramprobe" / "data" / "roles.csv"
Row = dict[str, str]


class Use(NamedTuple):
    """One use of a table's rows; ``lines`` are its own."""

    table: str
    use: str
    role: str
    lines: set[int]
    page: str


def uses() -> list[Use]:
    """Every use of published rows, without those that nothing uses."""
    memory, speed = "vramprobe/data/published.csv", "vramprobe/data/published_speed.csv"
    again = [row for row in _rows("benchmarks/truth/reproduce.csv") if row["outcome"] == "ok"]
    context = [row for row in again if _shows_context(row)]
    later = _lines_of("benchmarks/speed/counted_later.csv")
    counted = _lines_of("benchmarks/speed/counted_steps.csv")  # those without a line are of another commit's file
    later -= counted  # three lines were counted twice, once for the fit
    serving, t4 = "benchmarks/rollouts/published_vllm.csv", "benchmarks/truth/t4_published.csv"
    halves = {int(row["row"]): row["half"] for row in _rows("benchmarks/rollouts/serving.csv")}
    return [
        Use(memory, "runs repeated by emulation", "shown", _numbers(again), "benchmarks/truth/reproduce.md"),
        Use(
            memory, "predictions", "shown", _lines_of("benchmarks/truth/published.csv"), "benchmarks/truth/published.md"
        ),
        Use(memory, "context of an A100", "fitted to", _numbers(context), "benchmarks/truth/contexts.md"),
        Use(speed, "step times by count", "fitted to", counted, "benchmarks/speed/counted_steps.md"),
        Use(speed, "step times by count", "held out", later, "benchmarks/speed/counted_later.md"),
        Use(
            "vramprobe/data/contexts.csv",
            "contexts by card",
            "fitted to",
            _where("vramprobe/data/contexts.csv", lambda row: True),
            "benchmarks/truth/contexts.md",
        ),
        *(
            Use(
                serving,
                "serving charges",
                "fitted to" if half == "learnt from" else half,
                _where(serving, lambda row, half=half: halves.get(int(row["row"])) == half),
                "benchmarks/rollouts/serving.md",
            )
            for half in ("learnt from", "held out")
        ),
        Use(t4, "emulation and prediction of a T4", "shown", _where(t4, _completed), "benchmarks/truth/t4.md"),
        Use(t4, "context of a T4", "fitted to", _where(t4, _completed), "benchmarks/truth/contexts.md"),
        Use(
            "benchmarks/truth/oom.csv",
            "explanations of errors",
            "shown",
            _where("benchmarks/truth/oom.csv", lambda row: True),
            "benchmarks/truth/oom.md",
        ),
    ]


def manifest() -> list[Row]:
    """The manifest's rows: each use, and for each table what nothing uses."""
    found = uses()
    for table in dict.fromkeys(one.table for one in found):
        used = set().union(*(one.lines for one in found if one.table == table))
        if rest := _where(table, lambda row: True) - used:
            found.append(Use(table, "", "listed", rest, ""))
    return [
        {
            "table": one.table,
            "use": one.use,
            "role": one.role,
            "number": str(len(one.lines)),
            "lines": ranges(one.lines),
            "page": one.page,
        }
        for one in found
    ]


def ranges(lines: Iterable[int]) -> str:
    """``2-5 7``: the numbers, ascending, those in a row joined."""
    runs: list[list[int]] = []
    for line in sorted(lines):
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _rows(path: str) -> list[Row]:
    return read_csv(ROOT / path)


def _lines_of(path: str) -> set[int]:
    return _numbers(_rows(path))


def _numbers(rows: Iterable[Row]) -> set[int]:
    return {int(row["line"]) for row in rows if row["line"]}


def _where(path: str, is_meant: Callable[[Row], bool]) -> set[int]:
    return {line for line, row in enumerate(_rows(path), start=2) if is_meant(row)}


def _shows_context(row: Row) -> bool:
    """Return True for the runs on one GPU whose nvidia-smi figure less reserved memory is a row of contexts.csv."""
    has_both = row["nvidia_smi_bytes"] and row["reserved_emulated_bytes"]
    return bool(row["num_gpus"] == "1" and has_both and row["stack"] != "fms-2025-02")


def _completed(row: Row) -> bool:
    return bool(row["allocated_mib"])


if __name__ == "__main__":
    write_or_check({MANIFEST: as_csv(manifest())}, "../tools/roles.py", check="--check" in sys.argv)
