"""Gain of a change: by the ratio of two counts of one GPU, by intervals of two, with the memory that it costs."""

import json

import pytest
from profile_factory import analysed, training
from rich.console import Console

from vramprobe.cli.display_step_time import print_step_time, print_time_difference
from vramprobe.profile.diff import compare
from vramprobe.profile.summary import markdown
from vramprobe.records.profile import ProfileRecord
from vramprobe.records.step_time import StepTime
from vramprobe.units import MIB


def timed(seconds: float, *, gpu: str = "A100-80GB-SXM", tokens: int = 4096, **by_class: float) -> StepTime:
    return StepTime(
        gpu=gpu, step=2, seconds=seconds, low_seconds=seconds / 1.2, high_seconds=seconds * 1.2, condition="usual",
        tokens=tokens, mfu=0.4, hfu=0.4, by_class=by_class or {"products": seconds}, flops=1, num_bytes=1,
        num_launches=1, unclaimed_share=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> ProfileRecord:
    folder = tmp_path_factory.mktemp("run")
    return analysed(folder, training())


def at(record: ProfileRecord, time: StepTime | None, more_bytes: int = 0) -> ProfileRecord:
    (rank,) = record.ranks
    peak = rank.peak.model_copy(update={"reserved_bytes": rank.peak.reserved_bytes + more_bytes})
    return record.model_copy(update={"step_time": time, "ranks": [rank.model_copy(update={"peak": peak})]})


@pytest.mark.parametrize(
    ("seconds", "more_bytes", "is_told", "verdict"),
    [
        (0.8, 0, True, "worth it: 20.0% faster"),
        (0.8, 4 * MIB, True, "worth it: 20.0% faster, for 4.00 MiB more reserved memory"),
        (1.25, -4 * MIB, True, "worth it only for the memory: 25.0% slower, 4.00 MiB less reserved memory"),
        (1.25, 0, True, "not worth it: 25.0% slower"),
        (1.25, 4 * MIB, True, "not worth it: 25.0% slower, and 4.00 MiB more reserved memory"),
        (1.02, 0, False, "no difference in time that can be told"),
        (0.98, -4 * MIB, False, "no difference in time that can be told, 4.00 MiB less reserved memory"),
    ],
)
def test_of_one_gpu_the_ratio_decides(
    seconds: float, more_bytes: int, is_told: bool, verdict: str, record: ProfileRecord
) -> None:
    found = compare(at(record, timed(1.0)), at(record, timed(seconds), more_bytes)).time
    assert found.ratio == pytest.approx(seconds)
    assert (found.is_told, found.verdict) == (is_told, verdict)
    assert "whose errors are mostly common" in found.compared


@pytest.mark.parametrize(("seconds", "is_told"), [(0.8, False), (0.6, True), (1.4, False), (1.5, True)])
def test_of_two_gpus_the_intervals_have_to_lie_apart(seconds: float, is_told: bool, record: ProfileRecord) -> None:
    found = compare(at(record, timed(1.0)), at(record, timed(seconds, gpu="H100-SXM"))).time
    assert found.is_told == is_told
    assert "the 80 % intervals do not meet" in found.compared


def test_steps_of_different_numbers_of_tokens_are_compared_by_the_token(record: ProfileRecord) -> None:
    found = compare(at(record, timed(1.0)), at(record, timed(1.5, tokens=8192))).time
    assert (found.per, found.ratio) == ("token", 0.75)
    assert found.verdict == "worth it: 25.0% faster"


def test_classes_that_changed_come_by_how_much(record: ProfileRecord) -> None:
    before = {"products": 0.5, "attention": 0.1, "copies": 0.2}
    after = {"products": 0.5, "attention": 0.4, "copies": 0.1}
    found = compare(at(record, timed(1.0, **before)), at(record, timed(1.0, **after))).time
    assert [one.what for one in found.by_class] == ["attention", "copies"]


def test_it_is_shown_as_predicted_and_in_the_summary(record: ProfileRecord) -> None:
    before, after = at(record, timed(1.0, products=0.9)), at(record, timed(0.8, products=0.7, attention=0.2))
    difference = compare(before, after)
    assert json.loads(difference.model_dump_json())["time"]["verdict"] == "worth it: 20.0% faster"
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_time_difference(console, difference.time)
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "time, predicted, by class, which overlap:" in lines
    assert "step 1.00 s → 800 ms -20.0%" in lines
    assert "attention - → 200 ms" in lines
    assert any(line.startswith("worth it: 20.0% faster, predicted from") for line in lines)
    assert "Time, predicted: worth it: 20.0% faster" in markdown(after, difference)


def test_without_a_counted_step_there_is_no_difference_in_time(record: ProfileRecord) -> None:
    assert compare(at(record, None), at(record, timed(1.0))).time is None


@pytest.mark.parametrize("condition", ["card never seen", "usual", "short steps"])
def test_what_the_interval_does_not_know_is_said(condition: str, capsys: pytest.CaptureFixture) -> None:
    print_step_time(Console(width=200), timed(1.0, gpu="T4").model_copy(update={"condition": condition}))
    said = capsys.readouterr().out
    assert ("fewer than two sources have published steps of T4" in said) == (condition == "card never seen")
    assert ("the host decides: " in said) == (condition == "short steps")
