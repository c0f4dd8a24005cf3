"""Fragmentation: the batches of a run, in turn, through the caching allocator: reserved memory over the steps.

In: a cell on one GPU, the shapes of its batches, allocator settings. Out: a Course for each setting. Requests are those
of the arithmetic (terms/step/requests.py), blocks those of torch's allocator (allocator/). Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import cycle, islice
from typing import Any

from vramprobe import catalog
from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.ledger import Device
from vramprobe.choices import meant
from vramprobe.errors import SpecError
from vramprobe.lengths.answer import words_of
from vramprobe.lengths.batches import Shape
from vramprobe.lengths.course import SETTINGS, Course, CourseUnderWay, settings_for
from vramprobe.predict.questions import cell as resolved
from vramprobe.predict.verdict import usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.loading import batch_names
from vramprobe.terms.replayed import card_of
from vramprobe.terms.step.requests import Run
from vramprobe.trainers import USUAL_LOOP

_BYTES_PER_TOKEN = 8  # int64
_MAX_LOGS = 512  # kept at once, about 1 MB each for an 8B model


class _Steps(Run):
    """One shape's steps, for allocators that have the model already."""

    def go_on(self, allocator: CachingAllocator, *, is_first: bool) -> None:
        """One step; ``is_first``: the first of this allocator, which makes the optimizer's state."""
        self.allocator = allocator  # pyrefly: ignore[bad-override-mutable-attribute]
        self._num_steps = 0 if is_first else 1
        for name in batch_names(self.spec):
            if allocator.has(name):
                allocator.free(name)
            allocator.allocate(name, _BYTES_PER_TOKEN * self.spec.num_tokens)
        self.step()


def _play(steps: _Steps, allocator: CachingAllocator, *, is_first: bool) -> None:
    """One step of a shape; before the first, the model is loaded."""
    if is_first:
        steps.allocator = allocator
        steps.load()
        allocator.empty_cache()
        allocator.ledger.reset_peaks()
    steps.go_on(allocator, is_first=is_first)


def reserved_over_steps(
    shapes: Sequence[Shape],
    num_steps: int,
    *,
    gpu: str | None = None,
    settings: Sequence[tuple[str, int]] = SETTINGS,
    on_step: Callable[[int], None] = lambda step: None,
    **words: Any,
) -> list[Course]:
    """``num_steps`` steps of ``shapes``, epoch after epoch, under each of ``settings``; ``gpu`` is the limit.

    Settings that need a card's size are left out without one. ``alloc_conf`` of ``words`` comes first. Raises SpecError
    for what is not replayed, UnsupportedArchitecture for what there is no arithmetic for.
    """
    card = catalog.gpu_or_size(gpu) if gpu is not None else None
    own = words.pop("alloc_conf", None)
    num_gpus = words.pop("num_gpus", None) or 1
    grad_accum, loop = words.get("grad_accum") or 1, meant("loop", words.get("loop") or USUAL_LOOP)
    reasons = {
        f"--num-gpus {num_gpus}": num_gpus > 1,
        f"--grad-accum {grad_accum}": grad_accum > 1,
        "cpu": words.get("device") == "cpu",
        f"--loop {loop}": loop != USUAL_LOOP,
    }
    if given := next((words for words, is_given in reasons.items() if is_given), None):
        raise SpecError(
            "--replay-steps is for one GPU with one batch per step in a Trainer's loop, and "
            f"{given} was given: drop one of them"
        )
    device = Device()
    if card is not None:
        device = Device(total_bytes=card.total_bytes, segment_bytes=usable_bytes(card, device_is_known=False))
    workspace_bytes, chip = card_of(card)
    courses = [CourseUnderWay(one, device) for one in settings_for(own, tuple(settings), has_limit=card is not None)]

    @lru_cache(maxsize=_MAX_LOGS)
    def steps_of(shape: Shape) -> _Steps:
        spec: CellSpec = resolved(**words | {"device": "cuda"} | words_of(shape))
        return _Steps(spec, courses[0].allocator, workspace_bytes=workspace_bytes, chip=chip)

    for number, shape in enumerate(islice(cycle(shapes), num_steps), 1):
        steps = steps_of(shape)
        for course in courses:
            course.step(partial(_play, steps, is_first=number == 1))
        on_step(number)
        if all(course.oom_step is not None for course in courses):
            break
    return [course.course() for course in courses]
