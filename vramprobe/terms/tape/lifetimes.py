"""Lifetimes: a step's values end when their tensors would, whoever watches the Python that plays it.

In: a function that plays a step. Out: the same function, undisturbed. A value lives as long as a name, a container or a
node holds it, exactly as a tensor does: models are written as transformers writes them, and CPython ends both alike.
This is exact unless somebody else keeps the frames of functions that have returned: a debugger, a profiler, coverage.
So a step is played without the thread's trace and profile functions, and the tape checks that all of its values ended
with it, in the thread that made them (``Tape.require_ended``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from vramprobe.errors import VramprobeError

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class OutlivedStep(VramprobeError):
    """A value of a step was alive for longer than its tensor would be, so that the step's bytes are not to be used."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: something keeps the frames of vramprobe's functions alive (a debugger, a sampling profiler), and "
            "with them values that should have ended; predict without it"
        )


def undisturbed(play: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """``play`` without this thread's trace and profile functions, as they may keep its frames; they are set again
    afterwards. A C profiler (cProfile) keeps none and stays.
    """

    @wraps(play)
    def played(*args: _Given.args, **options: _Given.kwargs) -> _Made:
        tracer, profiler = sys.gettrace(), sys.getprofile()
        if tracer is None and not callable(profiler):
            return play(*args, **options)
        sys.settrace(None)
        if callable(profiler):
            sys.setprofile(None)
        try:
            return play(*args, **options)
        finally:
            if callable(profiler):
                sys.setprofile(profiler)
            sys.settrace(tracer)

    return played
