"""Faults, injected at every point of a sweep: no finished record is lost or doubled, and every sweep can be resumed.

Most of it runs the real runner and journal with cells that end at once, in a forked child that dies at the n-th call of
the operating system (over 30 calls; 3 ways to be killed, 3 signals, a full disk); the rest with torn, cut and damaged
journals, and with real workers that go wrong, in one sweep: over 400 faults in all.
"""

import errno
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_worker
import pytest
from factories import TINY_LLAMA_PATH, make_environment, make_record, make_spec, make_started
from grids import grid

from vramprobe.errors import StoreError
from vramprobe.measure import environment, launcher
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Timeout
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep import here, runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.limits import SweepLimits
from vramprobe.sweep.plan import SweepPolicy
from vramprobe.sweep.resume import MAX_RETRIES, open_journal

CELLS = tuple(make_spec(seq_len=16 * number, timing_steps=0) for number in range(1, 6))
SWEEP = Sweep(name="faults", description="", cells=CELLS, held_out=frozenset(), notes=())
WATCHED = ("open", "write", "fsync", "ftruncate")
HERE = make_environment()


@pytest.fixture(autouse=True)
def _instant_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each cell ends at once, with a record; a folder for rescued records."""

    def attempt(spec: CellSpec, launcher: object, ticket: Any, log: Path, timeout_seconds: float) -> RunRecord:
        return make_record(spec, attempt_id=ticket.attempt_id)

    (tmp_path / "rescued").mkdir()
    monkeypatch.setattr(writing.tempfile, "gettempdir", lambda: str(tmp_path / "rescued"))
    monkeypatch.setattr(here, "run_isolated", attempt)
    monkeypatch.setattr(launcher.Server, "start", lambda self, timeout_seconds=0.0: None)
    monkeypatch.setattr(environment, "capture", lambda *words, **more: HERE)


def sweep_in_child(folder: Path, fault: Callable[[], None], policy: SweepPolicy | None = None) -> tuple[int, list[str]]:
    """Run the sweep in a forked child that installs ``fault`` first: (wait status, the attempts it saw stored)."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
            real_write = os.write

            def report(event: runner.Progress) -> None:
                if event.kind == "finished":
                    real_write(write_end, event.record.attempt_id.encode() + b"\n")

            fault()
            summary = runner.run(SWEEP, folder, policy=policy, on_event=report)
            status = 128 + signal.Signals[summary.stopped_by] if summary.stopped_by else 0
        except StoreError:
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        stored = pipe.read().split()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stored


def at_call(number: int, then: Callable[[str, Callable, tuple], Any]) -> Callable[[], None]:
    """A fault: at the ``number``-th watched call (from 0), ``then(name, real, args)`` takes its place."""

    def install() -> None:
        calls = iter(range(10**9))
        for name in WATCHED:
            real = getattr(os, name)

            def call(*args: Any, name: str = name, real: Callable = real, **more: Any) -> Any:
                if next(calls) == number:
                    return then(name, lambda *a: real(*a, **more), args)
                return real(*args, **more)

            setattr(os, name, call)

    return install


def num_calls(folder: Path) -> int:
    """Return the number of watched calls that an undisturbed sweep makes."""
    counted: list[int] = []
    count = folder / "count"

    def install() -> None:
        for name in WATCHED:
            real = getattr(os, name)

            def call(*args: Any, real: Callable = real, **more: Any) -> Any:
                counted.append(1)
                return real(*args, **more)

            setattr(os, name, call)
        real_exit = os._exit

        def leave(status: int) -> None:
            count.write_text(str(len(counted)))
            real_exit(status)

        os._exit = leave

    assert sweep_in_child(folder / "undisturbed", install)[0] == 0
    return int(count.read_text())


