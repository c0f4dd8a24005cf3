"""A campaign as ``vramprobe plan`` and ``vramprobe run`` show it: stage after stage, what each came to, what is left.

In: a campaign file and the options of a sweep. Out: plans, progress and results, as text or JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from vramprobe.cli import display_plan, live
from vramprobe.report.formats import terminal
from vramprobe.units import format_seconds

if TYPE_CHECKING:
    from vramprobe.sweep.boundary import Boundary
    from vramprobe.sweep.campaign import Campaign
    from vramprobe.sweep.progress import Progress
    from vramprobe.sweep.stages import StageResult


def plan(campaign: Campaign, words: dict[str, Any], *, as_json: bool) -> None:
    """Each stage's plan, and all of them in sum; a boundary's is its first round."""
    from vramprobe import api

    plans = api.plan_campaign(campaign, **words)
    for name, planned in plans.items():
        if as_json:
            print(json.dumps({"stage": name} | display_plan.plan_as_json(planned, with_cells=True)))
        else:
            print(f"stage {name}")
            display_plan.print_plan(planned)
    if as_json:
        return
    seconds = sum(one.seconds for one in plans.values())
    priced = [dollars for one in plans.values() if (dollars := one.dollars) is not None]
    cost = f", ${sum(priced):.2f}" if len(priced) == len(plans) else ""
    print(
        f"{len(plans)} stages with cells: about {format_seconds(seconds)}{cost}, estimated; a boundary takes at least "
        "one cell more, and up to about ten where its prediction is off"
    )


def run(campaign: Campaign, words: dict[str, Any], limits: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Run what is left of each stage; with ``dry_run`` only plan. Exits as a sweep does."""
    from vramprobe import api

    if dry_run:
        plan(campaign, {name: value for name, value in words.items() if name not in ("on", "jobs")}, as_json=as_json)
        return
    with contextlib.ExitStack() as stack:

        def on_stage(name: str) -> Callable[[Progress], None]:
            stack.close()  # what showed the stage before
            if not as_json:
                Console(stderr=True, highlight=False).print(f"stage {name}", style="bold")
            return stack.enter_context(live.sweep_progress(as_json=as_json))

        def on_result(result: StageResult) -> None:
            stack.close()
            show(result, as_json=as_json)

        results = api.campaign(campaign, **words, **limits, on_stage=on_stage, on_result=on_result)
    stopped_by = results[-1].stopped_by
    if stopped_by in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[stopped_by])
    raise typer.Exit(1 if any(one.summary and one.summary.failed() for one in results) else 0)


def show(result: StageResult, *, as_json: bool) -> None:
    """Print the results of a stage."""
    if as_json:
        print(json.dumps(result_as_json(result)), flush=True)
        return
    if result.summary is not None:
        live.print_summary(result.summary, as_json=False)
    if result.fit is not None:
        print(f"stage {result.name}: a fit of {result.fit.num_records} records ({result.fit.data_fingerprint})")
    elif result.summary is None:
        print(f"stage {result.name}: no fit, as no record was measured on a GPU")
    if (error := result.mean_absolute_error) is not None:
        print(
            f"stage {result.name}: predicted before it ran: {100 * error:.2f} % mean absolute "
            f"error, {result.inside} of {len(result.errors)} inside their interval"
        )
    if result.boundaries:
        _print_boundaries(result.boundaries)


def result_as_json(result: StageResult) -> dict[str, Any]:
    """Return a stage's results for JSON.

    - ``kind``, ``stage``, ``stopped_by``: stage, its name, the signal or limit that ended it
    - ``summary``: of its sweep, as a sweep's summary; null of a fit
    - ``fit``: the data that it was fitted to; null of a sweep
    - ``errors``, ``inside``: predicted less measured, over measured, by cell; how many lay in their interval
    - ``boundaries``: cell, question, likely (predicted), runs, fails, is_exact, why there is no exact answer
    """
    return {
        "kind": "stage",
        "stage": result.name,
        "stopped_by": result.stopped_by,
        "summary": result.summary and live.summary_as_json(result.summary),
        "fit": result.fit and result.fit.data_fingerprint,
        "errors": result.errors,
        "inside": result.inside,
        "boundaries": [
            {
                "cell_id": one.spec.cell_id,
                "question": one.question,
                "likely": one.step * one.predicted.likely,
                "runs": one.runs,
                "fails": one.fails,
                "is_exact": one.is_exact,
                "why": one.why,
            }
            for one in result.boundaries
        ],
    }


def _print_boundaries(boundaries: list[Boundary]) -> None:
    rows = []
    for one in boundaries:
        known = [str(value) if value is not None else "-" for value in (one.runs, one.fails)]
        rows.append((str(one.step * one.predicted.likely), *known, one.spec.cell_id, one.why))
    print(f"the largest {boundaries[0].question}:")
    titles = ("predicted", "runs", "out of memory", "cell, smallest", "")
    terminal.show_whole(titles, rows, left=titles[3:])
