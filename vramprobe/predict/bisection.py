"""Bisection: the largest whole number of which something holds, where it holds of all below it.

In: what is asked of a number. Out: the number, or None. For questions that cost little; largest.py asks those that the
page asks, too.
"""

from __future__ import annotations

from collections.abc import Callable


def bisected(fits: Callable[[int], bool], limit: int, *, least: int) -> int | None:
    """The largest number from ``least`` to ``limit`` that fits; None where ``least`` does not."""
    if not fits(least):
        return None
    low, high = least, least + 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
