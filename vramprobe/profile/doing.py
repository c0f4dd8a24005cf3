"""Describe a process's last known activity in words: phase and progress, compiling or importing, the program's line.

In: the text of a ``.doing`` file (hook/doing.py). Out: a Doing, or None for a torn one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from vramprobe.profile.places import Places
from vramprobe.units import format_bytes

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
#: On the stack while something is compiled. Dynamo's wrappers stand there as well where nothing is: gradient
#: checkpointing is one of the functions that it is kept out of; and all stand there while they are imported.
_COMPILERS = ("/torch/_dynamo/convert_frame", "/torch/_inductor/compile_fx", "/triton/compiler/")
#: Frames of who waits for a thread or a queue, or imports a name when it is asked for: the line that waits says more.
_WAITS = (
    "/threading.py",
    "/queue.py",
    "/selectors.py",
    "/importlib/__init__.py",
    "/_lazy_module.py",
    "/import_utils.py",
)
_OWN = re.compile(r"(?:^|/)vramprobe/(?:emulate|profile)/")
_NAMES = {None: "before its first use of a GPU", "load": "loading", "other": "between phases"}


@dataclass(frozen=True, kw_only=True)
class Doing:
    """``stack``: of the main thread, innermost first."""

    phase: str | None = None  # null before its first use of a GPU
    step: int | None = None
    num_steps: int = 0
    num_phases: int = 0  # of this name, that have ended
    allocated_bytes: int | None = None
    says_its_pace: bool = False  # a generation by transformers, token by token
    stack: tuple[tuple[str, int, str], ...]

    def said(self, homes: Sequence[str]) -> str:
        """``evaluation, 640 so far, 0 steps done, 1.20 GiB allocated, compiling, at train.py:12 main``."""
        place = self.place(homes)
        return f"{self.progress()}, at {place}" if place else self.progress()

    def place(self, homes: Sequence[str]) -> str:
        """The program's line: ``train.py:12 main``, the one that imports during an import; empty where only the
        profiler's own lines are on the stack.
        """
        stack = [one for one in self.stack[self._imports() :] if not one[0].endswith(_WAITS)]
        place = Places((), list(homes)).of_stack(stack)
        return f"{place.line} {place.function}" if place.line and not _OWN.search(place.line) else ""

    def _imports(self) -> int:
        """Count the frames up to the outermost import, before training: 0 where nothing is imported."""
        if self.phase not in (None, "load"):  # a program may train within an import
            return 0
        return max((n for n, frame in enumerate(self.stack, 1) if frame[2] == "_find_and_load"), default=0)

    def progress(self) -> str:
        """``evaluation, 640 so far, 0 steps done, 1.20 GiB allocated, compiling``."""
        words = [_NAMES.get(self.phase, self.phase or "")]
        if self.step is not None:
            words[0] += f" of step {self.step}"
        if self.phase in ("evaluation", "generation") and self.num_phases:
            words.append(f"{self.num_phases:,} so far")
        if self.phase is not None:
            words.append(f"{self.num_steps:,} step{'' if self.num_steps == 1 else 's'} done")
        if self.allocated_bytes:
            words.append(f"{format_bytes(self.allocated_bytes)} allocated")
        if any(part in file and name != "<module>" for file, _, name in self.stack for part in _COMPILERS):
            words.append("compiling")
        if self._imports():
            words.append("importing")
        return ", ".join(words)


def doing_of(text: str) -> Doing | None:
    """Parse the file."""
    first, _, dumped = text.partition("\n")
    try:
        said = json.loads(first)
        main, thread, stack = said["main_thread"], None, []
    except (ValueError, KeyError, TypeError):
        return None
    for line in dumped.splitlines():
        if (begun := _THREAD.match(line)) is not None:
            thread = int(begun[1], 16)
        elif thread == main and (frame := _FRAME.match(line)) is not None:
            stack.append((frame[1], int(frame[2]), frame[3]))
    known = {one.name: said[one.name] for one in fields(Doing) if one.name in said}
    return Doing(**known, stack=tuple(stack))
