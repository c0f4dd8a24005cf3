"""The field's other programs: ``python benchmarks/frameworks/programs.py FOLDER [--only PROGRAM ...]``.

FOLDER has what each command is started from: ``venv`` (torch 2.13.0 without NVIDIA's packages, torchvision,
ultralytics, timm, diffusers, lerobot, wandb, rustbpe, tiktoken), clones of ``examples`` (pytorch/examples), ``timm``,
``diffusers``, ``nanochat`` and ``openfold``, ``classification`` (torchvision 0.14.1's references), and the data that
programs_inputs.py makes. Each runs under ``vramprobe profile --emulate GPU --empty-weights``, some minutes. Written:
programs.csv and .md; ``--only`` runs these alone and keeps the others' rows; ``--check`` compares page and csv.
Emulated: nothing was measured here.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check

TABLE = Path(__file__).resolve().with_suffix(".csv")


class Run(NamedTuple):
    """A command from FOLDER, and what others published of it."""

    program: str
    gpu: str
    command: str
    published: str = ""


RUNS = [Run(**one) for one in tomllib.loads(TABLE.with_suffix(".toml").read_text())["run"]]


def run(one: Run, folder: Path) -> dict[str, str]:
    """One row."""
    command = one.command.replace("{runs}", str(TABLE.parent / "runs"))
    began = time.monotonic()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = ["--emulate", one.gpu, "--empty-weights"]
    record = journal.profiled(options, shlex.split(command), cwd=folder, environment={"PATH": path})
    highest = max(record["ranks"], key=lambda rank: rank["peak"]["allocated_bytes"])
    step = record["step_time"]
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
    }


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""

    def mib(row: dict[str, str], name: str) -> str:
        return f"{int(row[name]) / 2**20:,.0f}" if row[name] else "–"

    lines = [
        [
            row["program"],
            row["gpu"],
            row["steps"],
            row["phase"],
            mib(row, "allocated_bytes"),
            mib(row, "reserved_bytes"),
            f"{float(row['step_seconds']) * 1e3:.1f}" if row["step_seconds"] else "–",
            mib(row, "host_bytes"),
            row["seconds"],
            row["published"] or "–",
        ]
        for row in rows
    ]
    columns = [
        "program",
        "GPU",
        "steps",
        "peak in",
        "allocated, MiB",
        "reserved, MiB",
        "step, ms",
        "host, MiB",
        "took, s",
    ]
    table = as_markdown([*columns, "published"], "llrlrrrrrl", lines)
    commands = [f"- {row['program']}: `{row['command']}`" for row in rows]
    return filled(TABLE.with_suffix(".md"), table=table, commands=commands)


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
