"""The caching allocator's replay: every rule by hand, published numbers, random traces, and torch's own parser."""

import random
import time
from itertools import pairwise

import pytest
from allocator_trace import Alloc, EmptyCache, Event, Free, FreeCompleted, FreeRequested, Mark, apply, replay

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import AllocatorConfig, parse_alloc_conf
from vramprobe.allocator.ledger import Device, Ledger, OutOfMemory
from vramprobe.errors import SpecError
from vramprobe.records.outcomes import Oom
from vramprobe.units import GIB, KIB, MIB


def fresh(conf: str = "", **device: int) -> CachingAllocator:
    return CachingAllocator(parse_alloc_conf(conf), Device(**device))


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_round_size_is_to_512(size: int, rounded: int) -> None:
    assert AllocatorConfig().round_size(size) == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),  # kSmallSize is still small
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),  # under kMinLargeAlloc
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (31 * MIB, 32 * MIB),  # kRoundLarge
    ],
)
def test_get_allocation_size(size: int, segment: int) -> None:
    assert AllocatorConfig().allocation_size(size) == segment


def power2_div(size: int, divisions: int) -> int:
    """The reference of pytorch's test/test_cuda.py (``TestCudaMallocAsync.power2_div``), in whole numbers."""
    power = 1
    while power < size:
        power *= 2
    if power == size:
        return power
    step, result = power // 2 // divisions, power // 2
    while result < size:
        result += step
    return result


@pytest.mark.parametrize(
    ("conf", "size", "rounded"),
    [
        # The comment above roundup_power2_next_division: 1200 with 4 divisions is 1280 (in large units).
        ("roundup_power2_divisions:4", 1200 * MIB, 1280 * MIB),
        # pytorch test/test_cuda.py, test_allocator_settings: 21 Mi and 100 Mi floats.
        ("roundup_power2_divisions:4", 84 * MIB, power2_div(84 * MIB, 4)),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84 * MIB, power2_div(84 * MIB, 8)),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400 * MIB, power2_div(400 * MIB, 2)),
        # 0 and 1 divisions round to 512 B only.
        ("roundup_power2_divisions:[128:1,256:0,512:4]", 268 * MIB, 268 * MIB),
        ("roundup_power2_divisions:[128:1,256:0,512:4]", 520 * MIB, 640 * MIB),
        ("roundup_power2_divisions:1", 1_312_500, 1_312_768),
        # A power of two stays; sizes up to 512 × divisions are rounded to 512.
        ("roundup_power2_divisions:4", 64 * MIB, 64 * MIB),
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:8", 4000, 4096),
        ("roundup_power2_divisions:4", 2049, 2560),
    ],
)
def test_roundup_power2_divisions(conf: str, size: int, rounded: int) -> None:
    assert parse_alloc_conf(conf).round_size(size) == rounded


