"""Growth: what each step leaves behind that no later step frees, by line, and the step at which the card is full.

In: a process's history, its phases, and the collections that its hook saw at work (hook/kept_lists.py). Out: a
MemoryGrowth or None. Steps without a history, as those of a measured run, say nothing.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vramprobe.records.profile_memory import KeptList, LineGrowth, MemoryGrowth

if TYPE_CHECKING:
    from vramprobe.profile.analyzed_rank import AnalyzedRank
    from vramprobe.profile.raw import RawRank

_LEAST_STEPS = 4  # that each leave something behind; the first step, which makes lasting state, is not among them
_LEAST_BYTES = 64 * 1024  # a step: below, as of detached losses, no run lasts long enough
_ADDS = ("append", "appendleft", "extend", "add", "insert", "update", "setdefault")


def growth_of(
    raw: RawRank, seen: AnalyzedRank | None, context_bytes: int | None, homes: Sequence[str]
) -> MemoryGrowth | None:
    """Return the blocks that every step from the second to the last but one left alive until the last one's end; None
    if they are small.
    """
    ends = {} if seen is None else {one.phase.step: one.stop for one in seen.spans if one.phase.step is not None}
    steps = [step for step in sorted(ends) if 2 <= step < raw.num_steps]
    if seen is None or raw.num_steps not in ends or len(steps) < _LEAST_STEPS:
        return None
    lives, last = seen.lives, ends[raw.num_steps]
    left = [
        np.flatnonzero((lives.starts >= ends[step - 1]) & (lives.starts < ends[step]) & (lives.ends >= last))
        for step in steps
    ]
    by_line = [_by_line(seen, blocks) for blocks in left]
    lines = {line for line in by_line[0] if all(found[line] for found in by_line)}
    slopes = {line: sum(found[line] for found in by_line) // len(steps) for line in lines}
    slope = sum(slopes.values())
    if slope < _LEAST_BYTES:
        return None
    return MemoryGrowth(
        bytes_per_step=slope,
        first_step=steps[0],
        last_step=steps[-1],
        full_at_step=_full_at(raw, slope, context_bytes),
        by_line=[
            LineGrowth(place=line, bytes_per_step=size)
            for line, size in sorted(slopes.items(), key=lambda one: (-one[1], one[0]))
        ],
        kept=[_kept(one, homes) for one in raw.kept],
    )


def _by_line(seen: AnalyzedRank, blocks: np.ndarray) -> Counter[str]:
    from vramprobe.profile.ranks import line_said

    found: Counter[str] = Counter()
    for line, size in zip(seen.lines[blocks].tolist(), seen.lives.sizes[blocks].tolist(), strict=True):
        found[line_said(seen.places.of(line))] += size
    return found


def _full_at(raw: RawRank, slope: int, context_bytes: int | None) -> int | None:
    """The first step whose peak is more than the card has, if each adds as much; allocated bytes, so at the latest."""
    total = raw.process.device_total_bytes
    peaks = [one.allocated_peak_bytes for one in raw.phases if one.step == raw.num_steps]
    if total is None or not peaks:
        return None
    free = total - (context_bytes or 0) - max(peaks)
    return raw.num_steps + max(free, 0) // slope + 1


def _kept(one: Mapping[str, Any], homes: Sequence[str]) -> KeptList:
    path = Path(one["file"])
    if not path.is_absolute() and homes:
        path = Path(homes[-1]) / path
    lines = [f"{path.name}:{number}" for number in _lines_that_add(path, one["name"])]
    return KeptList(
        name=one["name"],
        file=path.name,
        function=one["function"],
        num_tensors=one["num_tensors"],
        num_with_graph=one["num_with_graph"],
        added_at=lines,
    )


def _lines_that_add(path: Path, name: str) -> list[int]:
    """Numbers of the lines on which a file adds to the collection of this name: ``name.append(…)``, ``name[…] = …``,
    ``name += …``.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    last = name.rpartition(".")[2]

    def is_it(node: ast.AST) -> bool:
        return getattr(node, "attr" if "." in name else "id", None) == last

    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _ADDS and is_it(value):
                found.add(node.lineno)
            case ast.Assign(targets=[ast.Subscript(value=value), *_]) if is_it(value):
                found.add(node.lineno)
            case ast.AugAssign(target=target) if is_it(target):
                found.add(node.lineno)
    return sorted(found)
