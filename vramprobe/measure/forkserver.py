"""A fork server: the libraries are loaded once, each cell gets a fresh child in milliseconds.

``python -m vramprobe.measure.forkserver cpu|cuda [MODEL_TYPE …]`` says ``{"ready": null}``, or what makes it unsafe to
fork from, and then reads one JSON request per line on stdin (see :func:`vramprobe.measure.worker.work`), answering
``{"pid": …}`` at the start and ``{"exit": …}`` at the end of each child. One child at a time, never reused.

A CUDA context does not survive a fork, so the server must never make one. That is proven, not hoped: :func:`_unsafe`.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from vramprobe.emulate import machine_folder
from vramprobe.measure import environment, nvml
from vramprobe.measure.lifeline import die_with
from vramprobe.measure.worker import PRELOADED, loading, work

#: These import bitsandbytes, which asks for the device's capability as it loads, and that makes a context.
_PRELOADED_WITH_CARE = (
    "peft",
    "bitsandbytes",
    "transformers.integrations.bitsandbytes",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
)
#: What a cell on an emulated GPU needs besides.
_PRELOADED_EMULATED = (
    "vramprobe.measure.emulation", "vramprobe.measure.log_source", "vramprobe.emulate.values.watch",
    "vramprobe.emulate.values.compiled", "vramprobe.emulate.values.mode", "vramprobe.emulate.values.count.step",
)  # fmt: skip
#: Names a variable of the environment: the modules that a server leaves to its children.
_LEFT_OUT = "VRAMPROBE_FORKSERVER_WITHOUT"
#: What a killed process may take to go.
DYING_SECONDS = 20.0
#: What the canary allocates; NVML must see it, and see it go.
CANARY_BYTES = 256 * 2**20
_CANARY_SECONDS = 60  # a context takes one, or a few where the driver has to be loaded first


def is_available() -> bool:
    """Return True if this system has what the server needs: fork, and Linux's pidfd to wait for two things at once.

    Tried, not looked up: a sandbox may have Python's function and not the kernel's call (gVisor's issue 5839).
    """
    if not hasattr(os, "fork") or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ServerEnded(Exception):
    """The server went while it had a cell; ``status`` is its exit status (negative: the signal that ended it)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class ForkServer:
    """The runner's handle on a server process. ``close`` ends server and child; the others may raise ServerEnded."""

    def __init__(self, device: str, model_types: list[str], env: dict[str, str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vramprobe.measure.forkserver", device, *sorted(set(model_types))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
                start_new_session=True,
                bufsize=0,
            )
        self._child: int | None = None

    def unsafe(self, timeout_seconds: float) -> str | None:
        """Waits until the server has loaded everything; why it must not be forked from, None where it may."""
        answer = self._answer(timeout_seconds)
        return answer["ready"] if answer else f"it was not ready after {timeout_seconds:.0f} s"

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
            if self._answer(DYING_SECONDS) is None:  # it hangs in a driver: this server cannot be waited for
                raise ServerEnded(-signal.SIGKILL)
        self._child = None
        return answer and answer["exit"]

    def kill_child(self) -> None:
        """SIGKILL to the running cell, if there is one."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def close(self) -> None:
        """End the server at once; a running child goes with it (see ``die_with``)."""
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


def serve(device: str, model_types: list[str]) -> None:
    """Load, prove, freeze, then serve requests until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print while they load must not speak in the protocol
    left_out = os.environ.get(_LEFT_OUT, "").split()
    try:
        with loading():
            why = _load(device, model_types, left_out)
    except _InitialisedCuda as library:
        os.dup2(answers.fileno(), 1)
        _begin_without([*left_out, str(library)])
    why = why or _unsafe(device)
    _say(answers, {"ready": why})
    if why is not None:
        return
    gc.collect()
    gc.freeze()  # children neither scan nor copy what the server loaded
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    server = os.getpid()
    while line := requests.readline():
        pid = os.fork()
        if pid == 0:
            _become_the_cell(json.loads(line), server)
        _say(answers, {"pid": pid})
        _say(answers, {"exit": _wait(pid, requests.fileno())})


class _InitialisedCuda(Exception):
    """Importing this module opened the driver: a child of this process could not use the GPU."""


def _begin_without(left_out: list[str]) -> NoReturn:
    """Become a new server that leaves these modules to its children; the runner, which waits, need not know."""
    sys.stderr.write(f"fork server: {left_out[-1]} initialises CUDA as it loads: each cell loads it anew\n")
    os.environ[_LEFT_OUT] = " ".join(left_out)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vramprobe.measure.forkserver", *sys.argv[1:]])


def _import(name: str, left_out: list[str]) -> None:
    """Import ``name`` unless it is left out. Raises _InitialisedCuda where that opened the driver."""
    if name in left_out:
        return
    was_open = _has_the_driver_open()
    importlib.import_module(name)
    if _has_the_driver_open() and not was_open:
        raise _InitialisedCuda(name)


def _load(device: str, model_types: list[str], left_out: list[str]) -> str | None:
    """Import what cells use, and ask the slow questions that every record answers alike; why that cannot be done.

    Raises _InitialisedCuda for the module that a child must load for itself.
    """
    emulated = _PRELOADED_EMULATED if device == "cuda" and machine_folder() is not None else ()
    for name in (*PRELOADED, f"vramprobe.measure.{device}", *emulated):
        _import(name, left_out)
    for model_type in model_types:
        with contextlib.suppress(ImportError):  # an unknown type is the child's error to report
            importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    environment.remember()
    with contextlib.ExitStack() as care:
        if device == "cuda":
            capability = nvml.compute_capability()
            if capability is None:
                return "NVML does not tell the GPU's compute capability, and asking CUDA for it makes a context"
            care.enter_context(_capability_is_known(capability))
        for name in _PRELOADED_WITH_CARE:
            with contextlib.suppress(ImportError):  # not installed: a cell that needs it is refused by the runner
                _import(name, left_out)
    with contextlib.suppress(ImportError):  # transformers' own, and built anew (50 ms) by each child that lacks it
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # for any type the table of all types is built
    return None


@contextlib.contextmanager
def _capability_is_known(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, torch answers the question for the device's capability from NVML, without a context."""
    import torch

    ask = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = ask


def _unsafe(device: str) -> str | None:
    """Return the reason why a child cannot run a cell on ``device``; None once a canary child has allocated there.

    The server itself must not have initialised CUDA, neither through torch nor behind its back; the canary must be able
    to initialise it, allocate, and see with NVML what it allocated. The runner checks that NVML's count came back.
    """
    import torch

    if torch.cuda.is_initialized():
        return "a library has initialised CUDA while it loaded"
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with(server)
        signal.alarm(_CANARY_SECONDS)  # a driver that hangs must end the canary, and then the proof
        os._exit(_canary(device))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return None
    opened = ": a library has initialised the CUDA driver, /dev/nvidia-uvm is open" if _has_the_driver_open() else ""
    return f"the canary, a forked child that allocates on {device}, ended with {status}{opened}"


def _canary(device: str) -> int:
    """In a child: 0 where the device works after the fork; its words go to the server's log.

    NVML's own state does not cross a fork either: whoever asks it initialises it anew, which must work here, as it did
    in the server.
    """
    try:
        import torch

        torch.zeros(1, device=device)
        if device == "cuda":
            watched = nvml.open_first_visible()
            before_bytes = watched.used_bytes() if watched else None
            block = torch.zeros(CANARY_BYTES, dtype=torch.uint8, device=device)
            torch.cuda.synchronize()
            after_bytes = watched.used_bytes() if watched else None
            if before_bytes is None or after_bytes is None:
                raise RuntimeError("NVML answers the server, but not its child")
            if after_bytes - before_bytes < block.nbytes:
                raise RuntimeError(f"NVML saw {after_bytes - before_bytes} bytes of {block.nbytes}")
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def _has_the_driver_open() -> bool:
    return "/dev/nvidia-uvm" in _open_files()


def _open_files() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def _become_the_cell(request: dict[str, str], server: int) -> None:
    """In the child: log in place of the pipes, run, leave without the parent's clean-up."""
    status = 1
    try:
        die_with(server)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        work(request)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
