"""One call per stage, from doctor to report.

The command line calls nothing else. A cell is named by the words of :func:`vramprobe.spec.option_names`:
``measure(model="gpt2", method="lora", batch_size=1, seq_len=512)``. Importing this loads no torch; measuring loads it
in the worker's process only, simulating in this one. Long because every stage stands here, a function each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vramprobe import catalog, spec
from vramprobe.emulate import machine_folder
from vramprobe.errors import SpecError, StoreError
from vramprobe.predict.grpo import grpo
from vramprobe.predict.questions import cell, changes, given_fit, predict
from vramprobe.predict.serve import serve
from vramprobe.predict.what_fits import largest_model, max_batch_size, max_seq_len, min_gpus, min_gpus_by_sharding
from vramprobe.sweep.jobs import Job, Load, PlanEngine, default_results, job_of

if TYPE_CHECKING:
    from vramprobe.check import CheckReport
    from vramprobe.check.contribute import contribute
    from vramprobe.check.merge import merge
    from vramprobe.literature.calibrate import Calibration
    from vramprobe.literature.claims import Judgement
    from vramprobe.measure.doctor import Diagnosis
    from vramprobe.model.memory_model import MemoryModel
    from vramprobe.predict.evaluate import Evaluation, LeaveOut
    from vramprobe.recommend.questions import recommend
    from vramprobe.records.parquet import export
    from vramprobe.records.record import RunRecord
    from vramprobe.report.card_truth import card_truth, card_truth_gpu
    from vramprobe.simulate.run import Simulation
    from vramprobe.sweep.campaign import Campaign
    from vramprobe.sweep.definition import Sweep
    from vramprobe.sweep.launch import launch_tasks
    from vramprobe.sweep.launch_command import launch_command
    from vramprobe.sweep.on_data import Data
    from vramprobe.sweep.plan import Plan, Policy
    from vramprobe.sweep.progress import Progress, RunSummary
    from vramprobe.sweep.stages import StageResult

__all__ = [
    "calibrate", "campaign", "card_truth", "card_truth_gpu", "cell", "changes", "check", "claims", "contribute",
    "dataset", "default_results", "doctor", "evaluate", "export", "fit", "gpus", "grpo", "largest_model",
    "launch_command", "launch_tasks", "max_batch_size", "max_seq_len", "measure", "merge", "min_gpus",
    "min_gpus_by_sharding", "models", "plan", "plan_campaign", "predict", "recommend", "report", "run", "serve",
    "simulate",
]  # fmt: skip


#: What stands in its own room and is loaded when it is asked for: predictions need none of it.
_IN_THEIR_ROOMS = {
    "card_truth": "vramprobe.report.card_truth",
    "card_truth_gpu": "vramprobe.report.card_truth",
    "contribute": "vramprobe.check.contribute",
    "export": "vramprobe.records.parquet",
    "launch_command": "vramprobe.sweep.launch_command",
    "launch_tasks": "vramprobe.sweep.launch",
    "merge": "vramprobe.check.merge",
    "recommend": "vramprobe.recommend.questions",
}


def __getattr__(name: str) -> Any:
    """A function of ``_IN_THEIR_ROOMS``."""
    if name not in _IN_THEIR_ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IN_THEIR_ROOMS[name]), name)


def doctor(*, device: str = "auto", results: str | Path = "results") -> Diagnosis:
    """Whether this machine can measure on ``device``, and what to do where it cannot; takes about half a minute."""
    from vramprobe.measure.doctor import diagnose

    return diagnose(device, Path(results))


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
    from vramprobe.records import store
    from vramprobe.sweep import runner
    from vramprobe.sweep.limits import limits

    one = cell(**options)
    limit = limits(timeout_seconds=timeout_seconds).timeout_seconds
    if snapshot is not None and one.device != "cuda":
        raise SpecError(
            "a snapshot is the history of CUDA's caching allocator, and this cell is for the CPU: measure it on a GPU, "
            "or draw what it would do there with `vramprobe simulate --timeline FILE.html`"
        )
    if snapshot is not None and one.num_gpus > 1:
        raise SpecError(
            f"a snapshot is one card's, and num_gpus is {one.num_gpus}: measure without it, or draw the ranks of a "
            "training command with `vramprobe profile --timeline FILE.html`"
        )
    if verify:
        _require_emulated()
    if save is not None:
        store.require_journal(save)
    if snapshot is not None:
        store.require_writable(snapshot)
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
        store.append(save, record)
    return record


def _require_emulated() -> None:
    if machine_folder() is None:
        raise SpecError("a step is repeated under other values on an emulated GPU alone: give --emulate GPU, too")


def simulate(
    *,
    device: str = "auto",
    gpu: str | None = None,
    depth: Literal["auto", "full"] = "auto",
    timeline: str | Path | None = None,
    save: str | Path | None = None,
    **options: Any,
) -> RunRecord:
    """The record of a cell on fake tensors, on any machine: a prediction, and no measurement.

    ``device`` auto is CUDA. ``gpu``: as on this GPU of the catalog. ``timeline``: where to write the steady step's live
    memory, .html or .png; runs every layer where the events of a deep model are not known otherwise. Appended to
    ``save`` where that is given, which must not hold what was measured. Raises NotSimulated for what is not
    covered.
    """
    from vramprobe.records import store
    from vramprobe.report import timeline_file
    from vramprobe.sweep.resume import open_journal

    if depth not in ("auto", "full"):
        raise SpecError(f"depth {depth!r} is not known; use auto or full")
    if gpu is not None and device == "cpu":
        raise SpecError(f"a simulation for {gpu} is one for device cuda, and cpu was given; drop one of them")
    card = catalog.find_gpu(gpu) if gpu is not None else None
    one = cell(device="cuda" if device == "auto" else device, **options)
    if one.num_gpus > 1:
        raise SpecError(
            f"num_gpus {one.num_gpus}: a simulation is of one GPU; predict one rank with predict --sharding, or run it "
            "with measure --emulate"
        )
    if timeline is not None:
        timeline_file.require_writable(timeline)
    if save is not None:
        store.require_journal(save)
        if open_journal(save).attempts:
            raise StoreError(f"{save} holds what was measured; name another file for what is simulated")
    simulation = _simulated(one, card, depth, with_history=timeline is not None)
    if save is not None:
        store.append(save, simulation.record)
    if timeline is not None:
        from vramprobe.report.timeline import timeline_of

        assert simulation.history is not None
        timeline_file.write(timeline_of(simulation.record, simulation.history), timeline)
    return simulation.record


def _simulated(
    one: spec.CellSpec, card: catalog.Gpu | None, depth: Literal["auto", "full"], *, with_history: bool
) -> Simulation:
    """Raises NotSimulated also where a library cannot build the cell or run it on tensors that have no values."""
    from vramprobe.measure.isolation import require_packages

    require_packages([one], with_device=False)
    from vramprobe.simulate.run import simulate

    simulation = simulate(one, gpu=card, depth=depth)
    if with_history and simulation.history is None:
        simulation = simulate(one, gpu=card, depth="full")
    return simulation


def plan(
    path: str | Path | Load,
    *,
    choose: Callable[[Job], Sweep] = lambda job: job.sweep,
    out: str | Path | None = None,
    device: str = "auto",
    gpu: str | None = None,
    fit: str | Path | MemoryModel | None = None,
    usd_per_hour: float | None = None,
    provider: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    shard: str | None = None,
    engine: PlanEngine = "auto",
    policy: Policy | None = None,
    data: Data | None = None,
    **overrides: Any,
) -> Plan:
    """What running a sweep file would do, take and cost; for ``gpu``, if that names one, wherever it is planned.

    ``out`` is the folder it would resume in, and ``fit`` what predicts: a file, a model, or the folder's own fit.json.
    Cells without arithmetic are simulated, some seconds each, unless ``engine`` is formula. ``data``: each cell at the
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
        trace=job.trace(engine),
    )


