"""Course: one allocator setting on its way through the steps of a run, and reserved memory after each.

In: a setting, a device, what each step does to the allocator. Out: a Course. Knows no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.allocator.allocator import ALLOCATE, EMPTY_CACHE, FREE, CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.allocator.ledger import Device, OutOfMemory

STREAM = 1 << 48  # a request of play: on stream k, k times this more
#: PYTORCH_ALLOC_CONF, and after how many steps torch.cuda.empty_cache() is called (0: never).
SETTINGS: tuple[tuple[str, int], ...] = (
    ("", 0),
    ("", 10),
    ("expandable_segments:True", 0),
    ("max_split_size_mb:128", 0),
    ("roundup_power2_divisions:8", 0),
    ("garbage_collection_threshold:0.8,per_process_memory_fraction:0.95", 0),
)


def settings_for(
    own: str | None, settings: tuple[tuple[str, int], ...] = SETTINGS, *, has_limit: bool
) -> list[tuple[str, int]]:
    """``own`` first, unless it is there; without a limit, none that needs a card's size."""
    chosen = [(own, 0), *settings] if own and (own, 0) not in settings else list(settings)
    return [one for one in chosen if has_limit or "per_process_memory_fraction" not in one[0]]


@dataclass(frozen=True)
class Course:
    """Reserved memory over the steps under one setting."""

    alloc_conf: str
    empty_cache_steps: int
    num_steps: int  # that were completed
    first_reserved_bytes: int  # after the first step
    last_reserved_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    num_alloc_retries: int
    oom_step: int | None  # counted from 1
    reserved_bytes: tuple[int, ...]  # after each step


def play(allocator: CachingAllocator, events: Sequence[int], number: int) -> None:
    """Bytes for a request, numbered from ``number`` on, with its stream; ``~number`` where its block is given back; 0
    where the cache is emptied. Raises OutOfMemory.
    """
    given = np.array(events, dtype=np.int64)
    asks = given > 0
    actions = np.where(asks, ALLOCATE, np.where(given < 0, FREE, EMPTY_CACHE)).astype(np.int8)
    blocks = np.where(asks, number - 1 + np.cumsum(asks), ~given)
    allocator.play_log(actions, given % STREAM, blocks, (given // STREAM).astype(np.int8))


class CourseUnderWay:
    """One setting's allocator, on its way."""

    def __init__(self, setting: tuple[str, int], device: Device) -> None:
        self.alloc_conf, self.empty_cache_steps = setting
        self.allocator = counting_allocator(parse_alloc_conf(self.alloc_conf), device)
        self.reserved: list[int] = []
        self.oom_step: int | None = None

    def step(self, act: Callable[[CachingAllocator], None]) -> None:
        """One more step, which does ``act`` to the allocator; nothing once one ran out of memory."""
        if self.oom_step is not None:
            return
        number = len(self.reserved) + 1
        try:
            act(self.allocator)
        except OutOfMemory:
            self.oom_step = number
            return
        if self.empty_cache_steps and number % self.empty_cache_steps == 0:
            self.allocator.empty_cache()
        self.reserved.append(self.allocator.ledger.reserved)

    def course(self) -> Course:
        """As far as it came."""
        ledger, reserved = self.allocator.ledger, self.reserved or [0]
        return Course(
            alloc_conf=self.alloc_conf,
            empty_cache_steps=self.empty_cache_steps,
            num_steps=len(self.reserved),
            first_reserved_bytes=reserved[0],
            last_reserved_bytes=reserved[-1],
            peak_reserved_bytes=ledger.reserved_peak,
            peak_allocated_bytes=ledger.allocated_peak,
            num_alloc_retries=ledger.num_alloc_retries,
            oom_step=self.oom_step,
            reserved_bytes=tuple(self.reserved),
        )
