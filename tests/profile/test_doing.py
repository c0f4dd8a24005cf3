"""Activity of a process when it was cut: its phase and progress, whether it compiled, the program's line."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from profile_factory import Script, analysed
from test_shown import shown

from vramprobe.profile import waiting
from vramprobe.profile.doing import doing_of

#: A program that compiles, as far as its stack shows; the watch's own numbers are given.
_PROGRAM = """
import os, sys, time
from types import SimpleNamespace
from vramprobe.emulate import values
sys.modules["vramprobe_values"] = values
from vramprobe.profile.hook.doing import note_doing
phases = SimpleNamespace(name="evaluation", step=1, steps=0, num_phases={"evaluation": 640})
watch = SimpleNamespace(phases=phases, counters=SimpleNamespace(allocated_now=lambda: 2**30))
note_doing(sys.argv[1], [watch] if len(sys.argv) > 2 else [])
exec(compile("def call(f): f()", "/env/site-packages/torch/_dynamo/convert_frame.py", "exec"))
def evaluate():
    time.sleep(100)
call(evaluate)
"""


def cut(folder: Path, *words: str) -> tuple[int, str]:
    """(pid, what it left) of a process that is killed once it has written."""
    script = folder / "script.py"
    script.write_text(_PROGRAM)
    process = subprocess.Popen([sys.executable, str(script), str(folder), *words])
    path = folder / f"{process.pid}.doing"
    for _ in range(600):
        if path.exists() and "evaluate" in path.read_text():
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    return process.pid, path.read_text()


def test_a_rank_that_is_cut_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid, _ = cut(tmp_path, "watched")
    script = Script(pid, rank=0)
    script.write(tmp_path, with_history=False)
    record = analysed(tmp_path, exit_status=143, signal=15)
    assert record.outcome.kind == "interrupted"
    expected = "evaluation of step 1, 640 so far, 0 steps done, 1.00 GiB allocated, compiling, at script.py:12 evaluate"
    assert record.ranks[0].doing.replace(f"{tmp_path}/", "") == expected
    text = " ".join(" ".join(shown(record, capsys)).split())
    assert "rank 0 was last seen in evaluation of step 1, 640 so far" in text


def test_a_rank_that_is_cut_while_loading_has_used_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid, _ = cut(tmp_path, "watched")
    Script(pid, rank=0).write(tmp_path, with_history=False)
    record = analysed(tmp_path, exit_status=143, signal=15)
    assert not record.ranks[0].phases
    text = " ".join(" ".join(shown(record, capsys)).split())
    assert "no training step was seen: it was ended in its first phase, whose peak is not known" in text
    assert "no GPU" not in text


def test_a_process_that_has_used_no_gpu_yet_says_so(tmp_path: Path) -> None:
    cut(tmp_path)
    (said,) = (one for one in analysed(tmp_path, exit_status=143, signal=15).warnings if "last seen" in one)
    assert said.startswith("a process was last seen before its first use of a GPU, compiling, at ")
    assert not any("last seen" in one for one in analysed(tmp_path, exit_status=1).warnings), "an exception says more"


def test_a_torn_file_says_nothing() -> None:
    assert doing_of('{"pid": 1, "main') is None
    assert doing_of("") is None


def doing(phase: str, *stack: str, num_steps: int = 0, says_its_pace: bool = True) -> str:
    said = {"pid": 1, "main_thread": 1, "phase": phase, "step": 1, "num_steps": num_steps, "allocated_bytes": 2**30}
    said["says_its_pace"] = says_its_pace
    return "\n".join([json.dumps(said), "Thread 0x0000000000000001 (most recent call first):", *stack])


@pytest.mark.parametrize(("phase", "is_told"), [("forward", True), ("generation", False)])
def test_a_run_of_minutes_says_what_takes_its_time(phase: str, is_told: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    frames = [f'  File "/e/site-packages/tf/gdn.py", line {line} in chunks' for line in (5, 6)]
    (tmp_path / "7.doing").write_text(doing(phase, frames[0]))
    (tmp_path / "8.doing").write_text("torn")
    said: list[str] = []
    with waiting.told_each_minute(said.append, tmp_path, []):
        time.sleep(0.03)
        (tmp_path / "7.doing").write_text(doing(phase, frames[1]))
        time.sleep(0.3)
    assert bool(said) == is_told
    assert (
        not said
        or "forward of step 1, 0 steps done, 1.00 GiB allocated; seen 100% of the time at tf/gdn.py chunks" in said[0]
    )


def test_slow_steps_say_how_long_all_take_and_once_how_to_shorten_them(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pace, loop = waiting._Pace(3), "tf/gdn.py torch_chunk_gated_delta_rule"

    def at(seconds: float, num_steps: int, *places: str) -> str:
        clock[0] = seconds
        found = doing_of(doing("forward", num_steps=num_steps))
        assert found is not None
        pace.look(found)
        return pace.in_words(["train.py <module>", *places])

    assert at(0, 0) == at(20, 0) == ""
    first = at(60, 0)
    assert first.startswith("; a step takes more than 60 s here; to shorten the steps: fewer tokens in each")
    assert "flash-linear-attention" not in first
    assert at(70, 1) == "; a step takes about 70 s here, about 140 s to go"
    assert "about 135 s to go; a loop of Python over pieces" in at(75, 1, loop)
    assert at(100, 1) == "; a step takes about 70 s here, about 110 s to go"
    assert at(140, 3) == "; a step takes about 35 s here"
    after = doing_of(doing("other", num_steps=3))
    assert after is not None
    clock[0] = 300.0
    pace.look(after)
    assert pace.in_words([loop]) == "; a step takes about 35 s here"


@pytest.mark.parametrize("launcher", ["subprocess.py", "site-packages/torch/distributed/elastic/agent/server/api.py"])
def test_a_launcher_that_waits_is_not_the_process_whose_time_counts(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "7.doing").write_text(doing("load", '  File "/e/site-packages/tf/load.py", line 5 in load'))
    (tmp_path / "8.doing").write_text(doing("load", f'  File "/usr/lib/python3.11/{launcher}", line 9 in wait'))
    found = waiting.latest(tmp_path)
    assert found.stack[0][2] == "load"


def test_a_launcher_whose_child_has_not_begun_is_no_place_that_takes_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    (tmp_path / "8.doing").write_text(doing("load", '  File "/usr/lib/python3.11/subprocess.py", line 9 in _try_wait'))
    said: list[str] = []
    with waiting.told_each_minute(said.append, tmp_path, []):
        time.sleep(0.3)
    assert "loading" in said[0]
    assert "subprocess.py" not in said[0]


def test_a_generation_that_does_not_say_its_pace_is_told_of_each_minute(tmp_path: Path, monkeypatch) -> None:
    """Continuous batching asks no criterion for each token."""
    monkeypatch.setattr(waiting, "_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    frame = '  File "/e/site-packages/transformers/generation/continuous_batching/api.py", line 5 in run'
    (tmp_path / "7.doing").write_text(doing("generation", frame, says_its_pace=False))
    said: list[str] = []
    with waiting.told_each_minute(said.append, tmp_path, []):
        time.sleep(0.3)
    assert said[0].endswith("fewer or shorter completions shorten it")


def test_a_checkpointed_layer_is_not_said_to_be_compiled() -> None:
    """torch keeps Dynamo out of gradient checkpointing by a wrapper of Dynamo's own; an optimizer imports compilers."""
    wrapper = '  File "/e/site-packages/torch/_dynamo/eval_frame.py", line 1446 in _fn'
    compiling = '  File "/e/site-packages/torch/_dynamo/convert_frame.py", line 9 in compile_inner'
    imported = '  File "/e/site-packages/torch/_inductor/compile_fx.py", line 30 in <module>'
    for frame, is_compiling in ((wrapper, False), (compiling, True), (imported, False)):
        found = doing_of(doing("forward", '  File "/e/site-packages/tf/gdn.py", line 5 in chunks', frame))
        assert ("compiling" in found.progress()) is is_compiling


