"""A step of reinforcement learning beside an inference engine: who holds what in each of its stages.

In: a RawRank and its history as seen. Out: a RolloutStage for each phase of the last whole step that has a generation,
in order. What the engine's allocator has unmapped is not on the card, though torch counts it as allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vramprobe.profile import causes as causes_of
from vramprobe.profile.analyzed_rank import AnalyzedRank, moment_after
from vramprobe.profile.phase_spans import PhaseSpan
from vramprobe.profile.raw import RawAsleep, RawRank
from vramprobe.records.profile import RolloutStage

_GENERATION = "generation"
BETWEEN = ("other", "zero_grad", "sleep", "asleep", "wake_up")  # what they leave is seen in the stages around them


def stages(raw: RawRank, seen: AnalyzedRank | None) -> list[RolloutStage]:
    """Each stage at its fullest moment; empty where no step has a generation or no engine is in the process."""
    if seen is None or not any(one.cause == "kv_cache" for one in seen.history.held):
        return []
    steps = [one.phase.step for one in seen.spans if one.phase.name == _GENERATION and one.phase.step is not None]
    if not steps:
        return []
    own = [one for one in seen.spans if one.phase.step == max(steps) and one.phase.name not in BETWEEN]
    return [
        max((_stage(raw, seen, span) for span in own if span.phase.name == name), key=lambda one: one.live.total_bytes)
        for name in dict.fromkeys(one.phase.name for one in own)
    ]


def unmapped_bytes(raw: RawRank) -> int:
    """The most that an engine's allocator had unmapped at once."""
    return max((sum(size for _, size in one.ranges) for one in raw.asleep), default=0)


def _stage(raw: RawRank, seen: AnalyzedRank, span: PhaseSpan) -> RolloutStage:
    """The moment of a span with the most bytes that are mapped."""
    fullest = None
    for counts, unmapped in _stretches(raw.asleep, seen, span):
        moment = moment_after(seen, span, seen.lives.highest(counts))
        asleep = moment.alive & within(seen.history_log.addresses, unmapped)
        live = causes_of.composition(seen.lives, moment.causes, moment.alive & ~asleep)
        if fullest is None or live.total_bytes > fullest[0].total_bytes:
            fullest = live, int(seen.lives.sizes[asleep].sum())
    assert fullest is not None
    phase, (live, asleep_bytes) = span.phase, fullest
    device = phase.device_used_bytes if phase.device_peak_bytes is None else phase.device_peak_bytes
    return RolloutStage(name=phase.name, device_bytes=device, live=live, asleep_bytes=asleep_bytes)


def _stretches(
    asleep: tuple[RawAsleep, ...], seen: AnalyzedRank, span: PhaseSpan
) -> Iterator[tuple[np.ndarray, tuple[tuple[int, int], ...]]]:
    """The moments of a span between two changes, and the ranges unmapped then."""
    first, stop = span.start, span.stop + 1
    before = [one for one in asleep if one.time_ns <= span.phase.start_ns]
    unmapped = before[-1].ranges if before else ()
    for change in (one for one in asleep if span.phase.start_ns < one.time_ns < span.phase.end_ns):
        at = min(
            max(int(np.searchsorted(seen.history_log.times_us, change.time_ns // 1000, side="right")), first), stop - 1
        )
        yield np.arange(first, at + 1), unmapped
        first, unmapped = at, change.ranges
    yield np.arange(first, stop), unmapped


def within(addresses: np.ndarray, ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Mask of the addresses that lie in one of these (address, bytes), which are in order."""
    if not ranges:
        return np.zeros(len(addresses), bool)
    starts, sizes = (np.array(column, dtype=np.uint64) for column in zip(*ranges, strict=True))
    at = np.searchsorted(starts, addresses, side="right") - 1
    return (at >= 0) & (addresses < starts[np.maximum(at, 0)] + sizes[np.maximum(at, 0)])
