"""Counters of what the allocator took from the device and handed out: those of ``torch.cuda.memory_stats``, in bytes.

In: what the allocator does, one amount at a time. Out: the counters with their peaks. It also says whether the device
still has room, and where a segment lies. It never decides which block serves a request.
"""

from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.errors import SpecError

# cudaMalloc puts each large segment just below the one before: so do the two listings of torch.cuda.memory_snapshot()
# that tests/allocator/test_allocator.py replays. It decides nothing.
_TOP_ADDRESS = 1 << 52


@dataclass(frozen=True, kw_only=True)
class Device:
    """Capacity of the device in bytes. None: unlimited."""

    total_bytes: int | None = None  # the card's; what per_process_memory_fraction is a fraction of
    segment_bytes: int | None = None  # what segments may take together: total − context − other processes

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of segments above which cudaMalloc fails."""
        return self.total_bytes if self.segment_bytes is None else self.segment_bytes


class Usage(NamedTuple):
    """One moment, or one peak per counter."""

    requested_bytes: int  # what callers asked for
    allocated_bytes: int  # blocks in callers' hands: rounded, with what was too little to split off
    active_bytes: int  # and those freed that another stream may still use
    reserved_bytes: int  # segments, and granules mapped
    num_segments: int  # cudaMalloc calls not undone; granules of expandable segments do not count


class OutOfMemory(Exception):
    """The device has no room for a segment even after every cached one went back."""

    def __init__(
        self, *, requested_bytes: int, block_bytes: int, segment_bytes: int, usage: Usage, free_bytes: int
    ) -> None:
        super().__init__(f"tried to allocate {segment_bytes} B with {free_bytes} B free")
        self.requested_bytes = requested_bytes  # by the caller
        self.block_bytes = block_bytes  # rounded
        self.segment_bytes = segment_bytes  # what cudaMalloc was asked for: torch's "Tried to allocate"
        self.usage = usage  # after the cache was given back
        self.free_bytes = free_bytes  # of what segments may take


class Ledger:
    """The counters, current and peak."""

    __slots__ = (
        "_lowest_address", "active", "active_peak", "allocated", "allocated_peak", "allowed_bytes", "limit_bytes",
        "num_alloc_retries", "num_orders", "num_segments", "num_segments_peak", "requested", "requested_peak",
        "reserved", "reserved_peak",
    )  # fmt: skip

    def __init__(self, device: Device, memory_fraction: float) -> None:
        self.allocated = self.requested = self.active = self.reserved = self.num_segments = 0
        self.num_alloc_retries = self.num_orders = 0
        self.reset_peaks()
        self.limit_bytes = device.limit_bytes
        self.allowed_bytes: int | None = None  # allowed_memory_maximum: set only where the fraction is below 1
        if memory_fraction < 1:
            if device.total_bytes is None:
                raise SpecError("per_process_memory_fraction needs the card's size; give total_bytes")
            self.allowed_bytes = int(memory_fraction * device.total_bytes)
        self._lowest_address = _TOP_ADDRESS

    def address(self, size_bytes: int) -> int:
        """Return the address of a new segment: just below the one before."""
        self._lowest_address -= size_bytes
        return self._lowest_address

    def new_order(self) -> int:
        """A number for a new segment, higher than all before (``registration_counter``)."""
        self.num_orders += 1
        return self.num_orders

    def has_room(self, size_bytes: int) -> bool:
        """Return True if cudaMalloc or cuMemCreate would succeed."""
        return self.limit_bytes is None or self.reserved + size_bytes <= self.limit_bytes

    def take(self, size_bytes: int, *, num_segments: int = 0) -> None:
        """Count memory that came from the device: a whole segment, or granules of one."""
        self.reserved += size_bytes
        self.num_segments += num_segments
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.num_segments_peak = max(self.num_segments_peak, self.num_segments)

    def give(self, size_bytes: int, *, num_segments: int = 0) -> None:
        """Count memory that went back to the device."""
        self.reserved -= size_bytes
        self.num_segments -= num_segments

    def reset_peaks(self) -> None:
        """``reset_peak_memory_stats``."""
        self.allocated_peak, self.requested_peak, self.active_peak = self.allocated, self.requested, self.active
        self.reserved_peak, self.num_segments_peak = self.reserved, self.num_segments

    def now(self) -> Usage:
        """The counters as they stand."""
        return Usage(self.requested, self.allocated, self.active, self.reserved, self.num_segments)

    def peak(self) -> Usage:
        """Each counter's highest value since the peaks were reset."""
        return Usage(
            self.requested_peak, self.allocated_peak, self.active_peak, self.reserved_peak, self.num_segments_peak
        )
