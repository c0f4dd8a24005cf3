"""The command as a user starts it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vramprobe as package

#: From any folder, the package that the tests import is the one that runs.
HERE = str(Path(package.__file__).parents[1])


def vramprobe(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vramprobe", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=os.environ | (env or {}) | {"PYTHONPATH": HERE}
    )
