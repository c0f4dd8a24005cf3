"""``vramprobe launch``, ``status`` and ``collect``: sweeps and commands on rented GPUs by SkyPilot.

In: a sweep or a command, GPUs, a bucket. Out: what it costs, the tasks' files, managed jobs; then what became of them.
"""

from __future__ import annotations

import inspect
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.cli.modes import require_read
from vramprobe.cli.options import Json, print_json
from vramprobe.errors import MissingDependency, SpecError, VramprobeError

if TYPE_CHECKING:
    from vramprobe.sweep.launch import Task
    from vramprobe.sweep.launch_command import CommandTask
    from vramprobe.sweep.rented import Rented

Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder of the launch: the tasks' files, then the records.")]
_FOLDER = Path("out/launch")
#: A sweep does not read these.
_OF_A_COMMAND = ("predicted", "first_steps", "max_growth", "max_slowdown")


def launch(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A sweep file, the name of one that ships, or a training command after --.", metavar="SWEEP"
        ),
    ],
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
    budget: Annotated[float | None, typer.Option(help="US dollars for all jobs of a sweep together.")] = None,
    price: Annotated[
        float | None, typer.Option(help="US dollars per GPU hour (default: the catalog's cheapest on-demand price).")
    ] = None,
    predicted: Annotated[
        Path | None,
        typer.Option(help="Of a command: the .jsonl file of its profile with --emulate GPU, which must hold there."),
    ] = None,
    first_steps: Annotated[int, typer.Option(min=5, help="Of a command: steps to measure before it goes on.")] = 10,
    max_growth: Annotated[
        str, typer.Option(help="Of a command: stop if its peak is larger than predicted by more than this.")
    ] = "5%",
    max_slowdown: Annotated[
        float, typer.Option(min=0, help="Of a command: stop if a step takes more than so many times its prediction.")
    ] = 1.5,
    out: Folder = _FOLDER,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan and write the files; rent nothing.")] = False,
    json_output: Json = False,
) -> None:
    """Run a sweep or a command on rented GPUs by SkyPilot, a managed job per GPU; show the plan and the tasks first."""
    from vramprobe import api
    from vramprobe.sweep.launch import command

    of_a_sweep = [name for name in inspect.signature(launch).parameters if name not in _OF_A_COMMAND]
    of_a_command = [name for name in inspect.signature(launch).parameters if name != "budget"]
    if predicted is not None:
        require_read(launch, locals(), of_a_command, "a command", {"a sweep": of_a_sweep})
    else:
        require_read(launch, locals(), of_a_sweep, "a sweep", {"a command, with --predicted": of_a_command})
    words: dict[str, Any] = {"bucket": bucket, "spot": spot, "provider": provider, "usd_per_hour": price, "out": out}
    if predicted is not None:
        held = {"steps": first_steps, "max_growth": max_growth, "max_slowdown": max_slowdown}
        task, file = api.launch_command(what, gpu, predicted=predicted, **held, **words)
        found, files = [task], [file]
    else:
        found, files = api.launch_tasks(_sweep(what, gpu), gpu.split(","), budget=budget, **words)
    commands = [command(file) for file in files]
    if json_output:
        print_json([_as_json(task, file, words) for task, file, words in zip(found, files, commands, strict=True)])
    else:
        for task, file, started in zip(found, files, commands, strict=True):
            print(f"{_in_words(task)}\n→ {file}{_limit(task)}\n  {shlex.join(started)}")
        print("not counted: starting the machine and installing, 5 to 15 minutes of each job (an assumption)")
    if not dry_run:
        _start(commands)


def status(folder: Folder = _FOLDER, json_output: Json = False) -> None:
    """Show the jobs of a launch, as SkyPilot tells: time and dollars beside what was planned."""
    from vramprobe.sweep.rented import status as told

    _show(told(folder), as_json=json_output)


