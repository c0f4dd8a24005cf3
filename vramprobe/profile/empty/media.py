"""Images, videos and sound for rows, as files that the usual decoders read, and that need none where a row is read.

In: pixels, frames, seconds. Out: a PNG of one colour, its AVI, silence as a WAV, their paths; and what datasets' Audio
and transformers' video processors make of them. Of other files the library's own decoder says what is missing. The
standard library alone; numpy where a row is read.
"""

import os
import struct
import wave
import zlib

from vramprobe_values.imports import instead_of

#: Frames a second: as a processor that samples by time takes two of them or one, it keeps them all.
RATE = 1
_SAMPLES = 16_000  # a second, as speech models take it
_HAS_INDEX, _KEY_FRAME = 0x10, 0x10


def png(width, height):
    """Gray, 8 bits a channel, RGB."""
    line = b"\0" + b"\x80\x80\x80" * width
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(line * height, 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def _once(path, write):
    """The file at ``path``, which ``write(path of a part)`` makes where it is missing; one for all processes."""
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}"
        write(own)
        os.replace(own, path)
    return path


def silence(folder, seconds):
    """The path of a file of 16 bits, one channel."""

    def write(path):
        with wave.open(path, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(_SAMPLES)
            out.writeframes(bytes(2 * round(_SAMPLES * seconds)))

    return _once(os.path.join(folder, f"silence-{seconds:g}s.wav"), write)


def gray(folder, size):
    """The path of a file of ``size``: frames, width, height."""

    def write(path):
        with open(path, "wb") as out:
            out.write(avi(*size))

    return _once(os.path.join(folder, f"gray-{'x'.join(map(str, size))}.avi"), write)


def avi(frames, width, height):
    """An AVI file of PNG pictures, which ffmpeg decodes."""
    picture = png(width, height)
    picture += b"\0" * (len(picture) % 2)
    main = (1_000_000 // RATE, RATE * len(picture), 0, _HAS_INDEX, frames, 0, 1, len(picture), width, height)
    stream = struct.pack("<4s4sIHHIIIIIIiI4h", b"vids", b"MPNG", *[0] * 4, 1, RATE, 0, frames, *[0, -1, 0], *[0] * 4)
    bitmap = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MPNG", 3 * width * height, 0, 0, 0, 0)
    header = _list(
        b"hdrl",
        _chunk(b"avih", struct.pack("<14I", *main, *[0] * 4)),
        _list(b"strl", _chunk(b"strh", stream), _chunk(b"strf", bitmap)),
    )
    one = _chunk(b"00dc", picture)
    index = [struct.pack("<4sIII", b"00dc", _KEY_FRAME, 4 + at * len(one), len(picture)) for at in range(frames)]
    content = header + _list(b"movi", one * frames) + _chunk(b"idx1", b"".join(index))
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"AVI " + content


def _chunk(kind, data):
    return kind + struct.pack("<I", len(data)) + data


def _list(kind, *parts):
    return _chunk(b"LIST", kind + b"".join(parts))


def serve_videos(module, run):
    """transformers.video_processing_utils: a file of :func:`gray` needs no decoder; others are the library's affair."""

    @instead_of(module.BaseVideoProcessor, "fetch_videos")
    def fetch_videos(plain, self, video_url_or_urls, sample_indices_fn=None):
        asked = video_url_or_urls if isinstance(video_url_or_urls, list) else [video_url_or_urls]
        if not all(isinstance(path, str) and os.path.dirname(path) == run.folder for path in asked):
            return plain(self, video_url_or_urls, sample_indices_fn=sample_indices_fn)
        run.replaced("video decoder", "transformers", "none is needed for gray frames; real files need torchcodec")
        made = [read(run.asked["video_size"], sample_indices_fn) for _ in asked]
        return list(zip(*made, strict=True)) if asked is video_url_or_urls else made[0]


def read(size, sample=None):
    """(frames, what a decoder says of the file), those that ``sample`` chooses by it, or all."""
    import numpy
    from transformers.video_utils import VideoMetadata

    frames, width, height = size
    about = VideoMetadata(
        total_num_frames=frames,
        fps=float(RATE),
        duration=frames / RATE,
        width=width,
        height=height,
        video_backend="gray",
    )
    chosen = numpy.asarray(sample(metadata=about) if sample else range(frames))
    about.frames_indices = chosen
    return numpy.full((len(chosen), height, width, 3), 128, dtype=numpy.uint8), about


def serve_audio(module, run):
    """datasets.features.audio: rows of silence are read here where torchcodec is missing."""

    @instead_of(module.Audio, "decode_example")
    def decode_example(plain, self, value, *words, **options):
        try:
            return plain(self, value, *words, **options)
        except ImportError:
            path = value.get("path") or ""
            if os.path.dirname(path) != run.folder:
                raise
        run.replaced("audio decoder", "datasets", "none is needed for silence; real files need torchcodec")
        return _read(path, self.sampling_rate)


def _read(path, rate):
    import numpy

    with wave.open(path, "rb") as file:
        seconds = file.getnframes() / file.getframerate()
    rate = rate or _SAMPLES
    return {"path": path, "array": numpy.zeros(round(seconds * rate), dtype=numpy.float32), "sampling_rate": rate}
