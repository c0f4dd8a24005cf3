"""Reinforcement learning whose engine runs in processes of its own: who holds what on each GPU in each stage.

In: RawRanks and their histories as seen. Out: RolloutStages by process: those of its GPU, added up over all processes
that use it. A stage is a phase of the trainer's, or what the engine serves (``generation``), at its fullest moment once
the optimizer has stepped, so that its state is there; where it never comes to that, over the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramprobe.profile import causes as causes_of
from vramprobe.profile.analyzed_rank import AnalyzedRank, moment_after
from vramprobe.profile.raw import RawAsleep, RawPhase, RawRank
from vramprobe.profile.rollout import BETWEEN, within
from vramprobe.records.profile import RolloutStage
from vramprobe.records.profile_memory import Live

_TRAINS = {"forward", "backward", "log_probs"}
_OF_AN_ENGINE = {"serving": "generation", "weight_sync": "weight_sync"}


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
        return self.seen.lives.alive_after(num_events) & within(self.seen.history_log.addresses, change.ranges)


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
    named = [(one.name, one) for one in trainer.raw.phases if one.step is not None and one.name not in BETWEEN]
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
