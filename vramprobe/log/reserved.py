"""A log through CUDA's caching allocator: each phase in every tier.

In: a Log of two steps, the allocator's settings. Out: the phases as the counters of ``torch.cuda.memory_stats`` would
stand, or how often the cache goes back within a limit. The cache is emptied before training, as CudaInstrument does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device, OutOfMemory, Usage
from vramprobe.log.log import Log
from vramprobe.records.phase_memory import TRAINING_PHASES, PhaseMemory

_ALLOCATE, _EMPTY_CACHE = 0, 4


def reserve(
    phases: list[PhaseMemory], history: Log, config: AllocatorConfig | None = None, *, empties_cache: bool = True
) -> list[PhaseMemory]:
    """Copies of ``phases`` with the allocator's numbers; ``history`` holds the first of them, and step 2 for the rest.

    ``empties_cache``: before training, as CudaInstrument does; a command's own log has its own emptyings.

    Step 3 and later are step 2 again, which begins with the segments that step 1 left and ends with what it began with.
    """
    allocator = counting_allocator(config, None)
    ledger, play = allocator.ledger, player(history, allocator)
    tiers: list[dict[str, int]] = []
    settled = not empties_cache
    for mark in history.marks:
        if mark.name in TRAINING_PHASES and not settled:
            allocator.empty_cache()
            settled = True
        ledger.reset_peaks()
        play(slice(mark.events.start, mark.events.stop))
        tiers.append(_tiers(ledger.now(), "end") | _tiers(ledger.peak(), "peak"))
    second = [seen for mark, seen in zip(history.marks, tiers, strict=True) if mark.step == 2]
    later = len(phases) - len(tiers)
    assert later == 0 or later % len(second) == 0, "a later step is not the second again"
    tiers += [second[at % len(second)] for at in range(later)]
    return [phase.model_copy(update=seen) for phase, seen in zip(phases, tiers, strict=True)]


def num_retries(history: Log, config: AllocatorConfig, limit_bytes: int) -> int | None:
    """Count how often the cache goes back where segments may take so much together; None where it runs out."""
    allocator = counting_allocator(config, Device(segment_bytes=limit_bytes))
    try:
        player(history, allocator)(slice(None))
    except OutOfMemory:
        return None
    return allocator.ledger.num_alloc_retries


def player(history: Log, allocator: CachingAllocator) -> Callable[[slice], None]:
    """Return what plays a part of the log's events through ``allocator``; it raises OutOfMemory."""
    actions = _actions(history)
    sizes = np.ascontiguousarray(history.size_bytes, dtype=np.int64)
    blocks = np.ascontiguousarray(history.blocks, dtype=np.int64)
    streams = np.ascontiguousarray(history.each_stream(), dtype=np.int8)
    if hasattr(allocator, "play_log"):
        return lambda events: allocator.play_log(*(one[events] for one in (actions, sizes, blocks, streams)))
    allocate, ends = allocator.allocate, (allocator.free, allocator.request_free, allocator.complete_free)

    def play(events: slice) -> None:
        each = zip(*(one[events].tolist() for one in (actions, sizes, blocks, streams)), strict=True)
        for action, size, block, stream in each:
            if action == _ALLOCATE:
                allocate(block, size, stream)
            elif action == _EMPTY_CACHE:
                allocator.empty_cache()
            else:
                ends[action - 1](block)

    return play


def _actions(history: Log) -> np.ndarray:
    """Return for each event: 0 to allocate, 1 to free at once, 2 and 3 for the halves of a free whose block another
    stream still uses, 4 to empty the cache."""
    sizes, blocks = history.size_bytes, history.blocks
    is_late = np.isin(blocks, blocks[(sizes == 0) & (blocks > 0)])
    found = np.where(sizes > 0, _ALLOCATE, np.where(sizes < 0, 1 + is_late, np.where(blocks > 0, 3, _EMPTY_CACHE)))
    return found.astype(np.int8)


def _tiers(usage: Usage, moment: str) -> dict[str, int]:
    return {
        f"{tier}_{moment}_bytes": getattr(usage, f"{tier}_bytes")
        for tier in ("requested", "allocated", "active", "reserved")
    }
