"""A worker process gone wrong, in the way that its cell's seed names; for tests/sweep/test_faults.py.

Run in place of the interpreter, as ``python faulty_worker.py -m MODULE …``: the module runs as it is, but for what the
worker does with a request.
"""

import json
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

from vramprobe.measure import worker

_real_work = worker.work


def exit_0_without_a_record(request: dict[str, str]) -> None:
    os._exit(0)


def exit_3(request: dict[str, str]) -> None:
    os._exit(3)


def print_garbage(request: dict[str, str]) -> None:
    os.write(1, b'{"pid": 1}\n{"exit": 0}\n' + os.urandom(100_000))
    os._exit(0)


def leave_garbage_for_a_record(request: dict[str, str]) -> None:
    Path(request["record"]).write_bytes(os.urandom(1000))


def leave_half_a_record(request: dict[str, str]) -> None:
    _real_work(request)
    path = Path(request["record"])
    path.write_bytes(path.read_bytes()[:-100])


def leave_the_record_of_another_attempt(request: dict[str, str]) -> None:
    _real_work(request | {"attempt_id": "another"})


def raise_an_exception(request: dict[str, str]) -> None:
    raise RuntimeError("a bug in the worker itself")


def segfault(request: dict[str, str]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(request: dict[str, str]) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    Path(request["status"]).write_text("backward 2".ljust(32))
    time.sleep(1000)


def exhaust_host_memory(request: dict[str, str]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    _real_work(request)


def kill_the_server(request: dict[str, str]) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


#: By the cell's seed, from 1; a cell with seed 0 is left alone.
FAULTS = (
    exit_0_without_a_record,
    exit_3,
    print_garbage,
    leave_garbage_for_a_record,
    leave_half_a_record,
    leave_the_record_of_another_attempt,
    raise_an_exception,
    segfault,
    hang,
    exhaust_host_memory,
    kill_the_server,
)


def work(request: dict[str, str]) -> None:
    """The worker's own ``work``, unless the cell's seed names a fault."""
    seed = json.loads(request["spec"])["seed"]
    (FAULTS[seed - 1] if 0 < seed <= len(FAULTS) else _real_work)(request)


if __name__ == "__main__":
    worker.work = work
    module, sys.argv = sys.argv[2], sys.argv[2:]
    if module == "vramprobe.measure.worker":  # spawned: it is the main module itself
        worker._spawned()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
