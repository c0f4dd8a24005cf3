"""A memory history in torch's own format, read, replayed and held against the segments that torch took."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.blocks import Block
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.allocator.ledger import Device, SegmentEvent
from vramprobe.errors import VramprobeError
from vramprobe.log.against_snapshot import compare
from vramprobe.log.snapshot import read_snapshot
from vramprobe.units import GIB, MIB

BASE = 140_198_805_504_000  # an address of a real snapshot


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    """What torch/csrc/cuda/Module.cpp writes for one TraceEntry."""
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "frames": [],
        "time_us": 1_700_000_000_000_000,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
    }


def freed(addr: int, size: int, stream: int = 0) -> list[dict[str, Any]]:
    return [entry("free_requested", addr, size, stream), entry("free_completed", addr, size, stream)]


def segment(address: int, kind: str, blocks: list[tuple[int, int, str]], **more: Any) -> dict[str, Any]:
    """One SegmentInfo with its BlockInfos: (size, requested size, state)."""
    listed, at = [], address
    for size, requested, state in blocks:
        listed.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": []})
        at += size
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "stream": 0,
        "segment_type": kind,
        "allocated_size": sum(size for size, _, state in blocks if state == "active_allocated"),
        "active_size": sum(size for size, _, state in blocks if state != "inactive"),
        "requested_size": sum(requested for _, requested, state in blocks if state != "inactive"),
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": listed,
        **more,
    }


def snapshot(trace: list[dict[str, Any]], segments: list[dict[str, Any]], conf: str = "") -> dict[str, Any]:
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf}}


def by_hand() -> dict[str, Any]:
    """From the first request on: two blocks in one segment, one reused, one too large for what is left."""
    trace = [
        entry("segment_alloc", BASE, 20 * MIB),
        entry("alloc", BASE, 5 * MIB - 100),
        entry("alloc", BASE + 5 * MIB, 6 * MIB),
        *freed(BASE, 5 * MIB - 100),
        entry("alloc", BASE, 4 * MIB),  # the 5 MiB hole rather than the 9 behind; 1 MiB is left of it: not split off
        entry("segment_alloc", BASE - 12 * MIB, 12 * MIB),
        entry("alloc", BASE - 12 * MIB, 11 * MIB + 1),
        *freed(BASE - 12 * MIB, 11 * MIB + 1),
        entry("segment_free", BASE - 12 * MIB, 12 * MIB),  # empty_cache()
        entry("snapshot", 0, 11 * MIB),
    ]
    first = [(5 * MIB, 4 * MIB, "active_allocated"), (6 * MIB, 6 * MIB, "active_allocated"), (9 * MIB, 0, "inactive")]
    return snapshot(trace, [segment(BASE, "large", first)])


def test_a_history_by_hand_is_repeated_to_the_byte() -> None:
    history = read_snapshot(by_hand())
    assert history.initial == ()
    found = compare(history)
    assert (found.first, found.worst_gap_bytes, found.peak_error) == (None, 0, 0.0)
    assert (found.num_events, found.reserved_peak_torch, found.reserved_peak_replay) == (8, 32 * MIB, 32 * MIB)


@pytest.mark.parametrize("start", range(1, 9))
def test_a_history_may_begin_anywhere(start: int) -> None:
    """What stood before is the snapshot's end with the history undone."""
    whole = by_hand()
    whole["device_traces"] = [whole["device_traces"][0][start:]]
    if whole["device_traces"][0][0]["action"] == "free_completed":
        whole["device_traces"][0].pop(0)
    history = read_snapshot(whole)
    assert sum(state.size_bytes for state in history.initial) in (20 * MIB, 32 * MIB)
    assert compare(history).first is None


def test_what_was_too_little_to_split_off_belongs_to_the_block() -> None:
    """A block that the history frees shows its request only; in a large segment the last 1 MiB was never split off."""
    whole = by_hand()
    whole["device_traces"] = [whole["device_traces"][0][8:]]
    last, first = read_snapshot(whole).initial
    assert [(block.size_bytes, block.requested_bytes) for block in last.blocks] == [(12 * MIB, 11 * MIB + 1)]
    assert [block.size_bytes for block in first.blocks] == [5 * MIB, 6 * MIB]


def test_the_first_divergence_is_named() -> None:
    wrong = by_hand()
    wrong["device_traces"][0][5]["addr"] = BASE + 11 * MIB  # not the best fit
    found = compare(read_snapshot(by_hand())).first
    assert found is None
    wrong["segments"][0]["blocks"] = segment(
        BASE,
        "large",
        [(5 * MIB, 0, "inactive"), (6 * MIB, 6 * MIB, "active_allocated"), (9 * MIB, 4 * MIB, "active_allocated")],
    )["blocks"]
    found = compare(read_snapshot(wrong)).first
    assert found is not None
    assert (found.position, found.what, found.torch, found.replay) == (5, "address", BASE + 11 * MIB, BASE)

    other = by_hand()
    other["device_traces"][0][6]["size"] = 14 * MIB  # a segment that our rounding would not take
    other["device_traces"][0][10]["size"] = 14 * MIB
    found = compare(read_snapshot(other)).first
    assert found is not None
    assert (found.position, found.what) == (7, "segments")
    assert found.torch == (SegmentEvent("segment_alloc", BASE - 12 * MIB, 14 * MIB, 0),)
    assert found.replay == (SegmentEvent("segment_alloc", BASE - 12 * MIB, 12 * MIB, 0),)
    assert compare(read_snapshot(other)).worst_gap_bytes == 2 * MIB


