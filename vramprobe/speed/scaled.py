"""Counts of steps that were not counted: with more micro-steps, or with a number of rows between two that were.

In: Counts of one cell. Out: a Count, for counted.py's time. Each figure is linear in the micro-steps, and in the rows.
"""

from __future__ import annotations

from dataclasses import replace

from vramprobe.speed.counted import Count, CountRow


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


def between(fewer: Count, more: Count, share: float) -> Count:
    """Return the count of a step of rows between those of two; ``share``: 0 for the fewer, 1 for the more."""
    rows = [_scaled(row, 1 - share) for row in fewer.rows] + [_scaled(row, share) for row in more.rows]
    unclaimed = [max(0, one.num_launches - one.num_claimed) for one in (fewer, more)]
    claimed = sum(row.launches for row in rows)
    num_launches = claimed + round(unclaimed[0] * (1 - share) + unclaimed[1] * share)
    return replace(more, rows=tuple(rows), num_claimed=claimed, num_launches=num_launches)


def _scaled(row: CountRow, factor: float) -> CountRow:
    names = ("calls", "flops", "read", "written", "launches")
    return replace(row, **{name: round(getattr(row, name) * factor) for name in names})