def die(name: str, real: Callable, args: tuple) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(name: str, real: Callable, args: tuple) -> None:
    real(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(name: str, real: Callable, args: tuple) -> None:
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def signalled(signum: int) -> Callable:
    def then(name: str, real: Callable, args: tuple) -> Any:
        os.kill(os.getpid(), signum)
        return real(*args)

    return then


def no_space(name: str, real: Callable, args: tuple) -> None:
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def finished_in(folder: Path) -> Counter[str]:
    """Finished records by fingerprint."""
    journal = folder / runner.JOURNAL
    records = store.read(journal, allow_empty=True).records if journal.exists() else ()
    return Counter(record.fingerprint for record in records if record.outcome.kind in store.FINISHED)


def resume_and_check(folder: Path, stored: list[str]) -> None:
    """Check that what was stored is still there, and that a resume ends with one finished record of each cell."""
    journal = folder / runner.JOURNAL
    before = store.read(journal, allow_empty=True).records if journal.exists() else ()
    assert set(stored) <= {record.attempt_id for record in before}
    summary = runner.run(SWEEP, folder, policy=SweepPolicy(retry_quarantined=True))
    assert summary.stopped_by is None
    after = store.read(journal)
    assert after.records[: len(before)] == before
    assert after.torn_tail is None
    assert finished_in(folder) == Counter({cell.fingerprint: 1 for cell in CELLS})
    assert runner.run(SWEEP, folder).plan.actions() == {"kept": len(CELLS)}


@pytest.mark.parametrize("fault", grid([die, die_after, die_half_way], die_half_way), ids=lambda fault: fault.__name__)
def test_kill_9_at_any_call_of_the_system(fault: Callable, tmp_path: Path) -> None:
    total = num_calls(tmp_path)
    assert total > 6 * len(CELLS)  # a start and a record of each, opened, written and synced
    for number in range(total):
        folder = tmp_path / str(number)
        status, stored = sweep_in_child(folder, at_call(number, fault))
        assert status == -signal.SIGKILL
        resume_and_check(folder, stored)


def test_a_kill_while_the_libraries_load_is_no_attempt_at_a_cell(tmp_path: Path) -> None:
    def fault() -> None:
        launcher.Server.start = lambda self, seconds: os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(MAX_RETRIES + 2):
        assert sweep_in_child(tmp_path / "out", fault)[0] == -signal.SIGKILL
    assert not (tmp_path / "out" / runner.JOURNAL).exists()
    resume_and_check(tmp_path / "out", [])


@pytest.mark.parametrize("signum", grid([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGTERM))
def test_a_signal_at_any_call_of_the_system(signum: int, tmp_path: Path) -> None:
    for number in range(2, num_calls(tmp_path)):  # from when the sweep holds its lock
        folder = tmp_path / str(number)
        status, stored = sweep_in_child(folder, at_call(number, signalled(signum)))
        assert status == 128 + signum
        assert open_journal(folder / runner.JOURNAL).torn_tail is None
        resume_and_check(folder, stored)


def test_a_full_disk_at_any_call_of_the_system(tmp_path: Path) -> None:
    statuses: Counter[int] = Counter()
    for number in range(num_calls(tmp_path)):
        folder = tmp_path / str(number)
        status, stored = sweep_in_child(folder, at_call(number, no_space))
        statuses[status] += 1
        resume_and_check(folder, stored)
    # A StoreError, never a crash; only the lock's note of who holds it and the last clean-up may fail without a word.
    assert set(statuses) == {0, 2}
    assert statuses[0] == 2
    assert list((tmp_path / "rescued").glob("vramprobe-*.jsonl"))  # measured, and the journal had no room


@pytest.mark.parametrize("limit_kib", [0, 1, 3, 5, 8, 13, 21, 34, 89])
def test_a_journal_that_may_not_grow(limit_kib: int, tmp_path: Path) -> None:
    """A real limit of the kernel's, in the middle of lines."""

    def fault() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib * 1024, resource.RLIM_INFINITY))

    status, stored = sweep_in_child(tmp_path / "out", fault)
    assert status == (0 if limit_kib == 89 else 2)
    resume_and_check(tmp_path / "out", stored)


@pytest.mark.parametrize("seeds", grid([range(8), range(8, 20)], range(8)), ids=str)
def test_whatever_the_interruptions_resume_ends_with_the_planned_set(seeds: range, tmp_path: Path) -> None:
    """Sweeps interrupted again and again, at random points and in random ways."""
    total = num_calls(tmp_path)
    kinds = [die, die_after, die_half_way, signalled(signal.SIGTERM), signalled(signal.SIGINT), no_space]
    for seed in seeds:
        chance = random.Random(seed)
        folder, stored = tmp_path / f"seed{seed}", []
        for _ in range(chance.randint(2, 5)):
            fault = at_call(chance.randrange(total), chance.choice(kinds))
            stored += sweep_in_child(folder, fault)[1]
        policy = SweepPolicy()
        runner.run(SWEEP, folder, policy=policy)
        quarantined = {cell.fingerprint for cell in CELLS} - set(finished_in(folder))
        lost = Counter(started.fingerprint for started in store.read(folder).unfinished)
        assert all(lost[fingerprint] > MAX_RETRIES for fingerprint in quarantined)
        resume_and_check(folder, stored)


# Damaged journals


def a_journal(folder: Path) -> bytes:
    """Five cells, each started and ended."""
    for spec in CELLS:
        record = make_record(spec, attempt_id=f"attempt-{spec.fingerprint}")
        writing.append(folder / runner.JOURNAL, make_started(record))
        writing.append(folder / runner.JOURNAL, record)
    return (folder / runner.JOURNAL).read_bytes()


