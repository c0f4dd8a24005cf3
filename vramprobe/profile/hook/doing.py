"""Write a process's current activity every two seconds: all that is known of a phase in which it is killed.

In: the run's folder, this process's watches. Out: ``<pid>.doing``: a line of JSON, then the stacks of all threads as
faulthandler writes them, which takes no reference to a frame: its tensors are freed when the program frees them.
"""

import faulthandler
import json
import os
import sys
import threading
import time

from . import generation
from .journal import complain

_SECONDS = 2.0


def note_doing(folder, watches):
    """From now on, until the process ends; a forked child has no such thread."""
    threading.Thread(target=_write, args=(folder, watches), daemon=True).start()


def _write(folder, watches):
    path = os.path.join(folder, f"{os.getpid()}.doing")
    while not sys.is_finalizing():
        try:
            with open(path + ".part", "w", encoding="utf-8") as file:
                file.write(json.dumps(_said(watches)) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            os.replace(path + ".part", path)
        except Exception as error:  # a folder that is gone: the program goes on
            complain(error)
            return
        time.sleep(_SECONDS)


def _said(watches):
    said = {"pid": os.getpid(), "time_ns": time.time_ns(), "main_thread": threading.main_thread().ident}
    for watch in watches[-1:]:
        phases = watch.phases
        said |= {
            "phase": phases.name,
            "step": phases.step,
            "num_steps": phases.steps,
            "num_phases": phases.num_phases.get(phases.name, 0),
            "allocated_bytes": watch.counters.allocated_now(),
            "says_its_pace": bool(generation.told),
        }
    return said
