"""What became of each attempt at a published row, or at another run: JSON lines, appended and never changed.

In and out: dictionaries with ``line`` (or another key that names what was run), ``fingerprint`` and ``outcome``. A line
that was torn (a full disk, a kill) is passed over, and the next one starts on a line of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


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


def latest(entries: list[Entry], *, outcome: str | None = None) -> dict[int, Entry]:
    """The last entry of each line of published.csv (of this outcome), by line."""
    return {entry["line"]: entry for entry in entries if outcome in (None, entry["outcome"])}
