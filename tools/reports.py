"""Rebuild everything that is published from records: ``python tools/reports.py`` (``make readme``).

The commands below, in the order in which they need each other. ``--check`` changes nothing, makes everything anew
beside it, and fails naming each file that is missing or says something else. Folders, such as ``results/claims``: those
alone.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from vramprobe.catalog.own import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "claims --results results -o results/claims",
    "report results/emulated/records.jsonl.xz -o results/emulated --claims results/claims/claims.csv",
    "techniques -o results/techniques",
)


def main() -> None:
    is_check, failed = "--check" in sys.argv, False
    asked = [word for word in sys.argv[1:] if word != "--check"]
    for command in _chosen(asked):
        code = run([*shlex.split(command), *(["--check"] if is_check else [])])
        if code and not is_check:
            sys.exit(code)
        failed = failed or bool(code)
    if failed:
        sys.exit("rebuild what is stale: make readme")


def _chosen(asked: list[str]) -> list[str]:
    """The commands whose first path lies in a folder that was asked for, such as results/claims; all, if none was."""
    folders = {command: next(word for word in command.split() if word.startswith("results/")) for command in COMMANDS}
    found = [one for one, folder in folders.items() if not asked or folder.startswith(tuple(asked))]
    if not found:
        sys.exit(f"{', '.join(asked)}: nothing is made there; published are {', '.join(sorted(set(folders.values())))}")
    return found


def run(words: list[str]) -> int:
    """The exit code of this command of vramprobe, by the recipes that ship alone."""
    print(f"vramprobe {shlex.join(words)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ | {CACHE_VARIABLE: folder}
        whole = [sys.executable, "-m", "vramprobe", *words]
        return subprocess.run(whole, cwd=ROOT, stdout=subprocess.DEVNULL, env=own).returncode


if __name__ == "__main__":
    main()
