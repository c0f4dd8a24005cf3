"""``vramprobe plan`` and ``vramprobe run``: a sweep before it costs anything, and the sweep itself.

In: a sweep file and the options of a sweep. Out: the plan, or progress and a summary, as text or JSON.
"""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.catalog.sweeps import list_sweeps
from vramprobe.cli.emulate import enter_emulated
from vramprobe.cli.options import Emulate, Json, Timeout, print_json, takes_a_sweep
from vramprobe.errors import SpecError
from vramprobe.units import parse_duration

if TYPE_CHECKING:
    from vramprobe.sweep.plan import Plan

SweepFile = Annotated[
    str, typer.Argument(help=f"A sweep file, or the name of one that ships: {', '.join(list_sweeps())}.")
]


@takes_a_sweep
def plan(
    sweep: SweepFile,
    job: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU of `vramprobe gpus`; it need not be here.")] = None,
    emulate: Emulate = None,
    json_output: Json = False,
) -> None:
    """Show what a sweep or a campaign would run and cost: cells, predicted peaks, what fits, minutes, dollars."""
    from vramprobe import api

    if emulate is not None and gpu is not None:
        raise SpecError(f"--emulate {emulate} and --gpu {gpu} both name the GPU to plan for; drop one of them")
    enter_emulated(emulate, job["device"])
    from vramprobe.sweep.campaign import Campaign, campaign_or_sweep

    asked = campaign_or_sweep(sweep)
    if isinstance(asked, Campaign):
        from vramprobe.cli import campaigns  # loads records

        campaigns.plan(asked, job | {"gpu": gpu}, as_json=json_output)
        return
    _show_plan(api.plan(asked, gpu=gpu, **job), as_json=json_output)


def _show_plan(planned: Plan, *, as_json: bool) -> None:
    from vramprobe.cli import display_plan

    if as_json:
        print_json(display_plan.plan_as_json(planned, with_cells=True))
    else:
        display_plan.print_plan(planned)


@takes_a_sweep
def run(
    sweep: SweepFile,
    job: dict[str, Any],
    timeout: Timeout = None,
    max_time: Annotated[
        str | None,
        typer.Option(help="Start no cell that would end after this time, for example 9m; run again to continue."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Start no cell that would spend more than this many US dollars.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Run at most this many cells.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only plan, as `vramprobe plan` does.")] = False,
    on: Annotated[
        str,
        typer.Option(
            help="Where cells run: here | ray (this machine's cluster, or a new one) | ray://HOST:PORT | slurm."
        ),
    ] = "here",
    jobs: Annotated[int | None, typer.Option(help="Cells at once with --on slurm (default 16).")] = None,
    gpu: Annotated[str | None, typer.Option(help="With --on: use the nodes with this GPU of `vramprobe gpus`.")] = None,
    emulate: Emulate = None,
    json_output: Json = False,
) -> None:
    """Run a sweep or a campaign, each cell in its own process; run it again to resume."""
    from vramprobe import api
    from vramprobe.cli import live

    for name, given in (("on", None if on == "here" else on), ("jobs", jobs), ("gpu", gpu)):
        if dry_run and given is not None:
            raise SpecError(
                f"--dry-run plans for this machine; drop --{name} {given}, or use `vramprobe plan --gpu GPU`"
            )
    where: dict[str, Any] = {"on": on, "jobs": jobs, "gpu": gpu}
    if on == "here":
        enter_emulated(emulate, job["device"])
    else:
        where["emulate"] = emulate
    from vramprobe.sweep.campaign import Campaign, campaign_or_sweep
    from vramprobe.sweep.limits import limits as check_limits

    limits = {
        "timeout_seconds": timeout,
        "max_seconds": math.inf if max_time is None else parse_duration(max_time),
        "max_dollars": budget,
        "max_cells": limit,
    }
    asked = campaign_or_sweep(sweep)
    if isinstance(asked, Campaign):
        from vramprobe.cli import campaigns  # loads records

        campaigns.run(asked, job | where, limits, dry_run=dry_run, as_json=json_output)
        return
    if dry_run:
        planned = api.plan(asked, **job)
        check_limits(planned.rate, **limits)
        _show_plan(planned, as_json=json_output)
        return
    with live.sweep_progress(as_json=json_output) as on_event:
        summary = api.run(asked, **job, **where, **limits, on_event=on_event)
    live.print_summary(summary, as_json=json_output)
    if summary.stopped_by in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[summary.stopped_by])
    raise typer.Exit(1 if summary.failed() else 0)
