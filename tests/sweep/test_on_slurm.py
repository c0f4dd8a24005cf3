"""Slurm, by submitit's local engine: jobs are processes of this machine; skipped where submitit is not installed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import make_spec
from grids import exhaustive

from vramprobe.errors import MissingDependency, SpecError
from vramprobe.records import store
from vramprobe.records.record import record_from_json
from vramprobe.sweep import on_slurm, runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.fleet import Fleet, fleet_on
from vramprobe.sweep.nodes import Lost, Needs
from vramprobe.sweep.on_slurm import OnNode, SlurmPool
from vramprobe.units import GIB

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'vramprobe[slurm]'")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def asked(attempt_id: str, **more: Any) -> dict[str, Any]:
    words = {"spec": make_spec(timing_steps=0).model_dump_json(), "started_at": "2026-03-01T12:00:00+00:00"}
    limits = {"timeout_seconds": 100.0, "left_seconds": 100.0}
    return words | limits | {"attempt_id": attempt_id, "verify": False, "log": "a.log"} | more


def test_a_job_looks_at_its_node_runs_a_cell_and_one_that_fails_is_lost(tmp_path: Path) -> None:
    pool = SlurmPool(2, cluster="local", folder=tmp_path)
    (node,) = pool.nodes([make_spec().model_dump_json()])
    assert (node.environments[0].versions["torch"] is not None, node.num_slots(Needs(1, 0, GIB))) == (True, 2)
    pool.submit(asked("good"), Needs(1, 0, GIB), [node], ["llama"])
    pool.submit(asked("bad", spec="{}"), Needs(1, 0, GIB), [node], ["llama"])
    found: dict[str, Any] = {}
    deadline = time.monotonic() + 200
    while len(found) < 2:
        assert time.monotonic() < deadline
        found |= pool.ended(1.0)
    assert record_from_json(found["good"]["record"]).outcome.kind == "ok"
    assert found["good"]["node"] == os.uname().nodename
    assert isinstance(found["bad"], Lost)


def jobs_of(process: psutil.Process) -> list[psutil.Process]:
    jobs = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie whose command cannot be read
            if "submitit.core._submit" in child.cmdline():
                jobs.append(child)
    return jobs


@exhaustive
def test_a_killed_job_is_tried_again(tmp_path: Path) -> None:
    cells = tuple(make_spec(seq_len=16 * number, timing_steps=0) for number in range(1, 5))
    sweep = Sweep(name="slurm", description="", cells=cells, held_out=frozenset(), notes=())
    fleet, killed = Fleet(SlurmPool(2, cluster="local", folder=tmp_path / "jobs")), []
    fleet.card_of(sweep)

    def on_event(event: runner.Progress) -> None:
        if event.kind == "finished" and not killed:
            for job in jobs_of(psutil.Process())[:1]:
                job.send_signal(signal.SIGKILL)
                killed.append(job)

    summary = runner.run(sweep, tmp_path / "out", executor=fleet, on_event=on_event)
    assert (summary.counts(), summary.left) == ({"ok": 4}, 0)
    contents = store.read(tmp_path / "out")
    assert Counter(one.fingerprint for one in contents.records) == Counter(one.fingerprint for one in cells)


def test_a_preempted_job_makes_its_attempt_again() -> None:
    again = OnNode().checkpoint({"attempt_id": "a"}, None, ["llama"])
    assert isinstance(again.function, OnNode)
    assert again.args == ({"attempt_id": "a"}, None, ["llama"])


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_slurm.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependency, match="needs sbatch, and there is none here"):
        fleet_on("slurm")
    with pytest.raises(SpecError, match="--jobs must be at least 1, 0 given"):
        SlurmPool(0, cluster="local", folder=tmp_path)
    with pytest.raises(SpecError, match="--jobs 3 is for --on slurm"):
        fleet_on("ray", jobs=3)
