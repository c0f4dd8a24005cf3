"""The stages of a campaign, one after the other: sweeps are run, fits made, boundaries sought, within one budget.

In: a Campaign, its folder, and what runs one sweep. Out: a StageResult per stage, and in the folder a journal per
sweep, fit.json, the predictions made before measuring, and what was spent. Resumes where it stopped: the journals
decide what is left, so that a kill costs the running cell.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError
from vramprobe.model.card_fit import CardFit, save_fit
from vramprobe.predict.expected import fit_records, recording
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec
from vramprobe.sweep.boundary import Boundary, boundary_of, predicted_counts, with_count
from vramprobe.sweep.campaign import Campaign, Stage
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.jobs import Job
from vramprobe.sweep.plan import Plan
from vramprobe.sweep.progress import Progress, RunSummary
from vramprobe.sweep.runner import JOURNAL

FIT, PREDICTIONS, SPENT = "fit.json", "predictions.json", "spent.json"


#: ``run`` of questions.py, with all that every stage shares.
RunSweep = Callable[..., RunSummary]


@dataclass
class StageResult:
    """Results of one stage. ``errors``: predicted less measured, over measured, by cell; ``inside``: how many of them
    are in their interval.
    """

    name: str
    summary: RunSummary | None = None  # of the last sweep that was run
    fit: CardFit | None = None
    errors: dict[str, float] = field(default_factory=dict)
    inside: int = 0
    boundaries: list[Boundary] = field(default_factory=list)

    @property
    def stopped_by(self) -> str | None:
        return self.summary.stopped_by if self.summary else None

    @property
    def mean_absolute_error(self) -> float | None:
        return statistics.fmean(map(abs, self.errors.values())) if self.errors else None


class Purse:
    """Budget left to the campaign: dollars over all its runs, seconds and cells of this one."""

    def __init__(self, file: Path, max_seconds: float, max_dollars: float | None, max_cells: int | None) -> None:
        self._file, self._max_dollars = file, max_dollars
        self._spent = json.loads(file.read_text())["dollars"] if file.exists() else 0.0
        self._seconds_left, self._cells_left = max_seconds, max_cells

    @property
    def dollars(self) -> float:
        """Spent so far, in earlier runs too."""
        return self._spent

    def limits(self) -> dict[str, Any]:
        """For the next sweep. With nothing left it starts no cell, and says so where one is due."""
        dollars = None if self._max_dollars is None else max(self._max_dollars - self._spent, 1e-9)
        seconds = 0.0 if self._cells_left == 0 else max(self._seconds_left, 0.0)
        return {"max_seconds": seconds, "max_dollars": dollars, "max_cells": self._cells_left or None}

    def watch(self) -> Callable[[Progress], None]:
        """Notes what one sweep spends, at each of its events; a kill loses what came after the last one."""
        before = self._spent

        def on_event(event: Progress) -> None:
            if event.plan.rate is not None:
                self._spent = before + event.plan.rate.dollars(event.seconds)
                write_json(self._file, {"dollars": round(self._spent, 6)})

        return on_event

    def used(self, summary: RunSummary) -> None:
        """A sweep has ended. Where no cell was left to begin with, that is the limit that stopped it."""
        if self._cells_left == 0 and summary.stopped_by == "max-time":
            summary.stopped_by = "limit"
        self._seconds_left -= summary.seconds
        if self._cells_left is not None:
            ran = sum(record.outcome.kind != "skipped" for record in summary.records)
            self._cells_left = max(self._cells_left - ran, 0)


def run_stages(
    campaign: Campaign,
    folder: Path,
    run_sweep: RunSweep,
    *,
    max_seconds: float = math.inf,
    max_dollars: float | None = None,
    max_cells: int | None = None,
    on_stage: Callable[[str], Callable[[Progress], None]],
    on_result: Callable[[StageResult], None] = lambda result: None,
) -> list[StageResult]:
    """Run what is left of each stage, until the end, a limit or a signal.

    ``on_stage`` gives what shows the progress of a stage that begins. Raises FitError where too few records came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    purse = Purse(folder / SPENT, max_seconds, max_dollars, max_cells)
    results: list[StageResult] = []
    for name, stage in campaign.stages.items():
        if stage.fit:
            results.append(_fitted(name, stage, folder))
        else:
            run = _StageRun(campaign, name, folder, run_sweep, purse, on_stage(name))
            results.append(run.sought() if stage.boundary else run.measured())
        on_result(results[-1])
        if results[-1].stopped_by is not None:
            break
    return results


def plan_stages(campaign: Campaign, folder: Path, plan_sweep: Callable[..., Plan]) -> dict[str, Plan]:
    """The plan of each stage that is run; ``plan_sweep`` is ``plan`` of questions.py, with all that stages share."""
    plans = {}
    for name, stage in campaign.stages.items():
        if stage.fit:
            continue
        made = folder / stage.predict_with / FIT if stage.predict_with else None
        words: dict[str, Any] = {"fit": made} if made is not None and made.exists() else {}
        if stage.boundary:
            words["choose"] = lambda job, name=name, stage=stage: next_cells(stage, job, read_records(folder / name))[0]
        plans[name] = plan_sweep(functools.partial(campaign.sweep, name), out=folder / name, **words)
    return plans


