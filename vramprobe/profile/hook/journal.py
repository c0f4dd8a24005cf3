"""One process's lines in the run's folder: each is whole on disk before the program goes on.

In: dicts. Out: ``<pid>.jsonl``. A folder that is full or gone costs the profile, never the program.
"""

import contextlib
import errno
import json
import os
import sys
import threading

#: The run's folder.
FOLDER_VARIABLE = "VRAMPROBE_PROFILE"


class ProcessJournal:
    """Lines of this process."""

    def __init__(self, folder):
        self.folder, self._lock = folder, threading.Lock()
        self._pid, self._descriptor, self._inode, self._is_closed = None, None, None, False

    def close(self):
        """Nothing more is written, by this process or those that it forks."""
        self._is_closed = True

    def discard(self):
        """Close the journal, and delete it: its lines do not belong to the run."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path(".jsonl"))

    def write(self, line, **fields):
        """One line of this kind, at once and whole, or nothing."""
        if self._is_closed:
            return
        with self._lock:
            try:
                text = (json.dumps({"line": line, **fields}) + "\n").encode()
                size_bytes = self._opened()
                if os.write(self._descriptor, text) < len(text):
                    os.ftruncate(self._descriptor, size_bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except (OSError, ValueError) as error:
                complain(error)

    def _opened(self):
        """The file's size, once it is open: the program may have closed it, and have its own under our number."""
        if self._pid == os.getpid():
            try:
                found = os.fstat(self._descriptor)
                if (found.st_dev, found.st_ino) == self._inode:
                    return found.st_size
            except (OSError, TypeError):  # closed, or never opened
                pass
        self._descriptor = os.open(self.path(".jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        found = os.fstat(self._descriptor)
        self._pid, self._inode = os.getpid(), (found.st_dev, found.st_ino)
        return found.st_size

    def path(self, suffix):
        """This process's file of that kind."""
        return os.path.join(self.folder, f"{os.getpid()}{suffix}")


def warn(watches, message):
    """Add a warning to the profile where this process is watched; ``watches``: the list of its own."""
    for watch in watches[-1:]:
        watch.line("warning", message=message)


def append(folder, file, said):
    """Add a line to a file that all processes of the run write to. Raises OSError."""
    descriptor = os.open(os.path.join(folder, file), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, (json.dumps(said) + "\n").encode())
    finally:
        os.close(descriptor)


def hook_folders():
    """Return the folders of the frames that vramprobe's hooks add to the program's stacks."""
    from vramprobe_values.reads import OWN_FOLDERS

    return tuple(OWN_FOLDERS)


_complained = set()


def complain(error):
    """One line on stderr for each kind of trouble; the program goes on."""
    said = f"{type(error).__name__}: {error}"
    if said not in _complained:
        _complained.add(said)
        tell(f"this process is not fully profiled: {said}")


def tell(message):
    """One line on stderr."""
    with contextlib.suppress(OSError, ValueError):  # the program may have closed its stderr
        print(f"vramprobe: {message}", file=sys.stderr, flush=True)
