"""One count on many cards: seconds by each card's roofline, dollars by hand, the cheapest first, and where there is no
time."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from profile_factory import COUNT, ROW, analysed, training, write_launcher
from rich.console import Console

from vramprobe.catalog import find_gpu
from vramprobe.cli.display_cards import print_cards
from vramprobe.profile.analyse import analyse
from vramprobe.profile.card_times import with_times
from vramprobe.profile.run_files import read_run
from vramprobe.recommend.prices import Offer
from vramprobe.records.profile import CardVerdict, ProfileRecord
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of

TODAY = date(2026, 11, 25)


def offer(provider: str, gpu: str, num_gpus: int, usd_per_hour: float, written: str = "2026-11") -> Offer:
    return Offer(
        provider=provider,
        date=written,
        terms="on-demand",
        gpu=gpu,
        num_gpus=num_gpus,
        usd_per_hour=usd_per_hour,
        source="a test",
    )


OFFERS = [
    offer("dear", "L4", 1, 9.0),
    offer("cheap", "L4", 1, 0.5, "2026-03"),
    offer("whole", "H100-SXM", 8, 16.0),
    offer("one", "B200", 1, 1.0),
]


def run(folder: Path, *rows: dict[str, Any], world_size: int = 1) -> Path:
    for rank in range(world_size):
        script = training(
            pid=100 + rank, rank=rank, world_size=world_size, device_name="NVIDIA H200", capability=[9, 0]
        )
        script.say("count", **COUNT | {"rows": [*COUNT["rows"], *rows]})
        script.write(folder)
    write_launcher(folder)
    return folder


def timed(folder: Path, *gpus: str) -> list[CardVerdict]:
    found = analyse(folder).model_copy(update={"cards": []})
    raw = read_run(folder)
    from vramprobe.profile.cards import verdicts

    return with_times(raw, verdicts(raw, found, list(gpus)), OFFERS, TODAY)


def test_a_cards_time_is_the_counts_and_its_cost_that_of_the_cheapest_machine(tmp_path: Path) -> None:
    (found,) = timed(run(tmp_path), "L4")
    expected = time_of(count_of(COUNT), find_gpu("L4"))
    time = found.time
    assert (time.seconds, time.low_seconds, time.high_seconds) == (
        expected.seconds,
        expected.low_seconds,
        expected.high_seconds,
    )
    assert time.usd_per_1000_steps == pytest.approx(1000 * expected.seconds / 3600 * 0.5)
    assert time.high_usd_per_1000_steps == pytest.approx(1000 * expected.high_seconds / 3600 * 0.5)
    assert (time.provider, time.price_date, time.price_is_old) == ("cheap", "2026-03", True)
    assert time.tokens_per_second == pytest.approx(4 * 2048 / expected.seconds)


def test_a_machine_is_rented_whole(tmp_path: Path) -> None:
    (found,) = timed(run(tmp_path), "H100-SXM")
    assert (found.time.num_gpus, found.time.rented_gpus, found.time.usd_per_hour) == (1, 8, 16.0)


def test_several_ranks_need_a_machine_that_holds_them(tmp_path: Path) -> None:
    held, one = timed(run(tmp_path, world_size=2), "B200", "H100-SXM")
    assert held.gpu == "H100-SXM"
    assert (held.time.num_gpus, held.time.usd_per_hour) == (2, 16.0)
    assert (one.time.num_gpus, one.time.usd_per_hour, one.time.usd_per_1000_steps) == (2, None, None)


def test_the_cheapest_that_fits_is_first_and_those_without_a_price_go_by_time(tmp_path: Path) -> None:
    found = timed(run(tmp_path), "A10", "T4", "L4", "A100-80GB-SXM", "B200", "H100-SXM")
    assert [one.gpu for one in found] == ["B200", "L4", "H100-SXM", "A100-80GB-SXM", "A10", "T4"]
    assert found[0].time.usd_per_1000_steps < found[1].time.usd_per_1000_steps < found[2].time.usd_per_1000_steps
    assert found[3].time.seconds < found[4].time.seconds


def test_where_other_kernels_would_run_there_is_no_time(tmp_path: Path) -> None:
    eight_bits = ROW | {"name": "aten::_scaled_mm", "dtype": "float8_e4m3fn"}
    found = {one.gpu: one for one in timed(run(tmp_path, eight_bits), "A10", "L4", "V100-16GB-SXM", "MI300X")}
    assert found["L4"].time is not None
    assert found["A10"].verdict == "fits"
    assert "FP8" in found["A10"].why_no_time
    assert [found[name].time for name in ("A10", "V100-16GB-SXM", "MI300X")] == [None] * 3


def test_a_profile_has_them_and_the_command_line_shows_what_they_are(tmp_path: Path) -> None:
    record = analyse(run(tmp_path), gpus=["L4", "T4", "H100-SXM"])
    assert ProfileRecord.model_validate_json(record.to_json_line()) == record
    console = Console(width=80, highlight=False, emoji=False)
    with console.capture() as capture:
        print_cards(console, timed(tmp_path, "L4", "T4", "H100-SXM"))
    text = capture.get()
    assert "time and cost predicted" in text
    assert "unknown: T4: its kernels differ" in text
    assert "prices of 2026-03 are more than 3 months old" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_count_a_verdict_says_why(tmp_path: Path) -> None:
    cards = analysed(tmp_path, training(), gpus=["L4", "RTX-3090"]).cards
    assert [one.gpu for one in cards] == ["L4", "RTX-3090"]
    assert [one.time for one in cards] == [None, None]
    console = Console(width=80, highlight=False, emoji=False)
    with console.capture() as capture:
        print_cards(console, cards)
    assert "reserved of" in capture.get()
    assert "predicted" not in capture.get()
