"""Videos for rows: one gray frame over and over, a second each, as an AVI file that the usual decoders read.

In: frames and pixels. Out: a file, its path, and what transformers' video processors make of it without a decoder. The
standard library alone; numpy where a row is read.
"""

import functools
import os
import struct

from . import images

#: Frames a second: as a processor that samples by time takes two of them or one, it keeps them all.
RATE = 1
_HAS_INDEX, _KEY_FRAME = 0x10, 0x10


def gray(folder, size):
    """The path of a file of ``size``: frames, width, height; the same for all processes of a run."""
    path = os.path.join(folder, f"gray-{'x'.join(map(str, size))}.avi")
    if not os.path.exists(path):
        own = f"{path}.{os.getpid()}"
        with open(own, "wb") as out:
            out.write(avi(*size))
        os.replace(own, path)
    return path


def avi(frames, width, height):
    """An AVI file of PNG pictures, which ffmpeg decodes."""
    picture = images.png(width, height)
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


def serve(module, *, folder, size, replacements):
    """transformers.video_processing_utils: a file of :func:`gray` needs no decoder; others are the library's affair."""
    kind = module.BaseVideoProcessor
    plain = kind.fetch_videos

    @functools.wraps(plain)
    def fetch_videos(self, video_url_or_urls, sample_indices_fn=None):
        asked = video_url_or_urls if isinstance(video_url_or_urls, list) else [video_url_or_urls]
        if not all(isinstance(path, str) and os.path.dirname(path) == folder for path in asked):
            return plain(self, video_url_or_urls, sample_indices_fn=sample_indices_fn)
        replacements.replaced(
            "video decoder", "transformers", "none is needed for gray frames; real files need torchcodec"
        )
        made = [read(size, sample_indices_fn) for _ in asked]
        return list(zip(*made, strict=True)) if asked is video_url_or_urls else made[0]

    kind.fetch_videos = fetch_videos


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
