"""A counted step with more micro-steps than were counted: its count, and how fast a cell is by it.

In: a Count. Out: a Count, for counted.py's time: each figure is linear in the micro-steps; or an Estimate.
"""

from __future__ import annotations

from dataclasses import replace

from vramprobe.catalog import Gpu
from vramprobe.spec import CellSpec
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.figure import Figure
from vramprobe.speed.step import Estimate


def with_micro_steps(count: Count, factor: float) -> Count:
    """Return the count with ``factor`` times as many micro-steps before the optimizer's."""
    rows = tuple(row if row.phase == "optimizer" else _scaled(row, factor) for row in count.rows)
    claimed = sum(row.launches for row in rows)
    return replace(
        count,
        rows=rows,
        num_claimed=claimed,
        num_launches=claimed + round(max(0, count.num_launches - count.num_claimed) * factor),
        link_bytes=tuple((kind, round(num_bytes * factor), ranks) for kind, num_bytes, ranks in count.link_bytes),
    )


def _scaled(row: CountRow, factor: float) -> CountRow:
    names = ("calls", "flops", "read", "written", "launches")
    return replace(row, **{name: round(getattr(row, name) * factor) for name in names})


def counted_estimate(spec: CellSpec, count: Count, grad_accum: int, gpu: Gpu) -> Estimate:
    """Estimate the speed of a cell with ``grad_accum`` micro-steps from the ``count`` of one with its own.

    Raises SpecError for a card whose peak is not known.
    """
    time = time_of(with_micro_steps(count, grad_accum / spec.grad_accum), gpu)
    tokens = spec.num_gpus * grad_accum * spec.num_tokens
    return Estimate(
        seconds=time.seconds,
        tokens_per_second=Figure(
            value=tokens / time.seconds, low=tokens / time.high_seconds, high=tokens / time.low_seconds
        ),
        mfu=time.mfu,
        parts=time.by_class,
        condition=time.condition,
    )
