"""A command's recipe: what its training step requests at any rows and length, by branch of the order of its requests.

In: a file that a probed profile left (profile/probe.py). Out: a CommandRecipe; for a shape, its branch and the Log of
load and steps there. Raises StoreError for a file that is none. No torch, no device.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError, StoreError
from vramprobe.log.shapes import Shape
from vramprobe.recipe.packed import pack, unpack
from vramprobe.recipe.recipe import Recipe
from vramprobe.records.whole_file import replacing

FORMAT = 1
#: Where a profile's folder has it.
FILE_NAME = "recipe"
_WORDS = "command.json"
#: By which branches are told apart: a batch's rows, tokens and length, and the largest power of two in the length.
_FEATURES: dict[str, Callable[[Shape], int]] = {
    "rows": lambda shape: shape[0],
    "tokens in a batch": lambda shape: shape[0] * shape[1],
    "tokens in a row": lambda shape: shape[1],
    "the power of two that divides the length": lambda shape: min(shape[1] & -shape[1], 64),
}


class UnknownBranch(SpecError):
    """A shape at which the order of requests may be one that was not recorded."""


@dataclass(frozen=True, kw_only=True)
class Loose:
    """Requests whose size follows from no shape: the line that makes them, the most bytes of each by token, together,
    of all shapes that ran."""

    line: str
    num_requests: int
    bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Shapes (rows, tokens of a row) whose steps make the same requests in the same order, and the recipe of them.

    ``loose``: requests of it that follow from no shape; they count by tokens, as the largest of them did.
    """

    shapes: tuple[Shape, ...]
    recipe: Recipe
    loose: tuple[Loose, ...]


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Requests that some branches make and others do not, and the line of the first; ``is_on``: by branch."""

    line: str
    num_requests: int
    is_on: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class HeldOutShape:
    """A shape that ran and that no rule was made from: bytes requested and allocated at its step's peak, and those
    that the rules give."""

    shape: Shape
    requested_bytes: int
    predicted_requested_bytes: int
    allocated_bytes: int
    predicted_allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class CommandRecipe:
    """``shape``: the command's own. ``is_cut``: whether lengths were varied. ``stack``: package → version, with the
    emulator's."""

    command: tuple[str, ...]
    gpu: str
    shape: Shape
    is_cut: bool
    micro_steps: int
    alloc_conf: str | None
    stack: dict[str, str]
    branches: tuple[Branch, ...]  # the command's own first
    switches: tuple[Switch, ...]
    held_out: tuple[HeldOutShape, ...]

    def branch_of(self, shape: Shape) -> Branch:
        """The branch that ``shape`` is in. Raises UnknownBranch where the recorded shapes do not say."""
        if not self.is_cut and shape[1] != self.shape[1]:
            raise UnknownBranch(
                f"the length of this command's batches was not varied: only {self.shape[1]:,} is known; drop --seq-len"
            )
        ran = {own: number for number, branch in enumerate(self.branches) for own in branch.shapes}
        if shape in ran:
            return self.branches[ran[shape]]
        held = [switch for switch in self.switches if _cuts(switch, ran)]
        wanted = [self._is_on(switch, ran, shape) for switch in held]
        found = [
            branch for number, branch in enumerate(self.branches) if [switch.is_on[number] for switch in held] == wanted
        ]
        if len(found) == 1:
            return found[0]
        line = (held or self.switches)[0].line
        raise self._unknown(shape, "nothing of the shape says which is made" if found else "this one never ran", line)

    def _is_on(self, switch: Switch, ran: Mapping[Shape, int], shape: Shape) -> bool:
        """Decide whether its requests are made at ``shape``: all thresholds that part the recorded ones must agree."""
        found = set()
        for name, low, high, is_on_above in _cuts(switch, ran):
            value = _FEATURES[name](shape)
            if low < value < high:
                raise self._unknown(shape, f"it changes between {low:,} and {high:,} {name}", switch.line)
            found.add(is_on_above == (value >= high))
        if len(found) > 1:
            names = " or ".join(name for name, *_ in _cuts(switch, ran))
            raise self._unknown(
                shape, f"it changes with {names}, and the recorded shapes do not say which", switch.line
            )
        return found.pop()

    def _unknown(self, shape: Shape, why: str, line: str) -> UnknownBranch:
        known = "; ".join(", ".join(f"{rows} x {length:,}" for rows, length in one.shapes) for one in self.branches)
        return UnknownBranch(
            f"{shape[0]} x {shape[1]:,}: the order of requests depends on the shape at {line}, and {why}. Recorded, by "
            f"order: {known}. Ask for a shape beyond, or profile the command at this one"
        )


