"""A log, however long → the out-of-memory errors in it, each with its traceback, and the readings of nvidia-smi.

In: an open binary file, read once, a chunk at a time. Out: a Log. Ranks' output may be mixed: lines are told apart by
the prefixes of torchrun, torch, srun and Ray. Keeps no line of the log but the frames of open tracebacks.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
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
#: A line without any of these is of no interest; most of a log is passed over by this: about 16 MB a second.
_WORDS = ("emory", "Traceback", ".py", "Error", "Exc", "ALLOC", "failure", "Killed", "SIGKILL", "exit", "oom-")
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
    log, streams, seen = Log(), {}, set()
    for line in _lines(file, beginning, log):
        rank, text = _without_prefix(line)
        if rank not in streams and len(streams) >= _MAX_RANKS:
            rank = None
        _read_line(text, rank, streams.setdefault(rank, _Stream()), log, seen)
    for rank, stream in streams.items():
        _close_message(rank, stream, log, seen)
    return log


def _lines(file: IO[bytes], beginning: bytes, log: Log) -> Iterator[str]:
    chunk = beginning or file.read(_CHUNK_BYTES)
    encoding = "utf-16" if chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    if encoding == "utf-8" and b"\0" in chunk[:4096]:
        raise VramprobeError("this is neither a text log nor a memory snapshot: it holds binary data")
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest = ""
    while chunk:
        log.num_bytes += len(chunk)
        *whole, rest = re.split(r"[\r\n]+", rest + decoder.decode(chunk))
        for line in whole:
            log.num_lines += 1
            yield line[:_MAX_LINE]
        if len(rest) > _MAX_LINE:
            yield rest
            rest = ""
        chunk = file.read(_CHUNK_BYTES)
    if rest:
        log.num_lines += 1
        yield rest


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
