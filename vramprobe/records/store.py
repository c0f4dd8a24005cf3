"""The append-only journal, read: a line when an attempt starts, its record when it ends.

In: a file or folder, packed or not. Out: what it holds of cells (profiles of commands: records/profile.py). A torn tail
is told, never mended: that does writing.py. What a resumed sweep does with it: sweep/resume.py.
"""

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from vramprobe.errors import IncomparableRecords, StoreError
from vramprobe.records.record import FORMAT_HISTORY, RunRecord, Started, record_from_json

#: Outcomes that the same cell on the same machine would give again. ``invalid`` is one: the steps of this cell did not
#: repeat, and running it again unchanged hides that. The others (error, timeout, interrupted, oom_host, contaminated,
#: skipped) may be the machine's, a neighbour's or the plan's, and are run again.
FINISHED = ("ok", "oom", "invalid")
#: Outcomes that are nobody's failure: a result, or a cell that is still to be run.
NOT_FAILED = ("ok", "oom", "skipped", "interrupted")
_RECORD_BEGINS = f'{{"format":{max(FORMAT_HISTORY)},'.encode()
#: How a packed journal's name ends → what opens it.
_PACKED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
#: What a packed journal that is damaged raises.
DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
_HEAD_BYTES = 200  # of a line: its format and its kind stand there


@dataclass(frozen=True, kw_only=True)
class StoreContents:
    """Records read from files: ``records`` in the order of the files and lines, each attempt once.

    ``unfinished``: attempts that were started and have no record. ``torn_tail`` says which file ends in a half-written
    line, and what was done about it; null when none does.
    """

    records: tuple[RunRecord, ...]
    unfinished: tuple[Started, ...]
    torn_tail: str | None
    files: tuple[Path, ...]


def read(path_or_folder: str | Path, *, allow_empty: bool = False) -> StoreContents:
    """Every record of a .jsonl file, or of all below a folder, packed ones too, sorted by path; each attempt once.

    A half-written last line (a killed writer) is left out and reported; any other broken line is a StoreError with its
    file and number, and so is a format that this version does not know, and a place without records (but not a file
    that holds none yet, if ``allow_empty``).
    """
    files = journals(path_or_folder)
    records: dict[str, RunRecord] = {}
    started: dict[str, Started] = {}
    torn = []
    for file in files:
        in_file, tail = _entries_of(file)
        torn += [tail] if tail else []
        for entry in in_file:
            if isinstance(entry, Started):
                started[entry.attempt_id] = entry
                continue
            first = records.setdefault(entry.attempt_id, entry)
            if first != entry:
                raise StoreError(
                    f"{file}: attempt {entry.attempt_id} is there a second time with other values; an attempt is "
                    "written once and never changed. Delete the copy that was edited."
                )
    if not records and not allow_empty:
        raise StoreError(
            f"{path_or_folder} holds no record; run a sweep first: vramprobe run quickstart"
            + (f" ({'; '.join(torn)})" if torn else "")
        )
    unfinished = tuple(entry for attempt_id, entry in started.items() if attempt_id not in records)
    return StoreContents(
        records=tuple(records.values()), unfinished=unfinished, torn_tail="; ".join(torn) or None, files=files
    )


