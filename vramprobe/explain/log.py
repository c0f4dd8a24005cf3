"""A log, however long → the out-of-memory errors in it, each with its traceback, and the tables of memory in it.

In: an open binary file, read once, a chunk at a time; only lines that hold one of a few words are looked at. Out:
LogFacts. Ranks' output may be mixed: lines are told apart by the prefixes of torchrun, torch, srun and Ray. Keeps no
line of the log but the frames of open tracebacks.
"""

import json
import re
from dataclasses import dataclass, field
from typing import IO, Any

from vramprobe.explain import messages
from vramprobe.explain.lines import LogLines
from vramprobe.explain.messages import Form, OomMessage
from vramprobe.explain.phases import Frame
from vramprobe.explain.smi import Readings
from vramprobe.explain.summary import Summaries

_MAX_FRAMES = 400
_MAX_ERRORS = 1000
_MAX_WRAPPED = 7  # lines over which a terminal or an issue may wrap one message
_MAX_UNKNOWN = 3
_MAX_RANKS = 4096
_SOURCE_LINES = 40  # after a frame, in which its rank writes the line's source
_MAX_SOURCE = 500  # characters

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: What launchers, containers and loggers put before a line.
_TIME = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]? (?:std(?:out|err) [FP] )?")
_LOGGER = re.compile(r"^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")
_RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d{1,9})\](?::|(?=\s|$))|(\d{1,9}):(?=\s|$)) ?")
_RAY = re.compile(r"^\([\w.:-]+ pid=(\d{1,9})[^)]*\) ?")
_FRAME = re.compile(r'File "([^"]+)", line (\d{1,9}), in (\S+)')
_RICH_FRAME = re.compile(r"│\s+(\S+\.py):(\d{1,9}) in (\S+)")
_NOTEBOOK_FRAME = re.compile(r"^File (\S+\.py):(\d{1,9}), in (?:\w+\.)*(\w+)\(")
_OLD_NOTEBOOK_FRAME = re.compile(r"^(\S+\.py)() in (\w+)\(")
_FRAMES = (_FRAME, _RICH_FRAME, _NOTEBOOK_FRAME, _OLD_NOTEBOOK_FRAME)
_TRACEBACK = "Traceback (most recent call last)"
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_PROGRESS = re.compile(rb"\b(\d{1,9})/(\d{1,9}) \[\d*:?\d+:\d\d<")
_MAX_BARS = 200  # of a chunk's "<", from its end, that are looked at for a progress bar
_SETTINGS = {
    "model": re.compile(r"(?:model_name_or_path|base_model|--model(?:_name)?|model_id)['\"]?[=:\s]+['\"]?([\w./-]+)"),
    "batch_size": re.compile(r"(?:per_device_train_batch_size|micro_batch_size)['\"]?[=:\s]+['\"]?(\d{1,9})"),
    "seq_len": re.compile(
        r"(?:cutoff_len|max_length|max_seq_length|max_seq_len|sequence_len|model_max_length)['\"]?[=:\s]+['\"]?(\d{1,9})"
    ),
    "expandable": re.compile(
        r"(?<!setting )PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?[=:\s]+['\"]?\S*(expandable_segments:True)"
    ),
    "shared_memory": re.compile(
        r"\b(GB10|DGX Spark|Jetson|NvMap|[\w.-]*-?tegra|Orin|gfx115[01]|Strix Halo|Radeon 80[56]0S|MI300A)"
    ),
    "num_gpus": re.compile(r"(?:nproc[_-]per[_-]node|num_processes|world_size)['\"]?[=:\s]+['\"]?(\d{1,9})"),
}
_SETTINGS_BYTES = 8 * 2**20  # of the log's beginning, where settings are looked for
_SETTING_WORDS = (
    *("model_name", "base_model", "--model", "model_id", "batch_size", "_len", "nproc", "num_proc", "world_size"),
    "ALLOC_CONF",
    *("GB10", "DGX Spark", "Jetson", "NvMap", "tegra", "Orin", "gfx115", "Strix", "Radeon 80", "MI300A"),
)
#: Each line of a known message or a traceback, and the first of a table, holds one of these; a test goes through the
#: forms. Few and rare: a trainer writes "memory" in each of its lines, and each word costs 0.5 ms per MiB of log.
WORDS = (
    *("f memory", "f resource", "rror", "OOM", "_OUT_OF_", "ALLOC", "calloc", "bad_alloc", "annot allocate"),
    *("xit", "illed"),
    *("dispatched", "Memory on", "memory summary", "Memory-Usage", "memory.used"),
    *("Traceback", "File ", ".py in ", "│", "xception", "Interrupt"),
)
#: And what is looked at besides in the log's beginning: parts of tables of memory, and messages that nobody knows.
_BROAD_WORDS = ("emory", "VRAM", "lloc", "MiB", "0000:", ":00.0")
_BROAD_BYTES = 2 * 2**20
_MEMORY_WORDS = ("emory", "MEMORY", "VRAM", "lloc", "ALLOC", "oom", "OOM")
#: A line that speaks of memory that ran out, in whatever form.
_SPEAKS = re.compile(
    r"(?i)out of (?:\w+ ){0,2}memory|\boom\b|(?:insufficient|not enough|no available|exhausted) (?:\w+ ){0,2}memory|"
    r"memory (?:\w+ ){0,2}(?:exhausted|exceeded|insufficient)|"
    r"(?:fail\w*|unable|cannot|could not|can't|attempt\w*|tried) (?:to )?alloc|"
    r"alloc\w* (?:\w+ ){0,2}fail|ALLOC\w*_FAIL|OUT_OF_\w*MEMORY"
)
#: A line that speaks of memory at all.
_MENTIONS = re.compile(r"(?i)\b(?:memory|vram|oom)\b")


