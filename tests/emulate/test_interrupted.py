"""A run on an emulated card that is cut off: no process of it stays, and no machine that the next start does not clear.

Needs a CUDA build of torch, this interpreter's or the one that ``vramprobe emulate setup`` made.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import grid

from vramprobe.catalog.own import cache_folder
from vramprobe.emulate import MACHINE_VARIABLE, enter

ROOT = Path(__file__).parents[2]
CELL = """
    --model pythia-70m --num-layers 1 --method lora --batch-size 1 --seq-len 64 --steps 2000
""".split()  # noqa: SIM905


@pytest.fixture
def installation() -> None:
    require_emulation()


@pytest.fixture
def running(installation: None) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A measurement whose worker has begun, and its machine's folder."""
    command = [sys.executable, "-m", "vramprobe", "measure", "--emulate", "RTX-4090", *CELL]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    folder = None
    try:
        for _ in range(3000):
            assert process.poll() is None, process.communicate()
            folder = next(iter((cache_folder() / "machines").glob(f"{process.pid}-*")), None)
            if folder is not None and (folder / "state").exists():  # a worker has joined
                break
            time.sleep(0.1)
        assert folder is not None
        assert seen_by(folder)
        yield process, folder
    finally:
        process.kill()
        process.wait()
        for pid in seen_by(folder) if folder else ():
            os.kill(pid, signal.SIGKILL)


def seen_by(folder: Path) -> list[int]:
    """The processes that see this machine."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                environment = (place / "environ").read_bytes()
            except OSError:  # it is another's, or has just ended
                continue
            if f"{MACHINE_VARIABLE}={folder}".encode() in environment.split(b"\0"):
                found.append(int(place.name))
    return found


def wait_until_nobody_sees(folder: Path) -> None:
    for _ in range(300):
        if not seen_by(folder):
            return
        time.sleep(0.1)
    pytest.fail(f"{seen_by(folder)} still see {folder}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", grid(["SIGINT", "SIGTERM", "SIGKILL"], "SIGINT", "SIGKILL"))
def test_nothing_stays(running: tuple[subprocess.Popen, Path], name: str) -> None:
    process, folder = running
    signum = signal.Signals[name]
    process.send_signal(signum)
    _, told = process.communicate(timeout=120)
    wait_until_nobody_sees(folder)
    assert b"Traceback" not in told
    if signum == signal.SIGKILL:  # nobody was left to clear it: the next start does
        mine = enter._new_folder(cache_folder() / "machines")
        mine.rmdir()
    else:
        assert process.returncode == 128 + signum
    assert not folder.exists()


def test_a_machine_whose_owner_lives_stays(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"{os.getppid()}-of-another", f"{gone.pid}-left", "notes"):
        (tmp_path / name).mkdir()
    mine = enter._new_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"{os.getppid()}-of-another", "notes", mine.name]
    )
    assert mine.name.startswith(f"{os.getpid()}-")


def test_only_the_owner_takes_the_machine_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setenv(MACHINE_VARIABLE, str(machine))
    monkeypatch.setenv(enter.OWNER_VARIABLE, str(os.getppid()))
    with enter.leaving():
        pass
    assert machine.exists()
    monkeypatch.setenv(enter.OWNER_VARIABLE, str(os.getpid()))
    with pytest.raises(SystemExit), enter.leaving():
        sys.exit(143)
    assert not machine.exists()


def test_a_process_that_cannot_be_started_leaves_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine"
    machine.mkdir()
    way = enter.Entrance(python=tmp_path / "no-python", environment={}, machine=machine)
    monkeypatch.delenv(MACHINE_VARIABLE, raising=False)
    monkeypatch.setattr(enter, "entrance", lambda *words, **more: way)
    with pytest.raises(OSError, match="No such file"):
        enter.enter("H100-SXM", ["doctor"], lambda line: None)
    assert not machine.exists()
