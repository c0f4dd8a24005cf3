"""A command that is kept: it has ended when this says so, and with it all that it had started.

In: a command's words, its environment, a run's folder, where its stderr goes. Out: its status and how many processes it
had left behind. On Linux through a supervisor (supervisor.py), which ends the command where this process is killed;
elsewhere the processes are found by the run's mark in their environment alone.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vramprobe.errors import SpecError
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.sweep.signals import woken_by_signals

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_DYING_SECONDS = 10.0


class Kept:
    """A command that runs. ``wait`` once, ``interrupt`` and ``end`` as often as one likes, ``close`` at last."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: Path, stderr: int) -> None:
        """Raises SpecError where it cannot be started."""
        self._folder, self._socket = folder, None
        if sys.platform != "linux":
            try:
                self._process = subprocess.Popen(words, env=environment, stderr=stderr)
            except OSError as error:
                raise _cannot_start(words, error.strerror) from None
            return
        self._socket, theirs = socket.socketpair()
        ours_on_stderr = os.dup(2)
        with theirs:
            try:
                descriptors = (theirs.fileno(), ours_on_stderr)
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SUPERVISOR), *map(str, descriptors)],
                    stderr=stderr,
                    pass_fds=descriptors,
                )
            finally:
                os.close(ours_on_stderr)
        self._received = b""
        try:
            told = {"command": words, "environment": environment, "folder": str(folder)}
            with suppress(OSError):  # a supervisor that was killed is heard of below
                self._socket.sendall(json.dumps(told).encode() + b"\n")
            heard = self._heard()
            if "errno" in heard:
                raise _cannot_start(words, os.strerror(heard["errno"]))
        except BaseException:  # a signal may come at any moment
            self.close()
            raise

    def interrupt(self) -> None:
        """Hand on an interrupt that came to this process alone; a terminal's has reached the command already."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall(b"interrupt\n")

    def end(self) -> None:
        """End it, kindly at first; ``wait`` goes on until it has."""
        if self._socket is None:
            self._process.terminate()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> tuple[int, int]:
        """-> (its status, negative for the signal that killed it; the number of processes that it left behind)."""
        if self._socket is None:
            status, num_left = self._process.wait(), 0
        else:
            with woken_by_signals() as awake:
                heard = self._heard(awake)
            status, num_left = heard.get("status"), heard.get("num_left", 0)
            self._process.wait(_DYING_SECONDS)
        return -signal.SIGKILL if status is None else status, num_left + self._end_marked()

    def close(self) -> None:
        """Nothing of it is left afterwards."""
        self.end()
        if self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2 * _DYING_SECONDS)
            self._end_marked()
        if self._socket is not None:  # until then the supervisor is heard: it would say that this process was killed
            self._socket.close()

    def _heard(self, awake: int | None = None) -> dict[str, Any]:
        """One line of the supervisor's; empty where it was killed. ``awake``: what signals write to."""
        assert self._socket is not None
        waited = [self._socket] if awake is None else [self._socket, awake]
        with suppress(OSError):
            while b"\n" not in self._received:
                ready, _, _ = select.select(waited, [], [])
                if awake is not None and awake in ready:
                    os.read(awake, 4096)
                if self._socket in ready:
                    chunk = self._socket.recv(65536)
                    if not chunk:
                        return {}
                    self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line) if line else {}

    def _end_marked(self) -> int:
        """End the processes that carry this run's mark, wherever they are; -> how many there were."""
        left = list(_marked(self._folder))
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with suppress(psutil.Error):
                    end(process)
            _, alive = psutil.wait_procs(left, timeout=_DYING_SECONDS)
            if not alive:
                break
        return len(left)


def _cannot_start(words: list[str], why: str) -> SpecError:
    return SpecError(f"{words[0]} cannot be started: {why}; name a program, or what runs it: python train.py")


def _marked(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_marked = process.environ().get(FOLDER_VARIABLE) == str(folder)
            if is_marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
