"""Steps under other values after those that were asked for: what they allocate is the same, or where it parts."""

from pathlib import Path

import pytest
from command_line import within
from grids import exhaustive
from run_command import TRAIN, lines, profiled

from vramprobe.cli import verbs

STEERED = "    if loss.item() > 0.5: torch.empty(3_000_000, device='cuda')  # only then\n    loss.backward()\n"


def test_steps_that_no_value_decides_are_the_same(tmp_path: Path) -> None:
    ended = profiled(tmp_path, TRAIN, steps=3, num_steps=9, verify=True)
    (found,) = lines(tmp_path, "verification")
    assert ended.stopped
    assert found["same"]
    assert found["contents"] == ["zeros", "ones", "random"]
    assert found["num_events"] > 10
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2, 3]
    assert max(phase["step"] or 0 for phase in lines(tmp_path, "phase")) == 3
    assert len(list((tmp_path / "run").glob("*.history"))) == 1


def test_a_step_that_a_value_decides_is_found_with_its_line(tmp_path: Path) -> None:
    profiled(tmp_path, TRAIN.replace("    loss.backward()\n", STEERED), steps=3, num_steps=9, verify=True)
    (found,) = lines(tmp_path, "verification")
    text = (tmp_path / "script.py").read_text().splitlines()
    line = next(number for number, words in enumerate(text, start=1) if "# only then" in words)
    assert not found["same"]
    assert f"script.py:{line}" in found["parted_at"]
    assert "alloc of 12000000 B at" in found["parted_at"]


@exhaustive
def test_an_error_that_other_values_lead_to_is_no_error_of_the_run(tmp_path: Path) -> None:
    failing = STEERED.replace("3_000_000", "300_000_000_000")
    ended = profiled(tmp_path, TRAIN.replace("    loss.backward()\n", failing), steps=3, num_steps=9, verify=True)
    (found,) = lines(tmp_path, "verification")
    assert (ended.exit_status, ended.stopped) == (0, True)
    assert "ones it ended by OutOfMemoryError" in found["parted_at"]
    assert not lines(tmp_path, "oom")


@exhaustive
def test_a_run_that_is_too_short_is_not_verified_and_says_so(tmp_path: Path) -> None:
    profiled(tmp_path, TRAIN, steps=3, num_steps=5, verify=True)
    assert not lines(tmp_path, "verification")
    assert [line["message"] for line in lines(tmp_path, "warning")] == ["not verified: it ended 2 steps too early"]


@pytest.mark.parametrize("words", [("--verify",), ("--verify", "--emulate", "RTX-4090", "--whole")])
def test_what_cannot_be_verified_is_refused(words: tuple[str, ...]) -> None:
    done = within(verbs.main, ["vramprobe", "profile", *words, "--", "python", "-c", "pass"], Path.cwd())
    assert done.returncode == 1
    assert "give --emulate GPU, and no --whole" in done.stderr
