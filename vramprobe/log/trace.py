"""An allocation trace: an allocator's events by address → a Log, or what was alive at one moment, by cause.

In: events of an allocator (CPU profiler, CUDA memory history) and the addresses of tensors whose cause is known. Out: a
Log; a Composition that adds up to the byte. Knows no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vramprobe.log.blocks import NONE, Lives, block_numbers, blocks_at, causes_of, lives_of
from vramprobe.log.log import CAUSES, LayerMark, Log, PhaseMark
from vramprobe.records.phase_memory import Composition


class Event(NamedTuple):
    """One allocation (positive size) or free (negative) at an address; 0 bytes where the cache was emptied."""

    ptr: int
    size_bytes: int
    time_ns: int


@dataclass(frozen=True)
class Owned:
    """Storages whose cause is known, and the event after which they were seen alive."""

    cause: str  # weights, gradients, optimizer_state or batch
    position: int
    ptrs: frozenset[int]


def log_of(
    events: Sequence[Event],
    marks: Sequence[PhaseMark],
    owned: Iterable[Owned],
    layers: Sequence[LayerMark] = (),
    streams: Sequence[int] | None = None,
) -> Log:
    """Return the events with their causes; a free of what was not allocated is of no block."""
    forwards = [mark.events for mark in marks if mark.name == "forward"]
    sizes, blocks, causes, _ = _paired(events, owned, forwards, forwards[0].start if forwards else 0)
    return Log(
        size_bytes=sizes,
        blocks=blocks,
        causes=np.append(causes, np.int8(0))[blocks - 1],
        marks=tuple(marks),
        layers=tuple(layers),
        streams=None if streams is None else np.array(streams, dtype=np.int8),
    )


def composition(
    events: Sequence[Event], owned: Iterable[Owned], forwards: Sequence[range], *, step_start: int, at: int
) -> Composition:
    """Return the bytes alive after event ``at``, by cause, seen from the step that begins at event ``step_start`` and
    has these ``forwards`` (event positions of each).
    """
    _, _, causes, lives = _paired(events, owned, forwards, step_start)
    alive = lives.alive_after(at + 1)
    sizes = [int(lives.sizes[alive & (causes == number)].sum()) for number in range(len(CAUSES))]
    parts = {f"{cause}_bytes": size for cause, size in zip(CAUSES, sizes, strict=True)}
    return Composition(total_bytes=sum(sizes), **parts)


def _paired(
    events: Sequence[Event], owned: Iterable[Owned], forwards: Sequence[range], start: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Lives]:
    """(bytes of each event, its block; the cause of each block, the blocks' lives). The first of a block's owners has
    it."""
    sizes = np.fromiter((event.size_bytes for event in events), dtype=np.int64, count=len(events))
    addresses = np.fromiter((event.ptr for event in events), dtype=np.uint64, count=len(events))
    blocks = block_numbers(addresses, sizes)
    lives = lives_of(sizes, blocks)
    owners = np.full(len(lives.sizes), NONE, dtype=np.int8)
    for one in owned:
        wanted = np.fromiter(one.ptrs, dtype=np.uint64, count=len(one.ptrs))
        found = blocks_at(lives, addresses[lives.starts], wanted, one.position + 1)
        found = found[found != NONE]
        if len(free := found[owners[found] == NONE]):  # none of gradients that are kept: those are gradients already
            owners[free] = CAUSES.index(one.cause)
    return sizes, blocks, causes_of(lives, owners, forwards, start), lives