@dataclass(frozen=True)
class Failure:
    """One error and the frames that led to it, outermost first."""

    oom: OomMessage
    form: Form
    frames: tuple[Frame, ...]
    rank: str | None
    is_mixed: bool  # another traceback began inside this one: frames may be another rank's


@dataclass
class LogFacts:
    """Facts read from a log."""

    failures: list[Failure] = field(default_factory=list)
    progress: tuple[int, int] | None = None  # of the last progress bar before the first error
    settings: dict[str, str] = field(default_factory=dict)
    readings: Readings = field(default_factory=Readings)
    summaries: Summaries = field(default_factory=Summaries)
    unknown: list[int] = field(default_factory=list)  # numbers of lines that speak of memory that ran out, in no form
    mentions: list[int] = field(default_factory=list)  # and of lines that speak of memory at all
    num_bytes: int = 0
    num_lines: int = 0


@dataclass
class _Stream:
    """One rank's lines, as far as they are of a traceback or a message."""

    frames: list[Frame] = field(default_factory=list)
    is_open: bool = False
    is_mixed: bool = False
    form: Form | None = None
    message: list[str] = field(default_factory=list)
    source_due: int = 0  # lines in which the source of the last frame may follow


def read(file: IO[bytes]) -> LogFacts:
    """Read a log to its end. Raises VramprobeError for what is no text."""
    return _Reader(file).read()


