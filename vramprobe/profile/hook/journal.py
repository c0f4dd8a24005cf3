"""One process's lines in the run's folder: each is whole on disk before the program goes on.

In: dicts. Out: ``<pid>.jsonl``. A folder that is full or gone costs the profile, never the program.
"""

import json
import os
import sys
import threading

#: The run's folder.
FOLDER_VARIABLE = "VRAMPROBE_PROFILE"


class Journal:
    """Lines of this process; after a fork the child has a file of its own."""

    def __init__(self, folder):
        self.folder, self._pid, self._file, self._lock = folder, None, None, threading.Lock()

    def write(self, line, **fields):
        """One line of this kind, flushed."""
        with self._lock:
            try:
                if self._pid != os.getpid():
                    self._pid = os.getpid()
                    self._file = open(self.path(".jsonl"), "a", encoding="utf-8")  # noqa: SIM115
                self._file.write(json.dumps({"line": line, **fields}) + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                complain(error)

    def path(self, suffix):
        """This process's file of that kind."""
        return os.path.join(self.folder, f"{os.getpid()}{suffix}")


def hook_folders():
    """Where the frames are that vramprobe's hooks add to the program's stacks."""
    values = sys.modules.get("vramprobe_values")
    folders = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(values.__file__) if values else None]
    return tuple(folder + os.sep for folder in folders if folder)


_complained = set()


def complain(error):
    """One line on stderr for each kind of trouble; the program goes on."""
    said = f"{type(error).__name__}: {error}"
    if said not in _complained:
        _complained.add(said)
        print(f"vramprobe: this process is not fully profiled: {said}", file=sys.stderr)
