"""A snapshot's recorded history → its highest moment, and what was live then by the line that allocated it.

In: the trace of one GPU and its live blocks at the end. Out: a TracePeak in requested bytes, which the history has for
both requests and frees. What was allocated before the history begins, and freed in it, has no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    position = height = highest = 0
    for number, entry in enumerate(trace, 1):
        height += _change(entry)
        if height > highest:
            position, highest = number, height
    begin = sum(block["requested_size"] for block in live) - height
    alive: dict[int, Entry] = {}
    made = set()
    for number, entry in enumerate(trace, 1):
        if entry["action"] == "alloc":
            made.add(entry["addr"])
        if number <= position and entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        elif number <= position and entry["action"] in _FREES:
            alive.pop(entry["addr"], None)
    lines: Counter[str] = Counter()
    for entry in alive.values():
        lines[line_of(entry)] += entry["size"]
    for block in live:
        if block["addr"] not in made:  # it stands since before the history
            lines[line_of(block)] += block["requested_size"]
    if (rest := begin + highest - lines.total()) > 0:
        lines[_OLDER] += rest
    return TracePeak(begin + highest, position, len(trace), tuple(lines.most_common(max_lines)))


def _change(entry: Entry) -> int:
    if entry["action"] == "alloc":
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] in _FREES else 0
