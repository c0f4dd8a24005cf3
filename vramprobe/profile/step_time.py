"""A run's counted step → its time on a card, as a record: predicted; and the wall time of a step on a real GPU.

In: the raw ``count`` of the rank that takes longest, and a card of the catalog. Out: StepTime; None where nothing was
counted, as on a real GPU, without a second step or under ``--no-speed``. By the ends of phases: the measured seconds of
a step; None where kernels are no-ops (an emulated GPU) or too few steps ended.
"""

import statistics
from collections.abc import Callable
from itertools import pairwise

from vramprobe.catalog import Gpu, gpu_seen
from vramprobe.errors import SpecError
from vramprobe.profile.analyzed_rank import homes_of
from vramprobe.profile.places import Places
from vramprobe.profile.raw import RawRank, RawRun
from vramprobe.records.step_time import LineSeconds, StepTime, UnclaimedLaunches
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of

_NUM_UNCLAIMED = 10
#: The first step makes the optimizer's state and warms kernels up.
_FIRST_STEP, _LEAST_STEPS = 2, 3


def step_time(run: RawRun, warn: Callable[[str], None]) -> StepTime | None:
    """The predicted time of the counted step on the run's own card; of several ranks the slowest's."""
    counted = counted_ranks(run)
    gpu = gpu_seen(counted[0].process.device_name or "") if counted else None
    if gpu is None:
        return None
    folder = (run.launcher or {}).get("folder")
    try:
        times = [time_on(gpu, raw, folder) for raw in counted]
    except SpecError as error:
        warn(f"no step time: {error}")
        return None
    slowest = max(times, key=lambda one: one.seconds)
    if slowest.tokens is not None:
        return slowest
    first = next((one for one in times if one.tokens is not None), slowest)  # of a pipeline's stages, that which embeds
    return slowest.model_copy(update=_rates(first.tokens, first.samples, slowest.seconds))


def _with_waiting(time: StepTime) -> StepTime:
    """The step with what a pipeline's schedule adds while its ranks wait for each other's micro-batches."""
    share = time.bubble_share or 0.0
    once = time.by_class.get("rest", 0.0) + time.by_class.get("optimizer", 0.0)  # after all micro-batches
    waiting = share * max(time.seconds - once, 0.0)
    seconds = time.seconds + waiting
    longer = seconds / time.seconds
    return time.model_copy(
        update={
            "seconds": seconds,
            "low_seconds": time.low_seconds * longer,
            "high_seconds": time.high_seconds * longer,
            "mfu": time.mfu / longer,
            "hfu": time.hfu / longer,
            "by_class": time.by_class | ({"waiting": waiting} if waiting else {}),
            **_rates(time.tokens, time.samples, seconds),
        }
    )


def _rates(tokens: int | None, samples: int | None, seconds: float) -> dict[str, float | None]:
    amounts = {"tokens": tokens, "samples": samples}
    rates = {f"{name}_per_second": None if one is None else one / seconds for name, one in amounts.items()}
    return amounts | rates


def counted_ranks(run: RawRun) -> list[RawRank]:
    """Those whose step was counted."""
    return [raw for raw in run.ranks if raw.count is not None]


def time_on(gpu: Gpu, raw: RawRank, folder: str | None) -> StepTime:
    """The time of one rank's step on ``gpu``. Raises SpecError for a card whose peak is not known."""
    count = count_of(raw.count or {})
    found = time_of(count, gpu)
    places = Places((), homes_of(raw.process, folder))
    lines = []
    for frame, seconds in found.by_line:
        place = places.of_stack([frame])
        lines.append(LineSeconds(line=place.line or "", function=place.module or frame[2], seconds=seconds))
    time = StepTime(
        gpu=gpu.short_name,
        rank=raw.process.rank,
        step=count.step,
        seconds=found.seconds,
        low_seconds=found.low_seconds,
        high_seconds=found.high_seconds,
        condition=found.condition,
        **_rates(found.tokens, found.samples, found.seconds),
        parallel=dict(raw.parallel),
        num_micro_steps=_num_micro_batches(raw, count.step),
        mfu=found.mfu,
        hfu=found.hfu,
        by_class=found.by_class,
        by_line=lines,
        flops=sum(row.flops for row in count.rows),
        num_bytes=sum(row.read + row.written for row in count.rows),
        num_launches=found.num_kernels,
        unclaimed_share=count.unclaimed_share,
        unclaimed=[
            UnclaimedLaunches(where=where, num_launches=number)
            for where, number in sorted(count.unclaimed, key=lambda pair: -pair[1])[:_NUM_UNCLAIMED]
        ],
    )
    return _with_waiting(time)


def _num_micro_batches(raw: RawRank, step: int) -> int:
    """Backwards of a step; where chunks of layers are interleaved, each micro-batch has one for each chunk."""
    backwards = max((one.micro_step or 1 for one in raw.phases if one.step == step), default=1)
    return max(backwards // raw.parallel.get("virtual", 1), 1)


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