# What torch 2.13's own libc10 made of these strings (AcceleratorAllocatorConfig::parseArgs, called from C++).
@pytest.mark.parametrize(
    ("conf", "divisions"),
    [
        ("[256:1,512:2,1024:4,>:8]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)),
        ("[256:1,512:2]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0)),
        ("[>:8]", (0, *(8,) * 15)),
        ("[64:0,128:2]", (0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0)),
        ("[]", (0,) * 16),
        ("[128:2,>:4,64:8]", (2, 2, 2, 2, 2, 2, 8, 2, 4, 4, 4, 4, 4, 4, 4, 4)),
        ("[131072:8]", (8,) * 16),
    ],
)
def test_the_list_of_divisions_is_read_as_torch_reads_it(conf: str, divisions: tuple[int, ...]) -> None:
    assert parse_alloc_conf(f"roundup_power2_divisions:{conf}").roundup_power2_divisions == divisions


def test_settings_are_read_as_torch_reads_them() -> None:
    config = parse_alloc_conf(" max_split_size_mb:100 , expandable_segments : True,large_segment_size_mb:64")
    assert (config.max_split_bytes, config.expandable_segments) == (100 * MIB, True)
    assert (config.large_segment_bytes, config.max_non_split_rounding_bytes) == (64 * MIB, 64 * MIB)
    assert parse_alloc_conf("expandable_segments:True,expandable_segments:False").expandable_segments is False
    assert parse_alloc_conf("backend:native,pinned_use_background_threads:True") == AllocatorConfig()


@pytest.mark.parametrize("conf", [
    "foo:1,bar:2", "garbage_collection_threshold:1.2", "max_split_size_mb:2",  # test_allocator_settings
    "max_split_size_mb:30,large_segment_size_mb:64", "max_split_size_mb=100", "max_split_size_mb:", "max_split_size_mb",
    "max_split_size_mb:abc", "max_split_size_mb:100,,", "max_split_size_mb:1e3", "large_segment_size_mb:10",
    "max_non_split_rounding_mb:19", "garbage_collection_threshold:1.0", "garbage_collection_threshold:0",
    "expandable_segments:true", "roundup_power2_divisions:3", "roundup_power2_divisions:0",
    "roundup_power2_divisions:[3:4]", "roundup_power2_divisions:[64:8", "roundup_power2_divisions:[64]",
    "per_process_memory_fraction:1.5", "backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True", "[]:3", "a:b c:d",
])  # fmt: skip
def test_what_torch_refuses_or_the_replay_does_not_model_is_refused(conf: str) -> None:
    with pytest.raises(SpecError, match="PYTORCH_ALLOC_CONF"):
        parse_alloc_conf(conf)


# --- the native pools -------------------------------------------------------------------------------------------------


def test_small_requests_share_a_2_mib_segment() -> None:
    """kSmallBuffer, and should_split: a small remainder of 512 B is enough."""
    allocator = fresh()
    allocator.allocate("a", MIB)
    allocator.allocate("b", MIB - 512)
    assert allocator.ledger.reserved == 2 * MIB
    last = allocator.allocate("c", 1)
    assert (last.size, allocator.ledger.reserved) == (512, 2 * MIB)
    allocator.allocate("d", 1)
    assert allocator.ledger.reserved == 4 * MIB


def test_requests_under_10_mib_are_cut_from_20_mib() -> None:
    allocator = fresh()
    for name in "abc":
        allocator.allocate(name, 6 * MIB)
    assert allocator.ledger.reserved == 20 * MIB
    allocator.allocate("d", 6 * MIB)
    assert allocator.ledger.reserved == 40 * MIB


def test_a_large_remainder_of_1_mib_is_not_split_off() -> None:
    """should_split: more than kSmallSize; what is not split off counts as allocated, and not as requested."""
    allocator = fresh()
    allocator.allocate("a", 11 * MIB)  # in 12
    assert allocator.ledger.now()[:4] == (11 * MIB, 12 * MIB, 12 * MIB, 12 * MIB)
    allocator.free("a")
    allocator.allocate("b", 11 * MIB - 512)
    assert allocator.ledger.allocated == 11 * MIB - 512
    assert allocator.ledger.reserved == 12 * MIB


def test_best_fit_takes_the_smallest_then_the_oldest_segment() -> None:
    """get_free_block: lower_bound of (size, the segment's age, address), in torch 2.13 (pytorch#183591)."""
    allocator = fresh()
    blocks = {name: allocator.allocate(name, size * MIB) for name, size in zip("abcd", (40, 20, 30, 20), strict=True)}
    addresses = {name: block.address for name, block in blocks.items()}
    for name in "abcd":
        allocator.free(name)
    got = [allocator.allocate(name, 20 * MIB).address for name in "wxyz"]
    assert got == [addresses[name] for name in "bdca"]
    assert allocator.ledger.reserved == 110 * MIB


def test_of_equal_blocks_in_one_segment_the_lowest_serves() -> None:
    """Eight blocks of 2 MiB fill a segment of 20 but for 4; two of them apart are free, the higher one for longer."""
    allocator = fresh()
    blocks = {name: allocator.allocate(name, 2 * MIB) for name in "abcdefgh"}
    allocator.free("f")
    allocator.free("c")
    assert allocator.allocate("x", 2 * MIB).address == blocks["c"].address
    assert allocator.allocate("y", 2 * MIB).address == blocks["f"].address


def test_a_segment_that_lies_lower_but_is_younger_serves_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card fills a hole: the second segment of 20 MiB lies where one of 40 was given back, below the first."""
    allocator = fresh()
    places = iter((40 * MIB, 80 * MIB, 40 * MIB))
    monkeypatch.setattr(Ledger, "address", lambda ledger, size_bytes: next(places))
    allocator.allocate("hole", 40 * MIB)
    first = allocator.allocate("first", 20 * MIB)
    allocator.free("hole")
    allocator.empty_cache()
    allocator.allocate("second", 20 * MIB)
    allocator.free("second")
    allocator.free("first")
    assert allocator.allocate("x", 20 * MIB).address == first.address == 80 * MIB


def test_neighbours_merge_whichever_is_freed_first() -> None:
    """try_merge_blocks: a hole between two blocks takes both in."""
    for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
        allocator = fresh()
        for name in "abc":
            allocator.allocate(name, 6 * MIB)
        for name in order:
            allocator.free(name)
        whole = allocator.allocate("d", 20 * MIB - 512)
        assert (whole.size, allocator.ledger.reserved, whole.prev, whole.next) == (20 * MIB, 20 * MIB, None, None)


def test_pools_and_streams_do_not_share() -> None:
    allocator = fresh()
    allocator.allocate("a", 20 * MIB, 1)
    allocator.free("a")
    allocator.allocate("b", 20 * MIB, 2)  # another stream
    allocator.allocate("c", 512, 1)  # another pool
    assert allocator.ledger.reserved == 42 * MIB
    allocator.allocate("d", 20 * MIB, 1)
    assert allocator.ledger.reserved == 42 * MIB


def test_nothing_is_nothing() -> None:
    done = replay([Alloc("a", 0), Free("a"), Alloc("a", 1)])
    assert done.end == (1, 512, 512, 2 * MIB, 1)


def test_a_block_in_use_on_another_stream_is_active_until_its_free_completes() -> None:
    """Allocated falls in ``free``, active and requested in ``free_block``; only then may it be merged or reused."""
    done = replay([Alloc("a", 20 * MIB), FreeRequested("a"), Alloc("b", 20 * MIB), FreeCompleted("a")])
    assert [usage.allocated_bytes // MIB for usage in done.timeline] == [20, 0, 20, 20]
    assert [usage.active_bytes // MIB for usage in done.timeline] == [20, 20, 40, 20]
    assert [usage.reserved_bytes // MIB for usage in done.timeline] == [20, 20, 40, 40]


def test_empty_cache_gives_back_whole_segments_only() -> None:
    """release_blocks: a cached block with a live neighbour stays."""
    done = replay([Alloc("a", 4 * MIB), Alloc("b", 4 * MIB), Alloc("c", 30 * MIB), Free("b"), Free("c"), EmptyCache()])
    assert done.end == (4 * MIB, 4 * MIB, 4 * MIB, 20 * MIB, 1)


def test_peaks_are_of_their_phase() -> None:
    done = replay([Alloc("a", 30 * MIB), Free("a"), Mark("step"), Alloc("b", 12 * MIB), Free("b"), Mark("rest")])
    peaks = {phase.phase: (phase.peak.allocated_bytes, phase.peak.reserved_bytes) for phase in done.phases}
    assert peaks == {"": (30 * MIB, 30 * MIB), "step": (12 * MIB, 30 * MIB), "rest": (0, 30 * MIB)}
    assert done.peak.allocated_bytes == 30 * MIB


# --- a full device ----------------------------------------------------------------------------------------------------


def test_a_full_device_gives_the_cache_back_and_tries_again() -> None:
    """malloc: release_cached_blocks, then alloc_block(isRetry), which counts."""
    events = [Alloc("a", 60 * MIB), Free("a"), Alloc("b", 50 * MIB), Free("b"), Alloc("c", 70 * MIB)]
    done = replay(events, device=Device(total_bytes=100 * MIB))
    assert (done.num_alloc_retries, done.oom) == (1, None)
    assert done.end == (70 * MIB, 70 * MIB, 70 * MIB, 70 * MIB, 1)
    assert done.peak.reserved_bytes == 70 * MIB


def test_an_oom_ends_the_replay_and_says_how_far_it_was() -> None:
    events = [Alloc("a", 61 * MIB + 1), Alloc("b", 41 * MIB), Alloc("c", 1)]
    done = replay(events, device=Device(total_bytes=200 * MIB, segment_bytes=100 * MIB))
    assert (done.oom.requested_bytes, done.oom.segment_bytes, done.oom.free_bytes) == (41 * MIB, 42 * MIB, 38 * MIB)
    # The first keeps its 62: too little was left to split off.
    assert (done.oom.usage.active_bytes, done.oom.block_bytes) == (62 * MIB, 41 * MIB)
    assert (len(done.timeline), done.num_alloc_retries, done.end.reserved_bytes) == (1, 1, 62 * MIB)


def test_fragments_can_make_an_oom() -> None:
    """18 of 40 MiB are free, in two segments that cannot go back; in one range the two are one block."""
    events: list[Event] = [*(Alloc(name, 9 * MIB) for name in "abcd"), Free("b"), Free("c"), Alloc("big", 18 * MIB)]
    assert replay(events, device=Device(total_bytes=50 * MIB)).oom is not None
    done = replay(events, parse_alloc_conf("expandable_segments:True"), Device(total_bytes=50 * MIB))
    assert (done.oom, done.end.reserved_bytes) == (None, 40 * MIB)


def test_waiting_blocks_are_freed_before_an_oom() -> None:
    """pytorch test_caching_allocator_record_stream_oom: synchronize_and_free_events on a full device."""
    events: list[Event] = []
    for name in range(100):
        events += [Alloc(name, 160 * MIB), FreeRequested(name)]
    done = replay(events, device=Device(total_bytes=GIB))
    assert done.oom is None
    assert done.num_alloc_retries > 0


def test_set_per_process_memory_fraction() -> None:
    """pytorch test/test_cuda.py: 0.499 of the card fits under a fraction of 0.5, a half beside a tensor does not."""
    conf, device = parse_alloc_conf("per_process_memory_fraction:0.5"), Device(total_bytes=80 * GIB)
    tensor = Alloc("tensor", 4096)
    assert replay([tensor, Alloc("a", int(80 * GIB * 0.499) - 2 * MIB)], conf, device).oom is None
    assert replay([tensor, Alloc("a", 40 * GIB)], conf, device).oom is not None
    with pytest.raises(SpecError, match="total_bytes"):
        CachingAllocator(conf)


# --- max_split_size_mb and garbage collection -------------------------------------------------------------------------


def test_an_oversize_block_is_neither_broken_nor_given_to_a_small_request() -> None:
    """get_free_block: size < max_split and block ≥ max_split; should_split: size ≥ max_split."""
    allocator = fresh("max_split_size_mb:40")
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    allocator.allocate("small", 30 * MIB)
    assert allocator.ledger.reserved == 90 * MIB
    block = allocator.allocate("near", 45 * MIB)  # within 20 MiB: takes all of it
    assert (block.size, allocator.ledger.allocated, allocator.ledger.reserved) == (60 * MIB, 90 * MIB, 90 * MIB)


@pytest.mark.parametrize(
    ("conf", "reserved"),
    [
        ("max_split_size_mb:40", 100),  # block ≥ request + 20 MiB: refused
        ("max_split_size_mb:40,max_non_split_rounding_mb:21", 60),
        ("", 60),
    ],
)
def test_max_non_split_rounding(conf: str, reserved: int) -> None:
    done = replay([Alloc("a", 60 * MIB), Free("a"), Alloc("b", 40 * MIB)], parse_alloc_conf(conf))
    assert done.end.reserved_bytes == reserved * MIB


def test_a_full_device_frees_only_as_many_oversize_blocks_as_it_needs() -> None:
    """release_available_cached_blocks: one that is large enough, or the largest first; no retry is counted."""
    allocator = fresh("max_split_size_mb:40", total_bytes=300 * MIB)
    for name, size in (("a", 90), ("b", 100), ("c", 80), ("d", 30)):
        allocator.allocate(name, size * MIB)
    for name in "abcd":
        allocator.free(name)
    allocator.allocate("e", 65 * MIB)  # 80 and more are cached, yet 20 MiB larger or nearer: the 80 serves
    assert allocator.ledger.reserved == 300 * MIB
    allocator.allocate("f", 60 * MIB)  # 90 is too large to serve it and the first large enough to free
    assert (allocator.ledger.reserved, allocator.ledger.num_alloc_retries) == (270 * MIB, 0)
    allocator.allocate("g", 130 * MIB)  # no single one: the 100 goes, which is not enough, and then all cached ones
    assert (allocator.ledger.reserved, allocator.ledger.num_alloc_retries) == (270 * MIB, 1)


@pytest.mark.parametrize(("between", "reserved"), [(30, 160), (44, 114)])
def test_garbage_is_collected_above_the_threshold_oldest_first(between: int, reserved: int) -> None:
    """garbage_collect_cached_blocks: rounds of what is at least as old as the average, until enough went back.

    200 MiB are allowed and collection starts above 100. At the last request the ages, in searches of the large pool,
    are 2 and 1. With 30 MiB between, 30 are too many: the older block's 40 will do. With 44 both go, in two rounds.
    """
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    allocator = fresh(conf, total_bytes=400 * MIB)
    allocator.allocate("old", 40 * MIB)
    allocator.allocate("new", 60 * MIB)
    allocator.free("old")
    allocator.allocate("between", between * MIB, stream=1)  # 100 are reserved: not above the threshold
    allocator.free("new")
    assert allocator.ledger.reserved == (100 + between) * MIB
    allocator.allocate("last", 70 * MIB)
    assert (allocator.ledger.reserved, allocator.ledger.num_alloc_retries) == (reserved * MIB, 0)


def test_a_block_as_large_as_the_limit_is_oversize() -> None:
    done = replay([Alloc("a", 40 * MIB), Free("a"), Alloc("b", 30 * MIB)], parse_alloc_conf("max_split_size_mb:40"))
    assert done.end.reserved_bytes == 70 * MIB


def test_several_oversize_blocks_go_where_none_is_large_enough() -> None:
    """release_available_cached_blocks: from the largest down, to the first of the pool; no retry is counted."""
    events: list[Event] = [Alloc("a", 60 * MIB), Alloc("b", 50 * MIB), Free("a"), Free("b"), Alloc("c", 100 * MIB)]
    done = replay(events, parse_alloc_conf("max_split_size_mb:40"), Device(total_bytes=130 * MIB))
    assert (done.end.reserved_bytes, done.num_alloc_retries, done.oom) == (100 * MIB, 0, None)


def test_garbage_is_not_collected_without_a_memory_fraction() -> None:
    """malloc: only where allowed_memory_maximum is set."""
    conf = parse_alloc_conf("garbage_collection_threshold:0.1")
    done = replay([Alloc("a", 90 * MIB), Free("a"), Alloc("b", 95 * MIB)], conf, Device(total_bytes=400 * MIB))
    assert done.end.reserved_bytes == 186 * MIB


# --- expandable segments ----------------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_by_granules() -> None:
    """map_block: 2 MiB in the small pool, 20 MiB in the large one, and no segment is counted."""
    allocator = fresh("expandable_segments:True", total_bytes=GIB)
    first = allocator.allocate("a", 15 * MIB)
    second = allocator.allocate("b", 15 * MIB)
    small = allocator.allocate("c", MIB)
    assert small is not None
    assert second.address == first.address + 15 * MIB  # in one range, across the granules' border
    assert allocator.ledger.now() == (31 * MIB, 31 * MIB, 31 * MIB, 42 * MIB, 0)
    allocator.free("a")
    third = allocator.allocate("d", 16 * MIB)  # 15 free in front, 10 at the end that can grow: the end
    assert third.address == first.address + 30 * MIB
    assert allocator.ledger.reserved == 62 * MIB


def test_what_can_grow_is_left_for_last() -> None:
    """get_free_block, expandable_size: 10 MiB at the end fit better than a hole of 15, but can become more."""
    allocator = fresh("expandable_segments:True")
    allocator.allocate("hole", 15 * MIB)
    after = allocator.allocate("a", 15 * MIB)
    allocator.free("hole")
    block = allocator.allocate("b", 8 * MIB)
    assert block.address == after.address - 15 * MIB


def test_an_expandable_block_is_split_down_to_512() -> None:
    allocator = fresh("expandable_segments:True")
    allocator.allocate("a", 20 * MIB - 512)
    assert allocator.ledger.now()[:2] == (20 * MIB - 512, 20 * MIB - 512)


def test_empty_cache_unmaps_whole_granules() -> None:
    """unmap_block: the granules between live blocks go, the ends of a free block stay; new memory fills the gap."""
    allocator = fresh("expandable_segments:True", total_bytes=GIB)
    blocks = {name: allocator.allocate(name, size * MIB) for name, size in (("a", 10), ("b", 65), ("c", 5))}
    assert allocator.ledger.reserved == 80 * MIB
    allocator.free("b")  # from 10 to 75: granules 20–40 and 40–60 are free
    allocator.empty_cache()
    assert allocator.ledger.reserved == 40 * MIB
    again = allocator.allocate("d", 30 * MIB)  # 10 MiB in front, and one granule of the gap behind it
    assert again is not None
    assert blocks["b"] is not None
    assert allocator.ledger.reserved == 60 * MIB
    for name in "acd":
        allocator.free(name)
    allocator.empty_cache()
    assert allocator.ledger.now() == (0, 0, 0, 0, 0)


def test_a_full_device_moves_granules_between_streams() -> None:
    allocator = fresh("expandable_segments:True", total_bytes=100 * MIB)
    allocator.allocate("a", 80 * MIB, 1)
    allocator.free("a")
    allocator.allocate("b", 60 * MIB, 2)
    assert (allocator.ledger.reserved, allocator.ledger.num_alloc_retries) == (60 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.allocate("c", 60 * MIB, 1)
    assert allocator.ledger.reserved == 60 * MIB


# --- published numbers ------------------------------------------------------------------------------------------------


def test_a_published_run_on_an_rtx_3090() -> None:
    """Somebody's notes on Stable Diffusion's attention, with memory_allocated, memory_reserved and memory_snapshot().

    Two (16, 4096, 40) halves: 10 MiB allocated, 20 reserved. Then (16, 4096, 4096): 534,528 KiB, at most 1,583,110, and
    1558 MiB reserved in segments of 1 GiB, 512, 20 and 2 MiB. In single precision: 1,058,816, 1,069,062 and 1046. What
    came and went in between is not told: 1 GiB or 10 MiB, and 6 KiB, by the difference.
    """
    half = 16 * 4096 * 40 * 2
    inputs = [Alloc("query", half), Alloc("key", half), Mark("scores")]
    for scores, moment, allocated_kib, peak_kib, reserved_mib, num_segments in (
        (512 * MIB, GIB, 534_528, 1_583_110, 1558, 4),
        (GIB, 10 * MIB, 1_058_816, 1_069_062, 1046, 3),
    ):
        made = [Alloc("scores", scores), Alloc("moment", moment), Alloc("6 KiB", 6 * KIB)]
        done = replay([*inputs, *made, Free("moment"), Free("6 KiB")])
        assert (done.phases[0].end.allocated_bytes, done.phases[0].end.reserved_bytes) == (10 * MIB, 20 * MIB)
        assert (done.end.allocated_bytes, done.peak.allocated_bytes) == (allocated_kib * KIB, peak_kib * KIB)
        assert (done.end.reserved_bytes, done.end.num_segments) == (reserved_mib * MIB, num_segments)


def test_segments_lie_as_in_that_listing() -> None:
    """Its addresses: 20 MiB, below it 512, below that 1 GiB, without a gap."""
    allocator = fresh()
    blocks = [allocator.allocate(size, size) for size in (6 * MIB, 512 * MIB, GIB)]
    assert [block.address - allocator.ledger._lowest_address for block in blocks if block] == [1536 * MIB, GIB, 0]


# --- any trace --------------------------------------------------------------------------------------------------------

CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:32,large_segment_size_mb:24",
    "max_split_size_mb:20",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,expandable_segments:True",
)


def trace(seed: int, length: int = 600) -> list[Event]:
    """Requests over six orders of magnitude on three streams, freed in any order, some in two halves."""
    rng, events, alive, waiting = random.Random(seed), [], [], []
    for name in range(length):
        chance = rng.random()
        if chance < 0.52 or not alive:
            events.append(Alloc(name, int(2 ** rng.uniform(0, 26)), rng.choice((0, 0, 0, 7, 9))))
            alive.append(name)
        elif chance < 0.9:
            events.append(Free(alive.pop(rng.randrange(len(alive)))))
        elif chance < 0.94:
            waiting.append(alive.pop(rng.randrange(len(alive))))
            events.append(FreeRequested(waiting[-1]))
        elif waiting:
            events.append(FreeCompleted(waiting.pop(rng.randrange(len(waiting)))))
        elif chance > 0.99:
            events.append(EmptyCache())
    events += [Free(name) for name in alive] + [FreeCompleted(name) for name in waiting]
    return events


def check(allocator: CachingAllocator) -> None:
    """Every chain of blocks is without holes, overlaps, free neighbours and strays; the counters are their sums."""
    ledger = allocator.ledger
    assert 0 <= ledger.requested <= ledger.active <= ledger.reserved
    assert ledger.allocated <= ledger.active
    heads, pools = {}, [*allocator._small.values(), *allocator._large.values()]
    live = [block for block in allocator._live.values() if block is not None]
    cached = [block for pool in pools for _, _, block in pool.free]
    unmapped = [block for pool in pools for _, block in pool.unmapped]
    for block in (*live, *allocator._awaiting.values(), *cached, *unmapped):
        head = block
        while head.prev is not None:
            head = head.prev
        heads[id(head)] = head
    spans, mapped, num_blocks = [], 0, 0
    for head in heads.values():
        block = head
        while block is not None:
            num_blocks += 1
            mapped += block.size if block.mapped else 0
            if block.next is not None:
                assert block.next.prev is block
                assert block.address + block.size == block.next.address
                assert block.busy or block.next.busy or block.mapped != block.next.mapped
            spans.append((block.address, block.address + block.size))
            block = block.next
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert num_blocks == len(live) + len(allocator._awaiting) + len(cached) + len(unmapped)
    assert mapped == ledger.reserved
    assert sum(block.size for block in live) == ledger.allocated
    assert all(pool.free == sorted(pool.free) for pool in pools)


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("seed", range(3))
def test_any_trace_keeps_the_books(conf: str, seed: int) -> None:
    allocator = fresh(conf, total_bytes=8 * GIB)
    for event in trace(seed):
        apply(allocator, event)
        check(allocator)
    assert allocator.ledger.now()[:3] == (0, 0, 0)
    allocator.empty_cache()
    assert allocator.ledger.now() == (0, 0, 0, 0, 0)
    assert not [pool.unmapped for pool in (*allocator._small.values(), *allocator._large.values()) if pool.unmapped]


@pytest.mark.parametrize("conf", CONFS)
def test_a_replay_repeats_and_its_totals_do_not_depend_on_the_order(conf: str) -> None:
    events, device = trace(11), Device(total_bytes=8 * GIB)
    first = replay(events, parse_alloc_conf(conf), device)
    assert first == replay(events, parse_alloc_conf(conf), device)
    requests = [event for event in events if isinstance(event, Alloc)][:60]
    totals = set()
    for seed in range(3):
        random.Random(seed).shuffle(requests)
        totals.add(replay(requests, parse_alloc_conf(conf), Device(total_bytes=64 * GIB)).end.requested_bytes)
    assert totals == {sum(request.size_bytes for request in requests)}


class Slow:
    """Best fit by looking at every block of every segment: lists of (size, name or None), nothing sorted or chained."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, int, list[tuple[int, object]]]] = []

    def allocate(self, name: object, size: int, stream: int) -> None:
        size = -(-size // 512) * 512
        small = size <= MIB
        fits = [
            (block, -at, place)
            for at, (kind, owner, blocks) in enumerate(self.segments)
            if (kind, owner) == (small, stream)
            for place, (block, user) in enumerate(blocks)
            if user is None and block >= size
        ]
        if not fits:
            wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, stream, [(wanted, None)]))
            return self.allocate(name, size, stream)
        block, at, place = min(fits)  # a later segment lies lower
        rest = block - size
        split = rest >= 512 if small else rest > MIB
        self.segments[-at][2][place : place + 1] = [(size, name), (rest, None)] if split else [(block, name)]
        return None

    def free(self, name: object) -> None:
        for _, _, blocks in self.segments:
            joined: list[tuple[int, object]] = []
            for size, user in blocks:
                user = None if user == name else user
                if user is None and joined and joined[-1][1] is None:
                    joined[-1] = (joined[-1][0] + size, None)
                else:
                    joined.append((size, user))
            blocks[:] = joined

    def allocated(self) -> int:
        return sum(size for _, _, blocks in self.segments for size, user in blocks if user is not None)

    def reserved(self) -> int:
        return sum(size for _, _, blocks in self.segments for size, _ in blocks)


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_model_of_best_fit_agrees(seed: int) -> None:
    allocator, slow = fresh(), Slow()
    for event in trace(seed + 100, 400):
        if isinstance(event, Alloc):
            allocator.allocate(*event)
            slow.allocate(*event)
        elif isinstance(event, Free | FreeRequested):
            allocator.free(event.name)
            slow.free(event.name)
        assert (allocator.ledger.allocated, allocator.ledger.reserved) == (slow.allocated(), slow.reserved())


def test_half_a_million_events_take_seconds() -> None:
    events: list[Event] = []
    for name in range(250_000):
        events += [Alloc(name, (name % 977 + 1) * 9 * KIB), Free(name - 40)] if name >= 40 else [Alloc(name, KIB)]
    allocator, start = counting_allocator(None, None), time.perf_counter()
    for event in events:
        apply(allocator, event)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "size_bytes", [1, 512, MIB, MIB + 1, 9 * MIB, 10 * MIB, 10 * MIB + 1, 20 * MIB, 21 * MIB, GIB + 1]
)
def test_what_an_oom_needed_is_no_more_than_was_asked_for(size_bytes: int) -> None:
    """The allocator tells its observers the segment it wanted; several requests ask for the same one."""
    config = AllocatorConfig()
    segment = config.allocation_size(size_bytes)
    least = Oom(phase="forward", allocated_bytes=GIB, requested_bytes=segment, message="").at_least_bytes - GIB
    assert least <= size_bytes
    assert config.allocation_size(least) == segment
    assert least == 1 or config.allocation_size(least - 1) != segment
