"""A signal ends a sweep at once, whenever it comes; a hangup under nohup does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import TINY_LLAMA_PATH

from vramprobe.sweep.signals import Signals, Stopped


@pytest.fixture
def ignoring_hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_came_before_ends_what_raises() -> None:
    """Or a cell would run to its end, because the signal came while its start was written to the journal."""
    with Signals().caught() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="SIGTERM"), signals.raising():
            pytest.fail("entered")


def test_an_ignored_hangup_stays_ignored(ignoring_hangup: None) -> None:
    with Signals().caught() as signals, signals.raising():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signals.stopped_by is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_nohup_keeps_the_command_alive(ignoring_hangup: None, tmp_path: Path) -> None:
    """A pipe for a sweep file holds the command back until the signal has come."""
    sweep = tmp_path / "sweep.yaml"
    os.mkfifo(sweep)
    process = subprocess.Popen(
        [sys.executable, "-m", "vramprobe", "plan", str(sweep), "--device", "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with sweep.open("w") as file:
        process.send_signal(signal.SIGHUP)
        file.write(f"cells: [{{model: {TINY_LLAMA_PATH}, method: full, batch_size: 1, seq_len: 16}}]")
    complaints = process.communicate(timeout=60)[1]
    assert (process.returncode, complaints) == (0, "")
