"""Exceptions that nobody caught: each process of a command leaves its own, whatever its launcher says of it later.

In: the run's folder. Out: a line in its file ``uncaught``: pid, rank, time, the exception in words, its stack, the
innermost frame first. torch is not needed: a rank may fail before it imports it.
"""

import atexit
import os
import sys
import time
import traceback

from .journal import append, complain, hook_folders

FILE = "uncaught"
_MAX_CHARS, _MAX_FRAMES = 2000, 50


def note_uncaught(folder):
    """Write this process's exception as it ends; by sys.last_value, which no program's own excepthook takes away."""
    atexit.register(_note, folder)


def _note(folder):
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt):
        return
    try:
        frames = traceback.extract_tb(error.__traceback__)[::-1][:_MAX_FRAMES]
        stack = [[at.filename, at.lineno, at.name] for at in frames if not at.filename.startswith(hook_folders())]
        rank = os.environ.get("RANK", "")
        said = {
            "pid": os.getpid(),
            "rank": int(rank) if rank.isdecimal() else None,
            "time_ns": time.time_ns(),
            "error": "".join(traceback.format_exception_only(error)).strip()[:_MAX_CHARS],
            "stack": stack,
        }
        append(folder, FILE, said)
    except OSError:  # a folder that is gone, a program that may not write: it has said its error itself
        return
    except Exception as failed:  # an error that cannot be said
        complain(failed)
