"""``vramprobe launch``: a sweep on rented GPUs by SkyPilot: what it costs, the task of each GPU, then managed jobs.

In: a sweep, GPUs, a bucket. Out: the plan and the tasks' files; without --dry-run SkyPilot starts them.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.cli.options import Json, SweepFile, print_json
from vramprobe.errors import MissingDependency, VramprobeError

if TYPE_CHECKING:
    from vramprobe.sweep.launch import Task


def launch(
    sweep: SweepFile,
    gpu: Annotated[str, typer.Option(help="GPUs of `vramprobe gpus`, a job each: H100-SXM or H100-SXM,RTX-4090.")],
    bucket: Annotated[
        str, typer.Option(help="A bucket for the records, uploaded while the sweep runs: NAME, s3://NAME, gs://NAME.")
    ],
    spot: Annotated[
        bool, typer.Option("--spot", help="Rent spot machines; a preempted job goes on elsewhere.")
    ] = False,
    provider: Annotated[
        str | None, typer.Option(help="A cloud of SkyPilot, such as runpod (default: its cheapest).")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="US dollars for all jobs together.")] = None,
    price: Annotated[
        float | None, typer.Option(help="US dollars per GPU hour (default: the catalog's cheapest on-demand price).")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the tasks' files.")] = Path("out/launch"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan and write the files; rent nothing.")] = False,
    json_output: Json = False,
) -> None:
    """Run a sweep on rented GPUs by SkyPilot, a managed job per GPU; show the plan and write the tasks first."""
    from vramprobe import api

    found, files = api.launch_tasks(
        sweep, gpu.split(","), bucket=bucket, spot=spot, provider=provider, budget=budget, usd_per_hour=price, out=out
    )
    from vramprobe.sweep.launch import command

    commands = [command(file) for file in files]
    if json_output:
        print_json([_as_json(task, file, words) for task, file, words in zip(found, files, commands, strict=True)])
    else:
        _print(found, files, commands)
    if dry_run:
        return
    if shutil.which("sky") is None:
        raise MissingDependency("starting the jobs needs SkyPilot's command: pip install 'vramprobe[cloud]'")
    for words in commands:
        if (status := subprocess.run(words).returncode) != 0:
            raise VramprobeError(f"`{shlex.join(words)}` ended with {status}; jobs before it go on (`sky jobs queue`)")


def _as_json(task: Task, file: Path, words: list[str]) -> dict[str, Any]:
    plan = task.plan
    return {
        "gpu": task.gpu,
        "cells": len(plan.to_run),
        "expected_seconds": round(plan.seconds, 1),
        "expected_dollars": plan.dollars and round(plan.dollars, 4),
        "budget": task.budget,
        "file": str(file),
        "command": words,
    }


def _print(found: list[Task], files: list[Path], commands: list[list[str]]) -> None:
    from vramprobe.cli.display_plan import plan_in_words

    for task, file, words in zip(found, files, commands, strict=True):
        print(plan_in_words(task.plan))
        limit = "" if task.budget is None else f"; stops before ${task.budget:.2f}"
        print(f"→ {file}{limit}\n  {shlex.join(words)}")
    print("not counted: starting the machine and installing, 5 to 15 minutes of each job (an assumption)")
