"""Launches of a step, from shallow runs to the whole model: calls, FLOPs and bytes by operator and shape.

In: the counts of one step at several depths, as emulate/values/count wrote them. Out: one of the same kind at the
cell's own depth: every figure is linear in the number of layers, and the last depth must agree. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vramprobe.log.depth import NotLinear, line_of

_SUMS = ("calls", "flops", "read", "written", "launches")
#: Of other operators the bytes alone decide; the shapes of those over all weights differ from depth to depth.
_BY_SHAPE = ("product", "attention")
_EMBEDDING = "aten::embedding"

Launches = dict[str, Any]


def launches_of(counts: Sequence[Mapping[str, Any]], times: int) -> Launches | None:
    """Return the count at ``times`` periods more than the first depth; None where the depths are not on a line.

    ``counts``: of three depths, then of one that must follow from them; or of the whole model's alone.
    """
    sums = [_sums(count) for count in counts]
    if len(sums) == 1:
        return _count(sums[0])
    keys = {key: None for one in sums for key in one}
    full = [{key: one.get(key, (0,) * len(_SUMS)) for key in keys} for one in sums]
    try:
        if any(_line(full, key, 3) != full[3][key] for key in keys):
            return None
        return _count({key: _line(full, key, times) for key in keys})
    except NotLinear:
        return None


def _line(depths: Sequence[Mapping[Any, tuple[int, ...]]], key: Any, times: int) -> tuple[int, ...]:
    return tuple(line_of(values, times) for values in zip(*(one[key] for one in depths[:3]), strict=True))


def _sums(count: Mapping[str, Any]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The figures by what they are of: rows without lines, collectives, and the driver's launches."""
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for row in count["rows"]:
        shapes = row["shapes"] if row["what"] in _BY_SHAPE or row["name"] == _EMBEDDING else ""
        key = (row["phase"], row["what"], row["name"], shapes, row["dtype"], row.get("width", 0), "is_beside" in row)
        own = tuple(row[name] for name in _SUMS)
        found[key] = tuple(map(sum, zip(found.get(key, (0,) * len(own)), own, strict=True)))
    for kind, ranks, calls, num_bytes in count["moved"]:
        found["moved", kind, ranks] = (calls, num_bytes, 0, 0, 0)
    found["driver",] = (count["num_launches"], count["num_claimed"], 0, 0, 0)
    return found


def _count(sums: Mapping[tuple[Any, ...], tuple[int, ...]]) -> Launches:
    rows, moved = [], []
    for key, own in sums.items():
        if key[0] == "moved":
            moved.append([*key[1:], *own[:2]])
        elif key[0] != "driver":
            phase, what, name, shapes, dtype, width, is_beside = key
            words = {"phase": phase, "what": what, "name": name, "shapes": shapes, "dtype": dtype, "width": width}
            rows.append(words | {"is_beside": is_beside} | dict(zip(_SUMS, own, strict=True)))
    launched, claimed, *_ = sums["driver",]
    return {"step": 2, "num_launches": launched, "num_claimed": claimed, "unclaimed": {}, "moved": moved, "rows": rows}
