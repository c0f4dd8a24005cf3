"""The allocator's own history, from ``torch.cuda.memory._snapshot()``, as a trace and as the truth to hold it against.

In: the snapshot's dict or its pickle. Out: a MemoryHistory of one device: what stood before the first entry, the trace,
and the segments that torch took and gave back, in their places. Format: torch/cuda/memory.py (``_snapshot``) and
torch/csrc/cuda/Module.cpp, torch 2.11 to 2.13. Knows no torch.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args

from vramprobe.allocator.config import SMALL_SIZE, AllocatorConfig, parse_alloc_conf
from vramprobe.allocator.ledger import SegmentAction, SegmentEvent
from vramprobe.allocator.replay import Alloc, FreeCompleted, FreeRequested
from vramprobe.errors import VramprobeError

_SEGMENT_ACTIONS = frozenset(get_args(SegmentAction))


class LiveBlock(NamedTuple):
    """A block in use before the history begins."""

    address: int
    size_bytes: int
    requested_bytes: int
    awaiting: bool  # its free was requested and not completed


@dataclass(frozen=True)
class SegmentState:
    """A segment, or a contiguous mapped range of an expandable one, and what was in use in it."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[LiveBlock, ...]  # by address; the rest is cached


class SnapshotEntry(NamedTuple):
    """One entry of the history: a request, a free, or a segment taken or given back."""

    position: int  # in device_traces
    event: Alloc | FreeRequested | FreeCompleted | SegmentEvent
    address: int


@dataclass(frozen=True)
class MemoryHistory:
    """One device's history. Names of blocks are ``(address, how many blocks this address had before)``."""

    initial: tuple[SegmentState, ...]
    entries: tuple[SnapshotEntry, ...]
    config: AllocatorConfig


class _PlainUnpickler(pickle.Unpickler):
    """Makes dicts, lists, tuples, texts and numbers, all that a snapshot holds; imports and calls nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise VramprobeError("refused: this pickle would run code when it is loaded; a memory snapshot holds none")


def load_plain(file: IO[bytes]) -> Any:
    """The plain values of a pickle from anywhere, read without running code. Raises VramprobeError for all others."""
    try:
        return _PlainUnpickler(file).load()
    except VramprobeError:
        raise
    except Exception as error:  # damaged bytes raise almost anything
        raise VramprobeError(f"the snapshot's pickle is cut or damaged: {type(error).__name__}") from error


def read_snapshot(source: Mapping[str, Any] | str | Path, device: int = 0) -> MemoryHistory:
    """Read a snapshot, or a file that ``torch.cuda.memory._dump_snapshot`` wrote.

    Raises VramprobeError for what is no snapshot, a history that lost its beginning, and private pools.
    """
    if not isinstance(source, Mapping):
        with open(source, "rb") as file:
            source = load_plain(file)
    if not isinstance(source, Mapping) or not {"segments", "device_traces"} <= set(source):
        raise VramprobeError("this is no snapshot of torch.cuda.memory: it lacks segments or device_traces")
    traces = source["device_traces"]
    trace = traces[device] if device < len(traces) else []
    segments = [segment for segment in source["segments"] if segment.get("device", 0) == device]
    for entry in (*trace, *segments):
        pool = tuple(entry.get("pool_id", entry.get("segment_pool_id", (0, 0))))
        if pool != (0, 0):
            raise VramprobeError(f"the snapshot has the private pool {pool}: CUDA graphs and pools are not modelled")
    config = parse_alloc_conf(source.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF") or "")
    return MemoryHistory(_before(trace, segments, config), _entries(trace), config)


def _entries(trace: list[Mapping[str, Any]]) -> tuple[SnapshotEntry, ...]:
    counts: dict[int, int] = {}
    entries = []
    for position, entry in enumerate(trace):
        action, address = entry["action"], entry.get("addr", 0)
        name = (address, counts.get(address, 0))
        event: Alloc | FreeRequested | FreeCompleted | SegmentEvent
        if action == "alloc":
            name = (address, name[1] + 1)
            counts[address] = name[1]
            event = Alloc(name, entry["size"], entry["stream"])
        elif action == "free_requested":
            event = FreeRequested(name)
        elif action == "free_completed":
            event = FreeCompleted(name)
        elif action in _SEGMENT_ACTIONS:
            event = SegmentEvent(action, address, entry["size"], entry["stream"])
        else:
            continue  # oom and snapshot change nothing: what was freed in vain has entries of its own
        entries.append(SnapshotEntry(position, event, address))
    return tuple(entries)


def _before(
    trace: list[Mapping[str, Any]], segments: list[Mapping[str, Any]], config: AllocatorConfig
) -> tuple[SegmentState, ...]:
    """Return the segments before the first entry: the snapshot's segments (its end), with the history undone."""
    ranges = {
        segment["address"]: [
            segment["total_size"],
            segment["stream"],
            segment["segment_type"] == "small",
            bool(segment.get("is_expandable", False)),
        ]
        for segment in segments
    }
    live: dict[int, LiveBlock] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] != "inactive":
                awaiting = block["state"] != "active_allocated"
                live[address] = LiveBlock(address, block["size"], block["requested_size"], awaiting)
            address += block["size"]
    small = _small_ranges(trace)
    for entry in reversed(trace):
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        match action:
            case "alloc":
                live.pop(address, None)
            case "free_completed":
                live[address] = LiveBlock(address, config.round_size(size), size, awaiting=True)
            case "free_requested":
                if address not in live:
                    raise VramprobeError("the history is not whole: a free was requested and never completed")
                live[address] = live[address]._replace(awaiting=False)
            case "segment_free" | "segment_unmap":
                is_small = small.get((address, size), size == 2 * SMALL_SIZE)
                _add(ranges, address, [size, entry["stream"], is_small, action == "segment_unmap"])
            case "segment_alloc" | "segment_map":
                _cut(ranges, address, size)
    return _with_blocks(ranges, live)


