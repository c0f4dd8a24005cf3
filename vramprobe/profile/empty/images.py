"""Images for rows: one colour, any size, as PNG, which datasets decodes as it does real ones.

In: pixels. Out: bytes. The standard library alone.
"""

import struct
import zlib


def png(width, height):
    """Gray, 8 bits a channel, RGB."""
    line = b"\0" + b"\x80\x80\x80" * width
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(line * height, 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
