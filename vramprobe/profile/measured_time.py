"""The wall time of an optimizer step of a profiled command, measured on a real GPU by the ends of its phases.

In: the raw files of a run. Out: seconds, or None where kernels are no-ops (an emulated GPU) or too few steps ended.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

from vramprobe.profile.raw import RawRank, RawRun

#: The first step makes the optimizer's state and warms kernels up.
_FIRST_STEP, _LEAST_STEPS = 2, 3


def measured_step_seconds(run: RawRun) -> float | None:
    """Median seconds from the end of one optimizer step to the end of the next, of the slowest rank."""
    found = [_of_rank(raw) for raw in run.ranks if not raw.process.emulated]
    return max((one for one in found if one is not None), default=None)


def _of_rank(raw: RawRank) -> float | None:
    ends: dict[int, int] = {}
    for phase in raw.phases:
        if phase.name == "optimizer_step" and phase.step is not None and phase.step >= _FIRST_STEP - 1:
            ends[phase.step] = max(phase.end_ns, ends.get(phase.step, 0))
    steps = [(there - here) / 1e9 for (_, here), (_, there) in pairwise(sorted(ends.items()))]
    return statistics.median(steps) if len(steps) >= _LEAST_STEPS else None
