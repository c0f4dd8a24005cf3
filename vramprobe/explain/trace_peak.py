"""A snapshot's recorded history → its highest moment, and what was live then by the line that allocated it.

In: the trace of one GPU and its live blocks at the end. Out: a TracePeak in requested bytes, which the history has for
both requests and frees. What was allocated before the history begins, and freed in it, has no line.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vramprobe.log.blocks import block_numbers, lives_of

Entry = Mapping[str, Any]  # of the trace, or a live block
_FREES = ("free_requested", "free")
_OLDER = "allocated before the history begins"


class TracePeak(NamedTuple):
    """The highest moment of the history, bytes requested; ``position``: of ``num_entries``, the first one is 1."""

    requested: int
    position: int
    num_entries: int
    lines: tuple[tuple[str, int], ...]


def trace_peak(
    trace: Sequence[Entry], live: Sequence[Entry], line_of: Callable[[Entry], str], max_lines: int
) -> TracePeak | None:
    """The highest moment; None without a history. ``live``: the blocks in use at its end, by address in ``addr``."""
    if not trace:
        return None
    sizes = np.array([_change(entry) for entry in trace], np.int64)
    addresses = np.array([entry.get("addr", 0) for entry in trace], np.uint64)
    lives = lives_of(sizes, block_numbers(addresses, sizes))
    position = lives.highest(np.arange(len(trace) + 1))
    lines: Counter[str] = Counter()
    for number in lives.starts[lives.alive_after(position)].tolist():
        lines[line_of(trace[number])] += trace[number]["size"]
    made = set(addresses[lives.starts].tolist())
    for block in live:
        if block["addr"] not in made:  # it stands since before the history
            lines[line_of(block)] += block["requested_size"]
    begin = sum(block["requested_size"] for block in live) - int(sizes.sum())
    requested = begin + int(sizes[:position].sum())
    if (rest := requested - lines.total()) > 0:
        lines[_OLDER] += rest
    return TracePeak(requested, position, len(trace), tuple(lines.most_common(max_lines)))


def _change(entry: Entry) -> int:
    if entry["action"] == "alloc":
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] in _FREES else 0