def _cuts(switch: Switch, ran: Mapping[Shape, int]) -> list[tuple[str, int, int, bool]]:
    """(feature, the highest value on one side, the lowest on the other, whether it is on above) of each threshold that
    parts the shapes that make a switch's requests from those that do not."""
    cuts = []
    for name, feature in _FEATURES.items():
        on = [feature(shape) for shape, number in ran.items() if switch.is_on[number]]
        off = [feature(shape) for shape, number in ran.items() if not switch.is_on[number]]
        if max(off) < min(on):
            cuts.append((name, max(off), min(on), True))
        elif max(on) < min(off):
            cuts.append((name, max(on), min(off), False))
    return cuts


def write_command(recipe: CommandRecipe, path: Path) -> int:
    """Write ``recipe`` to ``path``, whole or not at all; the bytes of the file."""
    words = asdict(recipe, dict_factory=lambda pairs: {name: value for name, value in pairs if name != "recipe"})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(_WORDS, json.dumps(words | {"format": FORMAT}))
        for number, branch in enumerate(recipe.branches):
            file.writestr(f"{number}.recipe", pack(branch.recipe))
    packed = buffer.getvalue()
    with replacing(path) as part:
        part.write_bytes(packed)
    return len(packed)


def read_command(path: Path) -> CommandRecipe:
    """The recipe of a run: ``path`` is its folder, or the recipe's file. Raises StoreError."""
    file_path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise StoreError(f"there is no run at {path}: name the --folder that `vramprobe profile --emulate GPU` wrote")
    if not file_path.exists():
        raise StoreError(f"{path} holds no recipe: {_why_none(path)}")
    try:
        with zipfile.ZipFile(file_path) as file:
            words = json.loads(file.read(_WORDS))
            if (written := words.pop("format")) != FORMAT:
                raise StoreError(
                    f"{file_path} is a recipe of format {written}, and this vramprobe reads {FORMAT}: profile the "
                    "command again"
                )
            branches = [
                _branch(one, unpack(file.read(f"{number}.recipe"), str(file_path)))
                for number, one in enumerate(words.pop("branches"))
            ]
        shape, command = tuple(words.pop("shape")), tuple(words.pop("command"))
        held_out = tuple(HeldOutShape(**one | {"shape": tuple(one["shape"])}) for one in words.pop("held_out"))
        switches = tuple(Switch(**one | {"is_on": tuple(one["is_on"])}) for one in words.pop("switches"))
        return CommandRecipe(
            **words, shape=shape, command=command, held_out=held_out, branches=tuple(branches), switches=switches
        )
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{file_path} is no recipe of a command, or a damaged one ({type(error).__name__}): profile it again"
        ) from None


def _branch(words: dict[str, Any], recipe: Recipe) -> Branch:
    shapes = tuple((int(rows), int(length)) for rows, length in words["shapes"])
    loose = tuple(Loose(**one) for one in words["loose"])
    return Branch(shapes=shapes, recipe=recipe, loose=loose)


def _why_none(folder: Path) -> str:
    """Say what to do about a folder without one."""
    told = folder / "run.json"
    if not told.exists():
        return "it is no profile's folder; name the one that `vramprobe profile --emulate GPU --folder RUN` wrote"
    try:
        said = json.loads(told.read_text())
    except ValueError:
        return "its run.json is damaged; profile the command again"
    if said.get("no_recipe"):
        return said["no_recipe"]
    return "it was profiled on no emulated GPU, by an older vramprobe or with --no-probe; profile the command again"
