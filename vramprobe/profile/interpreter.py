"""Find the Python that a command's words start: its own, its script's, or the one on PATH.

In: a command, an environment. Out: an interpreter's path. It looks at files and asks the interpreter for its name;
nothing of the command runs.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from vramprobe.errors import SpecError

_HEAD_BYTES = 1024
#: What pip writes where the interpreter's path is too long for a first line: ``'''exec' /its/path "$0" "$@"``.
_LONG_SHEBANG = re.compile(rb"^'''exec' \"?([^\"\n]+?)\"? \"\$0\"", re.M)
_IS_PYTHON = re.compile(r"python[\d.]*$")


def executable_of(command: list[str], environment: Mapping[str, str]) -> Path:
    """The file that the first word names. Raises SpecError where there is none that can be run."""
    found = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if found is None:
        raise SpecError(
            f"there is no command {command[0]!r} here: give one that a shell would find, e.g. "
            "vramprobe profile -- python train.py"
        )
    return Path(found)


def interpreter_of(command: list[str], environment: Mapping[str, str]) -> Path:
    """The Python that runs the command; where that cannot be told (a shell script, ``uv run``), the one on PATH.

    Raises SpecError where there is none.
    """
    found = executable_of(command, environment)
    candidate = found if _IS_PYTHON.search(found.name) else _of_script(found, environment)
    if candidate is None:
        named = next((path for name in ("python", "python3") if (path := _which(name, environment))), None)
        if named is None:
            raise SpecError(f"{found} starts no Python that can be told, and there is none on PATH: put it there")
        candidate = named
    return _asked(candidate, environment)


def value_of(command: Sequence[str], *options: str) -> str | None:
    """Value of the first of these options that the words give, ``--name VALUE`` or ``--name=VALUE``; None without."""
    split = [part for word in command for part in word.split("=", 1)]
    return next((value for option, value in pairwise(split) if option.replace("_", "-") in options), None)


def _of_script(path: Path, environment: Mapping[str, str]) -> Path | None:
    """The Python of a script's first line."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if not head.startswith(b"#!"):
        return None
    if long := _LONG_SHEBANG.search(head):
        return Path(os.fsdecode(long[1]))
    words = shlex.split(os.fsdecode(head[2:].splitlines()[0]))
    words = [word for word in words if not word.startswith("-")]
    if not words or not _IS_PYTHON.search(words[-1]):
        return None
    return Path(words[-1]) if os.path.isabs(words[-1]) else _which(words[-1], environment)


def _which(name: str, environment: Mapping[str, str]) -> Path | None:
    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    return Path(found) if found else None


def _asked(python: Path, environment: Mapping[str, str]) -> Path:
    """Ask a shim for the interpreter's own path; return the shim where it does not answer."""
    try:
        run = subprocess.run(
            [python, "-c", "import sys; print(sys.executable)"],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return python
    said = run.stdout.strip().splitlines()
    return Path(said[-1]) if said else python
