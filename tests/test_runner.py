"""The runner with real workers: resume, failures, time-outs, kills and interruptions lose nothing that was measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import TINY_LLAMA_PATH, make_record, make_spec

from vramprobe import store
from vramprobe.errors import MissingDependency, StoreError
from vramprobe.measure import isolation, runner
from vramprobe.record import Ok, RunRecord, Timeout
from vramprobe.spec import CellSpec
from vramprobe.sweep import Sweep

FAST = {"timing_steps": 0}
ENDLESS = {"steps": 1_000_000, "timing_steps": 0}


def sweep_of(*cells: CellSpec, held_out: tuple[CellSpec, ...] = ()) -> Sweep:
    out = frozenset(cell.fingerprint for cell in held_out)
    return Sweep(name="test", description="", cells=cells, held_out=out, notes=())


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)
    return value


def worker_of(process: psutil.Process) -> psutil.Process | None:
    """The process that runs the cell: the fork server's child, which has loaded torch."""
    for server in process.children():
        for child in server.children():
            return child
    return None


def test_a_sweep_runs_stores_and_resumes(tmp_path: Path) -> None:
    full, lora = make_spec(**FAST), make_spec(method="lora", **FAST)
    cells = sweep_of(full, lora, held_out=(lora,))
    events: list[runner.Progress] = []
    summary = runner.run(cells, tmp_path, on_event=events.append)
    assert summary.counts() == {"ok": 2}
    assert [(event.kind, event.index) for event in events] == [
        ("started", 1),
        ("finished", 1),
        ("started", 2),
        ("finished", 2),
    ]
    stored = store.read(tmp_path).records
    assert [record.fingerprint for record in stored] == [full.fingerprint, lora.fingerprint]
    assert [(record.sweep, record.held_out) for record in stored] == [("test", False), ("test", True)]
    assert {record.environment.isolation for record in stored} == {"forkserver"}
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["forkserver.log"]  # of good cells none stay

    again = runner.run(cells, tmp_path)
    assert (again.kept, again.records) == (2, [])
    assert len(store.read(tmp_path).records) == 2


def test_forked_and_spawned_workers_measure_the_same_bytes(tmp_path: Path) -> None:
    spec = make_spec(method="qlora", gradient_checkpointing=True, **FAST)
    forked = runner.run(sweep_of(spec), tmp_path).records[0]
    spawned = runner.measure(spec, log=tmp_path / "log")
    assert "Fatal" not in (tmp_path / "log").read_text()
    assert (forked.environment.isolation, spawned.environment.isolation) == ("forkserver", "spawn")
    assert forked.peak == spawned.peak
    assert [p.model_dump(exclude={"rss_end_bytes"}) for p in forked.phases] == [
        p.model_dump(exclude={"rss_end_bytes"}) for p in spawned.phases
    ]


def test_a_failed_cell_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    broken = make_spec(model=str(TINY_LLAMA_PATH), weights="pretrained", **FAST)  # no weights beside that config
    huge = make_spec(batch_size=2**20, seq_len=2**20, **FAST)  # 8 TiB of tokens
    good = make_spec(**FAST)
    summary = runner.run(sweep_of(broken, huge, good), tmp_path)
    assert [record.outcome.kind for record in summary.records] == ["error", "oom_host", "ok"]
    assert summary.records[1].outcome.phase == "batch"
    assert summary.records[1].phases[0].name == "load"  # what was seen before the failure is kept
    assert runner.run(sweep_of(broken, good), tmp_path).kept == 1  # an error is run again, the good cell is not


def test_time_out_ends_the_cell_not_the_sweep(tmp_path: Path) -> None:
    summary = runner.run(sweep_of(make_spec(**ENDLESS), make_spec(**FAST)), tmp_path, timeout_seconds=8)
    assert [record.outcome.kind for record in summary.records] == ["timeout", "ok"]
    assert summary.records[0].outcome.limit_seconds == 8


