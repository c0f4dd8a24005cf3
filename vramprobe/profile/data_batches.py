"""The steps on chosen batches → memory as a function of a batch's shape, peaks by quantile, what fits the card.

In: a RawRank with the lines of hook/own_batches.py. Out: a DataBatches or None. What was run is *emulated*; between the
shapes that were run, peaks are interpolated, beyond them fitted, and called *predicted*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vramprobe.records.data_batches import BatchPeak, DataBatches, DataLimit, HeldOut

if TYPE_CHECKING:
    from vramprobe.profile.raw import RawRank

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_FLAT = 1.001  # a peak below this times the lowest one is that of another phase than forward and backward
_MAX_VALUE = 1 << 24


@dataclass(frozen=True)
class BatchRun:
    """One step on a chosen batch. ``is_oom``: it ran out of memory, and its bytes are a lower bound."""

    num_rows: int
    width: int
    allocated_bytes: int
    reserved_bytes: int
    is_held_out: bool
    is_oom: bool
    line: Mapping[str, Any]


class PeakByShape:
    """Peak bytes of (rows, width), learnt from points (rows, width, bytes).

    Within the widths seen of as many rows: linear between neighbours, which a peak that moves from one phase to another
    needs. Else: constant + tokens + tokens × width by least squares, never below the lowest peak seen.
    """

    def __init__(self, points: Sequence[tuple[int, int, int]]) -> None:
        self._points = sorted(points)
        self._floor = min(size for *_, size in self._points)
        rising = [one for one in self._points if one[2] > self._floor * _FLAT] or self._points
        self._terms = _fitted(rising)

    def __call__(self, num_rows: int, width: int) -> int:
        of_rows = [(own, size) for rows, own, size in self._points if rows == num_rows]
        widths = [own for own, _ in of_rows]
        if len(widths) > 1 and widths[0] <= width <= widths[-1]:
            return round(float(np.interp(width, widths, [size for _, size in of_rows])))
        constant, by_token, by_square = self._terms
        tokens = num_rows * width
        return max(self._floor, round(constant + by_token * tokens + by_square * tokens * width))


def _fitted(points: Sequence[tuple[int, int, int]]) -> tuple[float, float, float]:
    """Constant, bytes by token, bytes by token and width; the last is left out where it would be negative."""
    tokens = np.array([rows * width for rows, width, _ in points], float)
    widths = np.array([width for _, width, _ in points], float)
    sizes = np.array([size for *_, size in points], float)
    one = np.ones_like(tokens)
    for columns in ([one, tokens, tokens * widths], [one, tokens]):
        if len({(rows, width) for rows, width, _ in points}) < len(columns):
            continue
        found = np.linalg.lstsq(np.stack(columns, axis=1), sizes, rcond=None)[0]
        if found[-1] >= 0:
            return float(found[0]), float(found[1]), float(found[2]) if len(found) > 2 else 0.0
    return float(sizes.max()), 0.0, 0.0


def data_batches(raw: RawRank, context_bytes: int | None) -> DataBatches | None:
    """Return the memory that the run's own data needs; None where its batches were not requested."""
    seen = raw.batches
    if seen is None or not seen["shapes"]:
        return None
    table = [tuple(row) for row in seen["shapes"]]
    runs = runs_of(raw)
    total = raw.process.device_total_bytes
    found = DataBatches(
        how=seen["how"],
        is_complete=seen["is_complete"],
        num_rows=seen["num_rows"],
        num_batches=seen["num_batches"],
        num_seen=sum(count for _, _, count, _ in table),
        num_shapes=len(table),
        num_run=len(runs),
        usable_bytes=None if total is None else total - (context_bytes or 0),
    )
    fitted = [one for one in runs if not (one.is_held_out or one.is_oom)]
    if len(fitted) < 2:
        return found
    allocated = PeakByShape([(one.num_rows, one.width, one.allocated_bytes) for one in fitted])
    peaks = _peaks(table, runs, allocated)
    held_out = [
        HeldOut(
            num_rows=one.num_rows,
            width=one.width,
            allocated_bytes=one.allocated_bytes,
            predicted_bytes=allocated(one.num_rows, one.width),
        )
        for one in runs
        if one.is_held_out and not one.is_oom
    ]
    found = found.model_copy(update={"peaks": peaks, "held_out": held_out})
    if found.usable_bytes is None:
        return found
    unused = max(max(one.reserved_bytes for one in fitted) - max(one.allocated_bytes for one in fitted), 0)
    return found.model_copy(update=_verdict(found, raw, allocated, unused))


