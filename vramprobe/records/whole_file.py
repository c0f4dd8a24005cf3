"""Files that are whole or not there: written beside their place, and put into it in one step.

A kill, or a full disk, leaves the file that was there before.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which becomes ``path`` at the end; nothing of it stays where that fails."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
