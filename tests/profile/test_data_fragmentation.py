"""Requests by a batch's shape, learnt from the steps that ran, and reserved memory over the steps that follow: against
the same program run on all batches."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profile_factory import Script, write_launcher
from typer.testing import CliRunner

from vramprobe.allocator.ledger import Device
from vramprobe.cli.verbs import app
from vramprobe.lengths.course import CourseUnderWay, play
from vramprobe.profile.analyse import analyse
from vramprobe.profile.analyzed_rank import micro_steps_of, see
from vramprobe.profile.data_fragmentation import courses_of, data_fragmentation
from vramprobe.profile.next_steps import ProfiledRun, recorded
from vramprobe.profile.raw import RawRank
from vramprobe.profile.run_files import read_run
from vramprobe.units import MIB

SHAPES = [(4, 100), (4, 180), (4, 260), (4, 333), (4, 420), (4, 500), (4, 610)]  # that are run
HELD_OUT = (4, 333)
LATER = [(4, 150), (4, 590), (2, 600), (4, 301), (4, 610), (4, 120), (4, 444)]


def stack(name: str) -> tuple[tuple[str, int, str], ...]:
    return (("/srv/train.py", len(name), name),)


class Program:
    """A training whose requests follow from each batch's shape; above 1,600 tokens it makes one more."""

    def __init__(self, num_micro_steps: int = 1, *, is_random: bool = False) -> None:
        self.script, self.num_micro_steps = Script(), num_micro_steps
        self.is_random, self._drawn, self._batch = is_random, np.random.default_rng(1), 0
        with self.script.phase("load"):
            self.script.alloc(0x1000, 30 * MIB, stack("weights"))
            self.script.alloc(0x2000, 3 * MIB, stack("warm-up"))
            self.script.free(0x2000)

    def step(self, number: int, shapes: Sequence[tuple[int, int]]) -> None:
        for micro_step, (rows, width) in enumerate(shapes, 1):
            tokens = rows * width
            with self.script.phase("forward", number, micro_step):
                self._next_batch(tokens)
                for layer in range(3):
                    self.script.alloc(0x100000 + layer, 2000 * tokens, stack("hidden"))
                    self.script.alloc(0x200000 + layer, 96 * rows * (-(-width // 32) * 32), stack("logsumexp"))
                self.script.alloc(0x300000, rows * width * width * 4, stack("mask"))
            with self.script.phase("backward", number, micro_step):
                if tokens > 1600:
                    self.script.alloc(0x400000, 500 * tokens, stack("hidden"))
                    self.script.free(0x400000)
                if self.is_random:
                    self.script.alloc(0x500000, int(self._drawn.integers(1, 9)) * MIB, stack("of values"))
                    self.script.free(0x500000)
                self.script.free(*range(0x200000, 0x200003), 0x300000, *range(0x100000, 0x100003))
        with self.script.phase("optimizer_step", number):
            self.script.alloc(0x600000, 30 * MIB, stack("update"))
            self.script.free(0x600000)
        self.script.say("step", step=number)

    def _next_batch(self, tokens: int) -> None:
        """The former one goes once this one is there."""
        self._batch += 1
        self.script.alloc(0x700000 + self._batch, 8 * tokens, stack("batch"))
        if self._batch > 1:
            self.script.free(0x700000 + self._batch - 1)

    def ranks(self, folder: Path) -> RawRank:
        folder.mkdir(exist_ok=True)
        self.script.write(folder)
        write_launcher(folder, stopped=True)
        (raw,) = read_run(folder).ranks
        return raw


def profiled(folder: Path, num_micro_steps: int = 1, order: Sequence[tuple[int, int]] = (), **how: Any) -> RawRank:
    """Three steps, then one on each of SHAPES."""
    program = Program(num_micro_steps, **how)
    for number in (1, 2, 3):
        program.step(number, [(4, 256)] * num_micro_steps)
    table = [[*shape, 1, at] for at, shape in enumerate(sorted({*SHAPES, *order}))]
    where = {tuple(row[:2]): at for at, row in enumerate(table)}
    program.script.say("batches", steps=3, how="lengths", is_complete=True, micro_steps=num_micro_steps, shapes=table,
                       order=[where[shape] for shape in order] or None, lengths=None, num_batches=len(table),
                       num_rows=4 * len(table))  # fmt: skip
    for number, shape in enumerate(SHAPES, 4):
        words = {"rows": shape[0], "width": shape[1], "held_out": shape == HELD_OUT, "indices": []}
        program.script.say("batch", step=number, batch=number, **words)
        program.step(number, [shape] * num_micro_steps)
    return program.ranks(folder)


def truly_reserved(folder: Path, batches: Sequence[tuple[int, int]], num_micro_steps: int, conf: str) -> list[int]:
    """After each step on these batches, of the program itself."""
    program = Program(num_micro_steps)
    for number in (1, 2, 3):
        program.step(number, [(4, 256)] * num_micro_steps)
    left, number = iter(batches), 3
    while own := list(islice(left, num_micro_steps)):
        number += 1
        program.step(number, own)
    seen = see(program.ranks(folder))
    units = micro_steps_of(seen, range(3, number + 1), num_micro_steps)
    course, done, made = CourseUnderWay((conf, 0), Device()), 0, 0
    for of_step in units.values():
        events = recorded(seen, of_step[-1].stop)[done:]
        course.step(lambda allocator, events=events, made=made: play(allocator, events, made))
        done, made = of_step[-1].stop, int((seen.lives.starts < of_step[-1].stop).sum())
    return course.reserved


@pytest.mark.parametrize(("num_micro_steps", "conf"), [(1, ""), (1, "expandable_segments:True"), (2, "")])
def test_each_step_reserves_what_the_program_itself_would(tmp_path: Path, num_micro_steps: int, conf: str) -> None:
    raw = profiled(tmp_path / "profile", num_micro_steps)
    run = ProfiledRun(raw, see(raw))
    later = LATER * num_micro_steps
    (course,) = courses_of(run, later, 100, Device(), [(conf, 0)])
    assert list(course.reserved_bytes) == truly_reserved(tmp_path / "truth", later, num_micro_steps, conf)
    assert course.num_steps == 1 + len(LATER)
    assert len(set(course.reserved_bytes)) > 1
    assert run.inexact_tokens == []
    assert [(one.num_different, one.bytes_different) for one in run.held_out] == [(0, 0)]


def test_a_step_that_runs_out_of_memory_and_the_settings(tmp_path: Path, printed) -> None:
    raw = profiled(tmp_path, order=[(4, 100), (4, 5000), (4, 600)])
    found = data_fragmentation(raw, see(raw), raw.process.device_total_bytes - 100 * MIB)
    assert (found.first_step, [one.oom_step for one in found.courses]) == (4, [5])
    assert found.courses[0].num_steps == 4
    found = data_fragmentation(raw, see(raw), 0, num_steps=6)
    assert [one.oom_step for one in found.courses] == [None] * 6
    assert {one.num_steps for one in found.courses} == {9}
    shown = printed(analyse(tmp_path, replay_steps=6))
    assert "by the allocator's replay, predicted for steps 4 to 9" in shown
    assert "less than the default at the peak" in shown
    assert "--replay-steps compares other" in printed(analyse(tmp_path))


def test_sizes_that_do_not_follow_from_the_shape_are_told_with_their_line(tmp_path: Path, printed) -> None:
    raw = profiled(tmp_path, is_random=True)
    found = data_fragmentation(raw, see(raw), 0)
    assert found.inexact_at == ["train.py:9 of values"]
    assert found.num_inexact == 2  # with and without the request that only long batches make
    assert found.held_out[0].bytes_different > 0
    assert "sizes do not follow from the batch's shape: train.py:9 of values" in printed(analyse(tmp_path))


def test_a_run_that_teaches_nothing_says_why(tmp_path: Path, printed) -> None:
    raw = profiled(tmp_path)
    assert data_fragmentation(raw, None, 0).why_not == "no allocations were recorded (--trace all)"
    (tmp_path / "100.history").unlink()
    assert "reserved memory over the run is not predicted: no allocations were recorded" in printed(analyse(tmp_path))


def test_a_replay_needs_an_emulated_run(tmp_path: Path) -> None:
    for words in ([], ["--emulate", "RTX-4090", "--whole"], ["--emulate", "RTX-4090", "--trace", "none"]):
        done = CliRunner().invoke(app, ["profile", "--replay-steps", "5", *words, "--", "true"])
        assert done.exit_code == 1
        assert "--replay-steps 5: only an emulated run" in str(done.exception)
    profiled(tmp_path)
    done = CliRunner().invoke(app, ["profile", "--from", str(tmp_path), "--replay-steps", "5"])
    assert done.exit_code == 0
    assert "predicted for steps 4 to 8" in done.output
