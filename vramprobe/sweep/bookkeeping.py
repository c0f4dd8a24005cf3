"""Bookkeeping: what every executor shares: which cell is due, what the limits allow, the journal, progress.

In: a plan's rows in their order, attempts that began and ended. Out: lines of the journal, each synced, events for
whoever shows them, a RunSummary. Starts no process and knows no executor but by its answers.
"""

import bisect
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from vramprobe.measure.isolation import Ticket
from vramprobe.records import writing
from vramprobe.records.outcomes import Outcome
from vramprobe.records.record import Instrument, RunRecord, Started, attempt_fields
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.duration import Pace
from vramprobe.sweep.limits import Clock, SweepLimits
from vramprobe.sweep.plan import START_SECONDS, Plan, PlanRow, SweepPolicy, with_evidence
from vramprobe.sweep.progress import Progress, RunSummary, log_path
from vramprobe.sweep.signals import Signals


@dataclass
class Bookkeeping:
    """A sweep under way. ``describe`` writes the record of a cell that no worker described, as the executor knows it.

    The order of calls for one cell: :meth:`due`, :meth:`announce`, :meth:`journal_start`, :meth:`finish`.
    """

    sweep: Sweep
    summary: RunSummary
    policy: SweepPolicy
    limits: SweepLimits
    clock: Clock
    signals: Signals
    instrument_of: Callable[[CellSpec], Instrument]
    logs: Path
    on_event: Callable[[Progress], None]
    ooms: list[RunRecord]  # of this card, those of this run too
    pace: Pace = field(default_factory=Pace)
    describe: Callable[[CellSpec, Outcome], RunRecord] | None = None

    @property
    def plan(self) -> Plan:
        return self.summary.plan

    def due(self, index: int, row: PlanRow) -> Progress | None:
        """The event of a cell that is to be started now; None where it is not run, which is then told and recorded."""
        if row.is_run or row.action == "skip":
            row = with_evidence(row, self.ooms, self.plan.card, self.policy)
            self.summary.kept += row.action == "kept"  # skipped before, and certain again
        event = Progress(row.action, self.plan, index, row, row.reason, limits=self.limits)
        if row.action in ("kept", "quarantined"):
            self.tell(event)
        elif row.replicates and not self._was(row, "ok"):
            failed = self._was(row)
            self.summary.kept += failed
            reason = "no replicate: the first attempt did not end well" if failed else "its first attempt is left, too"
            self.tell(replace(event, kind="kept" if failed else "left", reason=reason))
        elif row.action == "skip":
            assert self.describe is not None
            assert row.skipped is not None
            record = self.keep(self.describe(row.spec, row.skipped))
            self.tell(replace(event, kind="skipped", record=record, attempt_id=record.attempt_id))
        elif self.signals.stopped_by is None and (why := self.forbidden(row)) is not None:
            self.leave(event, why)
        elif self.signals.stopped_by is None:
            return event
        return None

    def leave(self, event: Progress, why: str) -> None:
        """The limit ``why`` keeps a cell from being started."""
        self.summary.stopped_by = why
        self.tell(replace(event, kind="left", reason=why))

    def announce(self, event: Progress, ticket: Ticket) -> Progress:
        """Tell that a cell is being started; the event, complete."""
        row = event.cell
        event = replace(
            event,
            kind="started",
            log=log_path(self.logs, row.spec),
            status=ticket.status,
            attempt_id=ticket.attempt_id,
            expected_seconds=self.pace.correct(row.num_params, row.seconds) + self._start_seconds,
        )
        self.tell(replace(event, left_seconds=self._left_seconds(event.index)))
        return event

    def journal_start(self, event: Progress, ticket: Ticket) -> None:
        """The line that goes before a record."""
        spec = event.cell.spec
        fields = attempt_fields(spec, ticket.attempt_id, ticket.started_at, self.instrument_of(spec))
        self._append(Started(**fields, sweep=self.sweep.name))

    def finish(self, event: Progress, ticket: Ticket, record: RunRecord, seconds: float) -> None:
        """Keep the record of a cell that took so long, learn from it, and tell."""
        row, record = event.cell, self.keep(record)
        ticket.tear()
        if record.outcome.kind == "ok":
            assert event.log is not None
            event.log.unlink(missing_ok=True)
            self.pace.learn(row.num_params, row.seconds, seconds)
        elif record.outcome.kind == "oom":
            self.ooms.append(record)
        self.tell(replace(event, kind="finished", record=record, left_seconds=self._left_seconds(event.index + 1)))

    def keep(self, record: RunRecord) -> RunRecord:
        """The record with its sweep's name, once it is in the journal."""
        held_out = record.fingerprint in self.sweep.held_out
        record = record.model_copy(update={"sweep": self.sweep.name, "held_out": held_out})
        self._append(record)
        self.summary.records.append(record)
        return record

    def tell(self, event: Progress) -> None:
        self.on_event(replace(event, seconds=self.clock.elapsed_seconds))

    def forbidden(self, row: PlanRow, *, is_loaded: bool = False) -> str | None:
        """The limit that keeps this cell from being started."""
        if self.limits.max_cells is not None and self.clock.num_cells >= self.limits.max_cells:
            return "limit"
        seconds = self.pace.correct(row.num_params, row.seconds)
        return None if self.clock.allows(seconds, is_loaded=is_loaded) else self.limits.limited_by

    def upcoming(self, index: int) -> CellSpec | None:
        """The cell after row ``index`` that will be run, as far as is known now."""
        return next((row.spec for row in self.plan.rows[index:] if row.is_run), None)

    def note(self, text: str) -> None:
        """Something to be known at the end, once."""
        if text not in self.summary.notes:
            self.summary.notes.append(text)

    def _was(self, row: PlanRow, outcome: str | None = None) -> bool:
        """Return True if an attempt at the row's cell has ended, with this outcome if one is given."""
        records = [*self.summary.records, *([row.record] if row.record else [])]
        return any(
            record.fingerprint == row.spec.fingerprint and outcome in (None, record.outcome.kind) for record in records
        )

    def _append(self, entry: RunRecord | Started) -> None:
        warning = writing.append(self.summary.journal, entry)
        self.summary.notes += [warning] if warning else []

    def _left_seconds(self, index: int) -> float:
        """Expected from row ``index`` (1-based) on, at the pace so far, for as many cells as may still be started."""
        positions, sums = self._ahead
        first, last = bisect.bisect_left(positions, index - 1), len(positions)
        if self.limits.max_cells is not None:
            last = min(last, first + max(self.limits.max_cells - self.clock.num_cells, 0))
        seconds = sum(self.pace.correct(size, upto[last] - upto[first]) for size, upto in sums.items())
        return seconds / self.plan.num_slots + self._start_seconds

    @functools.cached_property
    def _ahead(self) -> tuple[list[int], dict[int, list[float]]]:
        """(places of the rows that are run, by model size the seconds expected of all before each of them)."""
        rows = [(place, row) for place, row in enumerate(self.plan.rows) if row.is_run]
        sums = {
            size: [0.0, *itertools.accumulate(row.seconds * (row.num_params == size) for _, row in rows)]
            for size in {row.num_params for _, row in rows}
        }
        return [place for place, _ in rows], sums

    @property
    def _start_seconds(self) -> float:
        """The first cell waits for the libraries, too."""
        return 0.0 if self.clock.num_cells else START_SECONDS
