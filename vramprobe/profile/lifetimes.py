"""The allocator's history → blocks with their lives, the bytes alive after each event, and where the phases begin.

In: a RawHistory and the phases of its process. Out: frozen arrays. Bytes are requested ones, as the history has them: a
block is alive from its request until its owner lets go of it (``free_requested``). Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.profile.hook.history import ACTIONS
from vramprobe.profile.raw import RawHistory, RawPhase

#: A phase's end is looked for among the events this near to its time: torch's clock and Python's are two.
_WINDOW_EVENTS = 4000
_WINDOW_US = 20_000
#: A history begins at a phase's start, give or take so much.
_SLACK_NS = 1_000_000


@dataclass(frozen=True)
class Lives:
    """Blocks, and the requests and frees that make them, in order; first, as events, what was alive before the history.

    Per block: ``addresses``, ``sizes`` (bytes), ``stacks`` (position in RawHistory.stacks, -1 none), ``starts`` and
    ``ends`` (positions of its request and of its free, ``num_events`` where it stays). ``totals``: bytes alive after
    each event. Of each event: ``times_us``, ``events`` (signed bytes), ``blocks`` and ``positions`` (in the history, -1
    for one that stands for a block from before it).
    """

    addresses: np.ndarray
    sizes: np.ndarray
    stacks: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    totals: np.ndarray
    times_us: np.ndarray
    events: np.ndarray
    blocks: np.ndarray
    positions: np.ndarray
    num_before: int

    @property
    def num_events(self) -> int:
        """Requests and frees, with one request for each block that was there before."""
        return len(self.totals)

    def alive_after(self, num_events: int) -> np.ndarray:
        """Mask of the blocks that are alive once so many events have happened."""
        return (self.starts < num_events) & (self.ends >= num_events)

    def total_after(self, num_events: int) -> int:
        """Bytes alive once so many events have happened."""
        return int(self.totals[num_events - 1]) if num_events else 0


def lives_of(history: RawHistory) -> Lives:
    """Pair requests with frees by address; a free of what nobody requested drops out."""
    before = np.array([(one[0], one[2], one[3]) for one in history.alive_before], dtype=object).reshape(-1, 3)
    actions = np.frombuffer(history.actions, dtype=np.int8) if history.actions else np.zeros(0, np.int8)
    chosen = np.flatnonzero((actions == ACTIONS["alloc"]) | (actions == ACTIONS["free_requested"]))

    def column(values, first, dtype):
        own = np.array(values, dtype=dtype) if len(values) else np.zeros(0, dtype)
        return np.concatenate([np.array(first, dtype=dtype), own[chosen]])

    addresses = column(history.addresses, before[:, 0], np.uint64)
    sizes = column(history.sizes, before[:, 1], np.int64)
    stacks = column(history.stacks_of, before[:, 2], np.int32)
    times = column(history.times_us, np.zeros(len(before)), np.int64)
    is_request = np.concatenate([np.ones(len(before), bool), actions[chosen] == ACTIONS["alloc"]])
    starts, ends = paired(addresses, is_request)
    positions = np.concatenate([np.full(len(before), -1), chosen])
    return _lives(addresses, sizes, stacks, np.maximum.accumulate(times), positions, starts, ends, len(before))


def paired(addresses: np.ndarray, is_request: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positions of requests, positions of what ends each: the next event at its address; the number of events)."""
    count = len(addresses)
    order = np.lexsort((np.arange(count), addresses))
    following = np.full(count, count)
    same = addresses[order][1:] == addresses[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    starts = np.flatnonzero(is_request)
    return starts, following[starts]


def _lives(addresses, sizes, stacks, times, positions, starts, ends, num_before) -> Lives:
    """Events without a block drop out, and positions are those of what is left."""
    count = len(addresses)
    frees = ends < count
    free_at = ends[frees]
    is_kept = np.zeros(count, bool)
    is_kept[starts] = is_kept[free_at] = True
    place = np.cumsum(is_kept) - 1
    block = np.zeros(count, np.int64)
    events = np.zeros(count, np.int64)
    numbers = np.arange(len(starts))
    block[free_at], events[free_at] = numbers[frees], -sizes[starts[frees]]
    # A request at an address that was never freed ends the block there: both changes are of one moment.
    events[starts] += sizes[starts]
    block[starts] = numbers
    kept = np.flatnonzero(is_kept)
    new_ends = np.full(len(starts), len(kept))
    new_ends[frees] = place[free_at]
    return Lives(
        addresses=addresses[starts],
        sizes=sizes[starts],
        stacks=stacks[starts],
        starts=place[starts],
        ends=new_ends,
        totals=np.cumsum(events[kept]),
        times_us=times[kept],
        events=events[kept],
        blocks=block[kept],
        positions=positions[kept],
        num_before=num_before,
    )


@dataclass(frozen=True)
class PhaseSpan:
    """One phase with its events, by position; ``closes``: whether the bytes at its end are the counter's."""

    phase: RawPhase
    start: int
    stop: int
    closes: bool | None  # null where the counter is not known

    @property
    def moments(self) -> tuple[int, int]:
        """Its moments as numbers of events that have happened: the first, before any of its own, and one past the
        last."""
        return self.start, self.stop + 1


def spans_of(lives: Lives, phases: Sequence[RawPhase], history: RawHistory) -> list[PhaseSpan]:
    """Each phase that the history covers, in order.

    An end is the event nearest in time after which as much is alive as the allocator's counter said then.
    """
    spans: list[PhaseSpan] = []
    for phase in sorted(phases, key=lambda one: (one.start_ns, one.end_ns)):
        if not _is_covered(phase, history):
            continue
        follows = bool(spans) and spans[-1].phase.end_ns == phase.start_ns
        begin = spans[-1].stop if follows else max(_first(lives, phase.start_ns), spans[-1].stop if spans else 0)
        if not spans and history.traced == "all":
            begin = lives.num_before
        stop, closes = _end(lives, phase, begin)
        spans.append(PhaseSpan(phase, begin, stop, closes))
    return spans


def _is_covered(phase: RawPhase, history: RawHistory) -> bool:
    """A history begins and ends where phases do, a little later: those before have ended, those after have not."""
    first_ns = None if history.traced == "all" else history.first_ns
    begins = first_ns is None or (phase.start_ns >= first_ns - _SLACK_NS and phase.end_ns > first_ns)
    return begins and (history.last_ns is None or phase.end_ns <= history.last_ns)


def _first(lives: Lives, time_ns: int) -> int:
    """Number of events before a time; those before the history always count."""
    return max(int(np.searchsorted(lives.times_us, time_ns // 1000, side="right")), lives.num_before)


def _end(lives: Lives, phase: RawPhase, begin: int) -> tuple[int, bool | None]:
    by_time = max(_first(lives, phase.end_ns), begin)
    wanted = phase.requested_end_bytes
    if wanted is None:
        return by_time, None
    low, high = max(begin, by_time - _WINDOW_EVENTS), min(lives.num_events, by_time + _WINDOW_EVENTS)
    counts = np.arange(low, high + 1)
    totals = np.where(counts > 0, lives.totals[counts - 1] if lives.num_events else 0, 0)
    near = np.ones(len(counts), bool)
    inside = counts > 0
    near[inside] = np.abs(lives.times_us[counts[inside] - 1] - phase.end_ns // 1000) <= _WINDOW_US
    near |= counts == by_time
    fitting = counts[(totals == wanted) & near]
    if not len(fitting):
        return by_time, False
    return int(fitting[np.abs(fitting - by_time).argmin()]), True
