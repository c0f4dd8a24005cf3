"""Record what was replaced, once for all processes of a run.

In: a sentence's parts. Out: lines of JSON in the run's file ``replaced`` (raw.py reads them). Trouble with the file
costs the line, never the program.
"""

import fcntl
import json
import os
import sys
from contextlib import contextmanager

FILE = "replaced"
#: Errors of huggingface_hub for what is not in its cache while it is offline; libraries raise their own from them.
_OF_THE_HUB = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "EntryNotFoundError", "RepositoryNotFoundError")


class Refused(Exception):
    """Error of something that cannot be replaced, with what to do."""


class Replacements:
    """Those of one run. ``asked``: sizes and ids (stand_ins.py); ``repositories``: its hub.Repositories."""

    def __init__(self, folder, asked=None, repositories=None):
        self.folder, self.asked, self.repositories = folder, asked, repositories
        self._path = os.path.join(folder, FILE)

    def replaced(self, kind, what, by):
        """``kind``: those of records/profile.py."""
        self._once({"kind": kind, "what": what, "by": by})

    def missing(self, message):
        """Record something that could not be replaced, on stderr too, as the command's own error may not name it."""
        if self._once({"kind": "missing", "what": message}):
            print(f"vramprobe: {message}", file=sys.stderr, flush=True)
            _end_in_one_line()

    def _once(self, line):
        """Append a line to the file; return True if it is new."""
        text = json.dumps(line) + "\n"
        try:
            with locked(self._path), open(self._path, "a+", encoding="utf-8") as file:
                file.seek(0)
                if text in file.readlines():
                    return False
                file.write(text)
        except OSError as error:
            complain(error)
        return True


def _end_in_one_line():
    """Print no traceback of the offline hub's own error: the line before it says what is missing, and what to do."""
    usual = sys.excepthook
    if usual.__module__ == __name__:
        return

    def excepthook(kind, error, traceback):
        chain, one = [], error
        while one is not None and one not in chain:
            chain.append(one)
            one = one.__cause__ or one.__context__
        if any(type(one).__name__ in _OF_THE_HUB for one in chain):
            print(f"vramprobe: the command ended for that reason ({kind.__name__})", file=sys.stderr, flush=True)
        else:
            usual(kind, error, traceback)

    sys.excepthook = excepthook


def write_json(folder, name, content):
    """Write one of a repository's files. json.dump would encode in Python, ten times as slowly."""
    path = os.path.join(folder, name)
    if os.path.islink(path):  # to the hub's cache, or to a folder of the user's, which stay as they are
        os.unlink(path)
    with open(path, "w", encoding="utf-8") as out:
        out.write(json.dumps(content))


def link(source, folder):
    """Links to the files of ``source`` and of the folders in it: what is added beside them never gets there."""
    for name in os.listdir(source):
        there = os.path.realpath(os.path.join(source, name))
        if not os.path.isdir(there):
            os.symlink(there, os.path.join(folder, name))
            continue
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        for inner in os.listdir(there):
            os.symlink(os.path.realpath(os.path.join(there, inner)), os.path.join(folder, name, inner))


@contextmanager
def locked(path):
    """Alone among all processes that ask for ``path``."""
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def complain(error):
    """One line on stderr; the program goes on."""
    print(f"vramprobe: nothing stands in for what is missing: {type(error).__name__}: {error}", file=sys.stderr)
