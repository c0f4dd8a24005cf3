"""A cell measured, a sweep or a campaign planned or run, as the command line and Python ask for it.

In: a cell's words, or a file, and what is asked of it. Out: a record, a Plan, a RunSummary, or those of a campaign's
stages. Loads no torch; ``vramprobe.api`` offers these functions.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.emulate import require_emulated
from vramprobe.errors import SpecError
from vramprobe.sweep.jobs import Load, job_of

if TYPE_CHECKING:
    from vramprobe.records.record import RunRecord
    from vramprobe.sweep.campaign import Campaign
    from vramprobe.sweep.fleet import Fleet
    from vramprobe.sweep.plan import Plan, SweepPolicy
    from vramprobe.sweep.progress import Progress, RunSummary
    from vramprobe.sweep.stages import StageResult


def measure(
    *,
    timeout_seconds: float | None = None,
    save: str | Path | None = None,
    snapshot: str | Path | None = None,
    verify: bool = False,
    **options: Any,
) -> RunRecord:
    """Run one cell in a process of its own; the record, also appended to ``save`` where that is given.

    ``verify``, on an emulated GPU alone: repeat a step under other values and compare what it allocates.

    ``snapshot``: where to write the history of a further step for PyTorch's memory_viz, on a GPU alone; where the cell
    did not get so far there is none, and the record says why.
    """
    from vramprobe.predict.questions import cell
    from vramprobe.records import writing
    from vramprobe.sweep import runner
    from vramprobe.sweep.limits import limits

    one = cell(**options)
    limit = limits(timeout_seconds=timeout_seconds).timeout_seconds
    if snapshot is not None and one.device != "cuda":
        raise SpecError(
            "a snapshot is the history of CUDA's caching allocator, and this cell is for the CPU: measure it on a GPU, "
            "or on an emulated one: --emulate GPU"
        )
    if snapshot is not None and one.num_gpus > 1:
        raise SpecError(
            f"a snapshot is one card's, and num_gpus is {one.num_gpus}: measure without it, or draw the ranks of a "
            "training command with `vramprobe profile --timeline FILE.html`"
        )
    if verify:
        require_emulated()
    if save is not None:
        writing.require_journal(save)
    if snapshot is not None:
        writing.require_writable(snapshot)
    handle, name = tempfile.mkstemp(prefix="vramprobe-", suffix=".log")
    os.close(handle)
    log = Path(name)
    record = None
    try:
        record = runner.measure(
            one,
            log=log,
            timeout_seconds=limit,
            snapshot=None if snapshot is None else Path(snapshot).resolve(),
            verify=verify,
        )
    finally:
        if record is None or record.outcome.kind == "ok":  # a failure's record names its log
            log.unlink(missing_ok=True)
    if save is not None:
        writing.append(save, record)
    return record


def plan(path: str | Path | Load, *, gpu: str | None = None, policy: SweepPolicy | None = None, **words: Any) -> Plan:
    """Plan a sweep file: the cells that would run, their seconds and cost, for ``gpu`` if that names one, on any
    machine; ``words`` are those of :func:`vramprobe.sweep.jobs.job_of`.
    """
    from vramprobe.measure import environment
    from vramprobe.sweep import runner
    from vramprobe.sweep.plan import plan_sweep
    from vramprobe.sweep.resume import open_journal

    job = job_of(path, gpu=gpu, **words)
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
        recording=job.recording,
    )


def run(
    path: str | Path | Load,
    *,
    device: str = "auto",
    policy: SweepPolicy | None = None,
    on: str | Fleet = "here",
    jobs: int | None = None,
    gpu: str | None = None,
    emulate: str | None = None,
    timeout_seconds: float | None = None,
    max_seconds: float = math.inf,
    max_dollars: float | None = None,
    max_cells: int | None = None,
    on_event: Callable[[Progress], None] = lambda event: None,
    **words: Any,
) -> RunSummary:
    """Run a sweep file's cells that ``out`` (results/<device>/<sweep> by default) has no finished record of; ``words``
    are those of :func:`vramprobe.sweep.jobs.job_of`.

    Starts none that would overrun ``max_seconds``, ``max_dollars`` or ``max_cells``.

    ``on``: where cells run: here, or on the nodes of ``ray``, ``ray://HOST:PORT`` or ``slurm`` (``jobs`` at once). Of
    these ``gpu`` names the GPU whose nodes are used, and ``emulate`` the GPUs that are emulated on each. A Fleet that
    is given stays open.
    """
    if policy is not None and policy.verify and emulate is None:
        require_emulated()
    from vramprobe.sweep import runner
    from vramprobe.sweep.limits import limits

    with _fleet(on, emulate, gpu, jobs) as fleet:
        card_of = None
        if fleet is not None:
            device, card_of = fleet.device if device == "auto" else device, fleet.card_of
        job = job_of(path, device=device, card_of=card_of, **words)
        rate = job.rate if fleet is None else fleet.of_all_gpus(job.rate)
        summary = runner.run(
            job.sweep,
            job.folder,
            card=job.card,
            fit=job.fit,
            rate=rate,
            policy=policy,
            on_event=on_event,
            recording=job.recording,
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
    return job_of(load, device=device, gpu=gpu, fit="none").folder.parent
