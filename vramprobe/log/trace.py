"""An allocation trace: every allocation and free in order, and what was alive at a moment, by cause.

In: events of an allocator (CPU profiler, CUDA memory history) and the addresses of tensors whose cause is known.
Out: lifetimes and Compositions that add up to the byte. Pure Python; knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.records.record import Composition


class Event(NamedTuple):
    """One allocation (positive size) or free (negative) at an address."""

    ptr: int
    size_bytes: int
    time_ns: int


class BlockLifetime(NamedTuple):
    """One block's life, as positions in the event order: alive from ``start`` up to, not including, ``end``."""

    ptr: int
    size_bytes: int
    start: int
    end: int

    def alive_after(self, position: int) -> bool:
        """Return True if the block is alive once event number ``position`` has happened."""
        return self.start <= position < self.end


@dataclass(frozen=True)
class Owned:
    """Storages whose cause is known, and the event after which they were seen alive."""

    cause: str  # weights, gradients, optimizer_state or batch
    position: int
    ptrs: frozenset[int]


def lifetimes(events: Iterable[Event]) -> list[BlockLifetime]:
    """Pair allocations with frees; a block never freed ends after the last event. Frees of unknown blocks drop out."""
    events = list(events)
    open_blocks: dict[int, tuple[int, int]] = {}
    blocks: list[BlockLifetime] = []
    for position, event in enumerate(events):
        if event.size_bytes > 0:
            open_blocks[event.ptr] = (position, event.size_bytes)
        elif event.ptr in open_blocks:
            start, size_bytes = open_blocks.pop(event.ptr)
            blocks.append(BlockLifetime(event.ptr, size_bytes, start, position))
    blocks += [BlockLifetime(ptr, size, start, len(events)) for ptr, (start, size) in open_blocks.items()]
    return blocks


def composition(
    blocks: Iterable[BlockLifetime], holdings: Iterable[Owned], forwards: Iterable[range], *, step_start: int, at: int
) -> Composition:
    """Return the bytes alive after event ``at``, by cause.

    A block belongs to a holding if its address was among the holding's while the block was alive. Of the rest, what was
    made in a forward (``forwards``: event positions of each) and outlived it is a saved activation, what is older than
    the step (event ``step_start``) is other, and the remainder is temporary. The parts add up to the total.
    """
    parts = dict.fromkeys(
        (name.removesuffix("_bytes") for name in Composition.model_fields if name != "total_bytes"), 0
    )
    holdings, forwards = list(holdings), list(forwards)
    for block in blocks:
        if block.alive_after(at):
            parts[_cause(block, holdings, forwards, step_start)] += block.size_bytes
    return Composition(total_bytes=sum(parts.values()), **{f"{cause}_bytes": size for cause, size in parts.items()})


def _cause(block: BlockLifetime, holdings: list[Owned], forwards: list[range], step_start: int) -> str:
    for holding in holdings:
        if block.ptr in holding.ptrs and block.alive_after(holding.position):
            return holding.cause
    if any(block.start in forward and block.end >= forward.stop for forward in forwards):
        return "saved_activations"
    return "other" if block.start < step_start else "temporaries"
