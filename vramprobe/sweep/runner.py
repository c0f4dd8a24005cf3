"""Sweep → records: each cell in its own process, each record stored and synced before the next cell starts.

In: cells and a results folder. Out: the journal in that folder, and a summary. Plans before it runs, resumes where it
stopped, starts nothing that time or money forbid; a failed cell never ends the sweep; SIGINT, SIGTERM and SIGHUP end it
with the running cell recorded as interrupted. Never prints: whoever shows progress passes ``on_event``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from vramprobe.errors import StoreError
from vramprobe.measure import environment
from vramprobe.measure.isolation import (
    Ticket,
    describe_death,
    interrupted,
    new_ticket,
    record_left,
    require_packages,
    run_isolated,
    scratch_folder,
)
from vramprobe.measure.launcher import Launcher, Server, Spawner, worker_environment
from vramprobe.model.memory_model import MemoryModel
from vramprobe.records import store
from vramprobe.records.record import RunRecord, Started
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card, Rate
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.duration import Pace
from vramprobe.sweep.limits import DEFAULT_TIMEOUT_SECONDS, Clock, Limits
from vramprobe.sweep.plan import START_SECONDS, Plan, Policy, Row, TraceEngine, plan_sweep, with_evidence
from vramprobe.sweep.progress import LOGS, Progress, RunSummary, log_path
from vramprobe.sweep.resume import Journal, open_journal
from vramprobe.sweep.signals import Signals, Stopped

JOURNAL = "records.jsonl"


def measure(
    spec: CellSpec,
    *,
    log: Path,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    snapshot: Path | None = None,
    verify: bool = False,
) -> RunRecord:
    """Run one cell in a process of its own and return its record; nothing is stored but a ``snapshot`` (cuda only)."""
    require_packages([spec])
    launcher = Spawner(worker_environment(), log)
    with scratch_folder() as folder:
        try:
            return run_isolated(spec, launcher, new_ticket(folder, snapshot, verify=verify), log, timeout_seconds)
        finally:
            launcher.close()


def run(
    sweep: Sweep,
    folder: Path,
    *,
    card: Card | None = None,
    fit: MemoryModel | None = None,
    rate: Rate | None = None,
    policy: Policy | None = None,
    limits: Limits | None = None,
    trace: TraceEngine | None = None,
    on_event: Callable[[Progress], None] = lambda event: None,
) -> RunSummary:
    """Run the cells of ``sweep`` that ``folder`` has no finished record of, within ``limits``.

    ``card`` is the GPU that is used, null on a CPU; ``trace`` predicts what has no arithmetic. Raises StoreError before
    running anything where the folder cannot be read or written, or another sweep writes to it, MissingDependency where
    a package or the GPU is not there.
    """
    policy, limits = policy or Policy(), limits or Limits()
    logs = folder / LOGS
    with store.lock(folder), Signals().caught() as signals:
        clock = Clock(limits)
        journal = open_journal(folder / JOURNAL)
        _require_one_kind(sweep, journal)
        context_of = environment.here()
        plan = plan_sweep(
            sweep,
            journal,
            card=card,
            context_of=context_of,
            fit=fit,
            policy=policy,
            rate=rate,
            trace=trace,
            stop=lambda: signals.stopped_by is not None,
        )
        require_packages(row.spec for row in plan.to_run)
        summary = RunSummary(journal.path, plan, kept=plan.actions().get("kept", 0), notes=journal.notes())
        try:
            logs.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write logs to {logs}: {error.strerror}; choose another folder") from error
        on_event(Progress("planned", plan, left_seconds=plan.seconds, seconds=clock.elapsed_seconds, limits=limits))
        with _Launchers(plan, logs) as launchers, scratch_folder() as scratch:
            sweeping = _Sweeping(
                sweep, summary, policy, limits, clock, signals, launchers, scratch, logs, on_event, list(plan.ooms)
            )
            for index, row in enumerate(plan.rows, start=1):
                sweeping.take(index, row)
                if signals.stopped_by:
                    break
        summary.stopped_by = signals.stopped_by or summary.stopped_by
        summary.seconds = clock.elapsed_seconds
    return summary


def _require_one_kind(sweep: Sweep, journal: Journal) -> None:
    """Raise StoreError where a journal would hold emulated and other records: no fit and no table would take both."""
    there = {attempt.instrument for attempts in journal.attempts.values() for attempt in attempts}
    here = {environment.instrument_for(spec) for spec in sweep.cells}
    if there and ("emulated" in there) != ("emulated" in here):
        raise StoreError(
            f"{journal.path} holds records of the instrument {' and '.join(sorted(there))}, and these would be of "
            f"{' and '.join(sorted(here))}, which must not be mixed: name another folder with --out"
        )


@dataclass
class _Sweeping:
    """A sweep under way: takes one row of the plan after the other, and keeps the journal of what became of it."""

    sweep: Sweep
    summary: RunSummary
    policy: Policy
    limits: Limits
    clock: Clock
    signals: Signals
    launchers: _Launchers
    scratch: Path
    logs: Path
    on_event: Callable[[Progress], None]
    ooms: list[RunRecord]  # of this card, those of this run too
    pace: Pace = field(default_factory=Pace)

    def take(self, index: int, row: Row) -> None:
        """Run the row's cell, or say why not."""
        plan = self.summary.plan
        if row.is_run or row.action == "skip":
            row = with_evidence(row, self.ooms, plan.card, self.policy)
            self.summary.kept += row.action == "kept"  # skipped before, and certain again
        event = Progress(row.action, plan, index, row, row.reason, limits=self.limits)
        if row.action in ("kept", "quarantined"):
            self._tell(event)
        elif row.replicates and not self._was(row, "ok"):
            failed = self._was(row)
            self.summary.kept += failed
            reason = "no replicate: the first attempt did not end well" if failed else "its first attempt is left, too"
            self._tell(replace(event, kind="kept" if failed else "left", reason=reason))
        elif row.action == "skip":
            record = self._keep(self._skip_record(row))
            self._tell(replace(event, kind="skipped", record=record, attempt_id=record.attempt_id))
        elif self.signals.stopped_by is None and (why := self._forbidden(row)) is not None:
            self.summary.stopped_by = why
            self._tell(replace(event, kind="left", reason=why))
        elif self.signals.stopped_by is None:
            self._run(event, row)

    def _was(self, row: Row, outcome: str | None = None) -> bool:
        """Whether an attempt at the row's cell has ended, with this outcome if one is given."""
        records = [*self.summary.records, *([row.record] if row.record else [])]
        return any(
            record.fingerprint == row.spec.fingerprint and outcome in (None, record.outcome.kind) for record in records
        )

    def _tell(self, event: Progress) -> None:
        self.on_event(replace(event, seconds=self.clock.elapsed_seconds))

    def _forbidden(self, row: Row, *, is_loaded: bool = False) -> str | None:
        """The limit that keeps this cell from being started."""
        if self.limits.max_cells is not None and self.clock.num_cells >= self.limits.max_cells:
            return "limit"
        seconds = self.pace.correct(row.num_params, row.seconds)
        return None if self.clock.allows(seconds, is_loaded=is_loaded) else self.limits.limited_by

    def _run(self, event: Progress, row: Row) -> None:
        spec, log, ticket = row.spec, log_path(self.logs, row.spec), new_ticket(self.scratch, verify=self.policy.verify)
        launcher = self.launchers.launcher_of(spec)
        event = replace(
            event,
            kind="started",
            log=log,
            status=ticket.status,
            attempt_id=ticket.attempt_id,
            expected_seconds=self.pace.correct(row.num_params, row.seconds) + self._start_seconds,
        )
        self._tell(replace(event, left_seconds=self._left_seconds(event.index)))
        if not self._ready(launcher):
            return
        if (why := self._forbidden(row, is_loaded=True)) is not None:  # loading took longer than it should
            self.summary.stopped_by = why
            self._tell(replace(event, kind="left", reason=why))
            return
        self._note_how_cells_start(launcher)
        launcher.expect(self._upcoming(event.index))
        started = Started(
            attempt_id=ticket.attempt_id,
            cell_id=spec.cell_id,
            fingerprint=spec.fingerprint,
            instrument=environment.instrument_for(spec),
            sweep=self.sweep.name,
            started_at=ticket.started_at.isoformat(timespec="milliseconds"),
        )
        self._append(started)
        record = self._keep(self._attempt(spec, launcher, ticket, log))
        ticket.tear()
        if record.outcome.kind == "ok":
            log.unlink(missing_ok=True)
            self.pace.learn(row.num_params, row.seconds, self.clock.last_seconds)
        elif record.outcome.kind == "oom":
            self.ooms.append(record)
        self._tell(replace(event, kind="finished", record=record, left_seconds=self._left_seconds(event.index + 1)))

    def _ready(self, launcher: Launcher) -> bool:
        """Have the libraries loaded, which is no cell's time nor attempt; False where a signal ended that."""
        try:
            with self.signals.raising():
                launcher.start(self.clock.left_seconds)
        except Stopped:
            launcher.close()
            return False
        return True

    def _note_how_cells_start(self, launcher: Launcher) -> None:
        """Whoever pays by the minute should know that each cell loads the libraries anew."""
        note = f"each cell loads the libraries anew: {launcher.isolation_reason}"
        if launcher.isolation_reason is not None and note not in self.summary.notes:
            self.summary.notes.append(note)

    def _attempt(self, spec: CellSpec, launcher: Launcher, ticket: Ticket, log: Path) -> RunRecord:
        """One cell; the record says so if a signal or the sweep's own limit ended it."""
        try:
            with self.signals.raising(), self.clock.timing() as limit_seconds:
                record = run_isolated(spec, launcher, ticket, log, limit_seconds)
        except Stopped as stop:
            launcher.close()
            if (record := record_left(ticket, spec)) is not None:  # it had ended: nothing measured is lost
                late = f"{stop.name} came as the cell ended, before the device was looked at once more"
                return record.model_copy(update={"warnings": [*record.warnings, late]})
            return interrupted(spec, launcher, ticket, stop.name, by_limit=False)
        if record.outcome.kind == "timeout" and limit_seconds < self.limits.timeout_seconds:
            return interrupted(spec, launcher, ticket, self.limits.limited_by, by_limit=True)
        return record

    def _skip_record(self, row: Row) -> RunRecord:
        """The record of not running a cell, with its evidence."""
        launcher, ticket = self.launchers.launcher_of(row.spec), new_ticket(self.scratch)
        return describe_death(row.spec, launcher, ticket, row.skipped)

    def _keep(self, record: RunRecord) -> RunRecord:
        """The record with its sweep's name, once it is in the journal."""
        held_out = record.fingerprint in self.sweep.held_out
        record = record.model_copy(update={"sweep": self.sweep.name, "held_out": held_out})
        self._append(record)
        self.summary.records.append(record)
        return record

    def _append(self, entry: RunRecord | Started) -> None:
        warning = store.append(self.summary.journal, entry)
        self.summary.notes += [warning] if warning else []

    def _upcoming(self, index: int) -> CellSpec | None:
        """The cell after row ``index`` that will be run, as far as is known now."""
        return next((row.spec for row in self.summary.plan.rows[index:] if row.is_run), None)

    def _left_seconds(self, index: int) -> float:
        """Expected from row ``index`` (1-based) on, at the pace so far, for as many cells as may still be started."""
        rest = [row for row in self.summary.plan.rows[index - 1 :] if row.is_run]
        if self.limits.max_cells is not None:
            rest = rest[: max(self.limits.max_cells - self.clock.num_cells, 0)]
        return sum(self.pace.correct(row.num_params, row.seconds) for row in rest) + self._start_seconds

    @property
    def _start_seconds(self) -> float:
        """The first cell waits for the libraries, too."""
        return 0.0 if self.clock.num_cells else START_SECONDS


class _Launchers:
    """How each cell is started: from a fork server of its device and allocator setting, started with its first cell."""

    def __init__(self, plan: Plan, logs: Path) -> None:
        self._model_types = [row.spec.model_type for row in plan.rows]
        self._logs = logs
        self._open: dict[tuple[str, str | None], Server] = {}

    def __enter__(self) -> _Launchers:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._open.values():
            server.close()

    def launcher_of(self, spec: CellSpec) -> Launcher:
        """The launcher of cells like ``spec``."""
        key = (spec.device, spec.alloc_conf)
        if key not in self._open:
            log = self._logs / "forkserver.log"
            self._open[key] = Server(spec.device, spec.alloc_conf, worker_environment(), self._model_types, log)
        return self._open[key]
