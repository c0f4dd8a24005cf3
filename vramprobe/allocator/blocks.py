"""Blocks and pools: pieces of segments, chained by address, and the free ones sorted for best fit.

Follows ``Block``, ``BlockPool`` and ``try_merge_blocks`` of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13).
A Pool here is one stream's share of a BlockPool: the C++ set is sorted by stream first, so that is the same search.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class ExpandableSegment(NamedTuple):
    """A range of addresses of which whole granules are mapped and unmapped (``ExpandableSegment``)."""

    address: int
    granule_bytes: int
    order: int


class Block:
    """A piece of a segment: in use, cached, or (in an expandable segment) addresses without memory."""

    __slots__ = (
        "address", "born", "busy", "expandable", "mapped", "next", "order", "pool", "prev", "requested", "size",
    )  # fmt: skip

    def __init__(
        self, address: int, size: int, pool: Pool, expandable: ExpandableSegment | None = None, order: int = 0
    ) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.expandable = expandable
        self.order = expandable.order if expandable is not None else order  # its segment's, as they were made
        self.requested = 0  # bytes the caller asked for
        self.busy = False  # allocated, or freed and perhaps in use on another stream
        self.mapped = True
        self.born = 0  # gc_count_base: the pool's searches when the block was cached
        self.prev: Block | None = None  # neighbours in the same segment
        self.next: Block | None = None

    def chain(self, before: Block | None, after: Block | None) -> None:
        """Stand between two neighbours (``splice``)."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Searches:
    """Number of searches of a BlockPool (``get_free_blocks_call_count``): the clock of garbage collection."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Pool:
    """The cached blocks of one stream and size class."""

    __slots__ = ("free", "is_small", "searches", "unmapped")

    def __init__(self, is_small: bool, searches: Searches) -> None:
        self.is_small, self.searches = is_small, searches
        #: By size, then the segment's age, then address (``BlockComparatorSizeCounterAddress``, pytorch#183591).
        self.free: list[tuple[int, tuple[int, int], Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address: BlockComparatorAddress

    def insert(self, block: Block) -> None:
        """Cache a free block (``insert_into_blocks``)."""
        block.born = self.searches.count
        insort(self.free, (block.size, (block.order, block.address), block))

    def remove(self, block: Block) -> None:
        """Take a free block out of the cache."""
        at = bisect_left(self.free, (block.size, (block.order, block.address)))
        assert self.free[at][2] is block
        del self.free[at]

    def insert_unmapped(self, block: Block) -> None:
        """Remember addresses without memory."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget them."""
        at = bisect_left(self.unmapped, (block.address,))
        assert self.unmapped[at][1] is block
        del self.unmapped[at]


def merge(block: Block, neighbour: Block | None) -> None:
    """Let a block swallow a neighbour that is free and mapped as it is (``try_merge_blocks``)."""
    if neighbour is None or neighbour.busy or neighbour.mapped != block.mapped:
        return
    if neighbour.mapped:
        block.pool.remove(neighbour)
    else:
        block.pool.remove_unmapped(neighbour)
    if block.prev is neighbour:
        block.address = neighbour.address
        block.chain(neighbour.prev, block.next)
    else:
        block.chain(block.prev, neighbour.next)
    block.size += neighbour.size
