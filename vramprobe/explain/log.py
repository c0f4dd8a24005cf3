"""A log, however long → the out-of-memory errors in it, each with its traceback, and the readings of nvidia-smi.

In: an open binary file, read once, a chunk at a time. Out: a Log. Ranks' output may be mixed: lines are told apart by
the prefixes of torchrun, torch, srun and Ray. Keeps no line of the log but the frames of open tracebacks.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from vramprobe.errors import VramprobeError
from vramprobe.explain import messages
from vramprobe.explain.messages import OutOfMemory
from vramprobe.explain.phases import Frame
from vramprobe.explain.smi import Readings

_CHUNK_BYTES = 2**20
_MAX_LINE = 20_000  # characters; a longer line is read in parts
_MAX_FRAMES = 400
_MAX_ERRORS = 1000
_MAX_WRAPPED = 7  # lines over which a terminal or an issue may wrap one message
_MAX_RANKS = 4096

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\](?::|(?=\s|$))|(\d+):(?=\s|$)) ?")
_RAY = re.compile(r"^\([\w.:-]+ pid=(\d+)[^)]*\) ?")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_RICH_FRAME = re.compile(r"│\s+(\S+\.py):(\d+) in (\S+)")
_NOTEBOOK_FRAME = re.compile(r"^File (\S+\.py):(\d+), in (?:\w+\.)*(\w+)\(")
_OLD_NOTEBOOK_FRAME = re.compile(r"^(\S+\.py)() in (\w+)\(")
_FRAMES = (_FRAME, _RICH_FRAME, _NOTEBOOK_FRAME, _OLD_NOTEBOOK_FRAME)
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_PROGRESS = re.compile(r"\b(\d+)/(\d+) \[\d*:?\d+:\d\d<")
_SETTINGS = {
    "model": re.compile(r"(?:model_name_or_path|base_model|--model(?:_name)?|model_id)['\"]?[=:\s]+['\"]?([\w./-]+)"),
    "batch_size": re.compile(r"(?:per_device_train_batch_size|micro_batch_size)['\"]?[=:\s]+['\"]?(\d+)"),
    "seq_len": re.compile(
        r"(?:cutoff_len|max_length|max_seq_length|max_seq_len|sequence_len|model_max_length)['\"]?[=:\s]+['\"]?(\d+)"
    ),
    "num_gpus": re.compile(r"(?:nproc[_-]per[_-]node|num_processes|world_size)['\"]?[=:\s]+['\"]?(\d+)"),
}
#: A line without any of these is of no interest.
_WORDS = ("emory", "Traceback", ".py", "Error", "Exc", "ALLOC", "failure", "Killed", "SIGKILL", "exit", "oom-")
#: Nor is a chunk without them, but for its last progress bar and for readings of nvidia-smi.
_BYTES = (*(word.encode() for word in _WORDS), b"MiB")
_SETTINGS_BYTES = 8 * 2**20  # of the log's beginning, where settings are looked for in every line
_SETTING_WORDS = ("model", "batch_size", "len", "max_", "proc", "world_size")


@dataclass(frozen=True)
class Failure:
    """One error and the frames that led to it, outermost first."""

    oom: OutOfMemory
    frames: tuple[Frame, ...]
    rank: str | None
    is_mixed: bool  # another traceback began inside this one: frames may be another rank's


@dataclass
class Log:
    """What was found."""

    failures: list[Failure] = field(default_factory=list)
    progress: tuple[int, int] | None = None  # of the last progress bar before the first error
    settings: dict[str, str] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)
    num_bytes: int = 0
    num_lines: int = 0


@dataclass
class _Stream:
    """One rank's lines, as far as they are of a traceback or a message."""

    frames: list[Frame] = field(default_factory=list)
    is_open: bool = False
    is_mixed: bool = False
    message: list[str] = field(default_factory=list)


def read(file: IO[bytes], beginning: bytes = b"") -> Log:
    """Read a log to its end; ``beginning`` is what was read of it before. Raises VramprobeError for what is no text."""
    log, seen = Log(), set[object]()
    streams: dict[str | None, _Stream] = {}

    def is_open() -> bool:
        return any(stream.message for stream in streams.values())

    for line in _lines(file, beginning, log, is_open):
        rank, text = _without_prefix(line)
        if rank not in streams and len(streams) >= _MAX_RANKS:
            rank = None
        _read_line(text, rank, streams.setdefault(rank, _Stream()), log, seen)
    for rank, stream in streams.items():
        _close_message(rank, stream, log, seen)
    return log


