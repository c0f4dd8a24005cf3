"""This very process under the hook: a notebook's kernel (cli/notebook.py), a block of a program (interop/watch.py).

In: nothing. Out: a run's folder with this process's files, which goes when it ends; what was seen so far on demand; its
output elsewhere, while a command runs whose output is not wanted.
"""

import atexit
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vramprobe.emulate.values import hook as values_hook
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.profile.launch import HOOK, Options, told_at_start, write_told


def folder_here() -> Path | None:
    """The run's folder that this process writes to, a command's or its own; None where it is not watched."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def watch(command: Sequence[str] = ("notebook",), trace: str = "step") -> None:
    """Watch this process, named ``command``, as a command's would be, and those that it starts. Raises StoreError."""
    folder = Path(tempfile.mkdtemp(prefix="vramprobe-profile-"))
    atexit.register(_remove, folder, os.getpid())
    write_told(folder, told_at_start(command, Options(trace=trace, steps=None)) | {"watched_pid": os.getpid()})
    site = values_hook.site_folder(str(folder), also=[HOOK])
    os.environ[FOLDER_VARIABLE] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    runpy.run_path(os.path.join(site, "vramprobe_watch.py"))


@contextmanager
def redirected(numbers: Sequence[int], to: int | str) -> Iterator[None]:
    """Send what this process and its children write to these descriptors elsewhere, to a descriptor or a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in numbers]
    opened = os.open(to, os.O_WRONLY) if isinstance(to, str) else os.dup(to)
    for number in numbers:
        os.dup2(opened, number)
    os.close(opened)
    try:
        yield
    finally:
        for number, own in zip(numbers, kept, strict=True):
            os.dup2(own, number)
            os.close(own)


def write_so_far(folder: Path, error_lines: Sequence[str] = ()) -> None:
    """Write this process's files as if it ended here, by an error where its lines are given. Raises StoreError."""
    if (hook := sys.modules.get("vramprobe_profile.start")) is not None:
        hook.write_so_far()
    with suppress(OSError, ValueError):
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if told.get("watched_pid") == os.getpid():
            tail = [line for lines in error_lines for line in lines.splitlines()]
            ended = {"ended_ns": time.time_ns(), "exit_status": int(bool(tail)), "tail": tail}
            write_told(folder, told | ended)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # no child's
        shutil.rmtree(folder, ignore_errors=True)
