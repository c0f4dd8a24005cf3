"""The allocator's history → the requests and frees of each micro-step, in order.

In: a process's history and its phases. Out: a RequestLog of blocks and events, and the MicroSteps of the requested
steps. Sizes are as they were requested. A free is where the allocator has the block back. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramprobe.profile.hook.history import ACTIONS
from vramprobe.profile.lifetimes import paired
from vramprobe.profile.ranks import AnalyzedRank

_GIVEN_BACK = [ACTIONS["segment_free"], ACTIONS["segment_unmap"]]
_TAKEN = [ACTIONS["segment_alloc"], ACTIONS["segment_map"]]
_OF_STEP = ("backward", "optimizer_step", "zero_grad")
#: In an event: a request on stream k has k times this more (allocator/allocator.py).
STREAM = 1 << 48


@dataclass(frozen=True)
class RequestLog:
    """Blocks in the order of their requests, each with its size and token (what asked for it, on which stream); events
    in order: the block, whether it is a request, its position in the history. ``empties``: before which events the
    cache was given back, other than for lack of memory.
    """

    sizes: np.ndarray  # with the stream: see STREAM
    tokens: np.ndarray
    blocks: np.ndarray
    is_request: np.ndarray
    positions: np.ndarray
    empties: np.ndarray
    num_streams: int

    def stack_of(self, token: int) -> int:
        """The position of its stack in the history's, -1 for none."""
        return token // self.num_streams

    def event_at(self, position: int) -> int:
        """Number of events up to this position in the history."""
        return int(np.searchsorted(self.positions, position))


@dataclass(frozen=True, eq=False)
class MicroStep:
    """One micro-step of ``step``, 1-based: events ``start`` to ``stop`` of the log."""

    log: RequestLog
    step: int
    start: int
    stop: int

    @cached_property
    def requested(self) -> np.ndarray:
        """Its blocks, in the order of their requests."""
        own = slice(self.start, self.stop)
        return self.log.blocks[own][self.log.is_request[own]]

    @cached_property
    def freed(self) -> np.ndarray:
        """The blocks that it frees, in order."""
        own = slice(self.start, self.stop)
        return self.log.blocks[own][~self.log.is_request[own]]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of its requests, without their streams."""
        return self.log.sizes[self.requested] % STREAM

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the token of each request's origin."""
        return self.log.tokens[self.requested]


def log_of(seen: AnalyzedRank) -> RequestLog:
    """All of a history; blocks from before it come first."""
    history = seen.history
    actions = np.frombuffer(history.actions, np.int8) if len(history.actions) else np.zeros(0, np.int8)
    streams, numbers = np.unique(np.array(history.streams, np.uint64), return_inverse=True)
    num_streams = max(len(streams), 1)
    freed = ACTIONS["free_requested" if num_streams == 1 else "free_completed"]
    chosen = np.flatnonzero((actions == ACTIONS["alloc"]) | (actions == freed))
    before = history.alive_before
    addresses = np.concatenate(
        [
            np.array([one[0] for one in before], np.uint64),
            np.array(history.addresses, np.uint64)[chosen],
        ]
    )
    is_request = np.concatenate([np.ones(len(before), bool), actions[chosen] == ACTIONS["alloc"]])
    starts, ends = paired(addresses, is_request)
    sizes = np.concatenate([np.array([one[2] for one in before], np.int64), np.array(history.sizes, np.int64)[chosen]])
    on = np.concatenate([np.zeros(len(before), np.int64), numbers[chosen]])
    stacks = np.concatenate([np.array([one[3] for one in before], np.int64), np.array(history.stacks_of)[chosen]])
    positions = np.concatenate([np.full(len(before), -1), chosen])
    blocks = np.full(len(addresses), -1)
    blocks[starts] = np.arange(len(starts))
    is_freed = ends < len(addresses)
    is_freed[is_freed] = ~is_request[ends[is_freed]]
    blocks[ends[is_freed]] = np.flatnonzero(is_freed)
    kept = blocks >= 0
    return RequestLog(
        sizes=(np.maximum(sizes, 1) + STREAM * on)[starts],
        tokens=(stacks * num_streams + on)[starts],
        blocks=blocks[kept],
        is_request=is_request[kept],
        positions=positions[kept],
        empties=np.searchsorted(positions[kept], _emptied(actions)),
        num_streams=num_streams,
    )


def _emptied(actions: np.ndarray) -> np.ndarray:
    """Positions of the first of segments given back in a row; not where new ones follow, as a full card makes it."""
    back = np.isin(actions, _GIVEN_BACK)
    begins = np.flatnonzero(back & ~np.concatenate([[False], back[:-1]]))
    ends = np.flatnonzero(back & ~np.concatenate([back[1:], [False]]))
    follows = np.isin(actions[np.minimum(ends + 1, len(actions) - 1)], _TAKEN)
    return begins[~follows]


def units_of(
    seen: AnalyzedRank, log: RequestLog, steps: Sequence[int], num_micro_steps: int
) -> dict[int, list[MicroStep]]:
    """The micro-steps of each of these steps that the history has whole.

    One ends with its backward, the last with the optimizer's step or zero_grad: what then comes is the next batch's.
    """
    micro_stops = {
        (one.phase.step, one.phase.micro_step): one.stop for one in seen.spans if one.phase.name == "backward"
    }
    stops = {one.phase.step: one.stop for one in seen.spans if one.phase.name in _OF_STEP}
    begin = next((at for at, one in enumerate(seen.spans) if one.phase.step == 1), 0)
    stops |= {0: seen.spans[begin - 1].stop} if begin else {}  # of what was before the steps
    found = {}
    for step in steps:
        within = [micro_stops.get((step, number)) for number in range(1, num_micro_steps)]
        cuts = [stops.get(step - 1), *within, stops.get(step)]
        if None not in cuts:
            at = [log.event_at(int(seen.lives.positions[cut - 1]) + 1) for cut in cuts if cut]
            found[step] = [MicroStep(log, step, *at[number : number + 2]) for number in range(num_micro_steps)]
    return found