def runs_of(raw: RawRank) -> list[BatchRun]:
    """The steps on chosen batches that came at least to a forward, in order."""
    out_of_memory = {one.step for one in raw.ooms}
    found = []
    for line in raw.plays:
        phases = [one for one in raw.phases if one.step == line["step"]]
        is_oom = line["step"] in out_of_memory
        if not is_oom and not any(one.name == "backward" for one in phases):
            continue
        found.append(
            BatchRun(
                line["rows"],
                line["width"],
                max((one.allocated_peak_bytes for one in phases), default=0),
                max((one.reserved_peak_bytes or 0 for one in phases), default=0),
                line["held_out"],
                is_oom,
                line,
            )
        )
    return found


def _peaks(table: Sequence[tuple[int, ...]], runs: Sequence[BatchRun], allocated: PeakByShape) -> list[BatchPeak]:
    """Quantiles of the batches by tokens; what was run is not predicted."""
    run = {(one.num_rows, one.width): one for one in runs}
    until = np.cumsum([row[2] for row in table])
    found = []
    for name, share in _QUANTILES.items():
        num_rows, width, _, number = table[int(np.searchsorted(until, share * until[-1]))]
        own = run.get((num_rows, width))
        is_known = own is not None and not own.is_oom
        found.append(
            BatchPeak(
                name=name,
                batch=number,
                rows=list(own.line["indices"]) if own is not None else [],
                num_rows=num_rows,
                width=width,
                allocated_bytes=own.allocated_bytes if is_known and own else allocated(num_rows, width),
                reserved_bytes=own.reserved_bytes if is_known and own else None,
                source="predicted" if own is None else "emulated" if is_known else "out of memory",
            )
        )
    return found


def _verdict(found: DataBatches, raw: RawRank, allocated: PeakByShape, unused_bytes: int) -> dict[str, Any]:
    """Judge the largest batch, and find the largest length and batch size that fit, with ``unused_bytes`` beside them
    that the allocator reserves.
    """
    seen = raw.batches or {}
    usable, worst = (found.usable_bytes or 0) - unused_bytes, found.peaks[-1]
    fits = {"emulated": True, "out of memory": False}.get(worst.source, worst.allocated_bytes <= usable)
    ends = [one.allocated_end_bytes for one in raw.phases if one.step == raw.num_steps]
    base, most = min(ends, default=0), worst.allocated_bytes

    def of_rows(rows: int) -> float:  # what is not the run's state is by row
        return base + (most - base) * rows / worst.num_rows

    batch_size = DataLimit(value=_largest(lambda rows: of_rows(rows) <= usable) if most > base else None)
    if fits:
        return {"fits": True, "max_batch_size": batch_size}
    usual = Counter({rows: 0 for rows, *_ in seen["shapes"]})
    for rows, _, count, _ in seen["shapes"]:
        usual[rows] += count
    rows = usual.most_common(1)[0][0]
    length = _largest(lambda width: width <= worst.width and allocated(rows, width) <= usable)
    return {"fits": False, "max_length": _cut(length, seen["lengths"]), "max_batch_size": batch_size}


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest value from 1 on that fits, by bisection; None for none."""
    found = bisect_right(range(1, _MAX_VALUE), False, key=lambda value: not fits(value))
    return found or None


def _cut(length: int | None, lengths: Sequence[Sequence[int]] | None) -> DataLimit:
    if length is None or lengths is None:
        return DataLimit(value=length)
    rows = sum(count for _, count in lengths)
    tokens = sum(own * count for own, count in lengths)
    return DataLimit(
        value=length,
        rows_cut_share=sum(count for own, count in lengths if own > length) / rows,
        tokens_cut_share=sum((own - length) * count for own, count in lengths if own > length) / tokens,
    )
