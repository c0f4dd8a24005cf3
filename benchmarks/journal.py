"""Journals of runs: JSON lines, appended and never changed, of which the last of each run counts; and new runs.

In and out: dictionaries with ``line`` (or another key that names what was run), ``fingerprint`` and ``outcome``, or
the profiles that ``vramprobe profile --save`` appends. A line that was torn (a full disk, a kill) is passed over, and
the next one starts on a line of its own.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vramprobe.records.profile import ProfileRecord, last_profile, read_profiles

Entry = dict[str, Any]
Row = TypeVar("Row", bound=Hashable)
_DYING_SECONDS = 30.0
#: Run in an environment that sees an emulated GPU: a cell on stdin, how it ended and its bytes on stdout.
_RUN = """
import json, pathlib, sys, tempfile
from vramprobe.spec import CellSpec
from vramprobe.sweep import runner
with tempfile.NamedTemporaryFile(prefix="vramprobe-", suffix=".log") as log:
    record = runner.measure(CellSpec.model_validate_json(sys.stdin.read()), log=pathlib.Path(log.name))
peak = record.peak if record.outcome.kind == "ok" else None
print(json.dumps([record.outcome.kind, peak and peak.allocated_bytes, peak and peak.reserved_bytes]))
"""


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


class Limited(NamedTuple):
    """Outcome of a command: its profile, None where it made none, what it printed, and whether it took too long."""

    record: ProfileRecord | None
    said: str
    is_late: bool


def limited(
    options: Sequence[str],
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float,
) -> Limited:
    """Run ``vramprobe profile OPTIONS -- COMMAND`` for at most so long; none of its processes is left."""
    saved, is_late = cwd / "profile.jsonl", False
    words = [sys.executable, "-m", "vramprobe", "profile", *options, "--json", "--save", str(saved), "--", *command]
    with (cwd / "said").open("wb") as said:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                process.send_signal(signal.SIGTERM)  # which ends the command's own processes, too
                process.wait(_DYING_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record = last_profile(saved) if saved.exists() else None
    return Limited(record, (cwd / "said").read_text(errors="replace"), is_late)


def run_cell(gpu: str, cell: dict[str, Any]) -> tuple[str, tuple[int | None, int | None]]:
    """(outcome, bytes allocated and reserved) of a cell, run whole on an emulated GPU."""
    from vramprobe.emulate.enter import entrance

    way = entrance(gpu, say=print)
    try:
        words, given = [str(way.python), "-c", _RUN], json.dumps(cell)
        done = subprocess.run(words, env=way.environment, input=given, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    outcome, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    return outcome, (allocated, reserved)


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


def latest(entries: Iterable[Entry], *keys: str) -> dict[Any, Entry]:
    """The last entry of each run that ended well, else its last; by the value of its key, or by those of several."""
    found: dict[Any, Entry] = {}
    for entry in entries:
        of = tuple(map(entry.get, keys)) if len(keys) > 1 else entry[keys[0]]
        if of not in found or entry["outcome"] == "ok" or found[of]["outcome"] != "ok":
            found[of] = entry
    return found


def latest_profiles(path: Path, rows_of: Callable[[ProfileRecord], Iterable[Row]]) -> dict[Row, ProfileRecord]:
    """The last profile of each row; ``rows_of`` a profile are those that it is a run of."""
    return {row: record for record in (read_profiles(path) if path.exists() else ()) for row in rows_of(record)}