def test_a_journal_cut_off_anywhere_is_resumed(tmp_path: Path) -> None:
    whole = a_journal(tmp_path / "whole")
    cuts = [*random.Random(0).sample(range(2, len(whole) - 1), 60), len(whole) - 1, whole.index(b"\n"), 1]
    for cut in cuts:
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / runner.JOURNAL).write_bytes(whole[:cut])
        ended = [json.loads(line) for line in whole[:cut].split(b"\n")[:-1]]
        resume_and_check(folder, [line["attempt_id"] for line in ended if "outcome" in line])


def test_a_journal_damaged_in_the_middle_runs_nothing_until_it_is_mended(tmp_path: Path) -> None:
    whole = a_journal(tmp_path / "whole")
    lines = whole.split(b"\n")[:-1]
    chance = random.Random(1)
    for number in range(len(lines) - 1):
        for damage in (
            lambda line: line[: len(line) // 2],
            lambda line: b"\0" * len(line),
            lambda line: os.urandom(200).replace(b"\n", b"?"),
            lambda line: line[:-1] + b"]",
        ):
            folder = tmp_path / f"{number}-{chance.random()}"
            folder.mkdir()
            damaged = b"\n".join([*lines[:number], damage(lines[number]), *lines[number + 1 :]]) + b"\n"
            (folder / runner.JOURNAL).write_bytes(damaged)
            with pytest.raises(StoreError, match=rf"line {number + 1} is"):
                runner.run(SWEEP, folder)
            assert (folder / runner.JOURNAL).read_bytes() == damaged
    (folder / runner.JOURNAL).write_bytes(b"\n".join([*lines[:number], *lines[number + 1 :]]) + b"\n")
    resume_and_check(folder, [])


# Real workers that go wrong


def faulty_interpreter(folder: Path) -> Path:
    """Stands in for the interpreter that the launchers start."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{faulty_worker.__file__}" "$@"\n')
    path.chmod(0o755)
    return path


#: A time limit must pass, or a new server load its libraries: tests/sweep/test_runner.py has a worker that hangs.
SLOW = frozenset({"hang", "kill_the_server"})


@pytest.mark.parametrize("slow", grid([frozenset(), SLOW], frozenset()), ids=["at once", "every way"])
def test_workers_that_go_wrong_in_every_way_cost_their_cell_only(
    slow: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launcher.sys, "executable", str(faulty_interpreter(tmp_path)))
    faults = {fault.__name__: seed for seed, fault in enumerate(faulty_worker.FAULTS, start=1)}
    faults = {name: seed for name, seed in faults.items() if name not in SLOW - slow}
    words = {"model": str(TINY_LLAMA_PATH), "timing_steps": 0}
    cells = [make_spec(**words, seed=seed) for seed in (0, *faults.values())]
    huge = make_spec(**words, seed=faults["exhaust_host_memory"], batch_size=512, seq_len=1024)
    good = make_spec(**words, seed=1000, seq_len=32)
    sweep = Sweep(name="wrong", description="", cells=(*cells, huge, good), held_out=frozenset(), notes=())
    summary = runner.run(sweep, tmp_path / "out", limits=SweepLimits(timeout_seconds=6))
    assert len(summary.records) == len(sweep.cells)
    outcomes = {(one.spec.seed, one.spec.batch_size): one.outcome for one in summary.records}
    found = {name: outcomes[seed, 2] for name, seed in faults.items() if name != "exhaust_host_memory"}
    assert outcomes[0, 2].kind == outcomes[1000, 2].kind == "ok"
    if slow:
        assert found.pop("hang") == Timeout(limit_seconds=6, phase="backward")
        assert "SIGKILL" in found["kill_the_server"].message
    assert outcomes[faults["exhaust_host_memory"], 512].kind == "oom_host"
    assert {outcome.error_type for outcome in found.values()} == {"WorkerDied"}
    assert "exited with status 3" in found["exit_3"].message
    assert "SIGSEGV" in found["segfault"].message
    for name in (
        "exit_0_without_a_record",
        "print_garbage",
        "leave_garbage_for_a_record",
        "leave_half_a_record",
        "leave_the_record_of_another_attempt",
    ):
        assert "exited with status 0" in found[name].message, name
        assert "without a record" in found[name].message, name
    assert "in zero_grad of step 3" in found["leave_half_a_record"].message
    for outcome in found.values():
        assert Path(outcome.message.rsplit("its log: ", 1)[1]).exists()
    contents = store.read(tmp_path / "out")
    assert contents.unfinished == ()
    assert len(contents.records) == len(sweep.cells)