def _lines(file: IO[bytes], beginning: bytes, log: Log, is_open: Callable[[], bool]) -> Iterator[str]:
    """Lines in order. Chunks that tell nothing are passed over unless ``is_open``: a message is being read."""
    source, chunk = file, beginning or file.read(_CHUNK_BYTES)
    if chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        source = _InUtf8(file, chunk)  # type: ignore[assignment]
        chunk = source.read(_CHUNK_BYTES)
    elif b"\0" in chunk[:4096]:
        raise VramprobeError("this is neither a text log nor a memory snapshot: it holds binary data")
    rest = b""
    while chunk:
        log.num_bytes += len(chunk)
        whole, rest = _split(rest + chunk)
        if log.num_bytes > _SETTINGS_BYTES and not is_open() and not log.readings.is_csv and _is_dull(whole):
            log.num_lines += whole.count(b"\n") + whole.count(b"\r") - whole.count(b"\r\n")
            yield from _last_bar(whole)
        elif whole:
            for line in re.split(r"[\r\n]+", whole.decode(errors="replace"))[:-1]:
                log.num_lines += 1
                yield line[:_MAX_LINE]
        if len(rest) > _MAX_LINE:
            yield rest.decode(errors="replace")
            rest = b""
        chunk = source.read(_CHUNK_BYTES)
    if rest:
        log.num_lines += 1
        yield rest.decode(errors="replace")


class _InUtf8:
    """A file in UTF-16, as PowerShell writes it, read as UTF-8."""

    def __init__(self, file: IO[bytes], beginning: bytes) -> None:
        self._file, self._beginning = file, beginning
        self._decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")

    def read(self, size: int) -> bytes:
        text = ""
        while not text and (chunk := self._beginning or self._file.read(size)):
            self._beginning = b""
            text = self._decoder.decode(chunk)
        return text.encode()


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and what is begun of the next."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def _is_dull(data: bytes) -> bool:
    return not any(word in data for word in _BYTES)


def _last_bar(data: bytes) -> Iterator[str]:
    """The line that a progress bar wrote last, if there is one."""
    at = data.rfind(b"<")
    if at >= 0:
        begin, _ = _split(data[:at])
        yield re.split(rb"[\r\n]", data[len(begin) :], maxsplit=1)[0].decode(errors="replace")[:_MAX_LINE]


def _without_prefix(line: str) -> tuple[str | None, str]:
    line = _ANSI.sub("", line) if "\x1b" in line else line
    ray = _RAY.match(line)
    rank = _RANK.match(line[ray.end() :] if ray else line)
    end = (ray.end() if ray else 0) + (rank.end() if rank else 0)
    if rank:
        return rank[1] or rank[2], line[end:]
    return (f"pid {ray[1]}" if ray else None), line[end:]


def _read_line(text: str, rank: str | None, stream: _Stream, log: Log, seen: set[object]) -> None:
    if stream.message:
        if _FRAME.search(text) or messages.begins(text) or text.startswith("Traceback") or not text.strip():
            _close_message(rank, stream, log, seen)
        else:
            stream.message.append(text)
            if messages.is_whole(text) or len(stream.message) > _MAX_WRAPPED:
                _close_message(rank, stream, log, seen)
            return
    if not any(word in text for word in _WORDS):
        _read_else(text, log)
    elif "Traceback (most recent call last)" in text:
        stream.is_mixed = stream.is_open
        stream.is_open = True
        stream.frames = stream.frames if stream.is_mixed else []
    elif frame := next((found for one in _FRAMES if (found := one.search(text))), None):
        if len(stream.frames) < _MAX_FRAMES:
            stream.frames.append(Frame(frame[1], int(frame[2] or 0), frame[3]))
    elif messages.begins(text):
        stream.message = [text]
        if messages.is_whole(text):
            _close_message(rank, stream, log, seen)
    elif (plain := messages.without_figures(text)) is not None:
        _add(plain, rank, stream, log, seen)
    elif _RAISED.match(text):
        stream.is_open, stream.frames = False, []
    else:
        _read_else(text, log)


def _read_else(text: str, log: Log) -> None:
    if not log.failures and "<" in text and (bar := _PROGRESS.search(text)):
        log.progress = (int(bar[1]), int(bar[2]))
    log.readings.read(text)
    if not any(word in text for word in _SETTING_WORDS):
        return
    for name, pattern in _SETTINGS.items():
        if name not in log.settings and (found := pattern.search(text)):
            log.settings[name] = found[1]


def _close_message(rank: str | None, stream: _Stream, log: Log, seen: set[object]) -> None:
    if stream.message:
        text = " ".join(part.strip() for part in stream.message)
        stream.message = []
        _add(messages.parse(text), rank, stream, log, seen)


def _add(oom: OutOfMemory, rank: str | None, stream: _Stream, log: Log, seen: set[object]) -> None:
    """Note an error once: launchers print a rank's message again."""
    frames, stream.frames = tuple(stream.frames), []
    is_mixed, stream.is_mixed, stream.is_open = stream.is_mixed, False, False
    if (oom in seen and not frames) or (oom, rank, frames) in seen or len(log.failures) >= _MAX_ERRORS:
        return
    seen.update((oom, (oom, rank, frames)))
    log.failures.append(Failure(oom, frames, rank, is_mixed))
