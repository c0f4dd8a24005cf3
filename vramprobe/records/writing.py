"""Append records to a journal, so that nothing measured is ever lost: whole lines, synced, torn tails set aside.

In: a path, an entry. Out: a line of the file, and a warning where something was mended; StoreError, which says where
the record was rescued to, where it cannot be written. The torn tail of a killed writer is moved to ``<file>.torn``. One
process writes to a folder at a time (:func:`lock`). store.py reads it.
"""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from vramprobe.errors import StoreError
from vramprobe.records.record import Started
from vramprobe.records.store import is_whole

_READ_BLOCK_BYTES = 2**16


class JournalLine(Protocol):
    """Interface of a journal's line."""

    @property
    def attempt_id(self) -> str: ...

    def to_json_line(self) -> str: ...


def append(path: str | Path, entry: JournalLine) -> str | None:
    """Add ``entry`` as one whole line, synced to disk; null, or a warning when a torn tail was moved away first.

    A write that fails half-way is cut off again, so the file stays clean. Raises StoreError (a full disk, no
    permission, a folder in the way) saying what to do. A sweep also holds :func:`lock`.
    """
    path = Path(path)
    line = entry.to_json_line().encode() + b"\n"
    try:
        descriptor, is_new = _open_to_append(path)
    except OSError as error:
        raise _cannot_write(path, error, _rescued(line, entry)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another's line in the making must not pass for a torn one
        warning = _move_torn_tail(path, descriptor)
        _write_whole(descriptor, line)
        if is_new:
            _sync_folder(path.parent)
    except OSError as error:
        raise _cannot_write(path, error, _rescued(line, entry)) from error
    finally:
        os.close(descriptor)
    return warning


@contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Hold ``folder`` for one writer; a kill frees it, too. Raises StoreError where another holds it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
            raise StoreError(
                f"another sweep writes to {folder} (process {holder}); wait for it, stop it, or choose another folder"
            ) from None
        with suppress(OSError):  # on a full disk the lock is held all the same, and the first line says what is wrong
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # frees the lock; the file stays, because deleting it would let two hold it


def _write_whole(descriptor: int, line: bytes) -> None:
    end = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(line):
            written += os.write(descriptor, line[written:])
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):  # if even this fails, the next append finds a torn tail and moves it away
            os.ftruncate(descriptor, end)
        raise


def _move_torn_tail(path: Path, descriptor: int) -> str | None:
    """Cut what follows the last newline and keep it in ``<file>.torn``; a warning when there was such a tail."""
    size = os.fstat(descriptor).st_size
    keep = _end_of_last_line(descriptor, size)
    if keep == size:
        return None
    tail = os.pread(descriptor, size - keep, keep)
    if is_whole(tail):  # killed between the line and its newline
        _write_whole(descriptor, b"\n")
        return None
    beside = path.with_name(path.name + ".torn")
    kept = os.open(beside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _write_whole(kept, tail + b"\n")
    finally:
        os.close(kept)
    os.ftruncate(descriptor, keep)
    return f"{path} ended in a half-written line of {len(tail)} bytes (a killed writer); moved to {beside}"


def _end_of_last_line(descriptor: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _READ_BLOCK_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _sync_folder(folder: Path) -> None:
    """A new file's name is only safe once its folder is synced, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_to_append(path: Path) -> tuple[int, bool]:
    """(descriptor, whether the file is new); its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644), is_new


def require_writable(path: str | Path) -> None:
    """Raise StoreError, before anything is measured, where :func:`append` could not write to ``path``."""
    path = Path(path)
    try:
        descriptor, is_new = _open_to_append(path)
        os.close(descriptor)
        if is_new:
            path.unlink()
        elif not path.is_file():
            raise OSError(errno.EINVAL, "not a plain file")
    except OSError as error:
        raise _cannot_write(path, error) from error


def require_journal(path: str | Path) -> None:
    """Raise StoreError unless records can be appended: as :func:`require_writable`, and the file must hold nothing
    else.
    """
    require_writable(path)
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        first = file.readline(1 << 16)
    if b'"format"' not in first and not b'{"format"'.startswith(first):  # a torn first line is a journal's, too
        raise StoreError(
            f"{path} is no file of records: it begins with {first[:60]!r}; name a new .jsonl file, or one that holds "
            "records"
        )


def _rescued(line: bytes, entry: JournalLine) -> str:
    """Save a record that could not be stored to the temporary folder; return a sentence that names the file."""
    if isinstance(entry, Started):
        return ""  # nothing was measured yet
    path = Path(tempfile.gettempdir()) / f"vramprobe-{entry.attempt_id}.jsonl"
    try:
        path.write_bytes(line)
    except OSError:
        return " The last record found no place in the temporary folder either."
    return f" The last record is in {path}; append that line to the journal when there is room."


def _cannot_write(path: Path, error: OSError, rescued: str = "") -> StoreError:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            todo = "the disk (or your quota) is full: free some space and resume"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            todo = "no permission to write there: choose another folder or change its permissions"
        case errno.EISDIR:
            todo = "a folder has that name: name a file"
        case errno.ENOTDIR | errno.EEXIST:
            todo = "a file stands where a folder is needed: choose another path"
        case _:
            todo = "name a file in a folder that exists and can be written"
    untouched = "What was written before is untouched."
    return StoreError(f"cannot write to {path}: {todo} ({error.strerror}). {untouched}{rescued}")
