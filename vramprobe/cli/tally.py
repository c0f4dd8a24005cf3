"""Tally: what a sweep under way has come to: cells by what became of them, time used and left, the worst prediction.

In: the runner's events, one by one as they come, or its summary. Out: counts, seconds and errors. Shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vramprobe.records import store
from vramprobe.records.record import RunRecord

if TYPE_CHECKING:
    from vramprobe.sweep.plan import PlanRow
    from vramprobe.sweep.progress import Progress

COUNTED = ("ok", "oom", "skipped", "failed", "kept", "quarantined")


class Tally:
    """The events of a sweep, added up. ``now`` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)  # all keys from the start: another thread may read while this one adds
        self.worst: tuple[float, str] | None = None  # as worst_error gives it
        self._now = now
        self._latest: tuple[Progress, float] | None = None  # and when it came
        self._left_seconds: float | None = None
        self._running: frozenset[int] = frozenset()  # rows

    def add(self, event: Progress) -> None:
        """Take note of what happened."""
        kind = became(event)
        if kind in self.counts:
            self.counts[kind] += 1
        if event.record is not None:
            found = worst_error([event.cell], [event.record])
            self.worst = _farthest(error for error in (self.worst, found) if error is not None)
        if event.left_seconds is not None:
            self._left_seconds = event.left_seconds
        if event.row is not None:
            self._running = self._running - {event.index} | ({event.index} if event.kind == "started" else set())
        self._latest = (event, self._now())

    @property
    def event(self) -> Progress | None:
        """The latest."""
        return self._latest and self._latest[0]

    @property
    def num_left(self) -> int:
        """Cells that nothing has become of yet, the running one included."""
        return self.event.total - sum(self.counts.values()) if self.event else 0

    @property
    def num_running(self) -> int:
        """Cells that were started and have not ended; several at once on a fleet."""
        return len(self._running)

    @property
    def seconds(self) -> float:
        """Used since the sweep began."""
        return self._latest[0].seconds + self._now() - self._latest[1] if self._latest else 0.0

    @property
    def cell_seconds(self) -> float | None:
        """Since the running cell was started; None while none runs."""
        event, came = self._latest or (None, 0.0)
        return self._now() - came if event and event.kind == "started" else None

    @property
    def left_seconds(self) -> float | None:
        """Expected until the end. A cell that takes longer than expected leaves what is expected of those behind it."""
        event, elapsed = self.event, self.cell_seconds
        if self._left_seconds is None or elapsed is None or event is None:
            return self._left_seconds
        return max(self._left_seconds - min(elapsed, event.expected_seconds or 0.0), 0.0)


def became(event: Progress) -> str:
    """Return the word by which the cell is counted: one of COUNTED, interrupted, or a mere event (planned, started,
    left).
    """
    if event.record is None:
        return event.kind
    outcome = event.record.outcome.kind
    return outcome if outcome in store.NOT_FAILED else "failed"


def prediction_error(row: PlanRow, record: RunRecord) -> float | None:
    """Predicted less measured peak, over measured: negative is an under-prediction. None where either is not known."""
    if row.prediction is None or record.outcome.kind != "ok" or record.peak is None:
        return None
    measured = record.peak.allocated_bytes
    return (row.prediction.peak_allocated_bytes.value - measured) / measured if measured else None


def worst_error(rows: Iterable[PlanRow], records: Iterable[RunRecord]) -> tuple[float, str] | None:
    """(prediction error, cell) of the one that is farthest from 0, the first of equals; None without any."""
    row_of = {row.spec.fingerprint: row for row in rows}
    errors = ((prediction_error(row_of[record.fingerprint], record), record.cell_id) for record in records)
    return _farthest((error, cell) for error, cell in errors if error is not None)


def _farthest(errors: Iterable[tuple[float, str]]) -> tuple[float, str] | None:
    return max(errors, key=lambda each: abs(each[0]), default=None)
