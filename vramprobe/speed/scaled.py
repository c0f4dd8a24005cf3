"""A count of a step with more micro-steps than were counted.

In: a Count. Out: a Count, for counted.py's time: each figure is linear in the micro-steps.
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


def _scaled(row: CountRow, factor: float) -> CountRow:
    names = ("calls", "flops", "read", "written", "launches")
    return replace(row, **{name: round(getattr(row, name) * factor) for name in names})
