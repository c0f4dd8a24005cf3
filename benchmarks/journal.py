"""Journals of runs: JSON lines, appended and never changed, of which the last of each run counts; one profile anew.

In and out: dictionaries with ``line`` (or another key that names what was run), ``fingerprint`` and ``outcome``, or
the profiles that ``vramprobe profile --save`` appends. A line that was torn (a full disk, a kill) is passed over, and
the next one starts on a line of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vramprobe.records.profile import ProfileRecord, read_profiles

Entry = dict[str, Any]
Row = TypeVar("Row", bound=Hashable)


def profiled(
    options: Sequence[str],
    command: Sequence[str],
    *,
    cwd: Path | str,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Entry:
    """The profile that ``vramprobe profile OPTIONS -- COMMAND`` made, whatever the command's exit code, as JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "profile.jsonl"
        words = [sys.executable, "-m", "vramprobe", "profile", *options, "--save", str(saved), "--", *command]
        out = subprocess.DEVNULL if quiet else None
        subprocess.run(words, cwd=cwd, env=os.environ | dict(environment or {}), stdout=out, check=False)
        return json.loads(saved.read_text().splitlines()[-1])


def append(path: Path, entry: Entry) -> None:
    """On the disk when this returns."""
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = b"" if file.read(1) == b"\n" else b"\n"
        else:
            torn = b""
        file.write(torn + json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, key: str = "line") -> list[Entry]:
    """Every whole entry, in order; ``key``: what names the run."""
    entries = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {key, "fingerprint", "outcome"} <= entry.keys():
            entries.append(entry)
    return entries


def latest(entries: list[Entry], key: str = "line", *, outcome: str | None = None) -> dict[Any, Entry]:
    """The last entry of each run (of this outcome), by ``key``."""
    return {entry[key]: entry for entry in entries if outcome in (None, entry["outcome"])}


def latest_profiles(path: Path, rows_of: Callable[[ProfileRecord], Iterable[Row]]) -> dict[Row, ProfileRecord]:
    """The last profile of each row; ``rows_of`` a profile are those that it is a run of."""
    return {row: record for record in (read_profiles(path) if path.exists() else ()) for row in rows_of(record)}