def _small_ranges(trace: list[Mapping[str, Any]]) -> dict[tuple[int, int], bool]:
    """Return for each range that is given back True if it was the small pool's: seen where a block of it was used."""
    starts = sorted({entry["addr"] for entry in trace if entry["action"] in ("segment_free", "segment_unmap")})
    sizes = {e["addr"]: e["size"] for e in trace if e["action"] in ("segment_free", "segment_unmap")}
    found: dict[tuple[int, int], bool] = {}
    for entry in trace:
        if entry["action"] in ("alloc", "free_completed"):
            at = bisect_right(starts, entry["addr"]) - 1
            if at >= 0 and entry["addr"] < starts[at] + sizes[starts[at]]:
                found[(starts[at], sizes[starts[at]])] = entry["size"] <= SMALL_SIZE
    return found


def _add(ranges: dict[int, list[Any]], address: int, added: list[Any]) -> None:
    """Put a range back; an expandable one joins its neighbours, as the snapshot shows them."""
    size, *kind = added
    if kind[-1]:
        after = ranges.get(address + size)
        if after is not None and after[1:] == kind:
            size += ranges.pop(address + size)[0]
        for start, (length, *other) in list(ranges.items()):
            if start + length == address and other == kind:
                ranges[start][0] += size
                return
    ranges[address] = [size, *kind]


def _cut(ranges: dict[int, list[Any]], address: int, size: int) -> None:
    """Take a range away; of an expandable one its ends may stay."""
    for start, (length, *kind) in list(ranges.items()):
        if start <= address and address + size <= start + length:
            del ranges[start]
            if start < address:
                ranges[start] = [address - start, *kind]
            if address + size < start + length:
                ranges[address + size] = [start + length - address - size, *kind]
            return
    raise VramprobeError(f"the history takes the segment {address:#x}, which the snapshot's end does not explain")


def _with_blocks(ranges: dict[int, list[Any]], live: dict[int, LiveBlock]) -> tuple[SegmentState, ...]:
    """Segments with their blocks. A block freed in the history is known by its request; what follows it in a large,
    ordinary segment and is no larger than 1 MiB was too little to split off, and is part of it.
    """
    blocks = sorted(live.values())
    states = []
    for address, (size, stream, is_small, is_expandable) in sorted(ranges.items()):
        inside = [block for block in blocks if address <= block.address < address + size]
        if not is_small and not is_expandable:
            ends = [block.address for block in inside[1:]] + [address + size]
            inside = [
                block._replace(size_bytes=end - block.address)
                if 0 < end - block.address - block.size_bytes <= SMALL_SIZE
                else block
                for block, end in zip(inside, ends, strict=False)
            ]
        states.append(SegmentState(address, size, stream, is_small, is_expandable, tuple(inside)))
    return tuple(states)
