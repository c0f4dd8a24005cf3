"""Which allocation each free takes back, said without naming blocks, so that it can be continued to deeper models.

In: a History. Out: for each of its phases, its events as a Script: what each is (a code) and, for a free, how many
blocks of the same size and cause that are newer live on (its rank). And back: Scripts → a History. Knows no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vramprobe.simulate.history import CAUSES, History
from vramprobe.simulate.instrument import PhaseMark

_BITS = 3  # of an event's code that hold its cause


class Unpaired(Exception):
    """A free that no living block answers to."""


@dataclass(frozen=True)
class Script:
    """One phase's events; two arrays of one length. Frees that follow each other stand in order of age.

    The libraries free some in the order of a hash table; the caching allocator comes to the same either way.
    ``codes``: the size times 8 plus the cause's position in :data:`CAUSES`; a free's size is negative.
    ``ranks``: for a free, the number of living blocks of its size and cause that were allocated later; else 0.
    """

    codes: np.ndarray  # int64
    ranks: np.ndarray  # int64

    @property
    def size_bytes(self) -> np.ndarray:
        """Bytes of each event, negative for a free."""
        return self.codes >> _BITS

    def bytes_by_cause(self, stop: int | None = None) -> np.ndarray:
        """Bytes that the first ``stop`` events (all by default) leave, one value per cause."""
        codes = self.codes[:stop]
        causes = codes & (1 << _BITS) - 1
        return np.array([(codes[causes == cause] >> _BITS).sum() for cause in range(len(CAUSES))], dtype=np.int64)


def scripts_of(history: History) -> list[Script]:
    """One Script per phase. Events between phases are none of them."""
    codes = (history.size_bytes << _BITS) | history.causes
    order = [_in_order(codes, history.blocks, mark.events) for mark in history.marks]
    flat = np.concatenate([*order, np.zeros(0, dtype=np.int64)])
    codes = codes[flat]
    ranks = _ranks(codes, history.blocks[flat])
    stops = np.cumsum([len(one) for one in order])[:-1]
    return [Script(*pair) for pair in zip(np.split(codes, stops), np.split(ranks, stops), strict=True)]


def history_from(scripts: Sequence[Script], marks: Sequence[PhaseMark]) -> History:
    """The events of phases that follow each other; blocks are numbered as they come. Raises Unpaired."""
    codes = np.concatenate([script.codes for script in scripts])
    blocks = _blocks(codes, np.concatenate([script.ranks for script in scripts]))
    stops = np.cumsum([len(script.codes) for script in scripts])
    return History(
        size_bytes=codes >> _BITS,
        blocks=blocks,
        causes=(codes & (1 << _BITS) - 1).astype(np.int8),
        marks=tuple(
            replace(mark, events=range(int(stop) - len(script.codes), int(stop)))
            for mark, script, stop in zip(marks, scripts, stops, strict=True)
        ),
    )


def _in_order(codes: np.ndarray, blocks: np.ndarray, events: range) -> np.ndarray:
    """Positions of a phase's events, with consecutive frees sorted by age."""
    positions = np.arange(events.start, events.stop)
    codes = codes[positions]
    is_free = codes < 0
    runs = np.cumsum(np.diff(is_free, prepend=False))
    return positions[np.lexsort((np.where(is_free, blocks[positions], positions), runs))]


def _ranks(codes: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    ranks = np.zeros(len(codes), dtype=np.int64)
    alive: defaultdict[int, list[int]] = defaultdict(list)
    for position, (kind, is_free, block) in enumerate(zip(*_kinds(codes), blocks.tolist(), strict=True)):
        same = alive[kind]
        if not is_free:
            same.append(block)
        elif same[-1] == block:
            same.pop()
        else:
            at = same.index(block)
            del same[at]
            ranks[position] = len(same) - at
    return ranks


def _blocks(codes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    blocks: list[int] = []
    alive: defaultdict[int, list[int]] = defaultdict(list)
    count = 0
    for kind, is_free, rank in zip(*_kinds(codes), ranks.tolist(), strict=True):
        same = alive[kind]
        if not is_free:
            count += 1
            same.append(count)
            blocks.append(count)
        elif 0 <= rank < len(same):
            blocks.append(same.pop(-1 - rank))
        else:
            raise Unpaired(f"a free of {kind >> _BITS} B")
    return np.array(blocks, dtype=np.int64)


def _kinds(codes: np.ndarray) -> tuple[list[int], list[bool]]:
    """The code of the allocation to which each event belongs, and whether the event is its free."""
    is_free = codes < 0
    causes = codes & (1 << _BITS) - 1
    return ((abs(codes >> _BITS) << _BITS) | causes).tolist(), is_free.tolist()
