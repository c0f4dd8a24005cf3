"""Reinforcement learning beside an inference engine: who holds what on each GPU in each stage of a step.

In: RawRanks and their histories as seen. Out: RolloutStages in order. With the engine in the trainer's process: each
phase of the last whole step that has a generation. With engines in processes of their own: by process, those of its
GPU, added up over all processes that use it; a stage is a phase of the trainer's, or what the engine serves
(``generation``), at its fullest moment once the optimizer has stepped, so that its state is there; where it never comes
to that, over the whole run. What the engine's allocator has unmapped is not on the card, though torch counts it as
allocated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramprobe.profile import causes as causes_of
from vramprobe.profile.analyzed_rank import AnalyzedRank, moment_after
from vramprobe.profile.phase_spans import PhaseSpan
from vramprobe.profile.raw import RawAsleep, RawPhase, RawRank
from vramprobe.records.profile import RolloutStage
from vramprobe.records.profile_memory import Live

_GENERATION = "generation"
_BETWEEN = ("other", "zero_grad", "sleep", "asleep", "wake_up")  # what they leave is seen in the stages around them
_TRAINS = {"forward", "backward", "log_probs"}
_OF_AN_ENGINE = {"serving": "generation", "weight_sync": "weight_sync"}


def stages(raw: RawRank, seen: AnalyzedRank | None) -> list[RolloutStage]:
    """Each stage at its fullest moment; empty where no step has a generation or no engine is in the process."""
    if seen is None or not any(one.cause == "kv_cache" for one in seen.history.held):
        return []
    steps = [one.phase.step for one in seen.spans if one.phase.name == _GENERATION and one.phase.step is not None]
    if not steps:
        return []
    own = [one for one in seen.spans if one.phase.step == max(steps) and one.phase.name not in _BETWEEN]
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
        asleep = moment.alive & _within(seen.history_log.addresses, unmapped)
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


def _within(addresses: np.ndarray, ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Mask of the addresses that lie in one of these (address, bytes), which are in order."""
    if not ranges:
        return np.zeros(len(addresses), bool)
    starts, sizes = (np.array(column, dtype=np.uint64) for column in zip(*ranges, strict=True))
    at = np.searchsorted(starts, addresses, side="right") - 1
    return (at >= 0) & (addresses < starts[np.maximum(at, 0)] + sizes[np.maximum(at, 0)])


@dataclass(frozen=True)
class _Member:
    """A process that uses a GPU."""

    raw: RawRank
    seen: AnalyzedRank

    @property
    def trains(self) -> bool:
        return any(one.name in _TRAINS for one in self.raw.phases)

    @property
    def has_engine(self) -> bool:
        return any(one.cause == "kv_cache" for one in self.seen.history.held)

    @cached_property
    def asleep(self) -> list[tuple[int, int, RawAsleep]]:
        """(µs, bytes of blocks that are unmapped from then on, the ranges), in order."""
        found = []
        for one in self.raw.asleep:
            at = one.time_ns // 1000
            found.append((at, int(self.seen.lives.sizes[self._unmapped(self._events(at), one)].sum()), one))
        return found

    def mapped(self, times_us: np.ndarray) -> np.ndarray:
        """Bytes that are mapped at these moments."""
        counts = np.searchsorted(self.seen.history_log.times_us, times_us, side="right")
        held = np.where(counts > 0, self.seen.lives.totals[np.maximum(counts, 1) - 1], 0)
        changes = [at for at, _, _ in self.asleep]
        sizes = np.array([0, *(size for _, size, _ in self.asleep)])
        return held - sizes[np.searchsorted(changes, times_us, side="right")]

    def moments(self, start_us: int, end_us: int) -> np.ndarray:
        """Return the times of its changes within an interval."""
        changes = np.array([at for at, _, _ in self.asleep], np.int64)
        times = np.concatenate([self.seen.history_log.times_us, changes])
        return times[(times >= start_us) & (times <= end_us)]

    def live(self, time_us: int) -> tuple[Live, int]:
        """Return the mapped blocks at a time, by cause, and the bytes that are unmapped although torch counts them."""
        seen, count = self.seen, self._events(time_us)
        span = next((one for one in seen.spans if one.phase.end_ns >= time_us * 1000), seen.spans[-1])
        moment = moment_after(seen, span, count)
        changes = [one for at, _, one in self.asleep if at <= time_us]
        asleep = self._unmapped(count, changes[-1]) if changes else np.zeros(len(seen.lives.sizes), bool)
        return causes_of.composition(seen.lives, moment.causes, moment.alive & ~asleep), int(
            seen.lives.sizes[asleep].sum()
        )

    def _events(self, time_us: int) -> int:
        return int(np.searchsorted(self.seen.history_log.times_us, time_us, side="right"))

    def _unmapped(self, num_events: int, change: RawAsleep) -> np.ndarray:
        return self.seen.lives.alive_after(num_events) & _within(self.seen.history_log.addresses, change.ranges)