def run(
    path: str | Path | Load,
    *,
    choose: Callable[[Job], Sweep] = lambda job: job.sweep,
    out: str | Path | None = None,
    device: str = "auto",
    fit: str | Path | MemoryModel | None = None,
    usd_per_hour: float | None = None,
    provider: str | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    shard: str | None = None,
    engine: PlanEngine = "formula",
    policy: Policy | None = None,
    data: Data | None = None,
    on: str = "here",
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
    simulate cells without arithmetic, unless ``engine`` is auto. ``data`` is :func:`plan`'s.

    ``on``: where cells run: here, or on the nodes of ``ray``, ``ray://HOST:PORT`` or ``slurm`` (``jobs`` at once). Of
    these ``gpu`` names the GPU whose nodes are used, and ``emulate`` the GPUs that are emulated on each.

    ``choose``: the cells to run, once the GPU and the fit are known.
    """
    if policy is not None and policy.verify and emulate is None:
        _require_emulated()
    from vramprobe.sweep import runner
    from vramprobe.sweep.fleet import fleet_on
    from vramprobe.sweep.limits import limits

    with contextlib.ExitStack() as stack:
        fleet = fleet_on(on, cards=emulate, gpu=gpu, jobs=jobs)
        card_of = None
        if fleet is not None:
            stack.callback(fleet.close)
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
            trace=job.trace(engine),
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


def campaign(path: str | Path, *, out: str | Path | None = None, **words: Any) -> list[StageResult]:
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
    return stages.run_stages(asked, Path(out), functools.partial(run, **words), **limits, **shown)


def plan_campaign(path: str | Path, *, out: str | Path | None = None, **words: Any) -> dict[str, Plan]:
    """The plan of each stage that is run, by name; ``words`` are those of :func:`plan`.

    Of a boundary: the cells that its first round would run. A fit that was not made yet does not predict.
    """
    from vramprobe.sweep import stages

    asked = _campaign(path, words)
    folder = _campaign_folder(asked, words.get("device", "auto"), words.get("gpu")) if out is None else Path(out)
    return stages.plan_stages(asked, folder, functools.partial(plan, **words))


def _campaign(path: str | Path, words: dict[str, Any]) -> Campaign:
    from vramprobe.sweep.campaign import campaign_in

    found = campaign_in(path)
    if found is None:
        raise SpecError(f"{path} is a sweep, not a campaign: it has no stages")
    for name, option in {"only": "only", "skip": "skip", "shard": "shard", "data": "lengths"}.items():
        if words.get(name):
            raise SpecError(f"--{option} is for a sweep, and {path} is a campaign; drop it, or run one of its sweeps")
    return found


def _campaign_folder(asked: Campaign, device: str, gpu: str | None = None) -> Path:
    """results/<device>/<campaign>, by its first sweep."""
    first = next(name for name, stage in asked.stages.items() if not stage.fit)
    load = functools.partial(asked.sweep, first)
    return job_of(load, None, device, gpu, "none", None, None, (), (), None, {}).folder.parent


def check(results: str | Path, *, strict: bool = False) -> CheckReport:
    """What speaks against the records under ``results``; ``strict``: warnings make the report not ok, too."""
    from vramprobe.check import check as check_records

    return check_records(results, strict=strict)


def fit(results: str | Path) -> MemoryModel:
    """A memory model fitted to the records under ``results``; cells that their sweep holds out stay out."""
    from vramprobe.model.fit import fit as fit_records
    from vramprobe.records import store
    from vramprobe.records.whole import read_whole

    return fit_records(store.latest_by_fingerprint(read_whole(results).records).values())


def evaluate(
    results: str | Path,
    *,
    hold_out: str | None = None,
    leave_out: LeaveOut | None = None,
    fit: str | Path | MemoryModel | None = None,
    out: str | Path | None = None,
    check: bool = False,
) -> Evaluation:
    """How far predictions are from the records under ``results`` that their fit has not seen; a page of it in ``out``.

    ``hold_out`` is a condition such as ``params>3e9``; ``leave_out`` takes each model, family or length out in turn;
    ``fit`` is judged by what it has not seen. With none of them, what the sweep held out is held out. ``check``: write
    nothing, and raise StaleReport where ``out`` holds other files.
    """
    from vramprobe.predict.evaluate import evaluate as evaluate_records
    from vramprobe.records.whole import read_whole

    found = evaluate_records(read_whole(results).records, hold_out=hold_out, leave_out=leave_out, model=given_fit(fit))
    if out is not None:
        from vramprobe.report import publish
        from vramprobe.report.evaluation import evaluation_page

        words = ["vramprobe", "evaluate", str(results), "-o", str(out)]
        words += ["--hold-out", hold_out] if hold_out else []
        words += ["--leave-out", leave_out] if leave_out else []
        words += ["--fit", str(fit) if isinstance(fit, str | Path) else "FIT.json"] if fit is not None else []
        publish(Path(out), evaluation_page(found, shlex.join(words)), check=check)
    return found


def calibrate(results: str | Path, *, fit: str | Path | MemoryModel | None = None) -> Calibration:
    """How far every formula and our engine are from the records under ``results``, and the formulas' constants."""
    from vramprobe.literature.calibrate import calibrate as calibrate_records
    from vramprobe.records.whole import read_whole

    return calibrate_records(read_whole(results).records, given_fit(fit))


def claims(
    ids: Sequence[str] = (),
    *,
    topics: Sequence[str] = (),
    gpu: str | None = None,
    results: str | Path | None = None,
    out: str | Path | None = None,
    check: bool = False,
) -> list[Judgement]:
    """The published claims with these ids, of these topics or on this GPU, judged; all 135 unless told.

    Comparable CUDA records under ``results`` go before predictions. ``out``: a folder for the tables and JSON; with
    ``check`` nothing is written, and StaleReport raised where it holds other files.
    """
    from vramprobe.literature.claims import judge_claims
    from vramprobe.records import store
    from vramprobe.records.whole import read_whole

    records = read_whole(results, allow_empty=True).records if results is not None else ()
    judged = judge_claims(ids, topics=topics, gpu=gpu, records=store.latest_by_fingerprint(records).values())
    if out is not None:
        from vramprobe.report import publish
        from vramprobe.report.claims import text_files

        words = [*(f"--id {name}" for name in ids), *(f"--topic {name}" for name in topics)]
        words += [f"--gpu {gpu}"] * bool(gpu) + [f"--results {results}"] * bool(results)
        files = text_files(judged, " ".join(["vramprobe claims", *words, f"-o {out}"]))
        publish(Path(out), files, check=check)
    return judged


def report(
    results: str | Path,
    out: str | Path,
    *,
    fit: str | Path | MemoryModel | None = None,
    claims: str | Path | None = None,
    check: bool = False,
) -> list[Path]:
    """Write tables, plots and a page from the records under ``results``, with predictions where a fit is given.

    The page, index.html, shows the claims.csv that ``claims`` names, as :func:`claims` writes it.
    With ``check`` nothing is written: raises StaleReport, naming each file of ``out`` that is missing or different.
    """
    from vramprobe.report import build, publish

    named = fit if isinstance(fit, str | Path) else None
    files = build(results, out, model=given_fit(fit), fit_path=named, claims_path=claims)
    return publish(Path(out), files, check=check)


def dataset(results: str | Path, out: str | Path, *, push: str | None = None, check: bool = False) -> list[Path]:
    """Write all records under ``results`` as Parquet with a card, and ``push`` both to this data set of the hub.

    ``check`` is :func:`report`'s. Raises MissingDependency for pushing without a token, VramprobeError where the hub
    refuses; what was written stays.
    """
    from vramprobe.report import dataset as data_set
    from vramprobe.report import publish
    from vramprobe.report.dataset import push as hub

    if push is not None:
        hub.require_name(push)
    files = data_set.build(results, out)
    written = publish(Path(out), files, check=check)
    if push is not None:
        hub.push(files, push)
    return written


def models() -> list[catalog.ModelEntry]:
    """The architectures that ship with vramprobe."""
    return catalog.list_models()


def gpus() -> list[catalog.Gpu]:
    """The GPUs that ship with vramprobe."""
    return catalog.list_gpus()