@pytest.mark.parametrize(("frames", "place"), [(["/job/train.py"], "/job/train.py:5 main"), ([], "")])
def test_the_line_that_waits_is_shown_and_never_one_of_the_profiler(frames: list[str], place: str) -> None:
    files = ["/usr/lib/python3.11/threading.py", "/any/vramprobe/profile/hook/history.py", *frames]
    found = doing_of(doing("generation", *(f'  File "{file}", line 5 in main' for file in files)))
    assert found.place([]) == place


@pytest.mark.parametrize(("phase", "is_importing"), [("load", True), ("forward", False)])
def test_a_long_import_is_said_at_the_programs_line(phase: str, is_importing: bool) -> None:
    bootstrap, package = '  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load', "/e/site-packages/timm"
    inner = [
        f'  File "{package}/layers.py", line 4 in <module>',
        bootstrap,
        f'  File "{package}/a.py", line 7 in <module>',
    ]
    lazy = '  File "/usr/lib/python3.11/importlib/__init__.py", line 126 in import_module'
    trl = '  File "/e/site-packages/trl/_lazy_module.py", line 9 in _get_module'
    found = doing_of(doing(phase, *inner, bootstrap, lazy, trl, '  File "/job/train.py", line 3 in main'))
    assert ("importing" in found.progress()) is is_importing
    assert found.place([]) == ("/job/train.py:3 main" if is_importing else "timm/layers.py:4 <module>")


def test_a_run_of_seconds_says_nothing_of_its_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    (tmp_path / "7.doing").write_text(doing("forward"))
    said: list[str] = []
    with waiting.told_each_minute(said.append, tmp_path, []):
        time.sleep(0.1)
    assert said == []