class _Reader:
    def __init__(self, file: IO[bytes]) -> None:
        self.log, self.lines = LogFacts(), LogLines(file)
        self.seen: set[object] = set()
        self.streams: dict[str | None, _Stream] = {}

    def read(self) -> LogFacts:
        log, lines = self.log, self.lines
        for chunk in lines.chunks():
            for text in chunk.lines(self._words(), self._wants_all):
                rank, text = _without_prefix(text)
                if rank not in self.streams:
                    rank = rank if len(self.streams) < _MAX_RANKS else None
                    self.streams.setdefault(rank, _Stream())
                had_failed = bool(log.failures)
                for part in _unwrapped(text):
                    self._read_line(part, rank, self.streams[rank])
                if log.failures and not had_failed:
                    log.progress = _last_bar(chunk.before()) or log.progress
            if not log.failures:
                log.progress = _last_bar(chunk.data) or log.progress
        for rank, stream in self.streams.items():
            self._close_message(rank, stream)
        log.num_bytes, log.num_lines = lines.num_bytes, lines.num_lines
        return log

    def _words(self) -> list[bytes]:
        """Return the words to look for in the next chunk."""
        words = list(WORDS)
        if self.lines.num_bytes <= _SETTINGS_BYTES and len(self.log.settings) < len(_SETTINGS):
            words += _SETTING_WORDS
        if self.lines.num_bytes <= _BROAD_BYTES or self.log.readings.is_table:
            words += _BROAD_WORDS
        return [word.encode() for word in words]

    def _wants_all(self) -> bool:
        """Return True if the next line counts, whatever it contains."""
        tables = self.log.readings.is_csv or self.log.summaries.is_open
        return tables or any(one.message or one.source_due for one in self.streams.values())

    def _read_line(self, text: str, rank: str | None, stream: _Stream) -> None:
        if stream.source_due:
            stream.source_due -= 1
            if _take_source(text, stream):
                return
        is_beginning = _TRACEBACK in text
        form = messages.form_of(text)
        if stream.message:
            if is_beginning or form or _FRAME.search(text) or not text.strip():
                self._close_message(rank, stream)
            else:
                self._continue_message(text, rank, stream)
                return
        if is_beginning:
            stream.is_mixed = stream.is_open
            stream.is_open = True
            stream.frames = stream.frames if stream.is_mixed else []
        frames = [match for one in _FRAMES for match in one.finditer(text)] if ".py" in text or 'File "' in text else []
        if frames:
            self._add_frames(frames, text, stream)
        if form is not None:
            stream.form, stream.message = form, [text]
            if messages.is_whole(form, text):
                self._close_message(rank, stream)
        elif not frames and not is_beginning:
            self._read_else(text, stream)

    def _continue_message(self, text: str, rank: str | None, stream: _Stream) -> None:
        stream.message.append(text)
        assert stream.form is not None
        if messages.is_whole(stream.form, text) or len(stream.message) > _MAX_WRAPPED:
            self._close_message(rank, stream)

    def _add_frames(self, found: list[re.Match[str]], text: str, stream: _Stream) -> None:
        for match in found[: _MAX_FRAMES - len(stream.frames)]:
            stream.frames.append(Frame(match[1], int(match[2] or 0), match[3]))
        stream.source_due = _SOURCE_LINES if found[-1].re is _FRAME and not text[found[-1].end() :].strip() else 0

    def _read_else(self, text: str, stream: _Stream) -> None:
        log = self.log
        if _RAISED.match(text):
            stream.is_open, stream.frames, stream.source_due = False, [], 0
        log.summaries.read(text)
        log.readings.read(text)
        if any(word in text for word in _MEMORY_WORDS):
            for numbers, pattern in ((log.unknown, _SPEAKS), (log.mentions, _MENTIONS)):
                if len(numbers) < _MAX_UNKNOWN and pattern.search(text):
                    numbers.append(self.lines.line_number())
        if self.lines.num_bytes <= _SETTINGS_BYTES and any(word in text for word in _SETTING_WORDS):
            for name, pattern in _SETTINGS.items():
                if name not in log.settings and (found := pattern.search(text)):
                    log.settings[name] = found[1]

    def _close_message(self, rank: str | None, stream: _Stream) -> None:
        """Note an error once: launchers print a rank's message again."""
        if not stream.message or stream.form is None:
            return
        form, text = stream.form, " ".join(part.strip() for part in stream.message)
        stream.message, stream.form, stream.source_due = [], None, 0
        oom = messages.parse(form, text)
        frames, stream.frames = tuple(stream.frames), []
        is_mixed, stream.is_mixed, stream.is_open = stream.is_mixed, False, False
        if (oom in self.seen and not frames) or (oom, rank, frames) in self.seen:
            return
        if len(self.log.failures) < _MAX_ERRORS:
            self.seen.update((oom, (oom, rank, frames)))
            self.log.failures.append(Failure(oom, form, frames, rank, is_mixed))


def _take_source(text: str, stream: _Stream) -> bool:
    """Keep the source that a traceback shows below its last frame; false where ``text`` is another line."""
    stripped = text.strip()
    if not text.startswith("  ") or stripped.startswith("File ") or not stripped.strip("^~"):
        return False
    stream.source_due = 0
    if stream.frames:
        stream.frames[-1] = stream.frames[-1]._replace(source=stripped[:_MAX_SOURCE])
    return True


def _without_prefix(line: str) -> tuple[str | None, str]:
    """The rank that wrote a line, where a prefix tells, and the line without its prefixes."""
    line = _ANSI.sub("", line) if "\x1b" in line else line
    line = line[found.end() :] if (found := _TIME.match(line)) else line
    ray = _RAY.match(line)
    line = line[ray.end() :] if ray else line
    line = line[found.end() :] if (found := _LOGGER.match(line)) else line
    if rank := _RANK.match(line):
        return rank[1] or rank[2], line[rank.end() :]
    return (f"pid {ray[1]}" if ray else None), line


def _unwrapped(text: str) -> list[str]:
    r"""The lines that one line of JSON holds, or one whose line ends are written as ``\n``; else the line itself."""
    if text.startswith("{") and text.endswith("}"):
        try:
            return [line for part in _strings(json.loads(text)) for line in part.splitlines()]
        except (ValueError, RecursionError):
            pass
    if "\\n" in text and (_TRACEBACK in text or "memory" in text):
        return text.replace('\\"', '"').replace("\\n", "\n").splitlines()
    return [text]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        inner = [(f'"{key}": {json.dumps(one)}' if isinstance(one, bool | int) else one) for key, one in value.items()]
        return [text for one in inner for text in _strings(one)]
    return [text for one in value for text in _strings(one)] if isinstance(value, list) else []


def _last_bar(data: bytes) -> tuple[int, int] | None:
    """Steps done and steps in all, by the last progress bar."""
    end = len(data)
    for _ in range(_MAX_BARS):
        end = data.rfind(b"<", 0, end)
        if end < 0:
            return None
        bars = _PROGRESS.findall(data, max(end - 64, 0), end + 1)
        if bars:
            return int(bars[-1][0]), int(bars[-1][1])
    return None
