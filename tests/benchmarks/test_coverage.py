"""The page of interval coverage: its figures are today's, and its widths are from the runs that it does not count."""

import pytest
from scripts import script


def test_widths_are_what_the_runs_give() -> None:
    coverage = script("truth.coverage")
    shares = tuple(round(one, 3) for one in coverage.versions_share())
    assert shares == coverage.open_words.VERSIONS
    assert 0 < shares[0] < shares[1]  # older stacks take more


@pytest.mark.exhaustive
def test_page_is_today_s() -> None:
    coverage = script("truth.coverage")
    runs = list(coverage.real_runs())
    assert coverage.page(runs) == coverage.PAGE.read_text(encoding="utf-8")
    assert round(coverage.fragmentation_share(runs), 3) == coverage.open_words.FRAGMENTATION


def test_a_run_counts_for_widths_or_for_coverage() -> None:
    coverage = script("truth.coverage")
    runs = list(coverage.real_runs())
    assert len({run.source for run in runs}) >= 5
    apart = [run for run in runs if run.sets_widths]
    assert 0.3 < len(apart) / len(runs) < 0.7
    one = next(run for run in apart if run.spec.num_gpus == 1 and "reserved" in run.measured)
    interval = coverage.Interval(value=10, low=9, high=11)
    said = [coverage.Held(run=one, tier=tier, is_told=True, interval=interval) for tier in coverage.TIERS]
    assert [coverage._counts(figure) for figure in said] == [True, False]


def test_what_is_outside_is_counted_as_such() -> None:
    coverage = script("truth.coverage")
    run = next(iter(coverage.real_runs()))
    size = run.measured["allocated"]
    around = coverage.Interval(value=size, low=size - 10, high=size + 10)
    above = coverage.Interval(value=2 * size, low=2 * size, high=3 * size)
    told = [coverage.Held(run=run, tier="allocated", is_told=True, interval=one) for one in (around, above)]
    assert [one.is_inside for one in told] == [True, False]
    assert told[1].beyond == 0.5
    assert coverage._of_group(told)[0] == "1 of 2 (50 %)"
