"""The emulated GPU's version, and the user's cache of what it builds: its lock, its errors in one line.

In: the sources, as installed; a folder. Out: digits that change with any source. Loads nothing of the build itself.
"""

import contextlib
import errno
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from vramprobe.catalog.own import CACHE_VARIABLE
from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.toolchain import BuildError

_SOURCES = ("build.py", "queries.py", "rules.py", "stubs.py", "symbols.py")  # beside driver/*: what a build is made by


def emulator_version() -> str:
    """12 hexadecimal digits that change when any source of the emulated GPU does; for records."""
    digest = hashlib.sha256()
    own = [Path(__file__).with_name(name) for name in _SOURCES]
    for path in (*driver_sources(), *own, Path(str(data_file("cuda_functions.txt")))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def driver_sources() -> tuple[Path, ...]:
    """The driver's C files and headers, as installed."""
    folder = Path(str(resources.files("vramprobe.emulate").joinpath("driver")))
    return tuple(sorted(p for p in folder.rglob("*") if p.suffix in (".c", ".h")))


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a file's lock; the kernel frees it when its holder ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def cache_errors(home: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden cache folder into one line that names it and how to move it."""
    advice = f"set {CACHE_VARIABLE} to a folder elsewhere"
    try:
        yield
    except OSError as error:
        what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"
        raise BuildError(f"the cache folder {home} {what}: make room there, or {advice}.") from error
    except BuildError as error:
        if "No space left" in str(error) or "Disk quota" in str(error):
            raise BuildError(f"the cache folder {home} is full: make room there, or {advice}.") from error
        raise
