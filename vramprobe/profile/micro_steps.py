"""A process's log → the micro-steps of its steps: what each requests, and what it gives back.

In: an AnalyzedRank. Out: MicroSteps of the requested steps. A block is given back where the allocator has it: later
than its free where another stream still used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramprobe.profile.analyzed_rank import AnalyzedRank

_OF_STEP = ("backward", "optimizer_step", "zero_grad")


@dataclass(frozen=True, eq=False)
class MicroStep:
    """One micro-step of ``step``, 1-based: events ``start`` to ``stop`` of the log; blocks by their position."""

    seen: AnalyzedRank
    step: int
    start: int
    stop: int

    @cached_property
    def requested(self) -> np.ndarray:
        """Its blocks, in the order of their requests."""
        return np.arange(*np.searchsorted(self.seen.lives.starts, (self.start, self.stop)))

    @cached_property
    def freed(self) -> np.ndarray:
        """The blocks that it gives back, in order."""
        own = slice(self.start, self.stop)
        return self.seen.log.blocks[own][self.seen.gives_back[own]] - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of its requests."""
        return self.seen.lives.sizes[self.requested]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the token of each request's origin."""
        return self.seen.tokens[self.requested]


def micro_steps_of(seen: AnalyzedRank, steps: Sequence[int], num_micro_steps: int) -> dict[int, list[MicroStep]]:
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
        cuts = [cut for cut in (stops.get(step - 1), *within, stops.get(step)) if cut is not None]
        if len(cuts) == num_micro_steps + 1:
            found[step] = [MicroStep(seen, step, *cuts[number : number + 2]) for number in range(num_micro_steps)]
    return found
