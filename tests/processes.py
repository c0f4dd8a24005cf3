"""The processes that tests start: found by name among this process's children, and ended where a test leaves them.

A process is a test's where its environment names the test (pytest's own variable, in the test itself, not in a fixture)
and these very tests; one that was forked from here and carries nothing has this process's command line.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_THESE_TESTS = "VRAMPROBE_TESTS"  # the process that runs them: others may run the same tests on this machine
_TEST = "PYTEST_CURRENT_TEST"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one for each process, until its end


def mark() -> None:
    """From here on each process that is started belongs to these tests, and has the default signal handlers.

    Under nohup SIGHUP arrives ignored, in a background job SIGINT, and what is ignored stays so in all that is started;
    what has a handler is reset in it.
    """
    os.environ[_THESE_TESTS] = str(os.getpid())
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def command_line(process: psutil.Process) -> str:
    """Its words; none where it has ended or is a zombie."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie does not, whose parent may never bury it."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def children(word: str) -> list[psutil.Process]:
    """This process's children whose command line has ``word`` in it."""
    return [child for child in psutil.Process().children() if word in command_line(child)]


def cell_of(process: psutil.Process) -> psutil.Process | None:
    """The process that runs a cell: the fork server's child that writes a cell's log (its canary does not)."""
    with suppress(psutil.Error):
        for child in process.children(recursive=True):
            with suppress(OSError):  # it has ended
                log = os.readlink(f"/proc/{child.pid}/fd/1")
                if log.endswith(".log") and not log.endswith("forkserver.log"):
                    return child
    return None


def _comes_true(condition: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    """Tell whether the condition is true of the process within a few seconds, or the process is gone."""
    for _ in range(500):
        with suppress(psutil.Error):
            if not is_alive(process) or condition(process):
                return True
        time.sleep(0.01)
    return False


def end_left_behind(test: str | None = None) -> list[str]:
    """Kill what this test has left running, or any test: their names and command lines."""
    here = psutil.Process()
    below = here.children(recursive=True)
    for one in below:  # for a moment after a program's start Linux shows its environment as empty
        _comes_true(lambda started: bool(started.environ()), one)
    forked = [one for one in below if command_line(one) == command_line(here)]
    left = dict.fromkeys(forked, "forked")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            name, _, stage = environment.get(_TEST, "").rpartition(" ")
            ours = environment.get(_THESE_TESTS) == str(here.pid) and stage == "(call)"
            if ours and test in (None, name) and not any(helper in command_line(process) for helper in _HELPERS):
                left[process] = name
    found = [f"{name}: {process.pid} {command_line(process)}" for process, name in left.items()]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    for process in left:  # a signal is on its way for a moment, too
        _comes_true(lambda killed: not is_alive(killed), process)
    return found


def run_until(
    words: Sequence[str],
    log: Path,
    is_enough: Callable[[], bool] | None,
    end: Callable[[subprocess.Popen[bytes]], None] = lambda process: os.killpg(process.pid, signal.SIGKILL),
    **options: Any,
) -> tuple[int, str]:
    """(status, output) of a command in a session of its own, ended by ``end`` once ``is_enough``; None: by itself."""
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, **options)
    while process.poll() is None and (is_enough is None or not is_enough()):
        time.sleep(0.1)
    if is_enough is not None:
        with suppress(ProcessLookupError):  # it ended by itself between two looks
            end(process)
    return process.wait(), log.read_text()