def test_max_time_starts_no_cell_it_cannot_end_and_cuts_one_that_overruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cell takes 0.2 s; the second would take for ever and is given what is left; no third is started."""

    def attempt(spec: CellSpec, launcher: object, log: Path, timeout_seconds: float, signals: object) -> RunRecord:
        time.sleep(min(0.2 if spec.method == "full" else 60, timeout_seconds))
        return make_record(spec, outcome=Ok() if spec.method == "full" else Timeout(limit_seconds=timeout_seconds))

    monkeypatch.setattr(runner, "_attempt", attempt)
    cells = sweep_of(make_spec(), make_spec(method="lora"), make_spec(seq_len=32))
    summary = runner.run(cells, tmp_path, max_seconds=0.7)
    assert [record.outcome.kind for record in summary.records] == ["ok", "interrupted"]
    assert summary.records[1].outcome.message == "stopped by max-time"
    assert summary.stopped_by == runner.OUT_OF_TIME
    monkeypatch.undo()
    assert runner.run(sweep_of(cells.cells[0]), tmp_path).kept == 1


def test_a_spawned_worker_that_hangs_is_killed_and_described(tmp_path: Path) -> None:
    record = runner.measure(make_spec(**ENDLESS), log=tmp_path / "log", timeout_seconds=3)
    assert (record.outcome.kind, record.outcome.limit_seconds) == ("timeout", 3)
    assert record.environment.isolation == "spawn"
    assert psutil.Process().children() == []


def test_a_record_that_cannot_be_stored_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path))
    record = make_record()
    with pytest.raises(StoreError, match="append that line to the journal"):
        store.append("/dev/full", record)
    (rescued,) = tmp_path.glob("*.jsonl")
    assert store.read(rescued).records == (record,)


def test_a_killed_worker_is_described_and_the_next_cell_runs(tmp_path: Path) -> None:
    import threading

    def kill_the_first() -> None:
        wait_for(lambda: worker_of(psutil.Process())).kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    summary = runner.run(sweep_of(make_spec(**ENDLESS), make_spec(**FAST)), tmp_path)
    killer.join()
    first, second = summary.records
    assert (first.outcome.kind, first.outcome.error_type) == ("error", "WorkerDied")
    assert "SIGKILL" in first.outcome.message
    assert "log" in first.outcome.message
    assert second.outcome.kind == "ok"


def test_a_killed_fork_server_costs_its_cell_and_is_replaced(tmp_path: Path) -> None:
    import threading

    workers: list[psutil.Process] = []

    def kill_the_server() -> None:
        workers.append(wait_for(lambda: worker_of(psutil.Process())))
        workers[0].parent().kill()

    killer = threading.Thread(target=kill_the_server)
    killer.start()
    summary = runner.run(sweep_of(make_spec(**ENDLESS), make_spec(**FAST)), tmp_path)
    killer.join()
    assert [record.outcome.kind for record in summary.records] == ["error", "ok"]
    assert "SIGKILL" in summary.records[0].outcome.message
    assert not workers[0].is_running()  # the cell does not outlive its server


@pytest.fixture
def endless_sweep(tmp_path: Path) -> Path:
    """One cell that ends and one that does not."""
    path = tmp_path / "endless.yaml"
    cell = {"model": str(TINY_LLAMA_PATH), "batch_size": 1, "seq_len": 8, "timing_steps": 0}
    cells = [cell | {"method": "full"}, cell | {"method": "lora", "steps": 1_000_000}]
    path.write_text(json.dumps({"name": "endless", "cells": cells}))
    return path


def start(sweep: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "vramprobe", "run", str(sweep), "--out", str(out), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def records_in(journal: Path) -> list[RunRecord]:
    return list(store.read(journal, allow_empty=True).records) if journal.exists() else []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_cleanly(endless_sweep: Path, tmp_path: Path, signum: int, code: int) -> None:
    out = tmp_path / "out"
    process = start(endless_sweep, out)
    wait_for(lambda: len(records_in(out / runner.JOURNAL)) == 1)
    worker = wait_for(lambda: worker_of(psutil.Process(process.pid)))
    began = time.monotonic()
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    assert time.monotonic() - began < 10
    assert "run the same command again" in stdout
    assert [record.outcome.kind for record in records_in(out / runner.JOURNAL)] == ["ok", "interrupted"]
    wait_for(lambda: not worker.is_running(), seconds=10)


def test_kill_9_of_the_runner_loses_no_record_and_leaves_no_worker(endless_sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(endless_sweep, out)
    wait_for(lambda: len(records_in(out / runner.JOURNAL)) == 1)
    worker = wait_for(lambda: worker_of(psutil.Process(process.pid)))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, seconds=10)
    assert [record.outcome.kind for record in records_in(out / runner.JOURNAL)] == ["ok"]
    with store.lock(out):  # the lock went with the process
        pass


def test_a_torn_last_line_is_moved_aside_and_the_sweep_goes_on(tmp_path: Path) -> None:
    spec = make_spec(**FAST)
    journal = tmp_path / runner.JOURNAL
    store.append(journal, make_record(make_spec(seq_len=32)))
    with journal.open("a") as file:
        file.write('{"format":1,"attempt_id":"half')
    summary = runner.run(sweep_of(spec), tmp_path)
    assert summary.counts() == {"ok": 1}
    assert any("torn" in note or "half" in note for note in summary.notes), summary.notes
    assert len(store.read(journal).records) == 2


def test_a_broken_middle_line_stops_before_anything_runs(tmp_path: Path) -> None:
    journal = tmp_path / runner.JOURNAL
    journal.write_text('{"not": "a record"}\n' + make_record().to_json_line() + "\n")
    with pytest.raises(StoreError, match=r"records\.jsonl.*1"):
        runner.run(sweep_of(make_spec(**FAST)), tmp_path)


def test_two_sweeps_on_one_folder_are_refused(tmp_path: Path) -> None:
    with store.lock(tmp_path), pytest.raises(StoreError, match="another sweep"):
        runner.run(sweep_of(make_spec(**FAST)), tmp_path)


def test_missing_packages_and_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = isolation.importlib.util.find_spec
    monkeypatch.setattr(isolation.importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(MissingDependency, match=r"peft.*pip install 'vramprobe\[measure\]'"):
        isolation.require_packages(make_spec(method="lora"))
    isolation.require_packages(make_spec(method="full"))
    monkeypatch.setattr(isolation.nvml, "first_visible_gpu", lambda: None)
    with pytest.raises(MissingDependency, match="no NVIDIA GPU is visible"):
        isolation.require_packages(make_spec(device="cuda"))
