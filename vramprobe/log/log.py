"""Every allocation and free of a run, in order: how much, which block, why, in which phase and layer.

In: events of a source: measure/log_source.py for a cell on a GPU, profile/history_log.py for any command. Out: a frozen
Log of flat arrays, which replay, timeline, extension and records are made from. Pure NumPy; knows no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vramprobe.choices import PhaseName

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
class Log:
    """Events in order; the arrays are of one length, one value per event.

    ``size_bytes``: as requested, positive for an allocation, negative for its free; 0 for no block where the cache is
    emptied, 0 for a block where the allocator gets it back only now: another stream used it when it was freed.
    ``blocks``: from 1 on in the order of their allocations, 0 for none. ``causes``: a position in ALL_CAUSES, of the
    block. ``marks``: the phases, with their events by position. ``layers``: where the model entered and left a layer,
    in order; empty where the source does not tell. ``streams``: the block's, 0 the default one and the others as they
    come; None where all is on that. ``lines``: what requested the block, as a position in its source's stacks, -1 for
    none; None, as ``times_us`` of each event, where the source does not keep it.
    """

    size_bytes: np.ndarray  # int64
    blocks: np.ndarray  # int64
    causes: np.ndarray  # int8
    marks: Sequence[PhaseMark]
    layers: Sequence[LayerMark] = ()
    streams: np.ndarray | None = None  # int8
    lines: np.ndarray | None = None  # int32
    times_us: np.ndarray | None = None  # int64

    def __len__(self) -> int:
        return len(self.size_bytes)

    def each_stream(self) -> np.ndarray:
        """The stream of each event's block."""
        return np.zeros(len(self), dtype=np.int8) if self.streams is None else self.streams

    @property
    def is_emptied(self) -> np.ndarray:
        """Mask of the events at which the cache is emptied."""
        return (self.size_bytes == 0) & (self.blocks == 0)

    @property
    def gives_back(self) -> np.ndarray:
        """Mask of the events at which the allocator has a block back."""
        is_late = (self.size_bytes == 0) & (self.blocks > 0)
        return is_late | ((self.size_bytes < 0) & ~np.isin(self.blocks, self.blocks[is_late]))
