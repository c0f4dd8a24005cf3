"""A run's phases → spans of its log: which events happened in which phase.

In: the log of a process, and its phases with the counters at their ends. Out: PhaseSpans in order. torch's clock and
Python's are two, so that an end is found by the bytes that were alive then, near its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.log.blocks import Lives
from vramprobe.profile.history_log import HistoryLog
from vramprobe.profile.raw import RawHistory, RawPhase

#: A phase's end is looked for among the events this near to its time.
_WINDOW_EVENTS = 4000
_WINDOW_US = 20_000
#: A history begins at a phase's start, give or take so much.
_SLACK_NS = 1_000_000


@dataclass(frozen=True)
class PhaseSpan:
    """One phase with its events, by position; ``closes``: whether the bytes at its end are the counter's."""

    phase: RawPhase
    start: int
    stop: int
    closes: bool | None  # null where the counter is not known

    @property
    def moments(self) -> np.ndarray:
        """Its moments as numbers of events that have happened, the first before any of its own."""
        return np.arange(self.start, self.stop + 1)


def spans_of(history_log: HistoryLog, lives: Lives, phases: Sequence[RawPhase], history: RawHistory) -> list[PhaseSpan]:
    """Each phase that the history covers, in order.

    An end is the event nearest in time after which as much is alive as the allocator's counter said then.
    """
    spans: list[PhaseSpan] = []
    for phase in sorted(phases, key=lambda one: (one.start_ns, one.end_ns)):
        if not _is_covered(phase, history):
            continue
        follows = bool(spans) and spans[-1].phase.end_ns == phase.start_ns
        begin = (
            spans[-1].stop
            if follows
            else max(events_until(history_log, phase.start_ns), spans[-1].stop if spans else 0)
        )
        if not spans and history.traced == "all":
            begin = history_log.num_before
        stop, closes = _end(history_log, lives, phase, begin)
        spans.append(PhaseSpan(phase, begin, stop, closes))
    return spans


def events_until(history_log: HistoryLog, time_ns: int) -> int:
    """Number of events before a time; those before the history always count."""
    return max(int(np.searchsorted(history_log.times_us, time_ns // 1000, side="right")), history_log.num_before)


def _is_covered(phase: RawPhase, history: RawHistory) -> bool:
    """A history begins and ends where phases do, a little later: those before have ended, those after have not."""
    first_ns = None if history.traced == "all" else history.first_ns
    begins = first_ns is None or (phase.start_ns >= first_ns - _SLACK_NS and phase.end_ns > first_ns)
    return begins and (history.last_ns is None or phase.end_ns <= history.last_ns)


def _end(history_log: HistoryLog, lives: Lives, phase: RawPhase, begin: int) -> tuple[int, bool | None]:
    by_time = max(events_until(history_log, phase.end_ns), begin)
    wanted = phase.requested_end_bytes
    if wanted is None:
        return by_time, None
    low, high = max(begin, by_time - _WINDOW_EVENTS), min(lives.num_events, by_time + _WINDOW_EVENTS)
    counts = np.arange(low, high + 1)
    fitting = counts[(lives.bytes_after(counts) == wanted) & _near(history_log, counts, phase.end_ns // 1000)]
    if not len(fitting):
        return by_time, False
    return int(fitting[np.abs(fitting - by_time).argmin()]), True


def _near(history_log: HistoryLog, counts: np.ndarray, time_us: int) -> np.ndarray:
    """Return which of these numbers of events had happened at a time, give or take what two clocks differ by: each
    stands from its own last event until the next one, however long a loaded machine waited between them."""
    first, last = counts[0], counts[-1]
    times_us = history_log.times_us[max(first - 1, 0) : last + 1].astype(float)
    begun = times_us if first else np.concatenate(([-np.inf], times_us))
    ends = np.concatenate((begun[1:], [np.inf]))
    size = len(counts)
    return (begun[:size] <= time_us + _WINDOW_US) & (ends[:size] >= time_us - _WINDOW_US)
