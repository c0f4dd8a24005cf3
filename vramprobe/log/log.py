"""Every allocation and free of a run, in order: how much, which block, why, in which phase and layer.

In: events, the marks of phases and layers, and the blocks whose cause is known. Out: a frozen Log of flat arrays, which
replay, timeline, extension and records are made from. Pure NumPy; knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vramprobe.log.trace import Event, Owned, lifetimes
from vramprobe.records.record import PhaseName

#: Why a block is there; positions in ALL_CAUSES are the values of :attr:`Log.causes`.
CAUSES = ("weights", "gradients", "optimizer_state", "batch", "saved_activations", "temporaries", "other")
#: Those, and what refined.py tells apart in a cell's recording.
ALL_CAUSES = (
    *CAUSES,
    *("checkpoint_store", "recomputed_layer", "logits", "cast_copies", "optimizer_temporaries", "workspaces"),
)


@dataclass(frozen=True)
class PhaseMark:
    """One phase and the events that happened in it, by position."""

    name: PhaseName
    step: int | None
    micro_step: int | None
    events: range


class LayerMark(NamedTuple):
    """From event ``position`` on, the model is at ``layer`` of its stack of layers number ``stack``, in ``visit``."""

    position: int
    stack: int  # -1: not among layers
    layer: int
    visit: str  # forward, backward, or after a layer


#: Where no layer has been entered yet.
OUTSIDE = LayerMark(0, -1, -1, "")


@dataclass(frozen=True)
class OwnedBlocks:
    """Blocks that stood after event ``position`` and whose cause is known; ``blocks``: address → bytes."""

    cause: str
    step: int | None
    position: int
    blocks: dict[int, int]


@dataclass(frozen=True)
class Log:
    """Events in order; the arrays are of one length, one value per event.

    ``size_bytes``: as requested, positive for an allocation, negative for its free; 0 where the cache is emptied, which
    is no block's. ``blocks``: a number of the block, the same for its allocation and its free, used once. ``causes``:
    a position in :data:`ALL_CAUSES`, of the block. ``marks``: the phases, with their events by position. ``layers``:
    where the model entered and left a layer, in order; empty where the source does not tell. ``streams``: the block's,
    0 the default one and the others as they come; None where all is on that.
    """

    size_bytes: np.ndarray  # int64
    blocks: np.ndarray  # int64
    causes: np.ndarray  # int8
    marks: Sequence[PhaseMark]
    layers: Sequence[LayerMark] = ()
    streams: np.ndarray | None = None  # int8

    def __len__(self) -> int:
        return len(self.size_bytes)

    def each_stream(self) -> np.ndarray:
        """The stream of each event's block."""
        return np.zeros(len(self), dtype=np.int8) if self.streams is None else self.streams


def log_of(
    events: list[Event],
    marks: list[PhaseMark],
    owned: list[OwnedBlocks],
    layers: Sequence[LayerMark] = (),
    streams: Sequence[int] | None = None,
) -> Log:
    """Return the events with their causes: of what nobody owns, what a forward made and left is a saved activation.

    An address may serve several blocks in turn: each gets a number of its own.
    """
    numbers, alive = np.zeros(len(events), dtype=np.int64), {}
    for position, event in enumerate(events):
        if event.size_bytes > 0:
            alive[event.ptr] = position + 1
        numbers[position] = alive.get(event.ptr, 0)
    return Log(
        size_bytes=np.fromiter((event.size_bytes for event in events), dtype=np.int64, count=len(events)),
        blocks=numbers,
        causes=_causes(events, marks, owned),
        marks=tuple(marks),
        layers=tuple(layers),
        streams=None if streams is None else np.array(streams, dtype=np.int8),
    )


def _causes(events: list[Event], marks: list[PhaseMark], owned: list[OwnedBlocks]) -> np.ndarray:
    """The cause of each event's block."""
    owners: dict[int, list[Owned]] = {}
    for one in owned:
        holding = Owned(one.cause, one.position, frozenset(one.blocks))
        for address in one.blocks:
            owners.setdefault(address, []).append(holding)
    forwards = [mark.events for mark in marks if mark.name == "forward"]
    causes = np.zeros(len(events), dtype=np.int8)
    for block in lifetimes(events):
        cause = next((one.cause for one in owners.get(block.ptr, ()) if block.alive_after(one.position)), None)
        if cause is None:
            made_in = next((forward for forward in forwards if block.start in forward), None)
            is_saved = made_in is not None and block.end >= made_in.stop
            is_older = bool(forwards) and block.start < forwards[0].start
            cause = "other" if is_older else "saved_activations" if is_saved else "temporaries"
        causes[block.start] = CAUSES.index(cause)
        if block.end < len(events):
            causes[block.end] = CAUSES.index(cause)
    return causes
