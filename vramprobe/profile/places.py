"""Find the line, function and module that requested a block: stacks → places in words.

In: stacks as the history has them, innermost first. Out: frozen Places. Files are read for their classes where they are
on this disk; where not, a place has no class. Runs nothing of what it reads.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Frame = tuple[str, int, str]
Stack = Sequence[Frame]

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_LIBRARY = re.compile(r".*/lib/python3\.\d+/")
#: Frames that ask for memory on somebody else's behalf: torch, Triton, copy.deepcopy, and what watches them.
_BEHIND = re.compile(
    r"(?:torch|triton)/|.*/pytorch/torch/|.*/torchinductor_[^/]*/|(?:.*/)?vramprobe/(?:emulate|profile)/|copy\.py$|<"
)
#: torch's way to who intercepts its operators: on autograd's threads nothing else is on the stack.
_DISPATCH = re.compile(r"torch/(?:_ops|_library/.*|_compile|utils/_python_dispatch)\.py|<")


@dataclass(frozen=True)
class Location:
    """Null where no line of Python was on the stack, as on the threads of autograd."""

    line: str | None  # "transformers/models/llama/modeling_llama.py:163"
    function: str | None
    module: str | None  # "LlamaMLP.forward"


NOWHERE = Location(None, None, None)


class Places:
    """Stacks of one process in words; ``homes``: where its own files lie, which are named from there."""

    def __init__(self, stacks: Sequence[Stack], homes: Sequence[str] = ()) -> None:
        self._stacks, self._homes = stacks, homes
        self._known: dict[int, Location] = {}

    def of(self, number: int) -> Location:
        """The place of the stack with this number; -1 has none."""
        if number not in self._known:
            stack = self._stacks[number] if 0 <= number < len(self._stacks) else ()
            self._known[number] = self.of_stack(stack)
        return self._known[number]

    def of_stack(self, stack: Stack) -> Location:
        """The innermost frame outside torch, or the innermost at all; the class is that of the first frame in one."""
        stack = [frame for frame in stack if not _DISPATCH.match(self._short(frame[0]))]
        if not stack:
            return NOWHERE
        own = [frame for frame in stack if not _BEHIND.match(self._short(frame[0]))]
        file, line, function = (own or stack)[0]
        module = next((found for frame in own if (found := _method(self._whole(frame[0]), frame[1]))), None)
        return Location(f"{self._short(file)}:{line}", function, module)

    def _short(self, file: str) -> str:
        """A file as one would import it: from its package, or from beside the script."""
        for known in (_PACKAGES, _LIBRARY):
            if found := known.match(file):
                return file[found.end() :]
        home = next((home for home in self._homes if file.startswith(f"{home}/")), None)
        return file if home is None else file[len(home) + 1 :]

    def _whole(self, file: str) -> str:
        """A script that was started by a relative name lies in the folder that it was started in."""
        return file if file.startswith("/") or not self._homes else f"{self._homes[-1]}/{file}"


def _method(file: str, line: int) -> str | None:
    """``Class.method`` around a line; None outside every class, and where the file is not here or no Python."""
    inside = [one for one in _methods(file) if one[0] <= line <= one[1]]
    return max(inside)[2] if inside else None


@cache
def _methods(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, Class.method) of every method in a file."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(
        (inner.lineno, inner.end_lineno or inner.lineno, f"{node.name}.{inner.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def pattern(name: str) -> str:
    """A parameter's name with its numbers as ``*``: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
