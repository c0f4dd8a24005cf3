"""A fork server: the libraries are loaded once, each cell gets a fresh child in milliseconds.

``python -m vramprobe.measure.forkserver [MODEL_TYPE …]`` reads one JSON request per line on stdin (``spec``,
``record``, ``log``) and answers ``{"pid": …}`` at the start and ``{"exit": …}`` at the end of each child. One child at
a time, never reused. It serves the cpu instrument: a server that must prove it never touched CUDA is a later matter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

_PRELOADED = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", 
              "vramprobe.measure.worker", "vramprobe.measure.cpu", "vramprobe.workload.training",
              "transformers.models.auto.modeling_auto", "transformers.integrations.bitsandbytes")  # fmt: skip


def is_available() -> bool:
    """Whether this system has what the server needs: fork, and Linux's pidfd to wait for two things at once."""
    return hasattr(os, "fork") and hasattr(os, "pidfd_open")


class ServerEnded(Exception):
    """The server went while it had a cell; ``status`` is its exit status (negative: the signal that ended it)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class ForkServer:
    """The runner's handle on a server process. ``run`` may raise ServerEnded; ``close`` ends server and child."""

    def __init__(self, model_types: list[str], env: dict[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vramprobe.measure.forkserver", *sorted(set(model_types))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=env, start_new_session=True, bufsize=0,
            )  # fmt: skip
        self._child: int | None = None

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None:
        """The child's exit status (negative: the signal that ended it), or None when its time ran out."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise ServerEnded(self._process.wait()) from None
        self._child = self._answer(None)["pid"]
        answer = self._answer(timeout_seconds)
        if answer is None:
            self.kill_child()
            self._answer(None)
        self._child = None
        return answer and answer["exit"]

    def kill_child(self) -> None:
        """SIGKILL to the running cell, if there is one."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def close(self) -> None:
        """End the server at once; a running child goes with it (see ``_die_with_the_server``)."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """One line from the server; None on time-out. Raises ServerEnded when it is gone."""
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise ServerEnded(self._process.wait())
        return json.loads(line)


def serve(model_types: list[str]) -> None:
    """Load, freeze, then serve requests until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print while they load must not speak in the protocol
    for name in _PRELOADED:
        importlib.import_module(name)
    for model_type in model_types:
        with contextlib.suppress(ImportError):  # an unknown type is the child's error to report
            importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    gc.collect()
    gc.freeze()  # children neither scan nor copy what the server loaded
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    while line := requests.readline():
        pid = os.fork()
        if pid == 0:
            _become_the_cell(json.loads(line))
        _say(answers, {"pid": pid})
        _say(answers, {"exit": _wait(pid, requests.fileno())})


def _become_the_cell(request: dict[str, str]) -> None:
    """In the child: log in place of the pipes, run, leave without the parent's clean-up."""
    status = 1
    try:
        _die_with_the_server()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        from vramprobe.measure.worker import work

        work(request["spec"], Path(request["record"]), "forkserver")
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_the_server() -> None:
    """Linux kills this process when its parent dies, however that comes about (prctl(2), PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait(pid: int, stdin: int) -> int:
    """The child's exit status; if the runner goes first, so does the child."""
    pidfd = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([pidfd, stdin], [], [])
        if pidfd not in ready:  # only end of file: the runner sends nothing while a cell runs
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _say(answers: TextIO, message: dict[str, int]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1:])
