"""The field's other programs: ``python benchmarks/frameworks/programs.py FOLDER [--only PROGRAM ...]``.

Each command of programs.toml runs in FOLDER under ``vramprobe profile --emulate GPU --empty-weights``, some minutes.
FOLDER has what it is started from: ``venv`` (torch 2.13.0 without NVIDIA's packages, torchvision, ultralytics, timm,
diffusers, lerobot, wandb, rustbpe, tiktoken, num2words), clones of ``examples`` (pytorch/examples), ``timm``,
``diffusers``, ``nanochat`` and ``openfold``, ``classification`` (torchvision 0.14.1's references), and the data that
programs.md names. Written: programs.csv and .md; ``--only`` runs these alone and keeps the others' rows; ``--check``
compares page and csv. Emulated: nothing was measured here.
"""

import os
import shlex
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from vramprobe.units import MIB

TABLE = Path(__file__).resolve().with_suffix(".csv")


class Run(NamedTuple):
    """A command from FOLDER, and what others published of it."""

    program: str
    gpu: str
    command: str
    published: str = ""
    kind: str = "program"
    options: str = ""
    as_images: dict[str, Any] | None = None


RUNS = [Run(**one) for one in tomllib.loads(TABLE.with_suffix(".toml").read_text())["run"]]


def run(one: Run, folder: Path) -> dict[str, str]:
    """One row."""
    command = one.command.replace("{runs}", str(TABLE.parent / "runs"))
    began = time.monotonic()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = ["--emulate", one.gpu, "--empty-weights", *shlex.split(one.options)]
    record = journal.profiled(options, shlex.split(command), cwd=folder, environment={"PATH": path})
    highest = max(record["ranks"], key=lambda rank: rank["peak"]["allocated_bytes"])
    step, tokens = record["step_time"], [said["by"] for said in record["replaced"] if said["kind"] == "video tokens"]
    return {
        "program": one.program,
        "gpu": one.gpu,
        "command": one.command,
        "ended": record["outcome"]["kind"],
        "steps": str(highest["num_steps"]),
        "phase": highest["peak"]["phase"],
        "allocated_bytes": str(highest["peak"]["allocated_bytes"]),
        "reserved_bytes": str(highest["peak"]["reserved_bytes"]),
        "step_seconds": f"{step['seconds']:.4f}" if step else "",
        "host_bytes": str((record["host"] or {}).get("peak_bytes", "")),
        "seconds": f"{time.monotonic() - began:.0f}",
        "published": one.published,
        "kind": one.kind,
        "options": one.options,
        "tokens": tokens[0].split()[0].replace(",", "") if tokens else "",
    }


def page(rows: Sequence[dict[str, str]]) -> str:
    """The page of these rows."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("program", "speech", "video")}
    lines = [
        f"- {one['program']}: `{one['command']}`" + (f", profiled with `{one['options']}`" if one["options"] else "")
        for one in rows
    ]
    return filled(TABLE.with_suffix(".md"), **{kind: _table(own) for kind, own in kinds.items()}, commands=lines)


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """The columns that some row has."""

    def mib(name: str) -> list[str]:
        return [f"{int(row[name]) / MIB:,.0f}" if row[name] else "" for row in rows]

    columns = {
        "program": [row["program"] for row in rows],
        "GPU": [row["gpu"] for row in rows],
        "steps": [row["steps"] for row in rows],
        "peak in": [row["phase"] for row in rows],
        "allocated, MiB": mib("allocated_bytes"),
        "reserved, MiB": mib("reserved_bytes"),
        "step, ms": [f"{float(row['step_seconds']) * 1e3:.1f}" if row["step_seconds"] else "" for row in rows],
        "host, MiB": mib("host_bytes"),
        "took, s": [row["seconds"] for row in rows],
        "published": [row["published"] for row in rows],
        "tokens of a video": [f"{int(row['tokens']):,}" if row["tokens"] else "" for row in rows],
    }
    head = [name for name, column in columns.items() if any(column)]
    align = "".join("l" if name in ("program", "GPU", "peak in", "published") else "r" for name in head)
    lines = [[columns[name][at] or "–" for name in head] for at in range(len(rows))]
    return as_markdown(head, align, lines)


def main() -> None:
    check = "--check" in sys.argv
    rows = read_csv(TABLE)
    if not check:
        folder, only = Path(sys.argv[1]).resolve(), sys.argv[3:]
        kept = {row["program"]: row for row in rows} if only else {}
        kept |= {one.program: run(one, folder) for one in RUNS if not only or one.program in only}
        rows = [kept[one.program] for one in RUNS if one.program in kept]
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "frameworks/programs.py FOLDER", check=check)


if __name__ == "__main__":
    main()