def recorded(seed: int, conf: str, length: int, device: Device) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A history as torch would write it, of a random trace through the simulator; and its end as torch lists it."""
    rng, allocator, trace = random.Random(seed), CachingAllocator(parse_alloc_conf(conf), device), []
    allocator.ledger.on_segment = lambda event: trace.append(
        entry(event.action, event.address, event.size_bytes, event.stream)
    )
    alive: dict[int, tuple[Block, int]] = {}
    for name in range(length):
        if rng.random() < 0.55 or not alive:
            size, stream = int(2 ** rng.uniform(4, 25)), rng.choice((0, 0, 7))
            block = allocator.allocate(name, size, stream)
            assert block is not None
            alive[name] = (block, size)
            trace.append(entry("alloc", block.address, size, stream))
        elif rng.random() < 0.97:
            gone = rng.choice(list(alive))
            block, size = alive.pop(gone)
            trace += freed(block.address, size, block.pool.stream)
            allocator.free(gone)
        else:
            allocator.empty_cache()
    blocks = [(block, "active_allocated") for block, _ in alive.values()]
    for pool in (*allocator._small.values(), *allocator._large.values()):
        blocks += [(block, "inactive") for _, _, block in pool.free]
    states = {id(block): state for block, state in blocks}
    segments = []
    for head, _ in blocks:
        if head.prev is not None and head.prev.mapped:
            continue
        listed, block = [], head
        while block is not None and block.mapped:
            listed.append((block.size, block.requested, states[id(block)]))
            block = block.next
        segments.append(
            segment(
                head.address,
                "small" if head.pool.is_small else "large",
                listed,
                stream=head.pool.stream,
                is_expandable=head.expandable is not None,
            )
        )
    return snapshot(trace, sorted(segments, key=lambda one: one["address"]), conf), trace


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"])
@pytest.mark.parametrize("seed", range(3))
def test_a_written_history_comes_back(seed: int, conf: str) -> None:
    """Whole: to the byte. Cut at its beginning: the state before is rebuilt, reserved within 1 % at every moment."""
    device = Device(total_bytes=16 * GIB)
    whole, trace = recorded(seed, conf, 500, device)
    found = compare(read_snapshot(whole))
    assert found.first is None
    assert found.reserved_peak_torch == found.reserved_peak_replay > 0
    for start in (len(trace) // 3, 2 * len(trace) // 3):
        while trace[start]["action"] != "alloc" or trace[start - 1]["action"].startswith("segment"):
            start += 1
        cut = copy.copy(whole)
        cut["device_traces"] = [trace[start:]]
        found = compare(read_snapshot(cut))
        assert found.worst_gap_bytes <= 0.01 * found.reserved_peak_torch


def test_a_full_card_is_found_by_the_replay_or_taken_from_the_history() -> None:
    device = Device(total_bytes=400 * MIB)
    trace = [
        entry("segment_alloc", BASE, 300 * MIB),
        entry("alloc", BASE, 300 * MIB),
        *freed(BASE, 300 * MIB),
        entry("segment_free", BASE, 300 * MIB),
        entry("segment_alloc", BASE, 350 * MIB),
        entry("alloc", BASE, 350 * MIB),
        {"action": "oom", "device_free": 50 * MIB, "size": 60 * MIB, "stream": 0, "frames": [], "time_us": 1},
    ]
    full = snapshot(trace, [segment(BASE, "large", [(350 * MIB, 350 * MIB, "active_allocated")])])
    assert compare(read_snapshot(full)).first is None
    assert compare(read_snapshot(full), device).first is None
    roomy = compare(read_snapshot(full), Device(total_bytes=GIB)).first
    assert roomy is not None
    assert (roomy.position, roomy.what) == (6, "segments")


def test_a_pickle_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(by_hand()))
    assert read_snapshot(path) == read_snapshot(by_hand())
    with pytest.raises(VramprobeError, match="no snapshot"):
        read_snapshot({"segments": []})
    pooled = by_hand()
    pooled["device_traces"][0][1]["pool_id"] = (0, 3)
    with pytest.raises(VramprobeError, match="private pool"):
        read_snapshot(pooled)
    torn = by_hand()
    torn["segments"] = []
    with pytest.raises(VramprobeError, match="does not explain"):
        read_snapshot(torn)
