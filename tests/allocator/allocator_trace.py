"""A trace of allocations and frees through the caching allocator, for its tests: peaks by phase, timeline, OOM."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device, OutOfMemory, Usage


class Alloc(NamedTuple):
    name: Hashable
    size_bytes: int
    stream: int = 0


class Free(NamedTuple):
    """The block is free for its stream at once."""

    name: Hashable


class FreeRequested(NamedTuple):
    """Another stream may still use the block."""

    name: Hashable


class FreeCompleted(NamedTuple):
    name: Hashable


class EmptyCache(NamedTuple):
    pass


class Mark(NamedTuple):
    """A phase begins here, and the peaks are reset."""

    phase: str


Event = Alloc | Free | FreeRequested | FreeCompleted | EmptyCache | Mark


class PhaseUsage(NamedTuple):
    phase: str  # empty for what came before the first mark
    end: Usage
    peak: Usage


@dataclass
class ReplayResult:
    phases: list[PhaseUsage] = field(default_factory=list)
    timeline: list[Usage] = field(default_factory=list)  # after each event that was replayed
    num_alloc_retries: int = 0
    oom: OutOfMemory | None = None

    @property
    def end(self) -> Usage:
        return self.phases[-1].end

    @property
    def peak(self) -> Usage:
        return Usage(*map(max, zip(*(phase.peak for phase in self.phases), strict=True)))


def replay(
    events: Sequence[Event], config: AllocatorConfig | None = None, device: Device | None = None
) -> ReplayResult:
    """Replay a trace from an empty allocator in Python, and in C where that is built: the same; an OOM ends it."""
    both = (CachingAllocator(config, device), counting_allocator(config, device))
    done, counted = (_played(events, allocator) for allocator in both)
    assert str(counted.oom) == str(done.oom)
    assert replace(counted, oom=done.oom) == done
    return done


def _played(events: Sequence[Event], allocator: Any) -> ReplayResult:
    done, phase, ledger = ReplayResult(), "", allocator.ledger
    for event in events:
        if isinstance(event, Mark):
            if done.timeline:
                done.phases.append(PhaseUsage(phase, ledger.now(), ledger.peak()))
            ledger.reset_peaks()
            phase = event.phase
            continue
        try:
            apply(allocator, event)
        except OutOfMemory as error:
            done.oom = error
            break
        done.timeline.append(ledger.now())
    done.phases.append(PhaseUsage(phase, ledger.now(), ledger.peak()))
    done.num_alloc_retries = ledger.num_alloc_retries
    return done


def apply(allocator: CachingAllocator, event: Event) -> None:
    match event:
        case Alloc():
            allocator.allocate(*event)
        case Free():
            allocator.free(event.name)
        case FreeRequested():
            allocator.request_free(event.name)
        case FreeCompleted():
            allocator.complete_free(event.name)
        case EmptyCache():
            allocator.empty_cache()
