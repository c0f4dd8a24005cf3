"""A Timeline → a file: a page (.html) or a picture (.png, .svg), by its name.

In: a Timeline and a path. Out: the file, the same bytes each time.
"""

from __future__ import annotations

from pathlib import Path

from vramprobe.errors import SpecError, StoreError
from vramprobe.report.timeline import Timeline

SUFFIXES = (".html", ".png", ".svg")


def kind_of(path: str | Path) -> str:
    """``.html``, ``.png`` or ``.svg``. Raises SpecError for another file name."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(
            f"a timeline is a page or a picture: {path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    return suffix


def write(timeline: Timeline, path: str | Path) -> None:
    """Write the page or the picture, by the file name. Raises SpecError for another, StoreError where that fails."""
    path = Path(path)
    kind = kind_of(path)
    if kind == ".html":
        from vramprobe.report.timeline_page import page

        content = page(timeline).encode()
    else:
        from vramprobe.report.timeline_picture import picture

        content = picture(timeline, kind[1:])
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StoreError(f"cannot write the timeline to {path}: {error.strerror}; name another file") from error


def require_writable(path: str | Path) -> None:
    """Raise, before anything is simulated, where :func:`write` could not write to ``path``; makes its folder."""
    path = Path(path)
    kind_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise StoreError(f"cannot write the timeline to {path}: {error.strerror}; name another file") from error
