"""The requests of steps on batches of several shapes → those of a step on any shape.

In: Units (step_requests.py) and the shape of each. Out: Learnt: for a shape, the order of events of the nearest shape
that ran, and each request's size as a function of rows and width, learnt from all shapes that make it. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.profile.request_names import RequestNames, learnt_sizes, matches
from vramprobe.profile.size_by_shape import Shape
from vramprobe.profile.step_requests import STREAM, MicroStep


@dataclass(frozen=True)
class Template:
    """One micro-step that ran, ``unit``, its requests under names that are those of all steps.

    ``events``: in order, the position in ``names`` of a request; ``~name`` for a free of this step's, ``~name`` less
    the number of all names for a free of the step before. ``empties``: before which events the cache is given back.
    """

    shape: Shape
    unit: MicroStep
    names: np.ndarray
    events: np.ndarray
    empties: tuple[int, ...]


@dataclass(frozen=True)
class HeldOutStep:
    """A step that was not learnt from: its requests, those that it makes and were not foreseen or the other way round,
    and the bytes that differ, of those that it requests."""

    num_requests: int
    num_different: int
    bytes_requested: int
    bytes_different: int


class Learnt:
    """See the module. ``before``: of each name, the block of the step before those that are played, -1 for none."""

    def __init__(
        self,
        steps: Sequence[tuple[Shape, Sequence[MicroStep]]],
        before: Sequence[MicroStep],
        others: Sequence[Sequence[MicroStep]] = (),
    ) -> None:
        """``steps``: shape and micro-steps of each step to learn from; ``before``: the micro-steps of the step before
        the first that is played, of whatever shape; ``others``: of steps between, whose blocks later ones free."""
        self.num_micro_steps = len(before)
        every = [*(units for _, units in steps), before, *others]
        named = [
            RequestNames([units[number] for units in every], [(shape, units[number]) for shape, units in steps])
            for number in range(self.num_micro_steps)
        ]
        self._tokens = np.concatenate([one.tokens for one in named])  # of every name
        offsets = np.cumsum([0, *(len(one.tokens) for one in named)])
        names = {
            id(unit): named[number].by_unit[id(unit)] + offsets[number]
            for units in every
            for number, unit in enumerate(units)
        }
        self.before = np.full(self.num_names, -1)
        for unit in before:
            self.before[names[id(unit)]] = unit.requested
        of_block = {
            int(block): (unit.step, int(name))
            for units in every
            for unit in units
            for block, name in zip(unit.requested, names[id(unit)], strict=True)
        }
        self._ends = _ends(every, of_block, self.num_names)
        self._templates = [
            [
                _template(shape, units[number], names[id(units[number])], of_block, self.num_names)
                for shape, units in steps
            ]
            for number in range(self.num_micro_steps)
        ]
        seen = [(shape, names[id(unit)], unit) for shape, units in steps for unit in units]
        self._size = learnt_sizes(seen, self.num_names)
        self._streams = np.zeros(self.num_names, np.int64)
        for _, own, unit in seen:
            self._streams[own] = unit.log.sizes[unit.requested] - unit.sizes
        self._sizes: dict[Shape, np.ndarray] = {}

    @property
    def num_names(self) -> int:
        """Requests of a step, each counted once over all shapes."""
        return len(self._tokens)

    @property
    def inexact_tokens(self) -> list[int]:
        """Return the tokens of the requests whose sizes follow no rule that the shapes show."""
        return self._tokens[~self._size.is_exact].tolist()

    def micro_step(self, number: int, shape: Shape) -> tuple[Template, np.ndarray]:
        """The events of a micro-step, counted from 0, on this shape, and the sizes of its requests, with their
        streams."""
        if shape not in self._sizes:
            self._sizes[shape] = self._size(shape) + self._streams
        template = min(self._templates[number], key=lambda one: _distance(one.shape, shape))
        return template, self._sizes[shape][template.names]

    def freed_by(self, number: int, num_steps: int) -> np.ndarray:
        """The names whose blocks are freed by the end of that micro-step, so many steps after their request."""
        steps, micro_steps = self._ends
        return np.flatnonzero((steps == num_steps) & (micro_steps == number))

    def held_out(self, shape: Shape, units: Sequence[MicroStep]) -> HeldOutStep:
        """Compare the prediction for this shape with a step that ran."""
        counts = np.zeros(4, np.int64)
        for number, unit in enumerate(units):
            template, sizes = self.micro_step(number, shape)
            *_, (theirs, ours) = matches(template.unit, template.shape, unit, shape)
            wrong = np.abs(sizes[theirs] % STREAM - unit.sizes[ours]).sum() + unit.sizes.sum() - unit.sizes[ours].sum()
            different = len(unit.sizes) + len(sizes) - 2 * len(ours)
            counts += [len(unit.sizes), different, unit.sizes.sum(), wrong]
        return HeldOutStep(*counts.tolist())


def _distance(one: Shape, other: Shape) -> tuple[bool, int]:
    return one[0] != other[0], abs(one[0] * one[1] - other[0] * other[1])


def _ends(
    every: Sequence[Sequence[MicroStep]], of_block: Mapping[int, tuple[int, int]], num_names: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return after how many steps each name's request is freed, and in which micro-step; -1 where that was not seen."""
    steps, micro_steps = np.full(num_names, -1), np.full(num_names, -1)
    for units in every:
        for number, unit in enumerate(units):
            for block in unit.freed.tolist():
                step, name = of_block.get(block, (0, -1))
                if name >= 0:
                    steps[name], micro_steps[name] = unit.step - step, number
    return steps, micro_steps


def _template(
    shape: Shape, unit: MicroStep, names: np.ndarray, of_block: Mapping[int, tuple[int, int]], num_names: int
) -> Template:
    """A free of a block that is older than the step before is left out: the run's next steps have none such."""
    log, events, empties, num_made = unit.log, [], [], 0
    emptied = set(log.empties.tolist())
    for at in range(unit.start, unit.stop):
        if at in emptied and at > unit.start:
            empties.append(len(events))
        if log.is_request[at]:
            events.append(num_made)
            num_made += 1
        elif (made := of_block.get(int(log.blocks[at]))) and unit.step - made[0] in (0, 1):
            events.append(~made[1] - (unit.step - made[0]) * num_names)
    return Template(shape, unit, names, np.array(events, np.int64), tuple(empties))
