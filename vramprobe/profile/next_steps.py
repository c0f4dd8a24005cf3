"""The steps that a profiled run would go on with, on batches of any shapes: the allocator's events of each.

In: a RawRank with its history, and the steps on chosen batches. Out: ProfiledRun.steps: a step is the events of the one
with the nearest shape that ran, the bytes of each request by its rule (steps_by_shape.py). They are *predicted*.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vramprobe.lengths.course import STREAM
from vramprobe.log.shapes import Shape
from vramprobe.profile.analyzed_rank import AnalyzedRank, MicroStep, micro_steps_of
from vramprobe.profile.raw import RawRank
from vramprobe.profile.steps_by_shape import named_steps
from vramprobe.records.data_batches import HeldOutRequests

_FEWEST = 3  # shapes to learn from
_EMPTIED = np.iinfo(np.int64).min


@dataclass(frozen=True)
class _Template:
    """A micro-step that ran on a batch of ``shape``: the names of its requests, in order; and its events, for each
    request its position among them, ``~name`` for a block of this step's that is given back, ``~name`` less the number
    of all names for one of the step before, _EMPTIED where the cache is emptied.
    """

    shape: Shape
    names: np.ndarray
    events: np.ndarray


class ProfiledRun:
    """Learn from a profiled run how its next steps allocate; ``first_step``: the first that is played.

    Raises ValueError for a run that teaches nothing, with the reason.
    """

    def __init__(self, raw: RawRank, seen: AnalyzedRank) -> None:
        self.seen, self.num_micro_steps = seen, (raw.batches or {}).get("micro_steps", 1)
        plays = {line["step"]: line for line in raw.plays if line["step"] not in {one.step for one in raw.ooms}}
        shapes = {step: (line["rows"], line["width"]) for step, line in plays.items()}
        held = {step for step, line in plays.items() if line["held_out"]}
        if len({shape for step, shape in shapes.items() if step not in held}) < _FEWEST:
            raise ValueError(f"fewer than {_FEWEST} shapes of batches were run")
        self.first_step = min(plays)
        units = micro_steps_of(seen, [self.first_step - 1, *plays], self.num_micro_steps)
        missing = [step for step in (self.first_step - 1, *plays) if step not in units]
        if missing:
            raise ValueError(f"the history does not have step {missing[0]} whole")
        self.before = units[self.first_step - 1]
        self.names = named_steps(seen, units, shapes, held)
        self._step_of = np.full(len(seen.lives.sizes), -2)  # of each block; none before the steps
        for step, its in units.items():
            for unit in its:
                self._step_of[unit.requested] = step
        self._ends = self._steps_until_given_back(units.values())
        self._templates = [
            [self._template(shapes[step], units[step][number]) for step in plays if step not in held]
            for number in range(self.num_micro_steps)
        ]
        self._streams = np.zeros(self.num_names, np.int64)
        self._streams[self.names.of_block[self._step_of >= 0]] = seen.streams[self._step_of >= 0]
        self._sizes: dict[Shape, np.ndarray] = {}
        self.held_out = [self._held_out(shapes[step], units[step]) for step in sorted(held)]

    @property
    def num_names(self) -> int:
        """Requests of a step, each counted once over all shapes."""
        return len(self.names.tokens)

    @property
    def inexact_tokens(self) -> list[int]:
        """Return the tokens of the requests whose sizes follow no rule that the shapes show."""
        has_none = np.flatnonzero(self.names.rules.rule_of < 0)
        return self.names.tokens[[*has_none.tolist(), *self.names.loose]].tolist()

    @property
    def num_events(self) -> int:
        """Number of requests and frees of a step: those of the step before the first that is played."""
        return self.before[-1].stop - self.before[0].start

    @property
    def num_before(self) -> int:
        """Requests that the run itself made before the first step that is played."""
        return int(np.searchsorted(self.seen.lives.starts, self.before[-1].stop))

    def steps(self, shapes: Iterable[Shape]) -> Iterator[list[int]]:
        """The events of each step on these batches, for :func:`play`; requests are numbered from ``num_before`` on."""
        number, shapes = self.num_before, iter(shapes)
        last = np.full(self.num_names, -1)
        for unit in self.before:
            last[self.names.of_block[unit.requested]] = unit.requested
        while batches := list(islice(shapes, self.num_micro_steps)):
            own, step = np.full(self.num_names, -1), []
            for micro_step, shape in enumerate(batches):
                template, sizes = self._micro_step(micro_step, shape)
                own[template.names] = number + np.arange(len(sizes))
                number += len(sizes)
                step += _events(template, sizes, own, last)
                step += _left(own, self._given_back(micro_step, 0)) + _left(last, self._given_back(micro_step, 1))
            yield step
            last = own

    def _micro_step(self, number: int, shape: Shape) -> tuple[_Template, np.ndarray]:
        """The events of a micro-step, counted from 0, on this shape, and the sizes of its requests, with their
        streams."""
        if shape not in self._sizes:
            self._sizes[shape] = np.maximum(self.names.rules.sizes(*shape), 1) + STREAM * self._streams
        template = min(self._templates[number], key=lambda one: _distance(one.shape, shape))
        return template, self._sizes[shape][template.names]

    def _given_back(self, number: int, num_steps: int) -> np.ndarray:
        """The names whose blocks are there no more by the end of that micro-step, so many steps after their request."""
        steps, micro_steps = self._ends
        return np.flatnonzero((steps == num_steps) & (micro_steps == number))

    def _steps_until_given_back(self, every: Iterable[Sequence[MicroStep]]) -> tuple[np.ndarray, np.ndarray]:
        """Return after how many steps each name's block is given back, and in which micro-step; -1 where that was not
        seen."""
        steps, micro_steps = np.full(self.num_names, -1), np.full(self.num_names, -1)
        for units in every:
            for number, unit in enumerate(units):
                blocks = unit.freed[self._step_of[unit.freed] >= 0]
                names = self.names.of_block[blocks]
                steps[names], micro_steps[names] = unit.step - self._step_of[blocks], number
        return steps, micro_steps

    def _template(self, shape: Shape, unit: MicroStep) -> _Template:
        """Leave out what is given back and older than the step before: the run's next steps have none such."""
        events, num_made = [], 0
        for event in self.seen.allocator_events(unit.start, unit.stop):
            if event == 0:
                events.append(_EMPTIED)
            elif event is not None and event > 0:
                events.append(num_made)
                num_made += 1
            elif event is not None and (age := unit.step - int(self._step_of[~event - 1])) in (0, 1):
                events.append(~int(self.names.of_block[~event - 1]) - age * self.num_names)
        return _Template(shape, self.names.of_block[unit.requested], np.array(events, np.int64))

    def _held_out(self, shape: Shape, units: Sequence[MicroStep]) -> HeldOutRequests:
        """Compare the prediction for this shape with a step that ran."""
        counts = np.zeros(4, np.int64)
        for number, unit in enumerate(units):
            template, sizes = self._micro_step(number, shape)
            _, theirs, ours = np.intersect1d(
                template.names, self.names.of_block[unit.requested], assume_unique=True, return_indices=True
            )
            wrong = np.abs(sizes[theirs] % STREAM - unit.sizes[ours]).sum() + unit.sizes.sum() - unit.sizes[ours].sum()
            different = len(unit.sizes) + len(sizes) - 2 * len(ours)
            counts += [len(unit.sizes), different, unit.sizes.sum(), wrong]
        num_requests, num_different, requested, wrong = counts.tolist()
        return HeldOutRequests(
            num_requests=num_requests, num_different=num_different, bytes_requested=requested, bytes_different=wrong
        )


