"""Fragmentation: the batches of a run, in turn, through the caching allocator: reserved memory over the steps.

In: a cell on one GPU, the shapes of its batches, allocator settings. Out: a Course for each setting. Requests are those
of recorded logs (step_logs.py), blocks those of torch's allocator (allocator/). Knows no torch.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from vramprobe import catalog
from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.ledger import Device
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.lengths.batches import Shape
from vramprobe.lengths.course import SETTINGS, STREAM, Course, CourseUnderWay, play, settings_for
from vramprobe.lengths.step_logs import logs_over
from vramprobe.log.log import Log, PhaseMark
from vramprobe.predict.questions import cell as resolved
from vramprobe.predict.verdict import usable_bytes

_MAX_LOGS = 512  # kept at once, about 1 MB each for an 8B model


class ReservedOverSteps(NamedTuple):
    """A Course for each setting; ``notes``: where the steps are near those of a run and not exact."""

    courses: list[Course]
    notes: list[str]


class _Part(NamedTuple):
    """Events of a log that follow each other: bytes of a request, with its stream; ``~block`` where that goes back; 0
    where the cache is emptied. ``born``: the first block that they request, and the one after the last; blocks are
    counted from 0 in a log.
    """

    events: np.ndarray
    born: range

    @property
    def given_back(self) -> np.ndarray:
        """The blocks that go back here, in the order in which they were made."""
        return np.sort(~self.events[self.events < 0])


class _Steps:
    """One shape's log: what stands before the first batch, the batch, the first step and one of the later ones."""

    def __init__(self, log: Log) -> None:
        is_alloc = log.size_bytes > 0
        number = np.zeros(int(log.blocks.max(initial=0)) + 1, dtype=np.int64)
        number[log.blocks[is_alloc]] = np.arange(is_alloc.sum())
        played = np.where(is_alloc, log.size_bytes + STREAM * log.each_stream().astype(np.int64), ~number[log.blocks])
        played[log.is_emptied] = 0
        is_played, num_born = is_alloc | log.gives_back | log.is_emptied, np.cumsum(is_alloc)

        def part(marks: list[PhaseMark]) -> _Part:
            first, last = marks[0].events.start, marks[-1].events.stop
            born = range(*(int(num_born[at - 1]) if at else 0 for at in (first, last)))
            return _Part(played[first:last][is_played[first:last]], born)

        self.load = part([one for one in log.marks if one.name in ("load", "prepare")])
        self.batch = part([one for one in log.marks if one.name == "batch"])
        self.first, self.later, after = (part([one for one in log.marks if one.step == step]) for step in (1, 2, 3))
        #: Of either kind of step, the blocks that the next one gives back.
        self.handed_on = _born_in(self.first, self.later.given_back), _born_in(self.later, after.given_back)
        self.num_blocks = after.born.stop


def _born_in(part: _Part, blocks: np.ndarray) -> np.ndarray:
    return blocks[(blocks >= part.born.start) & (blocks < part.born.stop)]


class _Chain:
    """Steps of several shapes that follow each other: blocks are numbered on, and what a step hands on is given back by
    the next, of whatever shape."""

    def __init__(self) -> None:
        self._number = 0
        self._batch: list[int] = []
        self._handed_on = np.zeros(0, dtype=np.int64)

    def start(self, steps: _Steps) -> list[int]:
        """The events before the first batch."""
        assert self._number == 0
        self._number = len(steps.load.born)
        return steps.load.events.tolist()

    def step(self, steps: _Steps) -> tuple[list[int], int]:
        """The events of one more step, its batch in the place of the one before, and the number of its first block."""
        is_first, first = not self._batch, self._number
        step, given = (steps.first if is_first else steps.later), steps.handed_on[0]
        numbers = np.arange(steps.num_blocks)  # what the load made has the same at each shape
        if not is_first:
            if len(given) != len(self._handed_on):
                raise VramprobeError("steps of these lengths do not hand on alike: they cannot follow each other")
            numbers[given] = self._handed_on
        events = [~one for one in self._batch]
        for part in (steps.batch, step):
            numbers[part.born.start : part.born.stop] = np.arange(self._number, self._number + len(part.born))
            self._number += len(part.born)
            is_free = part.events < 0
            events += np.where(is_free, ~numbers[np.where(is_free, ~part.events, 0)], part.events).tolist()
        self._batch = [int(one) for one in numbers[np.setdiff1d(steps.batch.born, steps.batch.given_back)]]
        self._handed_on = numbers[steps.handed_on[0 if is_first else 1]]
        return events, first


def _play_first(allocator: CachingAllocator, load: list[int], events: list[int], number: int) -> None:
    """Load the model, and the first step; peaks are counted from there."""
    play(allocator, load, 0)
    allocator.empty_cache()
    allocator.ledger.reset_peaks()
    play(allocator, events, number)


def reserved_over_steps(
    shapes: Sequence[Shape],
    num_steps: int,
    *,
    gpu: str | None = None,
    settings: Sequence[tuple[str, int]] = SETTINGS,
    say: Callable[[str], None] = lambda words: None,
    **words: Any,
) -> ReservedOverSteps:
    """``num_steps`` steps of ``shapes``, epoch after epoch, under each of ``settings``; ``gpu`` is the limit.

    Settings that need a card's size are left out without one. ``alloc_conf`` of ``words`` comes first. ``say`` hears
    what a recording does. Raises SpecError for what is not replayed, and as logs_over.
    """
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    own = words.pop("alloc_conf", None)
    num_gpus = words.pop("num_gpus", None) or 1
    grad_accum = words.get("grad_accum") or 1
    reasons = {f"--num-gpus {num_gpus}": num_gpus > 1, f"--grad-accum {grad_accum}": grad_accum > 1}
    if given := next((words for words, is_given in reasons.items() if is_given), None):
        raise SpecError(f"--replay-steps is for one GPU with one batch per step, and {given} was given: drop one")
    device = Device()
    if card is not None:
        device = Device(total_bytes=card.total_bytes, segment_bytes=usable_bytes(card, device_is_known=False))
    courses = [CourseUnderWay(one, device) for one in settings_for(own, tuple(settings), has_limit=card is not None)]
    played = list(islice(cycle(shapes), num_steps))
    spec = resolved(**{"device": "cuda"} | words)
    log_at, notes = logs_over(spec, set(played), card, say)
    steps_of, chain = lru_cache(maxsize=_MAX_LOGS)(lambda shape: _Steps(log_at(shape))), _Chain()
    for number, shape in enumerate(played):
        steps = steps_of(shape)
        load = chain.start(steps) if number == 0 else []
        events, first = chain.step(steps)
        act = partial(play if number else partial(_play_first, load=load), events=events, number=first)
        for course in courses:
            course.step(act)
        if all(course.oom_step is not None for course in courses):
            break
    return ReservedOverSteps([course.course() for course in courses], notes)
