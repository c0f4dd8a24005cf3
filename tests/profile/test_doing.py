"""What a process was doing when it was cut: its phase and progress, whether it compiled, the program's line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from profile_factory import Script, write_launcher
from test_shown import shown

from vramprobe.profile import waiting
from vramprobe.profile.analyse import analyse
from vramprobe.profile.doing import doing_of

#: A program that compiles, as far as its stack shows; the watch's own numbers are given.
_PROGRAM = """
import os, sys, time
from types import SimpleNamespace
from vramprobe.profile.hook.doing import note_doing
phases = SimpleNamespace(name="evaluation", step=1, steps=0, num_phases={"evaluation": 640})
watch = SimpleNamespace(phases=phases, counters=SimpleNamespace(allocated_now=lambda: 2**30))
note_doing(sys.argv[1], [watch] if len(sys.argv) > 2 else [])
exec(compile("def call(f): f()", "/env/site-packages/torch/_dynamo/convert.py", "exec"))
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
    write_launcher(tmp_path, exit_status=143, signal=15)
    record = analyse(tmp_path)
    assert record.outcome.kind == "interrupted"
    expected = "evaluation of step 1, 640 so far, 0 steps done, 1.00 GiB allocated, compiling, at script.py:10 evaluate"
    assert record.ranks[0].doing is not None
    assert record.ranks[0].doing.replace(f"{tmp_path}/", "") == expected
    text = " ".join(" ".join(shown(record, capsys)).split())
    assert "rank 0 was last seen in evaluation of step 1, 640 so far" in text


def test_a_process_that_has_used_no_gpu_yet_says_so(tmp_path: Path) -> None:
    cut(tmp_path)
    write_launcher(tmp_path, exit_status=143, signal=15)
    (said,) = (one for one in analyse(tmp_path).warnings if "last seen" in one)
    assert said.startswith("a process was last seen before its first use of a GPU, compiling, at ")


def test_a_torn_file_says_nothing() -> None:
    assert doing_of('{"pid": 1, "main') is None
    assert doing_of("") is None


def doing(phase: str, *stack: str) -> str:
    said = {"pid": 1, "main_thread": 1, "phase": phase, "step": 1, "num_steps": 0, "allocated_bytes": 2**30}
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


def test_a_run_of_seconds_says_nothing_of_its_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    (tmp_path / "7.doing").write_text(doing("forward"))
    said: list[str] = []
    with waiting.told_each_minute(said.append, tmp_path, []):
        time.sleep(0.1)
    assert said == []
