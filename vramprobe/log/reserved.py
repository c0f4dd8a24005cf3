"""A simulated run through CUDA's caching allocator: each phase in every tier, and where the card is too small.

In: a Log of two steps, the allocator's settings, the card if there is a limit. Out: the phases as the counters of
``torch.cuda.memory_stats`` would stand, or the OOM. The cache is emptied before training, as CudaInstrument does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.allocator.ledger import Device, OutOfMemory, Usage
from vramprobe.log.log import Log
from vramprobe.records.record import TRAINING_PHASES, Oom, PhaseMemory
from vramprobe.units import format_bytes


@dataclass(frozen=True)
class Reserved:
    """The phases that were completed, in all tiers; ``oom`` says where it ended, None where all went well."""

    phases: list[PhaseMemory]
    num_alloc_retries: int
    oom: Oom | None


def reserve(
    phases: list[PhaseMemory],
    history: Log,
    config: AllocatorConfig | None = None,
    device: Device | None = None,
) -> Reserved:
    """Copies of ``phases`` with the allocator's numbers; ``history`` holds the first of them, and step 2 for the rest.

    Step 3 and later are step 2 again, which begins with the segments that step 1 left and ends with what it began with.
    """
    allocator = counting_allocator(config, device)
    ledger, allocate, free = allocator.ledger, allocator.allocate, allocator.free
    sizes, blocks, streams = history.size_bytes.tolist(), history.blocks.tolist(), history.each_stream().tolist()
    tiers: list[dict[str, int]] = []
    oom, settled = None, False
    for mark in history.marks:
        if mark.name in TRAINING_PHASES and not settled:
            allocator.empty_cache()
            settled = True
        ledger.reset_peaks()
        events = slice(mark.events.start, mark.events.stop)
        try:
            for size, block, stream in zip(sizes[events], blocks[events], streams[events], strict=True):
                if size > 0:
                    allocate(block, size, stream)
                elif size:
                    free(block)
                else:
                    allocator.empty_cache()
        except OutOfMemory as error:
            oom = _oom(error, mark.name, mark.step)
            break
        tiers.append(_tiers(ledger.now(), "end") | _tiers(ledger.peak(), "peak"))
    done = [phase.model_copy(update=seen) for phase, seen in zip(phases, tiers, strict=False)]
    if oom is None:
        second = [seen for mark, seen in zip(history.marks, tiers, strict=True) if mark.step == 2]
        later = phases[len(tiers) :]
        assert len(later) % len(second) == 0, "a later step is not the second again"
        done += [phase.model_copy(update=second[at % len(second)]) for at, phase in enumerate(later)]
    return Reserved(done, ledger.num_alloc_retries, oom)


def _tiers(usage: Usage, moment: str) -> dict[str, int]:
    return {
        f"{tier}_{moment}_bytes": getattr(usage, f"{tier}_bytes")
        for tier in ("requested", "allocated", "active", "reserved")
    }


def _oom(error: OutOfMemory, name: Any, step: int | None) -> Oom:
    """In CudaInstrument's words: requested is the segment that the device had no room for."""
    return Oom(
        phase=name,
        step=step,
        requested_bytes=error.segment_bytes,
        allocated_bytes=error.usage.allocated_bytes,
        reserved_bytes=error.usage.reserved_bytes,
        free_bytes=error.free_bytes,
        message=f"simulated: {format_bytes(error.segment_bytes)} wanted with {format_bytes(error.free_bytes)} free",
    )
