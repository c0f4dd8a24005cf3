"""Commands of the runs that try the techniques, alone and together, and the reasons why some have none.

In: the registry, and the tables of data/techniques.toml that only benchmarks read. Out: commands as words.
"""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.catalog.shipped import data_file
from vramprobe.techniques.registry import Base, Technique

_TABLE: dict[str, Any] = tomllib.loads(data_file("techniques.toml").read_text(encoding="utf-8"))
#: The techniques without a row: group (optim, peft, quantization) → the library's name → reason.
LEFT_OUT: dict[str, dict[str, str]] = _TABLE["left_out"]


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Several techniques in one run."""

    base: str
    techniques: tuple[str, ...]


#: Those that were run together.
COMBINATIONS = tuple(
    Combination(base=one["base"], techniques=tuple(one["techniques"])) for one in _TABLE.get("combination", ())
)


def command_of(base: Base, several: Sequence[Technique]) -> list[str]:
    """The command that tries these techniques together, or none of them."""
    command = next((one.command for one in several if one.command), base.command)
    return _joined([*shlex.split(command), *(word for one in several for word in arguments_of(one))])


def arguments_of(technique: Technique) -> list[str]:
    """Arguments that a technique's run adds to its base's command."""
    given = ((f"--{name}", getattr(technique, name)) for name in ("optim", "adapter", "quantization"))
    return [*(word for pair in given if pair[1] for word in pair), *shlex.split(technique.run)]


def _joined(words: list[str]) -> list[str]:
    """Python that several techniques run at one place as one argument: of a repeated one the last counts."""
    for name in ("--patch", "--loaded", "--then"):
        at = [index + 1 for index, word in enumerate(words) if word == name]
        if len(at) > 1:
            code = "; ".join(words[index] for index in at)
            words = [word for index, word in enumerate(words) if {index, index + 1}.isdisjoint(at)] + [name, code]
    return words
