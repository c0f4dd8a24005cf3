"""Compose a step of two micro-steps from one of one: what gradient accumulation adds to a recorded step.

In: the phases of steps with one micro-step, as Scripts, and their Log. Out: the same steps with a second forward and
backward each, whose gradients are added to those that are there and freed at once; more micro-steps are like the
second. Knows no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from vramprobe.errors import VramprobeError
from vramprobe.log.log import ALL_CAUSES, Log, PhaseMark
from vramprobe.log.pairing import Script

_GRADIENTS = ALL_CAUSES.index("gradients")
#: The step whose micro-step is repeated: what the first allocates once for all is there.
_STEADY = 2

Phases = list[tuple[PhaseMark, Script]]


class NoSecond(VramprobeError):
    """A recorded step that a second micro-step does not follow from."""


def two_micro_steps(marks: Sequence[PhaseMark], scripts: Sequence[Script], log: Log) -> Phases:
    """Return the phases of steps with two micro-steps; ``log`` holds the events of ``scripts``, in their order.

    Raises NoSecond where no second step shows what a later micro-step asks for, or gradients are made in forward, as a
    fused loss does.
    """
    phases = list(zip(marks, scripts, strict=True))
    steady = {mark.name: place for place, mark in enumerate(marks) if mark.step == _STEADY}
    if not {"forward", "backward", "zero_grad"} <= steady.keys():
        raise NoSecond("no second step was recorded")
    made, ends = (log.marks[steady[name]].events for name in ("forward", "zero_grad"))
    if np.isin(log.blocks[made.start : made.stop], log.blocks[ends.start : ends.stop]).any():
        raise NoSecond("gradients are made in forward")
    forward, backward = scripts[steady["forward"]], scripts[steady["backward"]]
    again = _adding(backward, _stays(log, log.marks[steady["backward"]]))
    return [phase for mark, script in phases for phase in _with_second(mark, script, forward, again)]


def _with_second(mark: PhaseMark, script: Script, forward: Script, backward: Script) -> Iterator[tuple]:
    yield mark, script
    if mark.name == "backward":
        yield replace(mark, name="forward", micro_step=2), forward
        yield replace(mark, micro_step=2), backward


def _stays(log: Log, mark: PhaseMark) -> np.ndarray:
    """Return the mask of a backward's events that allocate a gradient which is there when it ends."""
    events = slice(mark.events.start, mark.events.stop)
    sizes, blocks, causes = log.size_bytes[events], log.blocks[events], log.causes[events]
    return (sizes > 0) & (causes == _GRADIENTS) & ~np.isin(blocks, blocks[sizes < 0])


def _adding(backward: Script, stays: np.ndarray) -> Script:
    """Return the backward whose gradients that would stay are freed before it asks for the next block."""
    asks = np.append(np.flatnonzero(backward.codes > 0), len(backward.codes))
    made = np.flatnonzero(stays)
    before = asks[np.searchsorted(asks, made, side="right")]  # each its own: nothing of its kind is newer then
    own = np.abs(backward.size_bytes)
    return Script(
        backward.kinds,
        np.insert(backward.codes, before, -backward.codes[made]),
        np.insert(backward.ranks, before, 0),
        np.insert(own, before, own[made]),
    )
