"""torch's library, loaded by a thread while the interpreter imports what needs no torch.

In: nothing. Out: a thread, to be joined once torch is imported, which then finds its library there. It takes 0.2 s of
the linker's and of C++ constructors, and no Python. Where there is no such file, or it does not load, nothing is done:
torch knows what it then does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path

#: As torch loads them (torch/__init__.py, ``_load_global_deps``, and what ``torch._C`` is linked with); Linux's names.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))


def load_library() -> threading.Thread:
    """The thread that does it, started."""
    thread = threading.Thread(target=_load, name="torch's library")
    thread.start()
    return thread


def _load() -> None:
    torch = find_spec("torch")  # which does not import it
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent / "lib"
    if not all((folder / name).is_file() for name, _ in _LIBRARIES):
        return
    load = ctypes.CDLL(None).dlopen  # a call, during which others may run; ctypes.CDLL(path) keeps the interpreter
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    all(load(os.fsencode(folder / name), how) for name, how in _LIBRARIES)
