"""The runner with real workers: resume, failures, time-outs, kills and interruptions lose nothing that was measured."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import TINY_LLAMA_PATH, make_environment, make_oom, make_record, make_spec
from grids import exhaustive, grid
from processes import cell_of, children, is_alive

from vramprobe.errors import MissingDependency, StoreError
from vramprobe.measure import environment, forkserver, isolation, launcher
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Ok, Timeout
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep import here, runner
from vramprobe.sweep import limits as limits_module
from vramprobe.sweep.card import Card
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.limits import SweepLimits
from vramprobe.sweep.plan import SweepPolicy
from vramprobe.sweep.progress import log_path

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


#: Its library makes a tensor as it loads, which is no cell's.
OF_A_LIBRARY = {"optim": "adamw_bnb_8bit"}


@dataclass(frozen=True)
class Swept:
    """A sweep of real cells that has ended, and what it said as it ran."""

    cells: Sweep
    folder: Path
    summary: runner.RunSummary
    events: list[runner.Progress]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    full, lora = make_spec(**FAST), make_spec(method="lora", **FAST)
    cells = sweep_of(full, lora, make_spec(**OF_A_LIBRARY, **FAST), held_out=(lora,))
    folder, events = tmp_path_factory.mktemp("swept"), []
    return Swept(cells, folder, runner.run(cells, folder, on_event=events.append), events)


def test_a_sweep_runs_stores_and_resumes(swept: Swept) -> None:
    assert swept.summary.counts() == {"ok": 3}
    assert [(event.kind, event.index) for event in swept.events] == [
        ("planned", 0),
        *((kind, index) for index in (1, 2, 3) for kind in ("started", "finished")),
    ]
    contents = store.read(swept.folder)
    stored = contents.records
    assert contents.unfinished == ()
    assert [record.fingerprint for record in stored] == [cell.fingerprint for cell in swept.cells.cells]
    assert [(record.sweep, record.held_out) for record in stored] == [("test", False), ("test", True), ("test", False)]
    journal = [json.loads(line) for line in (swept.folder / runner.JOURNAL).read_text().splitlines()]
    assert [line.get("line") for line in journal] == 3 * ["started", None]
    assert [line["attempt_id"] for line in journal[::2]] == [line["attempt_id"] for line in journal[1::2]]
    assert {record.environment.isolation for record in stored} == {"forkserver"}
    logs = sorted(path.name for path in (swept.folder / "logs").iterdir())
    assert logs == ["forkserver.log"]  # of good cells none stay

    again = runner.run(swept.cells, swept.folder)
    assert (again.plan.actions(), again.records) == ({"kept": 3}, [])
    assert len(store.read(swept.folder).records) == 3


def test_forked_and_spawned_workers_measure_the_same_bytes(swept: Swept, tmp_path: Path) -> None:
    (forked,) = (record for record in swept.summary.records if record.spec.optim == OF_A_LIBRARY["optim"])
    assert_spawned_alike(forked, tmp_path)


@exhaustive
def test_so_they_do_with_quantized_weights(tmp_path: Path) -> None:
    spec = make_spec(method="qlora", gradient_checkpointing=True, **FAST)
    assert_spawned_alike(runner.run(sweep_of(spec), tmp_path).records[0], tmp_path)


def assert_spawned_alike(forked: RunRecord, folder: Path) -> None:
    spawned = runner.measure(forked.spec, log=folder / "log")
    assert "Fatal" not in (folder / "log").read_text()
    assert (forked.environment.isolation, spawned.environment.isolation) == ("forkserver", "spawn")
    assert forked.peak == spawned.peak
    assert [p.model_dump(exclude={"rss_end_bytes"}) for p in forked.phases] == [
        p.model_dump(exclude={"rss_end_bytes"}) for p in spawned.phases
    ]


@exhaustive
def test_a_failed_cell_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    broken = make_spec(model=str(TINY_LLAMA_PATH), weights="pretrained", **FAST)  # no weights beside that config
    huge = make_spec(batch_size=2**20, seq_len=2**20, **FAST)  # 8 TiB of tokens
    good = make_spec(**FAST)
    records = {one.fingerprint: one for one in runner.run(sweep_of(broken, huge, good), tmp_path).records}
    kinds = [records[cell.fingerprint].outcome.kind for cell in (broken, huge, good)]
    assert kinds == ["error", "oom_host", "ok"]
    assert records[huge.fingerprint].outcome.phase == "batch"
    assert records[huge.fingerprint].phases[0].name == "load"  # what was seen before the failure is kept
    again = runner.run(sweep_of(broken, good), tmp_path)  # an error is run again, the good cell is not
    assert again.plan.actions() == {"kept": 1, "run": 1}


@exhaustive
def test_time_out_ends_the_cell_not_the_sweep(tmp_path: Path) -> None:
    cells = sweep_of(make_spec(**ENDLESS), make_spec(seq_len=32, **FAST))
    summary = runner.run(cells, tmp_path, limits=SweepLimits(timeout_seconds=8))
    assert [record.outcome.kind for record in summary.records] == ["timeout", "ok"]
    assert summary.records[0].outcome.limit_seconds == 8
    assert summary.records[0].outcome.phase in ("forward", "backward", "optimizer_step", "zero_grad")


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cells that take as long as told, in seconds by their length, and end by themselves or when their time is up."""

    def set_up(seconds_of: Callable[[CellSpec], float], outcome: Any = None, known: Any = None) -> None:
        def attempt(spec: CellSpec, launcher: object, ticket: Any, log: Path, timeout_seconds: float) -> RunRecord:
            time.sleep(min(seconds_of(spec), timeout_seconds))
            late = seconds_of(spec) > timeout_seconds
            found = Timeout(limit_seconds=timeout_seconds) if late else outcome(spec) if outcome else Ok()
            return make_record(spec, attempt_id=ticket.attempt_id, outcome=found, environment=machine)

        machine = known or make_environment()
        monkeypatch.setattr(launcher.Server, "start", lambda self, timeout_seconds=0.0: None)
        monkeypatch.setattr(environment, "capture", lambda *words, **more: machine)
        monkeypatch.setattr(here, "run_isolated", attempt)

    return set_up


