"""The blocks of a log: from when to when each is there, which of them holds an address, and why each was made.

In: the addresses of an allocator's events, or a Log. Out: block numbers, Lives, causes. It never decides which blocks
are weights or gradients: whoever records says so (log/trace.py, profile/causes.py). Pure NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.log.log import CAUSES

NONE = -1  # no block, no cause
_SAVED, _TEMPORARY, _OTHER = (CAUSES.index(cause) for cause in ("saved_activations", "temporaries", "other"))


@dataclass(frozen=True)
class Lives:
    """Blocks in the order of their allocations: ``sizes`` in bytes, ``starts`` and ``ends``, the positions of their
    allocation and of their free (the number of events where there is none). ``totals``: bytes alive after each event.
    """

    sizes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    totals: np.ndarray

    @property
    def num_events(self) -> int:
        """Events of the log."""
        return len(self.totals)

    def alive_after(self, num_events: int) -> np.ndarray:
        """Mask of the blocks that are alive once so many events have happened."""
        return (self.starts < num_events) & (self.ends >= num_events)

    def bytes_after(self, counts: np.ndarray) -> np.ndarray:
        """Return the bytes alive after each of these numbers of events."""
        return np.where(counts > 0, self.totals[counts - 1], 0) if self.num_events else np.zeros(len(counts), np.int64)

    def highest(self, counts: np.ndarray) -> int:
        """Return the first of these numbers of events after which the most bytes are alive."""
        return int(counts[self.bytes_after(counts).argmax()])


def previous_at(addresses: np.ndarray) -> np.ndarray:
    """Positions of the event before each at its address; NONE for the first one there."""
    order = np.argsort(addresses, kind="stable")
    previous = np.full(len(addresses), NONE)
    same = addresses[order][1:] == addresses[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def block_numbers(addresses: np.ndarray, size_bytes: np.ndarray) -> np.ndarray:
    """Each event's block, from 1 on in the order of allocations; 0 for a free of what is not there and for no block."""
    is_alloc, previous = size_bytes > 0, previous_at(addresses)
    numbers = np.cumsum(is_alloc)
    is_paired = (size_bytes < 0) & (previous >= 0) & is_alloc[previous]
    return np.where(is_alloc, numbers, np.where(is_paired, numbers[previous], 0))


def lives_of(size_bytes: np.ndarray, blocks: np.ndarray) -> Lives:
    """Return the lives of the blocks of these events (a log's, or a part of one), in the order of their allocations."""
    starts, frees = np.flatnonzero(size_bytes > 0), np.flatnonzero(size_bytes < 0)
    ends = np.full(len(starts), len(size_bytes))
    number = np.full(int(blocks.max(initial=0)) + 1, NONE)
    number[blocks[starts]] = np.arange(len(starts))
    frees = frees[number[blocks[frees]] != NONE]
    ends[number[blocks[frees]]] = frees
    return Lives(size_bytes[starts], starts, ends, np.cumsum(size_bytes))


def blocks_at(lives: Lives, block_addresses: np.ndarray, wanted: np.ndarray, num_events: int) -> np.ndarray:
    """The block that each address lies in once so many events have happened, NONE where there is none."""
    alive = np.flatnonzero(lives.alive_after(num_events))
    if not len(alive) or not len(wanted):
        return np.full(len(wanted), NONE)
    alive = alive[np.argsort(block_addresses[alive])]
    at = np.searchsorted(block_addresses[alive], wanted, side="right") - 1
    found = alive[np.maximum(at, 0)]
    inside = (at >= 0) & (wanted < block_addresses[found] + lives.sizes[found].astype(np.uint64))
    return np.where(inside, found, NONE)


def causes_of(
    lives: Lives, owners: np.ndarray, forwards: Sequence[range], start: int, outlived: Sequence[int] = ()
) -> np.ndarray:
    """The cause of each block, a position in CAUSES: its owner's (``owners``, NONE for nobody); else by its life.

    Made in one of ``forwards`` (event positions) and alive at its end, it is a saved activation; older than event
    ``start``, or alive after one of ``outlived``, other; else temporary.
    """
    causes = np.full(len(lives.sizes), _TEMPORARY, dtype=np.int8)
    for forward in forwards:
        is_saved = (lives.starts >= forward.start) & (lives.starts < forward.stop) & (lives.ends >= forward.stop)
        causes[is_saved] = _SAVED
    causes[lives.starts < start] = _OTHER
    for stop in outlived:
        causes[lives.ends >= stop] = _OTHER
    return np.where(owners == NONE, causes, owners).astype(np.int8)
