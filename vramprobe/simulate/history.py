"""Every allocation and free of a simulated run, in order: how much, which block, why, and in which phase.

In: a Recorder's events, the phases' marks and what was held. Out: a frozen History of flat arrays, which the replay of
the caching allocator, the timeline and the record are made from. Pure NumPy; knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.measure.trace import Event, Holding, lifetimes
from vramprobe.simulate.instrument import Held, PhaseMark

#: Why a block is there; the positions are the values of :attr:`History.causes`.
CAUSES = ("weights", "gradients", "optimizer_state", "batch", "saved_activations", "temporaries", "other")


@dataclass(frozen=True)
class History:
    """Events in order; the arrays are of one length, one value per event.

    ``size_bytes``: as asked for, positive for an allocation, negative for its free; 0 where the cache is emptied, which
    is no block's. ``blocks``: a number of the block,
    the same for its allocation and its free, used once. ``causes``: a position in :data:`CAUSES`, of the block.
    ``marks``: the phases, with their events by position.
    """

    size_bytes: np.ndarray  # int64
    blocks: np.ndarray  # int64
    causes: np.ndarray  # int8
    marks: Sequence[PhaseMark]

    def __len__(self) -> int:
        return len(self.size_bytes)


def history_of(events: list[Event], marks: list[PhaseMark], held: list[Held]) -> History:
    """The events with their causes: what was held has a cause; of the rest, what a forward made and left is saved."""
    return History(
        size_bytes=np.fromiter((event.size_bytes for event in events), dtype=np.int64, count=len(events)),
        blocks=np.fromiter((event.ptr for event in events), dtype=np.int64, count=len(events)),
        causes=_causes(events, marks, held),
        marks=tuple(marks),
    )


def _causes(events: list[Event], marks: list[PhaseMark], held: list[Held]) -> np.ndarray:
    holdings = [Holding(one.cause, one.position, frozenset(one.blocks)) for one in held]
    forwards = [mark.events for mark in marks if mark.name == "forward"]
    causes = np.zeros(len(events), dtype=np.int8)
    owner = {ptr: CAUSES.index(one.cause) for one in holdings for ptr in one.ptrs}
    for block in lifetimes(events):
        cause = owner.get(block.ptr)
        if cause is None:
            made_in = next((forward for forward in forwards if block.start in forward), None)
            saved = made_in is not None and block.end >= made_in.stop
            is_older = bool(forwards) and block.start < forwards[0].start
            cause = CAUSES.index("other" if is_older else "saved_activations" if saved else "temporaries")
        causes[block.start] = cause
        if block.end < len(events):
            causes[block.end] = cause
    return causes