def _distance(one: Shape, other: Shape) -> tuple[bool, int]:
    return one[0] != other[0], abs(one[0] * one[1] - other[0] * other[1])


def _events(template: _Template, sizes: np.ndarray, own: np.ndarray, last: np.ndarray) -> list[int]:
    """One micro-step's events; blocks are taken out of ``own`` and ``last`` as they are given back, and a free of what
    this shape's step before did not make drops out.
    """
    events, num_names = template.events, len(own)
    found = np.where(events >= 0, sizes[np.maximum(events, 0)], 0)
    for blocks, shift in ((own, 0), (last, num_names)):
        names = ~events - shift
        is_free = (names >= 0) & (names < num_names) & (events < 0)
        found[is_free] = ~blocks[names[is_free]]
        blocks[names[is_free]] = -1
    return found[(found != ~-1) | (events == _EMPTIED)].tolist()


def _left(blocks: np.ndarray, names: np.ndarray) -> list[int]:
    """Frees of these, as far as they are there, of shapes whose next step ran with another order of requests."""
    names = names[blocks[names] >= 0]
    found = (~blocks[names]).tolist()
    blocks[names] = -1
    return found


def recorded(seen: AnalyzedRank, stop: int) -> list[int]:
    """The run's own events up to ``stop``, as ``ProfiledRun.steps`` has them."""
    sizes = (seen.lives.sizes + STREAM * seen.streams).tolist()
    known = (event for event in seen.allocator_events(0, stop) if event is not None)
    return [sizes[event - 1] if event > 0 else event and event + 1 for event in known]
