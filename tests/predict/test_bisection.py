"""Bisection: the last number that fits, whatever the limit."""

from vramprobe.predict.bisection import bisected


def test_it_is_the_last_that_fits_up_to_the_limit() -> None:
    for limit in range(1, 70):
        for last in range(70):
            found = bisected(lambda number, last=last: number <= last, limit, least=1)
            assert found == (min(last, limit) or None), (limit, last)
    assert bisected(lambda number: number <= 16, 16, least=2) == 16
    assert bisected(lambda number: number <= 1, 16, least=2) is None
