"""Find whether a run's steps differ by more than 0.5 %, and in what: phases, shapes, a first use, times of frees.

In: a process's phases, and its history where there is one. Out: StepPeaks and words, or None where nothing differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vramprobe.records.profile_memory import StepPeaks

if TYPE_CHECKING:
    from vramprobe.profile.analyzed_rank import AnalyzedRank
    from vramprobe.profile.raw import RawPhase

_OF_NO_STEP = ("other", "zero_grad")  # which a loop may have or not, and nothing follows from it


def repeats(phases: Sequence[RawPhase], num_steps: int) -> bool | None:
    """Return True if the last two whole steps, from the second on, have the same peaks and ends; None with fewer than
    two.
    """
    if num_steps < 3:
        return None
    one, other = (
        [(phase.name, phase.allocated_peak_bytes, phase.allocated_end_bytes) for phase in _of(phases, step)]
        for step in (num_steps - 1, num_steps)
    )
    return one == other


def step_peaks(phases: Sequence[RawPhase], num_steps: int, seen: AnalyzedRank | None = None) -> StepPeaks | None:
    """The lowest and the highest allocated peak of the whole steps, without the first, in which optimizers make their
    state, and what differs between the two; None with fewer than two such steps."""
    peaks = {
        step: max(phase.allocated_peak_bytes for phase in own)
        for step in range(2, num_steps + 1)
        if (own := _of(phases, step))
    }
    if len(peaks) < 2:
        return None
    lowest, highest = (
        min(peaks, key=lambda step: (peaks[step], -step)),
        max(peaks, key=lambda step: (peaks[step], step)),
    )
    found = StepPeaks(lowest_bytes=peaks[lowest], highest_bytes=peaks[highest])
    if not found.differ:
        if peaks[lowest] == peaks[highest] or _requested(phases, lowest) != _requested(phases, highest):
            return found
        return found.model_copy(update={"what": "equal requests, which the allocator put into blocks of other sizes"})
    return found.model_copy(update={"what": _what(phases, seen, lowest, highest, num_steps)})


def _of(phases: Sequence[RawPhase], step: int) -> list[RawPhase]:
    return [phase for phase in phases if phase.step == step]


def _requested(phases: Sequence[RawPhase], step: int) -> list[object]:
    """Requested peaks and ends of a step's phases, before the allocator rounds them; of no other step if unknown."""
    own = _of(phases, step)
    if any(phase.requested_peak_bytes is None for phase in own):
        return [step]
    return [(phase.name, phase.requested_peak_bytes, phase.requested_end_bytes) for phase in own]


def _what(phases: Sequence[RawPhase], seen: AnalyzedRank | None, lowest: int, highest: int, num_steps: int) -> str:
    """Describe what step ``highest`` has and step ``lowest`` does not."""
    names, others = ({one.name for one in _of(phases, step)} - {*_OF_NO_STEP} for step in (highest, lowest))
    if more := sorted(names - others):
        return f"step {highest} has {', '.join(more)} in it, step {lowest} has not"
    sizes, other_sizes = _requests(seen, highest), _requests(seen, lowest)
    if sizes is None or other_sizes is None:
        return "why is not known: not all steps have a history of their allocations (--trace all)"
    if sizes == other_sizes:
        return f"steps {lowest} and {highest} allocate the same and free it at other times: work that overlaps"
    if highest < lowest and all(_requests(seen, step) == other_sizes for step in range(highest + 1, num_steps + 1)):
        return f"step {highest} is the last that allocates for a first use; the steps after it are alike"
    if sizes.total() == other_sizes.total():
        return f"steps {lowest} and {highest} make as many allocations of other sizes: their batches have other shapes"
    return f"step {highest} makes {sizes.total():,} allocations and step {lowest} {other_sizes.total():,}"


def _requests(seen: AnalyzedRank | None, step: int) -> Counter[int] | None:
    """Count how often a step allocates each size; None where it was not traced."""
    spans = [] if seen is None else [one for one in seen.spans if one.phase.step == step]
    if seen is None or not spans:
        return None
    starts, sizes = seen.lives.starts, seen.lives.sizes
    return Counter(sizes[(starts >= spans[0].start) & (starts < spans[-1].stop)].tolist())
