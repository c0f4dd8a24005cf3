"""A published file and what is due → what is wrong with it: of a text what it says, of a picture what is drawn.

In: a path and the content that is due. Out: a few words, or None where the file is fresh. Never writes.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from vramprobe.report.plots.drawn import is_same_picture

_EMBEDDED = re.compile(rb"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")


def what_is_wrong(path: Path, content: bytes) -> str | None:
    """With the file at ``path``, beside its due ``content``."""
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if there == content:
        return None
    (rest, then), (same_rest, now) = _apart(path, there), _apart(path, content)
    if rest == same_rest and len(then) == len(now) and all(map(is_same_picture, then, now)):
        return None
    return "differs from what the records give"


def _apart(path: Path, content: bytes) -> tuple[bytes, list[bytes]]:
    """Return a file's content without its pictures, and its pictures."""
    if path.suffix in (".svg", ".png"):
        return b"", [content]
    if path.suffix != ".html":
        return content, []
    return _EMBEDDED.sub(b"", content), [base64.b64decode(found) for found in _EMBEDDED.findall(content)]
