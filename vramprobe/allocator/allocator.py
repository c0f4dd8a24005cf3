"""CUDA's caching allocator, without CUDA: which block serves a request, and what it costs in reserved memory.

In: allocations and frees, one at a time or a log's in arrays. Out: blocks with addresses, and a Ledger.
Follows ``DeviceCachingAllocator`` of c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13; names in brackets are its.
Not modelled: CUDA graphs and user pools, settings changed on the way, the cudaMallocAsync backend. Knows no torch.
"""

from bisect import bisect_left
from collections.abc import Hashable

import numpy as np

from vramprobe.allocator.blocks import Block, Pool, Searches, merge
from vramprobe.allocator.config import MIN_BLOCK, SMALL_SIZE, AllocatorConfig
from vramprobe.allocator.expandable import allocate_expandable, reachable_bytes, unmap
from vramprobe.allocator.ledger import Device, Ledger, OutOfMemory

#: Actions of play_log; the two in the middle are the halves of a free whose block another stream still uses.
ALLOCATE, FREE, REQUEST_FREE, COMPLETE_FREE, EMPTY_CACHE = range(5)


class CachingAllocator:
    """One device's allocator. Callers name their allocations; a name may be used again once it was freed."""

    def __init__(self, config: AllocatorConfig | None = None, device: Device | None = None) -> None:
        self.config = config = config or AllocatorConfig()
        self.device = device or Device()
        self.ledger = Ledger(self.device, config.per_process_memory_fraction)
        self._only_512 = config.only_512
        self._expandable = config.expandable_segments
        self._max_split = config.max_split_bytes
        # Without a memory fraction there is no limit to come near to, and the setting does nothing.
        self._collects = config.garbage_collection_threshold > 0 and self.ledger.allowed_bytes is not None
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._searches = {True: Searches(), False: Searches()}
        self._live: dict[Hashable, Block | None] = {}  # None: a request of no bytes, which never gets here in torch
        self._awaiting: dict[Hashable, Block] = {}  # freed, perhaps in use on another stream

    def allocate(self, name: Hashable, size_bytes: int, stream: int = 0) -> Block | None:
        """Serve a request (``malloc``). Raises OutOfMemory; the counters then stand as torch leaves them."""
        assert name not in self._live, f"{name!r} is already allocated"
        if size_bytes == 0:
            self._live[name] = None
            return None
        rounded = (size_bytes + 511) & -512 if self._only_512 else self.config.round_size(size_bytes)
        pool = self.pool(stream, is_small=rounded <= SMALL_SIZE)
        block = self._best_fit(pool, rounded)
        if block is None:
            block = self._grow(pool, rounded, size_bytes)
        if block.size != rounded and self._should_split(block, rounded):
            block = self._split(block, rounded)
        block.busy = True
        block.requested = size_bytes
        self._live[name] = block
        self._count(block)
        return block

    def free(self, name: Hashable) -> None:
        """Take a block back at once: no other stream uses it."""
        block = self._live.pop(name)
        if block is not None:
            self.ledger.allocated -= block.size
            self._cache(block)

    def request_free(self, name: Hashable) -> None:
        """The caller's half of a free: another stream may still use the block (``free`` after ``recordStream``)."""
        block = self._live.pop(name)
        if block is not None:
            self.ledger.allocated -= block.size
            self._awaiting[name] = block

    def complete_free(self, name: Hashable) -> None:
        """The other half, once those streams are done; nothing where a full device made torch wait for them before."""
        block = self._awaiting.pop(name, None)
        if block is not None:
            self._cache(block)

    def empty_cache(self) -> None:
        """Give back every segment without a live block, and every free granule (``release_cached_blocks``)."""
        for name in list(self._awaiting):
            self.complete_free(name)  # synchronize_and_free_events
        for pools in (self._large, self._small):
            cached = [block for pool in _by_stream(pools) for _, _, block in pool.free]
            for block in cached:
                if block.expandable is None and block.prev is None and block.next is None:
                    self._release(block)
            for block in cached:
                if block.expandable is not None:
                    unmap(block, self.ledger)

    def play_log(self, actions: np.ndarray, sizes: np.ndarray, blocks: np.ndarray, streams: np.ndarray) -> None:
        """Do what a log's events say: of each an action, bytes, the block by its number, which is its name, and its
        stream. Raises OutOfMemory.
        """
        ends = {FREE: self.free, REQUEST_FREE: self.request_free, COMPLETE_FREE: self.complete_free}
        each = zip(*(one.tolist() for one in (actions, sizes, blocks, streams)), strict=True)
        for action, size, block, stream in each:
            if action == ALLOCATE:
                self.allocate(block, size, stream)
            elif action == EMPTY_CACHE:
                self.empty_cache()
            else:
                ends[action](block)

    def pool(self, stream: int, *, is_small: bool) -> Pool:
        """The pool of this stream and size class (``get_pool``)."""
        pools = self._small if is_small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = Pool(is_small, self._searches[is_small])
        return pool

    def _count(self, block: Block) -> None:
        ledger, size = self.ledger, block.size
        ledger.requested = requested = ledger.requested + block.requested
        ledger.allocated = allocated = ledger.allocated + size
        ledger.active = active = ledger.active + size
        if requested > ledger.requested_peak:
            ledger.requested_peak = requested
        if allocated > ledger.allocated_peak:
            ledger.allocated_peak = allocated
        if active > ledger.active_peak:
            ledger.active_peak = active

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest cached block that may serve, of equals one of the oldest segment (``get_free_block``)."""
        if self._collects:
            pool.searches.count += 1
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        block = free[at][2]
        if block.expandable is not None:
            # What matters is how far a block can grow, so that the end of the range is left for those who need it.
            while (
                free[at][2].expandable is not None
                and at + 1 < len(free)
                and reachable_bytes(free[at + 1][2]) < reachable_bytes(free[at][2])
            ):
                at += 1
            block = free[at][2]
        limit = self._max_split
        if limit is not None:
            if size < limit <= block.size:
                return None  # an oversize block is not broken for a smaller request
            if size >= limit and block.size >= size + self.config.max_non_split_rounding_bytes:
                return None
        del free[at]
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        """``should_split``."""
        remaining = block.size - size
        if block.pool.is_small or self._expandable:
            return remaining >= MIN_BLOCK
        return (self._max_split is None or size < self._max_split) and remaining > SMALL_SIZE

    def _split(self, block: Block, size: int) -> Block:
        """Cut the front off a block and cache the rest (``alloc_found_block``)."""
        front = Block(block.address, size, block.pool, block.expandable, block.order)
        front.chain(block.prev, block)
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return front

    def _cache(self, block: Block) -> None:
        """Put a freed block among the cached ones, with its free neighbours (``free_block``)."""
        ledger = self.ledger
        ledger.active -= block.size
        ledger.requested -= block.requested
        block.busy = False
        block.requested = 0
        if block.prev is not None:
            merge(block, block.prev)
        if block.next is not None:
            merge(block, block.next)
        block.pool.insert(block)

    def _grow(self, pool: Pool, size: int, size_bytes: int) -> Block:
        """Get memory from the device, freeing cached segments step by step if it is full (``malloc``)."""
        wanted = self.config.allocation_size(size)
        if self._collects:
            self._collect_garbage()
        block = self._new_block(pool, size, wanted)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size, wanted)
        if block is None:
            self.empty_cache()
            self.ledger.num_alloc_retries += 1
            block = self._new_block(pool, size, wanted)
        if block is None:
            ledger = self.ledger
            limits = [limit for limit in (ledger.limit_bytes, ledger.allowed_bytes) if limit is not None]
            raise OutOfMemory(
                requested_bytes=size_bytes,
                block_bytes=size,
                segment_bytes=wanted,
                usage=ledger.now(),
                free_bytes=min(limits) - ledger.reserved,
            )
        return block

    def _new_block(self, pool: Pool, size: int, wanted: int) -> Block | None:
        """A free block outside the cache, from the device; None where it is full (``alloc_block``)."""
        ledger = self.ledger
        # The fraction is held against a whole segment, though an expandable one might map less.
        if ledger.allowed_bytes is not None and ledger.reserved + wanted > ledger.allowed_bytes:
            return None
        if self._expandable:
            return allocate_expandable(pool, size, self.config, self.device, ledger)
        if not ledger.has_room(wanted):
            return None
        ledger.take(wanted, num_segments=1)
        return Block(ledger.address(wanted), wanted, pool, order=ledger.new_order())

    def _release(self, block: Block) -> None:
        """cudaFree a segment that is one cached block (``release_block``)."""
        block.pool.remove(block)
        self.ledger.give(block.size, num_segments=1)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free enough oversize blocks for the request: one, or the largest ones (``release_available_cached_blocks``).

        They are never split, so each is a segment.
        """
        if self._max_split is None:
            return False
        wanted = max(size, self._max_split)
        at = bisect_left(pool.free, (wanted,))
        if at < len(pool.free) and pool.free[at][2].expandable is None:
            self._release(pool.free[at][2])
            return True
        released = 0
        while released < wanted and at > 0 and pool.free[at - 1][0] >= self._max_split:
            at -= 1
            block = pool.free[at][2]
            if block.expandable is None:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Near the allowed maximum, free the large segments that were not reused for longest.

        ``garbage_collect_cached_blocks``: rounds of everything at least as old as the average, until enough is free.
        """
        allowed = self.ledger.allowed_bytes
        assert allowed is not None
        excess = self.ledger.reserved - int(self.config.garbage_collection_threshold * allowed)
        if excess <= 0:
            return
        now = self._searches[False].count
        whole = [
            block
            for pool in _by_stream(self._large)
            for _, _, block in pool.free
            if block.prev is None and block.next is None
        ]
        total_age, count, freed = sum(now - block.born for block in whole), len(whole), 0
        while freed < excess and count > 0:
            threshold, old = total_age / count, []
            for block in whole:  # the threshold stays for the round, as blocks leave
                if block.expandable is None and now - block.born >= threshold:
                    old.append(block)
            if not old:
                return
            for block in old:
                freed += block.size
                total_age -= now - block.born
                count -= 1
                self._release(block)
            whole = [block for block in whole if block not in old]


def _by_stream(pools: dict[int, Pool]) -> list[Pool]:
    """Pools as the C++ set holds them: by stream."""
    return [pools[stream] for stream in sorted(pools)]
