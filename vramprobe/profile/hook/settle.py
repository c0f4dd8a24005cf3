"""Processes that others end by force, a server's engine or Ray's workers, write what they have been seen to do before.

In: the run's folder, a Watch. Out: the journal's line ``end`` and the history, from a thread of each process that
listens, once a file asks for it: that of the client (requests.py), of a program that leaves Ray, or of a trainer whose
engine has processes of its own.
"""

import atexit
import functools
import os
import sys
import threading
import time

from .journal import complain

#: The file by which it is asked for; a process has answered once its journal has a line ``settled``.
FILE = "settle"
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 300.0
_LISTENS, _ANSWER = b'{"line": "listens"', b'{"line": "settled"'


def is_of_ray():
    """Return True if Ray has started this process, or one that it has started has."""
    return bool(sys.argv) and sys.argv[0].endswith("ray/_private/workers/default_worker.py")


def listen(folder, watch):
    """Write so far as soon as it is asked for; twice is once."""
    if not watch.is_listening:
        watch.is_listening = True
        watch.line("listens")
        threading.Thread(target=_wait, args=(os.path.join(folder, FILE), watch), daemon=True).start()


def ask(folder):
    """Have every process that listens write, and wait for those that are there."""
    try:
        journals = [entry.path for entry in os.scandir(folder) if entry.name.endswith(".jsonl")]
    except OSError:  # the folder is gone: nobody can write
        return
    awaited = [path for path in journals if _is_there(path) and _holds(path, _LISTENS) and not _holds(path, _ANSWER)]
    if not awaited:
        return
    with open(os.path.join(folder, FILE), "a", encoding="utf-8"):
        pass
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until and not all(not _is_there(path) or _holds(path, _ANSWER) for path in awaited):
        time.sleep(_POLL_SECONDS)


def before_ray_ends(folder, worker):
    """``ray._private.worker``: as the program leaves Ray, or ends, Ray kills its workers."""
    leave = worker.shutdown

    def asked():
        try:
            if worker.global_worker.connected and worker.global_worker.mode == worker.SCRIPT_MODE:
                ask(folder)
        except Exception as error:
            complain(error)

    @functools.wraps(leave)
    def shutdown(*args, **kwargs):
        asked()
        return leave(*args, **kwargs)

    worker.shutdown = shutdown
    atexit.register(asked)  # Ray has registered its own before


def _wait(path, watch):
    while not os.path.exists(path):
        if watch.is_ending or watch.is_of_another_process:
            return
        time.sleep(_POLL_SECONDS)
    import torch  # which has been imported

    try:
        own = max(watch.counters.cards(), key=torch.cuda.memory_allocated, default=None)  # a thread's is the first
        with torch.cuda.device(own):
            watch.write_so_far()
        watch.line("settled")
    except Exception as error:
        complain(error)


def _holds(path, line):
    with open(path, "rb") as file:
        return line in file.read()


def _is_there(path):
    """Return True if the process of a journal runs: it has not ended, as one that nobody has waited for has."""
    try:
        with open(f"/proc/{os.path.basename(path).removesuffix('.jsonl')}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