def test_max_time_starts_no_cell_it_cannot_end_and_cuts_one_that_overruns(
    tmp_path: Path, instant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "START_SECONDS", 0.0)
    cells = sweep_of(*(make_spec(seq_len=16 * number, timing_steps=0) for number in (1, 2, 3, 4)))
    instant(lambda spec: 60 if spec.seq_len == 32 else 0.01)
    summary = runner.run(cells, tmp_path, limits=SweepLimits(max_seconds=1.5))
    assert [record.outcome.kind for record in summary.records] == ["ok", "interrupted"]
    assert summary.records[1].outcome.message == "stopped by max-time"
    assert summary.records[1].outcome.by_limit
    assert (summary.stopped_by, summary.left) == ("max-time", 2)
    instant(lambda spec: 0.01)
    assert runner.run(cells, tmp_path, limits=SweepLimits(max_cells=1)).stopped_by == "limit"


def test_libraries_that_load_too_long_cost_no_attempt_and_no_time_beyond_the_limit(
    tmp_path: Path, instant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def load(self: launcher.Server, timeout_seconds: float) -> None:
        allowed.append(timeout_seconds)
        time.sleep(timeout_seconds)

    instant(lambda spec: 0.01)
    monkeypatch.setattr(launcher.Server, "start", load)
    monkeypatch.setattr(limits_module, "START_SECONDS", 0.0)
    summary = runner.run(sweep_of(make_spec(timing_steps=0)), tmp_path, limits=SweepLimits(max_seconds=1.0))
    assert (summary.stopped_by, summary.left, summary.records) == ("max-time", 1, [])
    assert 0.5 < allowed[0] <= 1.0
    assert not (tmp_path / runner.JOURNAL).exists()


def test_a_budget_stops_like_time_and_says_so(tmp_path: Path, instant: Callable[..., None]) -> None:
    instant(lambda spec: 0.01)
    limits = SweepLimits(max_seconds=0.1, limited_by="budget")  # less than the libraries take to load
    summary = runner.run(sweep_of(make_spec()), tmp_path, limits=limits)
    assert (summary.stopped_by, summary.left, summary.records) == ("budget", 1, [])
    assert not (tmp_path / runner.JOURNAL).exists()


def test_an_oom_skips_the_larger_cells_behind_it(
    tmp_path: Path, instant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card of 24 GiB, planned without knowing this family: the second length runs out, the third is not run."""
    specs = [make_spec(model="t5-large", method="lora", device="cuda", seq_len=length) for length in (512, 1024, 2048)]
    seen = make_environment(device_name="Test GPU", nvml_total_bytes=24 * 2**30)
    monkeypatch.setattr(here, "require_packages", lambda specs: None)
    instant(lambda spec: 0.0, lambda spec: make_oom(spec).outcome if spec.seq_len >= 1024 else Ok(), seen)
    options = {"card": Card(name="Test GPU", total_bytes=24 * 2**30, gpu=None), "policy": SweepPolicy(audit_share=0.0)}
    summary = runner.run(sweep_of(*specs), tmp_path, **options)
    assert [record.outcome.kind for record in summary.records] == ["ok", "oom", "skipped"]
    assert summary.records[2].outcome.evidence_attempt_id == summary.records[1].attempt_id
    assert "seq_len 2048 ≥ 1024" in summary.records[2].outcome.evidence
    again = runner.run(sweep_of(*specs), tmp_path, **options)
    assert (again.plan.actions(), again.records) == ({"kept": 3}, [])
    everything = runner.run(sweep_of(*specs), tmp_path, **options | {"policy": SweepPolicy(skip=False)})
    assert [record.outcome.kind for record in everything.records] == ["oom"]


def test_some_cells_are_measured_twice_if_asked_and_not_a_third_time(
    tmp_path: Path, instant: Callable[..., None]
) -> None:
    instant(lambda spec: 0.0, lambda spec: Timeout(limit_seconds=1) if spec.seq_len == 32 else Ok())
    cells = sweep_of(make_spec(), make_spec(seq_len=32))
    twice = SweepPolicy(replicate_share=1.0)
    summary = runner.run(cells, tmp_path, policy=twice)
    assert [(one.spec.seq_len, one.outcome.kind) for one in summary.records] == [
        (16, "ok"),
        (32, "timeout"),
        (16, "ok"),
    ]
    assert len({record.attempt_id for record in summary.records}) == 3
    again = runner.run(cells, tmp_path, policy=twice)
    assert [one.spec.seq_len for one in again.records] == [32]
    assert runner.run(sweep_of(make_spec()), tmp_path).plan.actions() == {"kept": 1}


def test_a_spawned_worker_that_hangs_is_killed_and_described(tmp_path: Path) -> None:
    record = runner.measure(make_spec(**ENDLESS), log=tmp_path / "log", timeout_seconds=3)
    assert (record.outcome.kind, record.outcome.limit_seconds) == ("timeout", 3)
    assert record.environment.isolation == "spawn"
    assert children("vramprobe.measure.worker") == []


def test_a_record_that_cannot_be_stored_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.tempfile, "gettempdir", lambda: str(tmp_path))
    record = make_record()
    with pytest.raises(StoreError, match="append that line to the journal"):
        writing.append("/dev/full", record)
    (rescued,) = tmp_path.glob("*.jsonl")
    assert store.read(rescued).records == (record,)


@exhaustive
def test_a_killed_worker_is_described_and_the_next_cell_runs(tmp_path: Path) -> None:
    import threading

    def kill_the_first() -> None:
        wait_for(lambda: cell_of(psutil.Process())).kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    summary = runner.run(sweep_of(make_spec(**ENDLESS), make_spec(seq_len=32, **FAST)), tmp_path)
    killer.join()
    first, second = summary.records
    assert (first.outcome.kind, first.outcome.error_type) == ("error", "WorkerDied")
    assert "SIGKILL" in first.outcome.message
    assert "log" in first.outcome.message
    assert second.outcome.kind == "ok"


@exhaustive
def test_a_killed_fork_server_costs_its_cell_and_is_replaced(tmp_path: Path) -> None:
    import threading

    workers: list[psutil.Process] = []

    def kill_the_server() -> None:
        workers.append(wait_for(lambda: cell_of(psutil.Process())))
        workers[0].parent().kill()

    killer = threading.Thread(target=kill_the_server)
    killer.start()
    summary = runner.run(sweep_of(make_spec(**ENDLESS), make_spec(seq_len=32, **FAST)), tmp_path)
    killer.join()
    assert [record.outcome.kind for record in summary.records] == ["error", "ok"]
    assert "SIGKILL" in summary.records[0].outcome.message
    assert not is_alive(workers[0])  # the cell does not outlive its server


@pytest.fixture
def endless_sweep(tmp_path: Path) -> Path:
    """One cell that ends and one that does not."""
    path = tmp_path / "endless.yaml"
    cell = {"model": str(TINY_LLAMA_PATH), "batch_size": 1, "seq_len": 8, "timing_steps": 0}
    cells = [cell | {"method": "full"}, cell | {"method": "lora", "seq_len": 64, "steps": 1_000_000}]
    path.write_text(json.dumps({"name": "endless", "cells": cells}))
    return path


def start(sweep: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "vramprobe", "run", str(sweep), "--out", str(out), "--device", "cpu"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def records_in(journal: Path) -> list[RunRecord]:
    return list(store.read(journal, allow_empty=True).records) if journal.exists() else []


@pytest.mark.parametrize(("signum", "code"), grid([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGINT, 130)))
def test_a_signal_ends_the_sweep_cleanly(endless_sweep: Path, tmp_path: Path, signum: int, code: int) -> None:
    out = tmp_path / "out"
    process = start(endless_sweep, out)
    wait_for(lambda: len(records_in(out / runner.JOURNAL)) == 1)
    worker = wait_for(lambda: cell_of(psutil.Process(process.pid)))
    began = time.monotonic()
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    assert time.monotonic() - began < 10
    assert "run the same command again" in stdout
    assert [record.outcome.kind for record in records_in(out / runner.JOURNAL)] == ["ok", "interrupted"]
    wait_for(lambda: not is_alive(worker), seconds=10)


def test_kill_9_of_the_runner_loses_no_record_and_leaves_no_worker(endless_sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(endless_sweep, out)
    wait_for(lambda: len(records_in(out / runner.JOURNAL)) == 1)
    wait_for(lambda: cell_of(psutil.Process(process.pid)))
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(is_alive, started)), seconds=60)  # a server of workers may be loading libraries yet
    contents = store.read(out / runner.JOURNAL)
    assert [record.outcome.kind for record in contents.records] == ["ok"]
    assert [one.cell_id.split("_")[1] for one in contents.unfinished] == ["lora-r16-all"]
    with writing.lock(out):  # the lock went with the process
        pass


@exhaustive
def test_a_torn_last_line_is_moved_aside_and_the_sweep_goes_on(tmp_path: Path) -> None:
    spec = make_spec(**FAST)
    journal = tmp_path / runner.JOURNAL
    writing.append(journal, make_record(make_spec(seq_len=32)))
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


def test_a_log_has_a_name_that_file_systems_take() -> None:
    """They count bytes: 255 for a name."""
    spec = make_spec()
    named = spec.model_copy(update={"model": 80 * "模"})
    assert len(log_path(Path("logs"), named).name.encode()) < 150
    assert log_path(Path("logs"), spec).name == f"{spec.cell_id}.{spec.fingerprint}.log"


def test_two_sweeps_on_one_folder_are_refused(tmp_path: Path) -> None:
    with writing.lock(tmp_path), pytest.raises(StoreError, match="another sweep"):
        runner.run(sweep_of(make_spec(**FAST)), tmp_path)


def test_missing_packages_and_devices_are_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = isolation.importlib.util.find_spec
    monkeypatch.setattr(isolation.importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(MissingDependency, match=r"lora.* needs peft.*pip install 'vramprobe\[measure\]'"):
        runner.run(sweep_of(make_spec(), make_spec(method="lora")), tmp_path)
    isolation.require_packages([make_spec(method="full")])
    monkeypatch.setattr(isolation.nvml, "first_visible_gpu", lambda: None)
    with pytest.raises(MissingDependency, match="no NVIDIA GPU is visible"):
        runner.run(sweep_of(make_spec(device="cuda")), tmp_path)
    assert not (tmp_path / runner.JOURNAL).exists()


# Launching


@exhaustive
def test_a_server_that_cannot_prove_itself_is_replaced_by_spawning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says how the cell was started, and why not otherwise; the summary, that it cost time."""
    why = "a library has initialised CUDA while it loaded"
    monkeypatch.setattr(launcher.ForkServer, "unsafe", lambda self, seconds: why)
    summary = runner.run(sweep_of(make_spec(**FAST)), tmp_path)
    (record,) = summary.records
    assert record.outcome.kind == "ok"
    assert record.environment.isolation == "spawn"
    assert summary.notes == [f"each cell loads the libraries anew: no fork server: {why}"]
    assert record.environment.isolation_reason == f"no fork server: {why}"


@exhaustive
def test_a_server_that_dies_as_it_loads_is_replaced_by_spawning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launcher.sys.executable
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *forkserver*) exit 7;; esac\nexec {real} "$@"\n')
    broken.chmod(0o755)
    monkeypatch.setattr(launcher.sys, "executable", str(broken))
    (record,) = runner.run(sweep_of(make_spec(**FAST)), tmp_path / "out").records
    assert record.outcome.kind == "ok"
    assert "it ended with 7 as it loaded" in record.environment.isolation_reason


def test_a_server_that_a_signal_ends_as_it_loads_gets_a_second_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings = iter([launcher.ServerEnded(-9), None])

    def unsafe(self: launcher.ForkServer, seconds: float) -> None:
        if (ending := next(endings)) is not None:
            raise ending

    monkeypatch.setattr(launcher.ForkServer, "unsafe", unsafe)
    server = launcher.Server("cpu", None, launcher.worker_environment(), [], tmp_path / "log")
    server.start()
    assert server.isolation == "forkserver"
    server.close()


def test_a_record_that_was_there_when_the_signal_came_is_kept(
    tmp_path: Path, instant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    instant(lambda spec: 0.0)

    def end_and_be_interrupted(spec: CellSpec, launcher: object, ticket: Any, log: Path, seconds: float) -> RunRecord:
        ticket.record.write_text(make_record(spec, attempt_id=ticket.attempt_id).to_json_line())
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal raises")

    monkeypatch.setattr(here, "run_isolated", end_and_be_interrupted)
    summary = runner.run(sweep_of(make_spec()), tmp_path)
    assert summary.stopped_by == "SIGTERM"
    assert [record.outcome.kind for record in summary.records] == ["ok"]
    assert "SIGTERM came as the cell ended" in summary.records[0].warnings[-1]


def test_the_proof_needs_a_canary_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert forkserver._unsafe("cpu") is None
    monkeypatch.setattr(forkserver, "_canary", lambda device: 1)
    assert "the canary" in forkserver._unsafe("cpu")
    monkeypatch.setattr(forkserver, "_open_files", lambda: {"/dev/nvidia-uvm"})
    assert "/dev/nvidia-uvm" in forkserver._unsafe("cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "has initialised CUDA" in forkserver._unsafe("cpu")


@exhaustive
def test_a_cuda_server_without_a_gpu_does_not_prove_itself(tmp_path: Path) -> None:
    """A machine without a GPU takes the very path of a proof that fails."""
    if launcher.nvml.first_visible_gpu() is not None:
        pytest.skip("there is a GPU here")
    server = launcher.Server("cuda", None, launcher.worker_environment(), ["llama"], tmp_path / "log")
    server.start()
    assert server.isolation == "spawn"
    assert "compute capability" in server.isolation_reason
    server.close()


@exhaustive
def test_the_next_spawned_worker_loads_while_the_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "may_prepare", lambda spec: True)
    one, two = make_spec(**FAST), make_spec(seq_len=32, **FAST)
    spawner = launcher.Spawner(launcher.worker_environment(), tmp_path / "log")
    spawner.expect(two)
    first = isolation.run_isolated(one, spawner, isolation.new_ticket(tmp_path), tmp_path / "log", 60)
    prepared = spawner._prepared[1]
    assert prepared.poll() is None
    spawner.expect(None)
    second = isolation.run_isolated(two, spawner, isolation.new_ticket(tmp_path), tmp_path / "log", 60)
    assert [first.outcome.kind, second.outcome.kind] == ["ok", "ok"]
    assert prepared.poll() is not None  # it was the one that ran
    spawner.expect(two)
    spawner.close()
    assert children("vramprobe.measure.worker") == []


@exhaustive
def test_workers_are_of_this_package_wherever_the_sweep_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with another vramprobe in it is not where the workers come from."""
    (tmp_path / "vramprobe").mkdir()
    (tmp_path / "vramprobe" / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    monkeypatch.chdir(tmp_path)
    assert runner.measure(make_spec(**FAST), log=tmp_path / "log").outcome.kind == "ok"


def test_processes_are_prepared_only_beside_a_gpu_with_cores_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 16)
    assert launcher.may_prepare(make_spec(device="cuda"))
    assert not launcher.may_prepare(make_spec())
    monkeypatch.setattr(launcher.os, "cpu_count", lambda: 2)
    assert not launcher.may_prepare(make_spec(device="cuda"))
