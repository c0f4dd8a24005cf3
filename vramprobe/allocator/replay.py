"""A trace of allocations and frees through the caching allocator: what was allocated and reserved, when, at most.

In: events in order. Out: a Replay with each phase's end and peak, the timeline if it is wanted, and the OOM if it came.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device, OutOfMemory, Usage


class Alloc(NamedTuple):
    """A request; its name lives until it is freed and may then be used again."""

    name: Hashable
    size_bytes: int
    stream: int = 0


class Free(NamedTuple):
    """The block is free for its stream at once."""

    name: Hashable


class FreeRequested(NamedTuple):
    """The caller let go of the block; another stream may still use it."""

    name: Hashable


class FreeCompleted(NamedTuple):
    """No stream uses the block any more."""

    name: Hashable


class EmptyCache(NamedTuple):
    """``torch.cuda.empty_cache()``."""


class Mark(NamedTuple):
    """A phase begins here: the peaks are reset, and the phase lasts until the next mark or the end."""

    phase: str


Event = Alloc | Free | FreeRequested | FreeCompleted | EmptyCache | Mark


@dataclass(frozen=True)
class PhaseUsage:
    """One phase; ``peak`` is per counter, so its parts need not be of one moment."""

    phase: str  # empty for what came before the first mark
    end: Usage
    peak: Usage


@dataclass(frozen=True)
class ReplayTimeline:
    """The counters after each event, bytes."""

    requested: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    active: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True)
class ReplayResult:
    """Result of a trace's replay."""

    phases: list[PhaseUsage]
    num_events: int  # replayed; fewer than given where it ended in an OOM
    num_alloc_retries: int
    oom: OutOfMemory | None
    timeline: ReplayTimeline | None

    @property
    def end(self) -> Usage:
        """The counters after the last event."""
        return self.phases[-1].end

    @property
    def peak(self) -> Usage:
        """Each counter's highest value in the whole trace."""
        return Usage(*map(max, zip(*(phase.peak for phase in self.phases), strict=True)))


def replay(
    events: Iterable[Event],
    config: AllocatorConfig | None = None,
    device: Device | None = None,
    *,
    keep_timeline: bool = False,
) -> ReplayResult:
    """Replay a trace from an empty allocator; an OOM ends it."""
    allocator = counting_allocator(config, device)
    ledger = allocator.ledger
    timeline = ReplayTimeline() if keep_timeline else None
    phases: list[PhaseUsage] = []
    phase, num_events, oom, began = "", 0, None, False
    for event in events:
        if type(event) is Mark:
            if began:
                phases.append(PhaseUsage(phase, ledger.now(), ledger.peak()))
            ledger.reset_peaks()
            phase = event.phase
        else:
            try:
                apply(allocator, event)
            except OutOfMemory as error:
                oom = error
                break
        began = True
        num_events += 1
        if timeline is not None:
            timeline.requested.append(ledger.requested)
            timeline.allocated.append(ledger.allocated)
            timeline.active.append(ledger.active)
            timeline.reserved.append(ledger.reserved)
    phases.append(PhaseUsage(phase, ledger.now(), ledger.peak()))
    return ReplayResult(phases, num_events, ledger.num_alloc_retries, oom, timeline)


def apply(allocator: CachingAllocator, event: Alloc | Free | FreeRequested | FreeCompleted | EmptyCache) -> None:
    """One event. Raises OutOfMemory."""
    kind = type(event)
    if kind is Alloc:
        allocator.allocate(event[0], event[1], event[2])
    elif kind is Free:
        allocator.free(event[0])
    elif kind is FreeRequested:
        allocator.request_free(event[0])
    elif kind is FreeCompleted:
        allocator.complete_free(event[0])
    else:
        assert kind is EmptyCache, event
        allocator.empty_cache()
