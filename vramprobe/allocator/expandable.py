"""Expandable segments: one range of addresses per pool and stream, in which granules are mapped as they are needed.

Follows ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and ``unmap_block`` of
c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13), and its Note [Expandable Segments].
"""

from vramprobe.allocator.blocks import Block, ExpandableSegment, Pool, merge
from vramprobe.allocator.config import SMALL_BUFFER, AllocatorConfig
from vramprobe.allocator.ledger import Device, Ledger

_ENDLESS = 1 << 46  # address space where the card's size is unknown


def allocate_expandable(
    pool: Pool, size_bytes: int, config: AllocatorConfig, device: Device, ledger: Ledger
) -> Block | None:
    """A free block of at least this size at the lowest address, mapping what it lacks; None where the device is full.

    What was mapped before the device was full stays cached (``try_allocate_expandable_block``).
    """
    block = _lowest(pool, size_bytes)
    if block is None:
        block = _new_segment(pool, config, device, ledger)
    if not block.mapped and not _map(block, min(block.size, size_bytes), ledger):
        return None
    while block.size < size_bytes:  # free, then unmapped: mapping the second swallows the first
        following = block.next
        assert following is not None
        if not _map(following, min(size_bytes - block.size, following.size), ledger):
            return None
        block = following
    pool.remove(block)
    return block


def unmap(block: Block, ledger: Ledger) -> None:
    """Give back the whole granules that a free block covers; its ends stay cached (``unmap_block``)."""
    segment = block.expandable
    assert segment is not None
    granule, pool = segment.granule_bytes, block.pool
    start = -(-(block.address - segment.address) // granule) * granule + segment.address
    end = (block.address + block.size - segment.address) // granule * granule + segment.address
    if start >= end:
        return
    pool.remove(block)
    before, after = start - block.address, block.address + block.size - end
    if before:
        head = Block(block.address, before, pool, segment)
        head.chain(block.prev, block)
        pool.insert(head)
    if after:
        tail = Block(end, after, pool, segment)
        tail.chain(block, block.next)
        pool.insert(tail)
    block.address, block.size, block.mapped = start, end - start, False
    merge(block, block.prev)
    merge(block, block.next)
    pool.insert_unmapped(block)
    ledger.give(end - start)
    if block.prev is None and block.next is None:
        pool.remove_unmapped(block)  # release_expandable_segment: the range goes too


def reachable_bytes(block: Block) -> int:
    """Bytes that a block can grow to: its size and the unmapped addresses behind it (``expandable_size``)."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def address_space_bytes(granule_bytes: int, device: Device) -> int:
    """One and an eighth of the card, in whole granules (the constructor of ``ExpandableSegment``)."""
    total = _ENDLESS if device.total_bytes is None else device.total_bytes + device.total_bytes // 8
    return -(-total // granule_bytes) * granule_bytes


def _lowest(pool: Pool, size_bytes: int) -> Block | None:
    """The lowest free or unmapped block from which enough free addresses follow (``find_expandable_block``)."""
    for _, unmapped in pool.unmapped:
        first = unmapped
        if unmapped.prev is not None and not unmapped.prev.busy:
            first = unmapped.prev
        room, block = 0, first
        while room < size_bytes and block is not None and not block.busy:
            room += block.size
            block = block.next
        if room >= size_bytes:
            return first
    return None


def _new_segment(pool: Pool, config: AllocatorConfig, device: Device, ledger: Ledger) -> Block:
    granule = SMALL_BUFFER if pool.is_small else config.large_segment_bytes
    size_bytes = address_space_bytes(granule, device)
    address = ledger.address(size_bytes)
    block = Block(address, size_bytes, pool, ExpandableSegment(address, granule, ledger.new_order()))
    block.mapped = False
    pool.insert_unmapped(block)
    return block


def _map(block: Block, size_bytes: int, ledger: Ledger) -> bool:
    """Put memory under the first granules of an unmapped block and cache it, or do nothing (``map_block``)."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    assert not block.mapped
    mapped = -(-size_bytes // segment.granule_bytes) * segment.granule_bytes
    if not ledger.has_room(mapped):
        return False
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(block.address + mapped, block.size - mapped, pool, segment)
        rest.mapped = False
        rest.chain(block, block.next)
        pool.insert_unmapped(rest)
        block.size = mapped
    merge(block, block.prev)
    merge(block, block.next)
    pool.insert(block)
    ledger.take(mapped)
    return True
