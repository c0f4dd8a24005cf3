"""Processes that others end by force write what they did before: who is asked, who is waited for."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vramprobe.profile.hook import settle


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "_PATIENCE_SECONDS", 60.0)


def journal(folder: Path, pid: int, *kinds: str) -> Path:
    path = folder / f"{pid}.jsonl"
    path.write_text("".join(json.dumps({"line": kind}) + "\n" for kind in kinds))
    return path


def test_nobody_is_asked_where_nobody_listens(tmp_path: Path) -> None:
    journal(tmp_path, os.getpid(), "process")  # a trainer's other rank: it has an end of its own
    journal(tmp_path, os.getppid(), "process", "listens", "settled")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        journal(tmp_path, gone.pid, "process", "listens")
    settle.ask(tmp_path)
    assert not (tmp_path / settle.FILE).exists()


def test_those_that_listen_are_waited_for(tmp_path: Path) -> None:
    path = journal(tmp_path, os.getpid(), "process", "listens", "end")  # of a cycle before
    asking = threading.Thread(target=settle.ask, args=(tmp_path,))
    asking.start()
    while not (tmp_path / settle.FILE).exists():
        time.sleep(0.01)
    asking.join(1.0)  # several looks: nothing has been written yet
    assert asking.is_alive()
    with path.open("a") as file:
        file.write('{"line": "settled"}\n')
    asking.join(50.0)
    assert not asking.is_alive()


@pytest.mark.parametrize(("connected", "mode", "asks"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_program_asks_before_it_leaves_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: bool, mode: int, asks: bool
) -> None:
    """Its workers do not: they end with it."""
    done: list[str] = []
    monkeypatch.setattr(settle, "ask", lambda folder: done.append("ask"))
    monkeypatch.setattr(settle.atexit, "register", lambda act: done.append("at exit"))
    worker = SimpleNamespace(
        SCRIPT_MODE=0,
        global_worker=SimpleNamespace(connected=connected, mode=mode),
        shutdown=lambda **words: done.append(f"shutdown {words}"),
    )
    settle.before_ray_ends(tmp_path, worker)
    worker.shutdown(wait=1)
    assert done == ["at exit", *["ask"] * asks, "shutdown {'wait': 1}"]
