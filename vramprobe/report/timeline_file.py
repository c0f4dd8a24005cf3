"""A Timeline → a file: a page (.html) or a picture (.png, .svg), by its name.

In: a Timeline and a path. Out: the file, the same bytes each time.
"""

from pathlib import Path

from vramprobe.errors import SpecError, StoreError, require_extra
from vramprobe.report.timeline import Timeline

PICTURES = (".png", ".svg")
SUFFIXES = (".html", *PICTURES)


def kind_of(path: str | Path, also: tuple[str, ...] = ()) -> str:
    """``.html``, ``.png``, ``.svg`` or one of ``also``. Raises SpecError for another file name."""
    suffix, allowed = Path(path).suffix.lower(), (*SUFFIXES, *also)
    if suffix not in allowed:
        raise SpecError(f"timeline {path}: the file name must end in {', '.join(allowed[:-1])} or {allowed[-1]}")
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


def require_writable(path: str | Path, also: tuple[str, ...] = ()) -> None:
    """Raise, before anything runs, if ``path`` could not be written or has no suffix of :func:`kind_of`; makes its
    folder."""
    path = Path(path)
    if kind_of(path, also) in PICTURES:
        require_extra("report", "a picture")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise StoreError(f"cannot write the timeline to {path}: {error.strerror}; name another file") from error