def _fitted(name: str, stage: Stage, folder: Path) -> StageResult:
    """The fit of these stages' records, made anew of the same records on each resume. Without a record of a GPU there
    is none: emulated cells are predicted by such runs already, and cells on the CPU are not predicted."""
    records = [record for one in stage.fit for record in store.read(folder / one).records]
    if not any(record.instrument == "cuda" for record in records):
        return StageResult(name)
    model = fit_records(store.latest_by_fingerprint(records).values(), recording())
    (folder / name).mkdir(exist_ok=True)
    save_fit(model, folder / name / FIT)
    return StageResult(name, fit=model)


class _StageRun:
    """One stage whose cells are run."""

    def __init__(
        self,
        campaign: Campaign,
        name: str,
        folder: Path,
        run_sweep: RunSweep,
        purse: Purse,
        on_event: Callable[[Progress], None],
    ) -> None:
        self._campaign, self._name, self._folder = campaign, name, folder / name
        self._stage, self._run_sweep, self._purse, self._tell = campaign.stages[name], run_sweep, purse, on_event
        made = folder / self._stage.predict_with / FIT if self._stage.predict_with else None
        self._fit = made if made is not None and made.exists() else None
        self._is_predicted = made is not None
        self._asked: set[str] = set()  # fingerprints of boundary cells that this run has asked for
        self._found: list[Boundary] = []

    def measured(self) -> StageResult:
        """The stage's sweep, and how far its predictions were off."""
        result = StageResult(self._name, self._run(lambda job: job.sweep))
        result.errors, result.inside = compared(self._folder)
        return result

    def sought(self) -> StageResult:
        """Rounds of one cell per boundary, until none asks for more."""
        while True:
            summary = self._run(self._next_cells)
            is_over = summary.stopped_by is not None or not summary.records
            _, self._found = self._decided(self._job)  # by the records of this round
            if is_over or all(one.next_count is None for one in self._found):
                return StageResult(self._name, summary, boundaries=self._found)

    def _run(self, choose: Callable[[Job], Sweep]) -> RunSummary:
        watch = self._purse.watch()

        def on_event(event: Progress) -> None:
            watch(event)
            if event.kind == "planned" and self._is_predicted:
                keep_predictions(self._folder, event)
            self._tell(event)

        def load(**words: Any) -> Sweep:
            return self._campaign.sweep(self._name, **words)

        words = {"fit": self._fit} if self._fit is not None else {}
        summary = self._run_sweep(
            load, choose=choose, out=self._folder, on_event=on_event, **self._purse.limits(), **words
        )
        self._purse.used(summary)
        return summary

    def _next_cells(self, job: Job) -> Sweep:
        self._job = job
        sweep, self._found = self._decided(job)
        self._asked |= {cell.fingerprint for cell in sweep.cells}
        return sweep

    def _decided(self, job: Job) -> tuple[Sweep, list[Boundary]]:
        return next_cells(self._stage, job, read_records(self._folder), frozenset(self._asked))


def next_cells(
    stage: Stage, job: Job, records: Iterable[RunRecord], asked: frozenset[str] = frozenset()
) -> tuple[Sweep, list[Boundary]]:
    """The cells that boundaries ask for next, after those that decide so far, and what is known of each boundary."""
    if job.card is None:
        raise SpecError(
            f"{job.sweep.name} looks for what a GPU's memory holds, and there is none here; --emulate GPU gives one"
        )
    question, records = stage.boundary, list(records)
    assert question is not None
    cells: dict[str, CellSpec] = {}
    found = []
    for spec in job.sweep.cells:
        predicted = predicted_counts(spec, question, stage.step, job.card, job.fit, records=job.records)
        one = boundary_of(spec, question, stage.step, predicted, records, asked)
        found.append(one)
        for count in (one.runs, one.fails, one.next_count):
            if count is not None:
                cell = with_count(spec, question, count)
                cells[cell.fingerprint] = cell
    return replace(job.sweep, cells=tuple(cells.values())), found


def read_records(folder: Path) -> tuple[RunRecord, ...]:
    """Read the records of a sweep's folder; none where it has not begun."""
    journal = folder / JOURNAL
    return store.read(journal, allow_empty=True).records if journal.exists() else ()


def keep_predictions(folder: Path, event: Progress) -> None:
    """Keep what is predicted of each cell that is about to run; of one that has its record nothing changes."""
    file = folder / PREDICTIONS
    known = json.loads(file.read_text()) if file.exists() else {}
    for row in event.plan.rows:
        if row.is_run and row.prediction is not None and not row.replicates:
            peak = row.prediction.peak_allocated_bytes
            fit = row.prediction.fit and row.prediction.fit.data_fingerprint
            known[row.spec.fingerprint] = {"cell_id": row.spec.cell_id, "fit": fit} | peak.model_dump()
    write_json(file, known)


def compared(folder: Path) -> tuple[dict[str, float], int]:
    """(error by cell, how many lay in their interval) of the predictions that were kept."""
    file = folder / PREDICTIONS
    if not file.exists():
        return {}, 0
    known, errors, inside = json.loads(file.read_text()), {}, 0
    for fingerprint, record in store.latest_by_fingerprint(read_records(folder)).items():
        if fingerprint in known and record.outcome.kind == "ok" and record.peak is not None:
            predicted, measured = known[fingerprint], record.peak.allocated_bytes
            errors[record.cell_id] = predicted["value"] / measured - 1
            inside += predicted["low"] <= measured <= predicted["high"]
    return errors, inside


def write_json(file: Path, content: Any) -> None:
    """Replace the file in one step, so that a kill leaves the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")