def latest_by_device(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The attempts that count for each cell on each device; raises as :func:`latest_by_fingerprint`."""
    by_device: dict[str | None, list[RunRecord]] = {}
    for record in records:
        by_device.setdefault(record.environment.device_name, []).append(record)
    return [one for group in by_device.values() for one in latest_by_fingerprint(group).values()]


def latest_by_fingerprint(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    """The attempt that counts for each cell: the latest finished one, or the latest at all where none finished.

    Raises IncomparableRecords for a cell that was both measured and emulated: the later of the two would silently take
    the other's place.
    """
    latest: dict[str, RunRecord] = {}
    by_kind: dict[str, str] = {}
    for record in sorted(records, key=lambda one: (one.outcome.kind in FINISHED, one.started_at)):
        latest[record.fingerprint] = record
        if by_kind.setdefault(record.fingerprint, record.instrument) != record.instrument:
            raise IncomparableRecords(
                f"these records must not be mixed: instrument is {by_kind[record.fingerprint]!r} in one attempt at "
                f"{record.cell_id} and {record.instrument!r} in another; keep them in folders of their own and name "
                "one of these"
            )
    return latest


def is_whole(tail: bytes) -> bool:
    """A JSON object is valid only up to its closing brace, so no shorter piece of a line can pass for a whole one."""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True


def is_profile(line: bytes) -> bool:
    """Return True if a line is the profile of a command (records/profile.py), which may be among a sweep's records."""
    if b'"profile"' not in line[:_HEAD_BYTES]:
        return False
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == "profile"


def journals(path_or_folder: str | Path) -> tuple[Path, ...]:
    """The file itself, or every .jsonl file below a folder, packed ones too, sorted by path. Raises StoreError where
    there is none."""
    place = Path(path_or_folder)
    if place.is_dir():
        ends = tuple(f".jsonl{end}" for end in ("", *_PACKED))
        below = os.walk(place)  # unlike rglob it goes on where a folder vanishes or may not be read
        files = tuple(sorted(Path(folder, name) for folder, _, names in below for name in names if name.endswith(ends)))
        if not files:
            raise StoreError(f"no .jsonl file in {place} or below; run a sweep first, or name the file of another")
        return files
    if not place.exists():
        raise StoreError(f"there are no results at {place}; name a .jsonl file or a folder that holds some")
    return (place,)


def _entries_of(file: Path) -> tuple[list[RunRecord | Started], str | None]:
    lines, tail = whole_lines(file)
    entries = [read_line(line, file, number) for number, line in lines if not is_profile(line)]
    return entries, describe_torn_tail(file, len(tail)) if tail else None


def whole_lines(file: Path) -> tuple[list[tuple[int, bytes]], bytes]:
    """The lines that say something, by number, and the torn tail that a killed writer left. Raises StoreError."""
    *lines, tail = bytes_of(file).split(b"\n")
    if is_whole(tail):
        lines, tail = [*lines, tail], b""
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()], tail


def opened(file: Path) -> IO[bytes]:
    """A journal's lines to read, unpacked."""
    return _PACKED[file.suffix](file, "rb") if file.suffix in _PACKED else file.open("rb", buffering=2**20)


def bytes_of(file: Path) -> bytes:
    """Read a file's bytes, decompressed. Raises StoreError where it cannot be read."""
    try:
        with opened(file) as lines:
            return lines.read()
    except (*DAMAGED, OSError) as error:
        raise cannot_read(file, error) from error


def cannot_read(path: Path, error: Exception) -> StoreError:
    """The error of a file that is there and cannot be read."""
    if isinstance(error, DAMAGED):
        return StoreError(f"cannot read {path}: {error}; restore the file from a copy")
    return StoreError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def describe_torn_tail(path: Path, size_bytes: int) -> str:
    """Describe a half-written last line, which a reader leaves out."""
    return f"{path} ends in a half-written line of {size_bytes} bytes (a killed writer), which is left out"


def read_line(line: bytes, file: Path, number: int) -> RunRecord | Started:
    """One line of a journal. Raises StoreError, naming file and line, for anything else."""
    if line.startswith(_RECORD_BEGINS):
        with suppress(ValidationError):  # another kind of line, or a damaged one: below
            return record_from_json(line)
    where = f"{file}, line {number}"
    try:
        content = json.loads(line)
        version, is_start = content["format"], content.get("line") == "started"
    except (ValueError, TypeError, KeyError, RecursionError):
        raise StoreError(
            f"{where} is not a record (damaged or edited by hand): {line[:60]!r}…; restore the file from a copy, or "
            "move that one line elsewhere, and its cell will be run again"
        ) from None
    if not isinstance(version, int) or version not in FORMAT_HISTORY:
        raise StoreError(
            f"{where} has format {version!r} and this vramprobe knows {', '.join(map(str, FORMAT_HISTORY))}; "
            "upgrade vramprobe to read it"
        )
    try:
        return Started.model_validate_json(line) if is_start else record_from_json(line)
    except ValidationError as error:
        raise cannot_be(f"{where} is a record of format {version}", error) from None


def cannot_be(what: str, error: ValidationError) -> StoreError:
    """The error of a line that says what it is, and is not."""
    first = error.errors()[0]
    return StoreError(
        f"{what}, but its {'.'.join(map(str, first['loc']))} cannot be ({first['msg']}); restore the file from a copy, "
        "or move that one line elsewhere"
    )
