"""A process that ends with the one that started it, however that comes about."""

import ctypes
import os
import signal
import threading


def die_with(parent: int) -> None:
    """Linux kills this process when its parent dies, however that comes about (prctl(2), PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we could ask for that
        os._exit(137)


def die_with_stdin() -> None:
    """Exit when stdin closes: a runner killed outright must not leave a worker on the GPU."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: a daemon thread that holds its lock aborts the interpreter as it ends
            pass
        os._exit(137)

    threading.Thread(target=watch, daemon=True).start()
