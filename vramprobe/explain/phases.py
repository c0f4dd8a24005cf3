"""A traceback's frames → the phase of the run that ran out of memory.

In: frames as (path, line, function, source), outermost first. Out: a Phase. The rules are data/phases.toml: names of
torch, transformers, TRL, accelerate, DeepSpeed, Megatron, verl and others. Of a path only what follows site-packages
is kept, else the file's name.
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.catalog.shipped import data_file


class Frame(NamedTuple):
    """One line of a traceback; ``source``: the code that it shows, empty where it shows none."""

    path: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True)
class Phase:
    """``name`` decides what helps; ``detail`` narrows it down; ``at``: the frame that tells, innermost one second."""

    name: str
    detail: str = ""
    at: tuple[str, ...] = ()


class PhaseRule(NamedTuple):
    """A name, and the frames that show it: all three expressions match. ``function`` is the whole name."""

    name: str
    path: str = ""
    function: str = r".*"
    source: str = ""

    def shows(self, frame: Frame) -> bool:
        """Return True if ``frame`` matches this rule."""
        return (
            re.fullmatch(self.function, frame.function) is not None
            and re.search(self.path, frame.path.replace("\\", "/")) is not None
            and (not self.source or re.search(self.source, frame.source) is not None)
        )


UNKNOWN = Phase("unknown")

_TABLE = tomllib.loads(data_file("phases.toml").read_text(encoding="utf-8"))


def _rule(row: dict[str, str]) -> PhaseRule:
    """A row of the table, the patterns that it names filled in."""

    def filled(text: str) -> str:
        return re.sub(r"<([A-Z_]+)>", lambda name: _TABLE["patterns"][name[1]], text)

    return PhaseRule(**{name: filled(text) for name, text in row.items()})


#: Phases that contain others; those of a step; forward; only where nothing else is found; what is the host's memory.
AROUND, STEP, FORWARD, OTHERS, HOST_COPIES = (
    tuple(map(_rule, _TABLE["rules"][name])) for name in ("AROUND", "STEP", "FORWARD", "OTHERS", "HOST_COPIES")
)
#: What narrows a phase down: the first that is found counts.
DETAILS: dict[str, tuple[PhaseRule, ...]] = {
    phase: tuple(_rule(row) for one in given for row in (_TABLE["groups"][one] if isinstance(one, str) else [one]))
    for phase, given in _TABLE["details"].items()
}


#: A phase in words, where its name is not enough; the kinds of tensor that it, or a detail, makes: any if not listed.
WORDS: dict[str, str] = _TABLE["words"]
KINDS: dict[str, list[str]] = _TABLE["makes"]


def phase_of(frames: Sequence[Frame]) -> Phase:
    """The phase that a traceback, outermost frame first, tells of; UNKNOWN where no frame is of a known library."""
    frames = [frame for frame in frames if "/torch/utils/_contextlib" not in frame.path]
    for rule in AROUND:
        found = find((rule,), frames)
        if found is not None:
            return _phase(rule.name, found[1], frames)
    for rules in (STEP, FORWARD, OTHERS):
        found = find(rules, reversed(frames))
        if found is not None:
            return _phase(found[0].name, found[1], frames)
    return UNKNOWN


def host_copy(frames: Sequence[Frame]) -> str:
    """Return how the innermost frames take the host's memory; empty where they do not."""
    found = find(HOST_COPIES, frames[-2:])
    return found[0].name if found else ""


def find(rules: Iterable[PhaseRule], frames: Iterable[Frame]) -> tuple[PhaseRule, Frame] | None:
    """The first frame that one of ``rules`` matches, and that rule."""
    rules = tuple(rules)
    return next(((rule, frame) for frame in frames for rule in rules if rule.shows(frame)), None)


def _phase(name: str, told_by: Frame, frames: Sequence[Frame]) -> Phase:
    detail = next((rule.name for rule in DETAILS.get(name, ()) if find((rule,), frames) is not None), "")
    return Phase(name, detail, tuple(dict.fromkeys((shown(told_by), shown(frames[-1])))))


def shown(frame: Frame) -> str:
    """A frame without the folders of whoever ran it, and without what a terminal would obey."""
    path = frame.path.replace("\\", "/")
    package = re.search(r"(?:site|dist)-packages/(.+)", path)
    text = f"{package[1] if package else path.rpartition('/')[2]}:{frame.line} in {frame.function}"
    return "".join(character for character in text if character.isprintable())
