"""Bisection: the largest whole number of which something holds, or the least, where it holds of all on that side.

In: what is asked of a number. Out: the number, or None. For questions that cost little; largest.py asks those that the
page asks, too.
"""

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


def first_of(holds: Callable[[int], bool], most: int, *, guess: int = 1) -> int | None:
    """The least number from 1 to ``most`` of which that holds, and of all above it; looked for from ``guess`` on, in
    steps that double.

    Under ZeRO-3 a number that divides a large weight without a rest may need less than the next one does.
    """
    few, many, step = 0, max(guess, 1), 1
    if holds(many):
        while many > 1 and holds(lower := max(many - step, 1)):
            many, step = lower, 2 * step
        few = max(many - step, few) if many > 1 else few
    else:
        while not holds(many):
            if many == most:
                return None
            few, many, step = many, min(many + step, most), 2 * step
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if holds(middle) else (middle, many)
    return many
