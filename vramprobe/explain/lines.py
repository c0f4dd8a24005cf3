"""An open binary file of any size → those of its lines that hold one of some words, without decoding the others.

In: a file, read once, a chunk at a time. Out: chunks, and lines of each as text, in order, with their numbers. Line
ends may be those of Windows, and a progress bar's carriage returns end a line as well. UTF-16 is read as UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from vramprobe.errors import VramprobeError

_CHUNK_BYTES = 2**20
_MAX_LINE = 200_000  # bytes; a longer line is read in parts


class LogLines:
    """Reads a file by chunks. Raises VramprobeError for what is no text."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._chunk = Chunk(b"", b"")
        self.num_bytes = self.num_lines = 0

    def chunks(self) -> Iterator[Chunk]:
        """Whole lines, about a MiB at a time."""
        rest = b""
        for data in self._blocks():
            self.num_bytes += len(data)
            text, rest = _split(rest + data)
            if len(rest) > _MAX_LINE:
                text, rest = text + rest, b""
            if text:
                yield self._next(text)
        if rest:
            yield self._next(rest)
        self.num_lines += self._chunk.num_lines()

    def line_number(self) -> int:
        """The number of the line that was read last, from 1."""
        return self.num_lines + self._chunk.text[: self._chunk.at].count(b"\n") + 1

    def _next(self, text: bytes) -> Chunk:
        self.num_lines += self._chunk.text.count(b"\n")
        text = text.replace(b"\r\n", b"\n")
        self._chunk = Chunk(text, text.replace(b"\r", b"\n"))
        return self._chunk

    def _blocks(self) -> Iterator[bytes]:
        data, decode = self._file.read(_CHUNK_BYTES), None
        if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # as PowerShell writes it
            decode = codecs.getincrementaldecoder("utf-16")(errors="replace").decode
        elif b"\0" in data[:4096]:
            raise VramprobeError("this is neither a text log nor a memory snapshot: it holds binary data")
        while data:
            yield decode(data).encode() if decode else data
            data = self._file.read(_CHUNK_BYTES)


@dataclass
class Chunk:
    """Whole lines of a file; ``data`` has line feeds where ``text`` has carriage returns."""

    text: bytes
    data: bytes
    at: int = 0  # where the line begins that was read last

    def lines(self, words: Sequence[bytes], wants_all: Callable[[], bool]) -> Iterator[str]:
        """Lines that hold one of ``words``, and each that follows while ``wants_all``."""
        data, begin = self.data, 0
        starts = iter(_starts(data, words))
        start = next(starts, len(data))
        while begin < len(data):
            if not wants_all():
                while start < begin:
                    start = next(starts, len(data))
                begin = start
                if begin >= len(data):
                    return
            end = data.find(b"\n", begin)
            end = len(data) if end < 0 else end
            self.at = begin
            yield data[begin:end].decode(errors="replace")
            begin = end + 1

    def before(self) -> bytes:
        """Bytes before the line that was read last."""
        return self.data[: self.at]

    def num_lines(self) -> int:
        return self.text.count(b"\n") + (not self.text.endswith(b"\n") and bool(self.text))


def _starts(data: bytes, words: Sequence[bytes]) -> list[int]:
    """Return the positions of lines that contain one of ``words``."""
    starts = set()
    for word in words:
        at = data.find(word)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            end = data.find(b"\n", at)
            at = data.find(word, end) if end >= 0 else -1
    return sorted(starts)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and what is begun of the next; a carriage return at the end may be half of a line's end."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
    return data[:end], data[end:]
