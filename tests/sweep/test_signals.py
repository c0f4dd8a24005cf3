"""A signal ends a sweep at once, whenever it comes; a hangup under nohup does not."""

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


#: Where an exit is lost: Python ignores it in a destructor, a library takes it for its own failure.
SWALLOWERS = {
    "a destructor": "class Gone:\n    def __del__(self): terminate()\nGone()",
    "any exception is caught": "try: terminate()\nexcept BaseException: pass",
    "another error": "try: terminate()\nexcept BaseException: raise ValueError('no schema') from None",
}


@pytest.mark.parametrize("where", SWALLOWERS)
def test_an_exit_that_is_swallowed_is_raised_again(where: str) -> None:
    """SIGTERM at a moment of the imports was lost, and the profiled command ran on; its cleaning up is left alone."""
    program = (
        "import os, signal, time\nfrom vramprobe.sweep.signals import exit_on_signal\n"
        "def terminate(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.001)\n"
        "with exit_on_signal.caught():\n    try:\n"
        + "".join(f"        {line}\n" for line in SWALLOWERS[where].splitlines())
        + "        time.sleep(50)\n    finally:\n        time.sleep(0.3); print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "")


def test_a_signal_that_another_thread_receives_ends_the_wait(tmp_path: Path) -> None:
    """The main thread waits for the command: its handler would run when the command has ended."""
    program = (
        "import os, signal, sys, threading, time\nfrom pathlib import Path\nfrom vramprobe.profile import launch\n"
        "def send(): time.sleep(1); os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=send, daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "options = launch.Options(trace='step', steps=None)\n"
        "print(launch.run(['sleep', '50'], Path(sys.argv[1]), options).exit_status)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "143\n", "")


def test_a_signal_before_the_commands_handlers_leaves_no_words(tmp_path: Path) -> None:
    """The supervisor said that the profile had been killed, and the thread that reads stderr ended in a traceback."""
    program = (
        "import sys\nfrom contextlib import contextmanager\nfrom pathlib import Path\n"
        "from vramprobe.profile import launch\n"
        "@contextmanager\ndef early(*words): sys.exit(143); yield []\n"
        "launch._signals_are_the_commands = early\n"
        "launch.run(['sleep', '50'], Path(sys.argv[1]), launch.Options(trace='step', steps=None))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
