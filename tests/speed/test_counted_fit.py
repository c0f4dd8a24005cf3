"""The fit to counted steps: rates that made the steps are found again, and what ships is what the journal gives."""

import dataclasses
import hashlib
import math
from pathlib import Path

import pytest
from grids import exhaustive

from benchmarks.speed.counted_fit import CountedStep
from benchmarks.speed.counted_steps import JOURNAL, files_of_later, steps, why_aside, with_first_flash
from benchmarks.speed.rates_fit import EXPECTED, fit_rates, left_out_errors, rates_of, source_of, unproven, with_widths
from vramprobe.catalog import find_gpu
from vramprobe.errors import FitError
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.rates import shipped_counted

A100 = find_gpu("A100-80GB-SXM")
SHAPES = "bfloat16[{0}, 4096] bfloat16[4096, 4096] -> bfloat16[{0}, 4096]"


def count_of_step(tokens: int, stream_bytes: int, num_launches: int) -> Count:
    figures = {"calls": 500, "flops": 500 * 2 * tokens * 4096**2, "launches": 500, "dtype": "bfloat16"}
    product = CountRow(phase="forward", what="product", name="aten::mm", shapes=SHAPES.format(tokens), **figures)
    other = CountRow(phase="backward", what="other", name="aten::mul", read=stream_bytes, launches=num_launches)
    return Count(step=2, num_launches=0, num_claimed=0, rows=(product, other))


def made_by(rates: dict[str, float], source: str) -> list[CountedStep]:
    whole = {name: value for name, (value, _) in EXPECTED.items()} | rates
    fit, found = unproven(rates_of([*map(math.log, whole.values())]), []), []
    for tokens, stream_bytes, num_launches in ((8192, 10**9, 10), (1024, 10**12, 10), (256, 10**9, 90_000)):
        count = count_of_step(tokens, stream_bytes, num_launches)
        seconds = time_of(count, A100, fit=fit).seconds
        step = {"source": source, "count": count, "gpu": A100, "tokens": tokens}
        found.append(CountedStep(**step, tokens_per_second=tokens / seconds))
    return found


def test_rates_that_made_the_steps_are_found_again() -> None:
    """But for what is expected of them, to which they are held."""
    truth = {"product": 0.86, "stream": 0.68, "kernel_seconds": 12e-6}
    found = fit_rates([*made_by(truth, "one"), *made_by(truth, "another")])
    for name, value in truth.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.05)


def test_a_step_at_full_rates_gives_the_times_of_its_count() -> None:
    rates = shipped_counted().rates
    for _, one in steps()[::4]:
        expected = time_of(one.count, one.gpu, fit=unproven(rates, [one])).seconds
        assert one.seconds(rates) == pytest.approx(expected)


def test_a_copy_beside_is_timed_alike_by_a_fit_and_by_a_count() -> None:
    rates, count = shipped_counted().rates, count_of_step(8192, 10**12, 10)
    copy = {"phase": "forward", "what": "device_to_host", "name": "aten::copy_", "read": 10**10}
    copies = [CountRow(**copy, is_beside=one) for one in (True, False)]
    count = dataclasses.replace(count, rows=(*count.rows, *copies))
    step = CountedStep(source="one", count=count, gpu=A100, tokens=8192, tokens_per_second=1.0)
    assert step.seconds(rates) == pytest.approx(time_of(count, A100, fit=unproven(rates, [step])).seconds)


def test_a_source_that_is_left_out_is_predicted_by_the_others() -> None:
    slow, fast = made_by({"product": 0.8}, "slow"), made_by({"product": 0.95}, "fast")
    errors = left_out_errors([*slow, *fast], source_of)
    assert errors["slow"][0][1] > 0.05 > -0.05 > errors["fast"][0][1]
    widths = with_widths(fit_rates([*slow, *fast]), [*slow, *fast]).half_widths
    assert min(widths["card never seen"], widths["short steps"]) >= widths["usual"] >= 0.05


def test_nothing_to_fit_to_is_said() -> None:
    with pytest.raises(FitError, match="no published step"):
        fit_rates([])


def test_the_first_flash_attention_takes_twice_as_long_and_nothing_else() -> None:
    count = count_of_step(8192, 10**9, 10)
    row = CountRow(phase="forward", what="attention", name="aten::_scaled_dot_product_flash_attention", flops=100)
    found = with_first_flash(Count(step=2, num_launches=0, num_claimed=0, rows=(*count.rows, row)))
    assert [one.flops for one in found.rows] == [*(one.flops for one in count.rows), 200]


def test_the_fit_that_ships_is_what_the_journal_gives() -> None:
    found, fit = [one for record, one in steps() if why_aside(record) is None], shipped_counted()
    assert hashlib.sha256(Path(JOURNAL).read_bytes()).hexdigest()[:16] in fit.data
    assert fit.num_configurations == len(found) == sum(fit.sources.values())
    assert fit_rates(found) == fit.rates


@exhaustive
def test_the_pages_of_later_steps_are_what_their_journal_gives() -> None:
    made = files_of_later()
    assert {path: path.read_text(encoding="utf-8") for path in made} == made


def test_every_launch_of_a_published_step_is_claimed_but_for_few() -> None:
    assert max(one.count.unclaimed_share for _, one in steps()) < 0.05
