"""A log through CUDA's caching allocator: each phase in every tier.

In: a Log of two steps, the allocator's settings. Out: the phases as the counters of ``torch.cuda.memory_stats`` would
stand, or how often the cache goes back within a limit. The cache is emptied before training, as CudaInstrument does.
"""

from collections.abc import Callable

import numpy as np

from vramprobe.allocator.allocator import ALLOCATE, COMPLETE_FREE, EMPTY_CACHE, FREE, REQUEST_FREE, CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device, OutOfMemory, Usage
from vramprobe.log.log import Log
from vramprobe.records.phase_memory import TRAINING_PHASES, PhaseMemory


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
    return lambda events: allocator.play_log(*(one[events] for one in (actions, sizes, blocks, streams)))


def _actions(history: Log) -> np.ndarray:
    """Return the action of each event; a free whose block another stream still uses has two halves."""
    sizes, blocks = history.size_bytes, history.blocks
    late = blocks[(sizes == 0) & (blocks > 0)]
    is_late = np.isin(blocks, late) if len(late) else False
    free, without_bytes = np.where(is_late, REQUEST_FREE, FREE), np.where(blocks > 0, COMPLETE_FREE, EMPTY_CACHE)
    return np.where(sizes > 0, ALLOCATE, np.where(sizes < 0, free, without_bytes)).astype(np.int8)


def _tiers(usage: Usage, moment: str) -> dict[str, int]:
    return {
        f"{tier}_{moment}_bytes": getattr(usage, f"{tier}_bytes")
        for tier in ("requested", "allocated", "active", "reserved")
    }
