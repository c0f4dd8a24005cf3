"""The replay held against torch's own history: which segments it takes, and where the two first part.

In: a MemoryHistory (snapshot.py). Out: a Comparison. Segments are put where torch's were, so that addresses agree
until then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.blocks import Block, ExpandableSegment
from vramprobe.allocator.config import SMALL_BUFFER
from vramprobe.allocator.expandable import address_space_bytes
from vramprobe.allocator.ledger import Device, OutOfMemory, SegmentAction, SegmentEvent
from vramprobe.allocator.replay import Alloc, FreeRequested
from vramprobe.log.snapshot import MemoryHistory, SegmentState

_GIVEN_BACK = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Divergence:
    """First difference between the replay and torch."""

    position: int  # in device_traces
    what: str  # "segments": taken or given back; "address": another block served the request
    torch: object
    replay: object


@dataclass(frozen=True)
class Comparison:
    """The replay and the truth over one history, bytes; reserved is compared after every request and free."""

    num_events: int
    first: Divergence | None  # None: the same segments at the same moments, every block at the same address
    reserved_peak_torch: int
    reserved_peak_replay: int
    worst_gap_bytes: int  # the largest |replay − torch| of reserved

    @property
    def peak_error(self) -> float:
        """(replay − torch) / torch of the reserved peak."""
        return self.reserved_peak_replay / self.reserved_peak_torch - 1 if self.reserved_peak_torch else 0.0


def compare(history: MemoryHistory, device: Device | None = None) -> Comparison:
    """Replay a history beside the segments that torch took.

    The history does not say when ``empty_cache`` was called, nor how full the card was. Without ``device`` every run of
    segments given back is taken for an ``empty_cache`` at that moment; with it, those just before a new segment are
    left for the replay to find (a full card, ``garbage_collection_threshold``).
    """
    return _Run(history, device).compare()


class _Run:
    def __init__(self, history: MemoryHistory, device: Device | None) -> None:
        self.history, self.predicts_full = history, device is not None
        self.allocator = CachingAllocator(history.config, device)
        restore(self.allocator, history.initial)
        self.truth: list[SegmentEvent] = []  # since the last request or free
        self.replayed: list[SegmentEvent] = []
        self.places: deque[tuple[SegmentAction, int]] = deque()
        self.allocator.ledger.on_segment = self.replayed.append
        self.allocator.ledger.place = self._place
        self.reserved = self.allocator.ledger.reserved
        self.peak_torch, self.worst_gap = self.reserved, 0
        self.first: Divergence | None = None

    def compare(self) -> Comparison:
        num_events = 0
        for position, event, address in self.history.entries:
            if isinstance(event, SegmentEvent):
                taken = event.action not in _GIVEN_BACK
                self.truth.append(event)
                self.reserved += event.size_bytes if taken else -event.size_bytes
                self.peak_torch = max(self.peak_torch, self.reserved)
                if taken:
                    self.places.append((event.action, address))
                continue
            num_events += 1
            self._empty_cache_if_seen(isinstance(event, Alloc))
            served = self._apply(event)
            if served is not None and served != address:
                self._note(position, "address", address, served)
            self._check(position)
        self._empty_cache_if_seen(False)
        self._check(len(self.history.entries))
        ledger = self.allocator.ledger
        return Comparison(num_events, self.first, self.peak_torch, ledger.reserved_peak, self.worst_gap)

    def _empty_cache_if_seen(self, before_request: bool) -> None:
        given = [event for event in self.truth if event.action in _GIVEN_BACK]
        leads_to_segment = before_request and len(given) < len(self.truth)
        if given and not (self.predicts_full and leads_to_segment):
            self.allocator.empty_cache()

    def _apply(self, event: Alloc | FreeRequested | object) -> int | None:
        """One request or free; the address that serves a request."""
        allocator = self.allocator
        if isinstance(event, Alloc):
            try:
                block = allocator.allocate(*event)
            except OutOfMemory:
                return -1  # torch found room
            return block.address if block is not None else None
        name = event[0]  # type: ignore[index]
        if isinstance(event, FreeRequested):
            if allocator.has(name):
                allocator.request_free(name)
        else:
            allocator.complete_free(name)
        return None

    def _check(self, position: int) -> None:
        if sorted(self.truth) != sorted(self.replayed):
            self._note(position, "segments", tuple(self.truth), tuple(self.replayed))
        self.worst_gap = max(self.worst_gap, abs(self.allocator.ledger.reserved - self.reserved))
        self.truth.clear()
        self.replayed.clear()
        self.places.clear()

    def _note(self, position: int, what: str, torch: object, replay: object) -> None:
        if self.first is None:
            self.first = Divergence(position, what, torch, replay)

    def _place(self, action: SegmentAction, _: int) -> int | None:
        """Return the address where torch's segment was put, if it took one at this point."""
        return self.places.popleft()[1] if self.places and self.places[0][0] == action else None


def restore(allocator: CachingAllocator, segments: tuple[SegmentState, ...]) -> None:
    """Set up what stood before: blocks in use are named ``(address, 0)``, the rest of each segment is cached.

    The ranges of one expandable segment are taken to begin at the lowest of them, and segments to be as old as they are
    listed.
    """
    roots: dict[tuple[int, bool], tuple[ExpandableSegment, Block | None]] = {}
    for segment in segments:
        pool = allocator.pool(segment.stream, is_small=segment.is_small)
        expandable, last, order = None, None, allocator.ledger.new_order()
        if segment.is_expandable:
            key = (segment.stream, segment.is_small)
            granule = SMALL_BUFFER if segment.is_small else allocator.config.large_segment_bytes
            size = address_space_bytes(granule, allocator.device)
            if key not in roots or segment.address >= roots[key][0].address + size:
                roots[key] = (ExpandableSegment(segment.address, size, granule, order), None)
            expandable, last = roots[key]
            end = expandable.address if last is None else last.address + last.size
            if end < segment.address:
                last = _append(allocator, last, Block(end, segment.address - end, pool, expandable), mapped=False)
        address = segment.address
        for live in (*segment.blocks, None):
            until = segment.address + segment.size_bytes if live is None else live.address
            if address < until:
                last = _append(allocator, last, Block(address, until - address, pool, expandable, order))
            if live is not None:
                block = Block(live.address, live.size_bytes, pool, expandable, order)
                block.requested, block.busy = live.requested_bytes, True
                last = _append(allocator, last, block)
                allocator.adopt((live.address, 0), block, awaiting=live.awaiting)
                address = live.address + live.size_bytes
        if expandable is not None:
            roots[(segment.stream, segment.is_small)] = (expandable, last)
        action: SegmentAction = "segment_map" if segment.is_expandable else "segment_alloc"
        allocator.ledger.take(action, segment.address, segment.size_bytes, segment.stream)
    for expandable, last in roots.values():
        assert last is not None
        end = last.address + last.size
        rest = expandable.address + expandable.size_bytes - end
        _append(allocator, last, Block(end, rest, last.pool, expandable), mapped=False)
    allocator.ledger.reset_peaks()


def _append(allocator: CachingAllocator, last: Block | None, block: Block, *, mapped: bool = True) -> Block:
    """Put a block behind another in its segment, and among the cached or the unmapped ones unless it is in use."""
    if last is not None:
        block.chain(last, None)
    block.mapped = mapped
    if not mapped:
        block.pool.insert_unmapped(block)
    elif not block.busy:
        block.pool.insert(block)
    return block