def collect(
    folder: Folder = _FOLDER,
    copy: Annotated[
        bool, typer.Option("--copy/--no-copy", help="Copy what is new in the bucket first (aws or gcloud).")
    ] = True,
    json_output: Json = False,
) -> None:
    """Bring the records of a launch here, and show what each job came to and cost beside its plan."""
    from vramprobe.records import store
    from vramprobe.records.profile import read_profiles
    from vramprobe.sweep import rented

    into = rented.collect(folder) if copy else folder / rented.RECORDS
    counts = Counter(record.outcome.kind for record in store.read(into, allow_empty=True).records)
    profiles = [one.name for one in read_profiles(into)]
    jobs = rented.status(folder)
    if json_output:
        jobs_said = [asdict(job) for job in jobs]
        print_json({"folder": str(into), "outcomes": counts, "profiles": profiles, "jobs": jobs_said})
        return
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no record of a cell"
    print(f"{said}; {len(profiles)} profiles of commands → {into}")
    _show(jobs, as_json=False)


def _sweep(what: Sequence[str], gpu: str) -> str:
    if len(what) > 1:
        raise SpecError(
            f"{shlex.join(what)} is a command: predict it first, by vramprobe profile --emulate {gpu} --empty-weights "
            "--save FILE -- COMMAND, and give that as --predicted FILE"
        )
    return what[0]


def _start(commands: list[list[str]]) -> None:
    if shutil.which("sky") is None:
        raise MissingDependency("starting the jobs needs SkyPilot's command: pip install 'vramprobe[cloud]'")
    for words in commands:
        if (code := subprocess.run(words).returncode) != 0:
            raise VramprobeError(f"`{shlex.join(words)}` ended with {code}; jobs before it go on (`sky jobs queue`)")


def _as_json(task: Task | CommandTask, file: Path, words: list[str]) -> dict[str, Any]:
    from vramprobe.sweep.launch import Task

    said = {"gpu": task.gpu, "file": str(file), "command": words}
    if isinstance(task, Task):
        plan = task.plan
        return said | {
            "cells": len(plan.to_run),
            "expected_seconds": round(plan.seconds, 1),
            "expected_dollars": plan.dollars and round(plan.dollars, 4),
            "budget": task.budget,
        }
    return said | {
        "num_gpus": task.num_gpus,
        "first_steps": task.steps,
        "predicted_bytes": task.predicted_bytes,
        "predicted_step_seconds": task.predicted_step_seconds,
        "usd_per_1000_steps": task.usd_per_1000_steps and round(task.usd_per_1000_steps, 4),
    }


def _in_words(task: Task | CommandTask) -> str:
    from vramprobe.cli.display_plan import plan_in_words
    from vramprobe.sweep.launch import Task
    from vramprobe.units import format_bytes, short_seconds

    if isinstance(task, Task):
        return plan_in_words(task.plan)
    seconds, dollars = task.predicted_step_seconds, task.usd_per_1000_steps
    text = f"{task.num_gpus} × {task.gpu}: {format_bytes(task.predicted_bytes)} allocated"
    text += ", no step time" if seconds is None else f", {short_seconds(seconds)} a step"
    text += "" if dollars is None else f", ${dollars:.2f} per 1,000 steps"
    return f"{text}, predicted; {task.steps} steps are measured there first, and the command goes on if that holds"


def _limit(task: Task | CommandTask) -> str:
    from vramprobe.sweep.launch import Task

    return f"; stops before ${task.budget:.2f}" if isinstance(task, Task) and task.budget is not None else ""


def _show(jobs: list[Rented], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(job) for job in jobs])
        return
    from vramprobe.report.formats import terminal
    from vramprobe.units import format_seconds

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    def dollars(value: float | None) -> str:
        return "-" if value is None else f"${value:.2f}"

    rows = []
    for job in jobs:
        times = seconds(job.seconds), seconds(job.planned_seconds)
        costs = dollars(job.dollars), dollars(job.planned_dollars), dollars(job.billed)
        rows.append((job.name, job.status or "not started", *times, *costs, str(job.num_recoveries)))
    at_price = ("at the planned price", "planned", "SkyPilot's bill")
    titles = ("job", "status", "time", "planned", *at_price, "preempted")
    terminal.show_whole(titles, rows, left=titles[:2])
