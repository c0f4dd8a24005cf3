"""The allocator's history, as the hook left it → a Log, the only form in which a run's requests are asked about.

In: a RawRank with its history. Out: a HistoryLog: the Log, first what was alive before the history began; where its
blocks lie, and the requests that could not be served. Causes and phases are found later (causes.py, phase_spans.py).
"""

from dataclasses import dataclass

import numpy as np

from vramprobe.log.blocks import NONE, previous_at
from vramprobe.log.log import CAUSES, Log
from vramprobe.profile.hook.history import ACTIONS
from vramprobe.profile.raw import RawRank

_ALLOC, _FREED, _COMPLETED, _OOM = (ACTIONS[word] for word in ("alloc", "free_requested", "free_completed", "oom"))
_GIVEN = [ACTIONS["segment_free"], ACTIONS["segment_unmap"]]
#: A segment that would have come to less than this share of the card found space.
_FULL_SHARE = 0.85


@dataclass(frozen=True)
class FailedRequest:
    """A request that ran out of memory once ``num_events`` of the log had happened."""

    num_events: int
    size_bytes: int
    stream: int
    time_us: int


@dataclass(frozen=True)
class HistoryLog:
    """``addresses``: of each block. ``num_before``: blocks, and events, that stand for what was there before."""

    log: Log
    addresses: np.ndarray  # uint64
    num_before: int
    failed: tuple[FailedRequest, ...]

    @property
    def times_us(self) -> np.ndarray:
        """The time of each event; 0 of those that stand for what was there before."""
        assert self.log.times_us is not None
        return self.log.times_us

    @property
    def lines(self) -> np.ndarray:
        """The position of the stack of each event's block in the history's; -1 for none."""
        assert self.log.lines is not None
        return self.log.lines


def read_history_log(raw: RawRank) -> HistoryLog | None:
    """The history of one process; None where it left none, or an empty one.

    A free of what nobody allocated drops out; a block whose address is allocated again was freed just before.
    """
    history = raw.history
    if history is None or not (len(history.actions) or history.alive_before):
        return None
    before, num_before = np.array(history.alive_before, dtype=object).reshape(-1, 4), len(history.alive_before)
    actions = np.frombuffer(history.actions, np.int8) if len(history.actions) else np.zeros(0, np.int8)
    sizes = np.array(history.sizes, np.int64)
    streams = np.unique(np.array(history.streams, np.uint64), return_inverse=True)[1]
    chosen = np.flatnonzero(np.isin(actions, [_ALLOC, _FREED, _COMPLETED]))

    def column(of_before, values, dtype=np.int64):
        of_before = np.full(num_before, of_before) if np.isscalar(of_before) else of_before
        return np.concatenate([of_before.astype(dtype), np.array(values, dtype)[chosen]])

    kinds, addresses = column(_ALLOC, actions), column(before[:, 0], history.addresses, np.uint64)
    positions = np.concatenate([np.full(num_before, -1), chosen])
    blocks, is_kept, again = _paired(kinds, addresses, positions)
    emptied = np.searchsorted(positions, _emptied_before(raw, actions, sizes))
    inserted = np.concatenate([emptied, again])
    is_kept = np.insert(is_kept, inserted, True)

    def events(values, of_emptied, of_again):
        more = [np.broadcast_to(of_emptied, len(emptied)), np.broadcast_to(of_again, len(again))]
        return np.insert(values, inserted, np.concatenate(more))[is_kept]

    numbers = events(blocks, 0, blocks[previous_at(addresses)[again]])
    signs = events(np.select([kinds == _ALLOC, kinds == _FREED], [1, -1]), 0, -1)
    times = np.maximum.accumulate(column(0, history.times_us))
    happened = events(positions, positions[emptied], positions[again])

    def of_block(values):
        return np.append(values[kinds == _ALLOC], values.dtype.type(0))[numbers - 1]

    log = Log(
        size_bytes=signs * of_block(column(before[:, 2], sizes)),
        blocks=numbers,
        causes=np.full(len(numbers), CAUSES.index("other"), np.int8),
        marks=(),
        streams=of_block(column(0, streams, np.int8)),
        lines=of_block(column(before[:, 3], history.stacks_of, np.int32)),
        times_us=events(times, times[emptied], times[again]),
    )
    failed = [
        FailedRequest(int(np.searchsorted(happened, at)), int(sizes[at]), int(streams[at]), history.times_us[at])
        for at in np.flatnonzero(actions == _OOM).tolist()
    ]
    return HistoryLog(log, addresses[kinds == _ALLOC], num_before, tuple(failed))


def _paired(kinds: np.ndarray, addresses: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    """(the block of each event, 0 for none; which events a log has; those that allocate where a block already is).

    A log has a completed free only where it did not follow at once.
    """
    previous = previous_at(addresses)
    kind_before = np.where(previous < 0, NONE, kinds[previous])
    numbers = np.cumsum(kinds == _ALLOC)
    is_free = (kinds == _FREED) & (kind_before == _ALLOC)
    is_completed = (kinds == _COMPLETED) & (kind_before == _FREED) & is_free[previous]
    blocks = np.where(kinds == _ALLOC, numbers, np.where(is_free | is_completed, numbers[previous], 0))
    is_late = is_completed & (positions != positions[previous] + 1)
    return blocks, (kinds == _ALLOC) | is_free | is_late, np.flatnonzero((kinds == _ALLOC) & (kind_before == _ALLOC))


def _emptied_before(raw: RawRank, actions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Positions, in the history, of the events just before which the program emptied the cache.

    The allocator gives segments back by itself, too, on a card that was full: where it took others in the same moment.
    """
    program = np.flatnonzero(np.isin(actions, [_ALLOC, _FREED, _COMPLETED, _OOM]))
    segment = np.setdiff1d(np.arange(len(actions)), program, assume_unique=True)
    next_event = np.searchsorted(program, segment)
    is_given = np.isin(actions[segment], _GIVEN)
    given, taken = (
        np.bincount(next_event, np.where(mask, sizes[segment], 0), len(program) + 1)[:-1]
        for mask in (is_given, ~is_given)
    )
    reserved_and_taken = np.cumsum(taken) - np.concatenate([[0], np.cumsum(given)[:-1]])
    was_never_full = raw.end is not None and raw.end.num_alloc_retries == 0
    is_space_left = reserved_and_taken < _FULL_SHARE * (raw.process.device_total_bytes or 0)
    kinds = actions[program]
    is_by_program = was_never_full | ~np.isin(kinds, [_ALLOC, _OOM]) | (taken == 0) | is_space_left
    return program[(given > 0) & (kinds != _OOM) & is_by_program]
