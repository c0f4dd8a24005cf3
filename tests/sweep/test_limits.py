"""Time, money and cells: what a sweep may use is kept, and what cannot be is refused."""

import math

import pytest

from vramprobe.errors import SpecError
from vramprobe.sweep.card import Rate
from vramprobe.sweep.limits import DEFAULT_TIMEOUT_SECONDS, Clock, SweepLimits, limits

RATE = Rate(3.6, "test")  # a tenth of a cent per second


def test_what_is_left_out_does_not_limit() -> None:
    assert limits() == SweepLimits(timeout_seconds=DEFAULT_TIMEOUT_SECONDS, max_seconds=math.inf, max_cells=None)


def test_a_budget_is_time_at_a_price_and_the_nearer_limit_counts() -> None:
    found = limits(RATE, max_dollars=0.1, max_seconds=200)
    assert (found.max_seconds, found.limited_by) == (pytest.approx(100), "budget")
    found = limits(RATE, max_dollars=0.1, max_seconds=50)
    assert (found.max_seconds, found.limited_by) == (50, "max-time")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"max_dollars": 1}, "give --price"),
        ({"rate": RATE, "max_dollars": 0}, "more than 0 dollars"),
        ({"rate": RATE, "max_dollars": math.nan}, "more than 0 dollars"),
        ({"timeout_seconds": 0}, "more than 0 seconds"),
        ({"timeout_seconds": math.inf}, "more than 0 seconds"),
        ({"max_cells": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(words: dict, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        limits(words.pop("rate", None), **words)


def test_the_clock_starts_nothing_that_would_not_end() -> None:
    clock = Clock(SweepLimits(max_seconds=100))
    assert clock.allows(70)
    assert not clock.allows(80)  # a margin for what was expected wrongly, and the libraries of the first cell
    with clock.timing() as seconds:
        assert 99 < seconds <= 100
    assert clock.num_cells == 1
    assert clock.allows(79)
    with Clock(SweepLimits(timeout_seconds=5)).timing() as seconds:
        assert seconds == 5
