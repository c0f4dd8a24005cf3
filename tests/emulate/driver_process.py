"""The driver of the emulated GPU, compiled once a session, and a way to use it in a process of its own.

A driver keeps its state for as long as its process lives, so every use is a forked child: ``in_process(function,
machine)`` calls ``function(Driver)`` there and gives back what it returns, or raises what it raised.
"""

import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_client import Driver

from vramprobe.emulate.machine import MachinePolicy, write_machine

SOURCES = Path(__file__).parents[2] / "vramprobe" / "emulate" / "driver"
MIB = 1 << 20
FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not found:
        pytest.skip("no C compiler: cc, gcc and clang are not on PATH")
    return found


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("driver") / "libvramprobe_driver.so"
    command = [compiler(), *FLAGS, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(to), "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to


def card(total_bytes: int = 1024 * MIB, **changed: object) -> types.SimpleNamespace:
    """A small card with the shape of an A100."""
    properties = {
        "name": "Emulated Test Card",
        "compute_capability": (8, 0),
        "total_bytes": total_bytes,
        "nvml_total_bytes": total_bytes + 100 * MIB,
        "sm_count": 108,
        "shared_memory_per_block_bytes": 48 << 10,
        "shared_memory_per_block_optin_bytes": 163 << 10,
        "shared_memory_per_sm_bytes": 164 << 10,
        "threads_per_sm": 2048,
        "blocks_per_sm": 32,
        "registers_per_sm": 65536,
        "l2_bytes": 40 * MIB,
        "memory_bus_bits": 5120,
        "clock_khz": 1410000,
        "memory_clock_khz": 1215000,
        "integrated": 0,
    }
    return types.SimpleNamespace(**(properties | changed))


@pytest.fixture
def make_machine(tmp_path: Path) -> Callable[..., Path]:
    """make_machine(num_devices=1, total_bytes=..., **policy) → a new machine's folder."""
    made = 0

    def make(num_devices: int = 1, total_bytes: int = 1024 * MIB, **policy: object) -> Path:
        nonlocal made
        made += 1
        policy.setdefault("context_bytes", 100 * MIB)
        return write_machine(tmp_path / f"machine{made}", [card(total_bytes)] * num_devices, MachinePolicy(**policy))

    return make


class Child:
    """A forked process that runs ``function(Driver)``; ``result()`` waits for it."""

    def __init__(self, library: Path, function: Callable, machine: Path | None, environment: dict[str, str]) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking where threads run: the child starts none
            self.pid = os.fork()
        if self.pid:
            os.close(write)
            self._status: int | None = None
            return
        try:
            faulthandler.disable()  # a run that ends by design is no crash of pytest's
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VRAMPROBE_EMULATED_MACHINE"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            if machine:
                os.environ["VRAMPROBE_EMULATED_MACHINE"] = str(machine)
            errors = os.environ.get("TEST_STDERR")
            if errors:
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            answer = (True, function(Driver(library)))
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def result(self) -> object:
        with os.fdopen(self._read, "rb") as pipe:
            data = pipe.read()
        status = self.wait()
        assert data, f"the child ended with status {status} and no answer"
        ok, value = pickle.loads(data)
        assert ok, value
        return value


@pytest.fixture
def start_process(driver_library: Path) -> Callable[..., Child]:
    def start(function: Callable, machine: Path | None, **environment: str) -> Child:
        return Child(driver_library, function, machine, environment)

    return start


@pytest.fixture
def in_process(start_process: Callable[..., Child]) -> Callable[..., object]:
    def run(function: Callable, machine: Path | None, **environment: str) -> object:
        return start_process(function, machine, **environment).result()

    return run


def on_card(
    *, returns: object = None, **machine: object
) -> Callable[[Callable[[Driver], object]], Callable[..., None]]:
    """Run the test in a process of its own, on a new machine of these words; it must return ``returns``."""

    def decorate(test: Callable[[Driver], object]) -> Callable[..., None]:
        def run_test(make_machine: Callable[..., Path], in_process: Callable[..., object]) -> None:
            found = in_process(test, make_machine(**machine))
            assert found == returns, found

        run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
        return run_test

    return decorate
