"""Two calls at once: one in a forked child, the other here.

In: two functions; what the child's gives must be one that pickle knows. Out: both results. Where there is one core, or
no fork, or the child does not come back, all is done here, one after the other.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_U = TypeVar("_U")


def both(there: Callable[[], _T], here: Callable[[], _U]) -> tuple[_T, _U]:
    """(``there()`` of the child's, ``here()``). What either raises is raised here."""
    if not hasattr(os, "fork") or (os.cpu_count() or 1) < 2:
        return there(), here()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _answer(there, write)
    os.close(write)
    try:
        with open(read, "rb") as answer:
            done = here()
            said = answer.read()
    finally:
        os.waitpid(child, 0)
    return pickle.loads(said) if said else there(), done


def _answer(there: Callable[[], Any], write: int) -> None:
    """The child's whole life: an error leaves nothing, and is met again where it can be told."""
    try:
        said = pickle.dumps(there(), protocol=pickle.HIGHEST_PROTOCOL)
        with open(write, "wb") as answer:
            answer.write(said)
    finally:
        os._exit(0)
