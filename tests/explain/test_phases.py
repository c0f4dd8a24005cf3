"""The phase that a traceback tells of, by frames of the libraries."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from vramprobe.explain.advice import ADVICE, MAX_CHANGES
from vramprobe.explain.phases import AROUND, DETAILS, FORWARD, OTHERS, STEP, UNKNOWN, Frame, host_copy, phase_of, shown

SITE = "/home/joe/env/lib/python3.10/site-packages/"
TRAINING = ("train.py:main", "transformers/trainer.py:train", "transformers/trainer.py:_inner_training_loop")
CALL = "torch/nn/modules/module.py:_call_impl"
ROWS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "phases.toml").read_text())["traceback"]


def frames(*places: str) -> list[Frame]:
    short = {"TRAINING": TRAINING, "CALL": (CALL,)}
    split = [each.rpartition(":") for place in places for each in short.get(place, (place,))]
    return [Frame(path if path == "train.py" else SITE + path, 7, function) for path, _, function in split]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['phase']}: {row['frames'][-1]}")
def test_phases(row: dict[str, Any]) -> None:
    found = phase_of(frames(*row["frames"]))
    assert (found.name, found.detail) == (row["phase"], row.get("detail", ""))
    assert "/home/joe" not in str(found)


def test_a_source_line_tells_what_no_function_name_does() -> None:
    told = [Frame("/job/x.py", 3, "setup", "a, b = accelerator.prepare(model, optimizer)")]
    assert phase_of(told).name == "prepare"
    assert phase_of([Frame("/job/x.py", 3, "setup", "a = model(b)")]) == UNKNOWN
    compiled = [
        Frame("/t/trainer.py", 3, "training_step", "self.accelerator.backward(loss)"),
        Frame("/x.py", 4, "call"),
    ]
    assert phase_of(compiled).name == "backward"
    tower = [Frame("/job/x.py", 3, "forward", "embeds = self.visual(pixels)"), Frame("/job/y.py", 4, "forward")]
    assert phase_of(tower).detail == "the vision tower"
    assert host_copy([Frame("/job/x.py", 3, "move", "x = x.to('cpu')")]) == "copying to the host"
    assert host_copy([Frame("/job/x.py", 3, "move", "x = x.to('cuda')")]) == ""
    assert phase_of([Frame("/home/vision/train.py", 3, "forward")]).detail == ""


def test_no_frames_tell_nothing() -> None:
    assert phase_of([]) == UNKNOWN


def test_a_frame_is_shown_without_folders_and_control_characters() -> None:
    assert shown(Frame(SITE + "torch/_tensor.py", 3, "backward")) == "torch/_tensor.py:3 in backward"
    assert shown(Frame(r"C:\Users\joe\secret\train.py", 3, "main")) == "train.py:3 in main"
    assert shown(Frame("/secret/x.py", 3, "f\x1b]0;title\x07")) == "x.py:3 in f]0;title"


def test_every_row_of_advice_is_of_a_phase_and_a_detail_that_rules_name() -> None:
    phases = {rule.name for rules in (AROUND, STEP, FORWARD, OTHERS) for rule in rules} | {"unknown"}
    details = {rule.name for rules in DETAILS.values() for rule in rules}
    details |= {"logits", "embedding or head", "load", "outside"}
    beside = {"larger than the GPU", "bug", "host", "pinned memory", "driver", "MPS"}
    for key, changes in ADVICE.items():
        phase, _, detail = key.partition(": ")
        assert phase in phases | beside, key
        assert not detail or detail in details, key
        assert 0 < len(changes) <= MAX_CHANGES, key
        assert len(set(changes)) == len(changes), key
    assert set(DETAILS) <= phases
    assert phases - set(ADVICE) == {"forward or backward", "startup"}  # that of forward or of backward, of generation
    named = {f"{phase}: {rule.name}" for phase in ("generation", "prepare") for rule in DETAILS[phase]}
    assert named <= {*ADVICE, "prepare: creating the optimizer state"}
