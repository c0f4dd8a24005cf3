"""Sweep → records: each cell in its own process, each record stored and synced before the next cell starts.

In: cells and a results folder. Out: the journal in that folder, and a summary. Resumes where it stopped; a failed cell
never ends the sweep; SIGINT, SIGTERM and SIGHUP end it with the running cell recorded as interrupted. Never prints:
whoever shows progress passes ``on_event``.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vramprobe import store
from vramprobe.errors import StoreError
from vramprobe.measure import forkserver
from vramprobe.measure.isolation import Launcher, Server, Spawner, interrupted, run_isolated, worker_environment
from vramprobe.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep import Sweep

JOURNAL = "records.jsonl"
OUT_OF_TIME = "max-time"
#: Slow enough for a 70B model to load and train its steps on one card; a hung cell costs no more than this.
DEFAULT_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Progress:
    """One thing that happened to cell ``index`` (1-based) of ``total``."""

    kind: Literal["kept", "started", "finished"]
    index: int
    total: int
    spec: CellSpec
    reason: str = ""  # why the cell is run or kept
    record: RunRecord | None = None
    log: Path | None = None


@dataclass
class RunSummary:
    """What a sweep did. ``stopped_by``: the signal, or OUT_OF_TIME, where it did not reach its end."""

    journal: Path
    total: int
    kept: int = 0
    records: list[RunRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped_by: str | None = None

    def counts(self) -> dict[str, int]:
        """Records of this run by outcome."""
        found: dict[str, int] = {}
        for record in self.records:
            found[record.outcome.kind] = found.get(record.outcome.kind, 0) + 1
        return found


class _Stopped(BaseException):
    """A signal asked the sweep to end; not an Exception, so that nothing on the way swallows it."""

    @property
    def name(self) -> str:
        return self.args[0]


def measure(spec: CellSpec, *, log: Path, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> RunRecord:
    """Run one cell in a process of its own and return its record; nothing is stored."""
    launcher = Spawner(worker_environment())
    try:
        return run_isolated(spec, launcher, log, timeout_seconds)
    finally:
        launcher.close()


def run(
    sweep: Sweep,
    folder: Path,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    max_seconds: float = math.inf,
    on_event: Callable[[Progress], None] = lambda event: None,
) -> RunSummary:
    """Run the cells of ``sweep`` that ``folder`` has no finished record of, starting none that ``max_seconds`` forbids.

    The time must do for the slowest cell so far; one that still overruns it is ended and recorded as interrupted.
    Raises StoreError before running anything where the folder cannot be read or written.
    """
    logs, signals = folder / "logs", _Signals()
    with store.lock(folder):
        summary = RunSummary(folder / JOURNAL, total=len(sweep.cells))
        planned = store.plan_resume(sweep.cells, _already(summary))
        try:
            logs.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write logs to {logs}: {error.strerror}; choose another folder") from error
        clock = _Clock(timeout_seconds, max_seconds)
        with _launchers(sweep, logs) as launcher_for, signals.caught():
            for index, cell in enumerate(planned, start=1):
                event = Progress("kept", index, summary.total, cell.spec, cell.reason)
                if cell.action == "kept":
                    summary.kept += 1
                    on_event(event)
                    continue
                summary.stopped_by = signals.stopped_by or (None if clock.allows_another() else OUT_OF_TIME)
                if summary.stopped_by:
                    break
                log = logs / f"{cell.spec.cell_id[:100]}.{cell.spec.fingerprint}.log"
                on_event(replace(event, kind="started", log=log))
                launcher = launcher_for(cell.spec)
                with clock.timing() as limit_seconds:
                    record = _attempt(cell.spec, launcher, log, limit_seconds, signals)
                if record.outcome.kind == "timeout" and limit_seconds < timeout_seconds:
                    record = interrupted(cell.spec, launcher.isolation, OUT_OF_TIME)
                _keep(record, sweep, summary)
                if record.outcome.kind == "ok":
                    log.unlink(missing_ok=True)
                on_event(replace(event, kind="finished", record=record, log=log))
            summary.stopped_by = signals.stopped_by or summary.stopped_by
    return summary


class _Clock:
    """The time a sweep has, and what its slowest cell took."""

    def __init__(self, timeout_seconds: float, max_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + max_seconds
        self._slowest_seconds = 0.0

    def allows_another(self) -> bool:
        """Whether the time left would have done for the slowest cell so far."""
        left_seconds = self._deadline - time.monotonic()
        return left_seconds > self._slowest_seconds

    @contextlib.contextmanager
    def timing(self) -> Iterator[float]:
        """Around one cell: gives the seconds it may take, and notes those it took."""
        began = time.monotonic()
        yield min(self._timeout_seconds, self._deadline - began)
        self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - began)


def _attempt(spec: CellSpec, launcher: Launcher, log: Path, timeout_seconds: float, signals: _Signals) -> RunRecord:
    """One cell; the record says so if a signal ended it."""
    try:
        with signals.raising():
            return run_isolated(spec, launcher, log, timeout_seconds)
    except _Stopped as stop:
        launcher.close()
        return interrupted(spec, launcher.isolation, stop.name)


def _keep(record: RunRecord, sweep: Sweep, summary: RunSummary) -> None:
    """Store the record, with its sweep's name, synced."""
    held_out = record.fingerprint in sweep.held_out
    record = record.model_copy(update={"sweep": sweep.name, "held_out": held_out})
    warning = store.append(summary.journal, record)
    summary.records.append(record)
    summary.notes += [warning] if warning else []


def _already(summary: RunSummary) -> list[RunRecord]:
    """What the journal holds; a torn tail is noted, a broken line raises before anything is run."""
    if not summary.journal.exists():
        return []
    contents = store.read(summary.journal, allow_empty=True)
    summary.notes += [contents.torn_tail] if contents.torn_tail else []
    return list(contents.records)


@contextlib.contextmanager
def _launchers(sweep: Sweep, logs: Path) -> Iterator[Callable[[CellSpec], Launcher]]:
    """How each cell is started: CPU cells from a fork server where the system has one, CUDA cells spawned."""
    env = worker_environment()
    spawner = Spawner(env)
    server: Launcher = spawner
    if forkserver.is_available():
        server = Server(env, [spec.model_type for spec in sweep.cells], logs / "forkserver.log")
    try:
        yield lambda spec: server if spec.device == "cpu" else spawner
    finally:
        server.close()
        spawner.close()


_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signals:
    """SIGINT, SIGTERM and SIGHUP while a sweep runs: they end the running cell, and the sweep once it is recorded.

    Outside ``raising`` a signal is only noted, so that no line is half written. Only the main thread can catch them.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self._raising = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals over; give them back at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._arrived) for signum in _CAUGHT}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal raises _Stopped at once."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _arrived(self, signum: int, frame: object) -> None:
        self.stopped_by = signal.Signals(signum).name
        if self._raising:
            self._raising = False
            raise _Stopped(self.stopped_by)
