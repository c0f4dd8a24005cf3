"""A sweep or a campaign, planned or run, as the command line and Python ask for it.

In: a file, and what is asked of it. Out: a Plan, a RunSummary, or those of a campaign's stages. Loads no torch;
``vramprobe.api`` offers these functions.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.emulate import require_emulated
from vramprobe.errors import SpecError
from vramprobe.sweep.jobs import Job, Load, PlanEngine, job_of

if TYPE_CHECKING:
    from vramprobe.model.card_fit import CardFit
    from vramprobe.sweep.campaign import Campaign
    from vramprobe.sweep.definition import Sweep
    from vramprobe.sweep.fleet import Fleet
    from vramprobe.sweep.on_data import Data
    from vramprobe.sweep.plan import Plan, SweepPolicy
    from vramprobe.sweep.progress import Progress, RunSummary
    from vramprobe.sweep.stages import StageResult


def plan(
    path: str | Path | Load,
    *,
    choose: Callable[[Job], Sweep] = lambda job: job.sweep,
    out: str | Path | None = None,
    device: str = "auto",
    gpu: str | None = None,
    fit: str | Path | CardFit | None = None,
    usd_per_hour: float | None = None,
    provider: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    shard: str | None = None,
    engine: PlanEngine = "auto",
    policy: SweepPolicy | None = None,
    data: Data | None = None,
    **overrides: Any,
) -> Plan:
    """Plan a sweep file: the cells that would run, their seconds and cost, for ``gpu`` if that names one, on any
    machine.

    ``out`` is the folder it would resume in, and ``fit`` what predicts: a file, a model, or the folder's own fit.json.
    Cells without arithmetic are recorded, some seconds each, unless ``engine`` is formula. ``data``: each cell at the
    longest batch that it makes of these rows, in place of its seq_len, which truncates them. ``choose``: the cells to
    plan, once the GPU and the fit are known.
    """
    from vramprobe.measure import environment
    from vramprobe.sweep import runner
    from vramprobe.sweep.plan import plan_sweep
    from vramprobe.sweep.resume import open_journal

    job = job_of(path, out, device, gpu, fit, usd_per_hour, provider, only, skip, shard, overrides, data=data)
    job = job._replace(sweep=choose(job))
    journal = open_journal(job.folder / runner.JOURNAL)
    context_of = environment.here() if gpu is None else lambda spec: None
    return plan_sweep(
        job.sweep,
        journal,
        card=job.card,
        context_of=context_of,
        fit=job.fit,
        policy=policy,
        rate=job.rate,
        recording=job.recording(engine),
    )


def run(
    path: str | Path | Load,
    *,
    choose: Callable[[Job], Sweep] = lambda job: job.sweep,
    out: str | Path | None = None,
    device: str = "auto",
    fit: str | Path | CardFit | None = None,
    usd_per_hour: float | None = None,
    provider: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    shard: str | None = None,
    engine: PlanEngine = "formula",
    policy: SweepPolicy | None = None,
    data: Data | None = None,
    on: str | Fleet = "here",
    jobs: int | None = None,
    gpu: str | None = None,
    emulate: str | None = None,
    timeout_seconds: float | None = None,
    max_seconds: float = math.inf,
    max_dollars: float | None = None,
    max_cells: int | None = None,
    on_event: Callable[[Progress], None] = lambda event: None,
    **overrides: Any,
) -> RunSummary:
    """Run a sweep file's cells that ``out`` (results/<device>/<sweep> by default) has no finished record of.

    Starts none that would overrun ``max_seconds``, ``max_dollars`` or ``max_cells``. A paid minute is too dear to
    record cells without arithmetic, unless ``engine`` is auto. ``data`` is :func:`plan`'s.

    ``on``: where cells run: here, or on the nodes of ``ray``, ``ray://HOST:PORT`` or ``slurm`` (``jobs`` at once). Of
    these ``gpu`` names the GPU whose nodes are used, and ``emulate`` the GPUs that are emulated on each. A Fleet that
    is given stays open.

    ``choose``: the cells to run, once the GPU and the fit are known.
    """
    if policy is not None and policy.verify and emulate is None:
        require_emulated()
    from vramprobe.sweep import runner
    from vramprobe.sweep.limits import limits

    with _fleet(on, emulate, gpu, jobs) as fleet:
        card_of = None
        if fleet is not None:
            device, card_of = fleet.device if device == "auto" else device, fleet.card_of
        words = {"data": data, "card_of": card_of}
        job = job_of(path, out, device, None, fit, usd_per_hour, provider, only, skip, shard, overrides, **words)
        job = job._replace(sweep=choose(job))
        rate = job.rate if fleet is None else fleet.of_all_gpus(job.rate)
        summary = runner.run(
            job.sweep,
            job.folder,
            card=job.card,
            fit=job.fit,
            rate=rate,
            policy=policy,
            on_event=on_event,
            recording=job.recording(engine),
            executor=fleet,
            limits=limits(
                rate,
                timeout_seconds=timeout_seconds,
                max_seconds=max_seconds,
                max_dollars=max_dollars,
                max_cells=max_cells,
            ),
        )
    summary.notes[:0] = job.sweep.notes
    return summary


@contextlib.contextmanager
def _fleet(on: str | Fleet, emulate: str | None, gpu: str | None, jobs: int | None) -> Iterator[Fleet | None]:
    """The fleet that ``on`` names, left at the end; one that is given stays open."""
    from vramprobe.sweep.fleet import fleet_on

    if not isinstance(on, str):
        yield on
        return
    fleet = fleet_on(on, cards=emulate, gpu=gpu, jobs=jobs)
    try:
        yield fleet
    finally:
        if fleet is not None:
            fleet.close()


def campaign(path: str | Path | Campaign, *, out: str | Path | None = None, **words: Any) -> list[StageResult]:
    """Run what is left of each stage of a campaign file; ``words`` are those of :func:`run`, whose limits are for all.

    ``out`` is results/<device>/<campaign> by default. ``max_dollars`` counts what earlier runs have spent.
    """
    from vramprobe.sweep import stages

    limits = {name: words.pop(name) for name in ("max_seconds", "max_dollars", "max_cells") if name in words}
    shown = {name: words.pop(name) for name in ("on_stage", "on_result") if name in words}
    asked = _campaign(path, words)
    if out is None:
        if words.get("on", "here") != "here":
            raise SpecError(f"a campaign on {words['on']} needs a folder for its results: --out FOLDER")
        out = _campaign_folder(asked, words.get("device", "auto"))
    with _fleet(words.pop("on", "here"), *(words.get(name) for name in ("emulate", "gpu", "jobs"))) as fleet:
        run_sweep = functools.partial(run, on=fleet or "here", **words)
        return stages.run_stages(asked, Path(out), run_sweep, **limits, **shown)


def plan_campaign(path: str | Path | Campaign, *, out: str | Path | None = None, **words: Any) -> dict[str, Plan]:
    """The plan of each stage that is run, by name; ``words`` are those of :func:`plan`.

    Of a boundary: the cells that its first round would run. A fit that was not made yet does not predict.
    """
    from vramprobe.sweep import stages

    asked = _campaign(path, words)
    folder = _campaign_folder(asked, words.get("device", "auto"), words.get("gpu")) if out is None else Path(out)
    return stages.plan_stages(asked, folder, functools.partial(plan, **words))


def _campaign(path: str | Path | Campaign, words: dict[str, Any]) -> Campaign:
    from vramprobe.sweep.campaign import Campaign, campaign_in

    found = path if isinstance(path, Campaign) else campaign_in(path)
    if found is None:
        raise SpecError(f"{path} is a sweep, not a campaign: it has no stages")
    what = found.name if found is path else path
    for name, option in {"only": "only", "skip": "skip", "shard": "shard", "data": "lengths"}.items():
        if words.get(name):
            raise SpecError(f"--{option} is for a sweep, and {what} is a campaign; drop it, or run one of its sweeps")
    return found


def _campaign_folder(asked: Campaign, device: str, gpu: str | None = None) -> Path:
    """results/<device>/<campaign>, by its first sweep."""
    first = next(name for name, stage in asked.stages.items() if not stage.fit)
    load = functools.partial(asked.sweep, first)
    return job_of(load, None, device, gpu, "none", None, None, (), (), None, {}).folder.parent