def stages_beside(raws: Sequence[RawRank], seen: Sequence[AnalyzedRank | None]) -> dict[int, list[RolloutStage]]:
    """By pid of a GPU's trainer, or of the engine that has it alone; nothing where no engine is in another process."""
    members = [_Member(raw, one) for raw, one in zip(raws, seen, strict=True) if one is not None and one.spans]
    trainers = [one for one in members if one.trains]
    if not trainers or any(one.has_engine for one in trainers) or not any(one.has_engine for one in members):
        return {}
    cards: dict[object, list[_Member]] = {}
    for one in members:
        cards.setdefault(one.raw.device_uuid, []).append(one)
    found = {}
    for own in cards.values():
        trainer = next((one for one in own if one.trains), None)
        engines = [one for one in own if one.has_engine] or [one for one in members if one.has_engine]
        of = trainer or next((one for one in own if one.has_engine), None)
        if of is not None:
            found[of.raw.process.pid] = _stages(own, _windows(trainer or trainers[0], engines))
    return found


def _windows(trainer: _Member, engines: Sequence[_Member]) -> dict[str, list[RawPhase]]:
    """Each stage's phases, in the order in which the stages first come in a step."""
    steps = [one.end_ns for one in trainer.raw.phases if one.name == "optimizer_step"]
    named = [(one.name, one) for one in trainer.raw.phases if one.step is not None and one.name not in _BETWEEN]
    named += [(_OF_AN_ENGINE[one.name], one) for it in engines for one in it.raw.phases if one.name in _OF_AN_ENGINE]
    named.sort(key=lambda one: one[1].start_ns)
    windows: dict[str, list[RawPhase]] = {}
    for name in dict.fromkeys(name for name, _ in named):
        own = [one for of, one in named if of == name]
        later = [one for one in own if steps and one.start_ns >= steps[0]]
        windows[name] = later or own
    return windows


def _stages(members: Sequence[_Member], windows: dict[str, list[RawPhase]]) -> list[RolloutStage]:
    found = []
    for name, phases in windows.items():
        times = np.unique(np.concatenate([_moments(members, one) for one in phases]))
        totals = sum(one.mapped(times) for one in members)
        time_us = int(times[np.argmax(totals)])
        held = [one.live(time_us) for one in members]
        parts = {part: sum(getattr(live, part) for live, _ in held) for part in Live.model_fields}
        device = [size for one in phases for size in _device_bytes(members, one)]
        found.append(
            RolloutStage(
                name=name,
                device_bytes=max(device, default=None),
                live=Live(**parts),
                asleep_bytes=sum(asleep for _, asleep in held),
            )
        )
    return found


def _moments(members: Sequence[_Member], phase: RawPhase) -> np.ndarray:
    start, end = phase.start_ns // 1000, phase.end_ns // 1000
    return np.concatenate([[start], *(one.moments(start, end) for one in members)])


def _device_bytes(members: Sequence[_Member], window: RawPhase) -> list[int]:
    """Bytes that all processes used of the card, as seen by those that have a phase within the window."""
    return [
        size
        for member in members
        for one in member.raw.phases
        if one.start_ns >= window.start_ns and one.end_ns <= window.end_ns
        for size in (one.device_used_bytes, one.device_peak_bytes)
        if size is not None
    ]
