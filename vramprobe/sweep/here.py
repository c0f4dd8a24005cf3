"""Here: the executor of this machine, one cell after the other, forked from a server that has loaded the libraries.

In: what is due, from the bookkeeping. Out: its record, whatever the cell's process does. Nothing else runs meanwhile.
"""

from collections.abc import Iterable
from pathlib import Path

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
from vramprobe.measure.launcher import Launcher, Launchers
from vramprobe.records.record import Environment, Instrument, RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.progress import Progress
from vramprobe.sweep.signals import Stopped


class Here:
    """This machine; see executor.Executor."""

    num_slots = 1

    def __init__(self) -> None:
        self._context_of = environment.here()

    def context_of(self, spec: CellSpec) -> Environment:
        return self._context_of(spec)

    def instrument_of(self, spec: CellSpec) -> Instrument:
        return environment.instrument_for(spec)

    def require(self, specs: Iterable[CellSpec]) -> None:
        require_packages(specs)

    def run(self, books: Bookkeeping) -> None:
        """Take the rows one by one, until the end or a signal."""
        model_types = [row.spec.model_type for row in books.plan.rows]
        with Launchers(model_types, books.logs / "forkserver.log") as launchers, scratch_folder() as scratch:
            running = _Running(books, launchers, scratch)
            books.describe = lambda spec, outcome: describe_death(
                spec, launchers.launcher_of(spec), new_ticket(scratch), outcome
            )
            for index, row in enumerate(books.plan.rows, start=1):
                event = books.due(index, row)
                if event is not None:
                    running.start(event)
                if books.signals.stopped_by:
                    break


class _Running:
    """Runs one due cell to its end."""

    def __init__(self, books: Bookkeeping, launchers: Launchers, scratch: Path) -> None:
        self._books, self._launchers, self._scratch = books, launchers, scratch

    def start(self, event: Progress) -> None:
        books, spec = self._books, event.cell.spec
        ticket = new_ticket(self._scratch, verify=books.policy.verify)
        launcher = self._launchers.launcher_of(spec)
        event = books.announce(event, ticket)
        if not self._ready(launcher):
            return
        if (why := books.forbidden(event.cell, is_loaded=True)) is not None:  # loading took longer than it should
            books.leave(event, why)
            return
        if launcher.isolation_reason is not None:  # whoever pays by the minute should know
            books.note(f"each cell loads the libraries anew: {launcher.isolation_reason}")
        launcher.expect(books.upcoming(event.index))
        books.journal_start(event, ticket)
        assert event.log is not None
        record = self._attempt(spec, launcher, ticket, event.log)
        books.finish(event, ticket, record, books.clock.last_seconds)

    def _ready(self, launcher: Launcher) -> bool:
        """Have the libraries loaded, which is no cell's time nor attempt; False where a signal ended that."""
        try:
            with self._books.signals.raising():
                launcher.start(self._books.clock.left_seconds)
        except Stopped:
            launcher.close()
            return False
        return True

    def _attempt(self, spec: CellSpec, launcher: Launcher, ticket: Ticket, log: Path) -> RunRecord:
        """One cell; the record says so if a signal or the sweep's own limit ended it."""
        books = self._books
        try:
            with books.signals.raising(), books.clock.timing() as limit_seconds:
                record = run_isolated(spec, launcher, ticket, log, limit_seconds)
        except Stopped as stop:
            launcher.close()
            if (record := record_left(ticket, spec)) is not None:  # it had ended: nothing measured is lost
                late = f"{stop.name} came as the cell ended, before the device was looked at once more"
                return record.model_copy(update={"warnings": [*record.warnings, late]})
            return interrupted(spec, launcher, ticket, stop.name, by_limit=False)
        if record.outcome.kind == "timeout" and limit_seconds < books.limits.timeout_seconds:
            return interrupted(spec, launcher, ticket, books.limits.limited_by, by_limit=True)
        return record
