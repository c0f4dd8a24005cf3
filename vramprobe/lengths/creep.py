"""Creep: the batches of a run, one after the other, through the caching allocator: reserved memory over the steps.

In: a cell on one GPU, the shapes of its batches, allocator settings. Out: a Course for each setting. Requests are those
of the arithmetic (terms/step/requests.py), blocks those of torch's allocator (simulate/allocator/). Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.lengths.answer import words_of
from vramprobe.lengths.batches import Shape
from vramprobe.model.replayed import card_of
from vramprobe.predict.questions import cell as resolved
from vramprobe.predict.verdict import usable_bytes
from vramprobe.simulate.allocator.allocator import CachingAllocator
from vramprobe.simulate.allocator.compiled import counting_allocator
from vramprobe.simulate.allocator.config import parse_alloc_conf
from vramprobe.simulate.allocator.ledger import Device, OutOfMemory
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.loading import batch_names
from vramprobe.terms.step.requests import Run

#: PYTORCH_ALLOC_CONF, and after how many steps torch.cuda.empty_cache() is called (0: never).
SETTINGS: tuple[tuple[str, int], ...] = (
    ("", 0),
    ("", 10),
    ("expandable_segments:True", 0),
    ("max_split_size_mb:128", 0),
    ("roundup_power2_divisions:8", 0),
    ("garbage_collection_threshold:0.8,per_process_memory_fraction:0.95", 0),
)
_BYTES_PER_TOKEN = 8  # int64
_MAX_LOGS = 512  # kept at once, about 1 MB each for an 8B model


@dataclass(frozen=True)
class Course:
    """Reserved memory over the steps under one setting."""

    alloc_conf: str
    empty_cache_steps: int
    num_steps: int  # that were completed
    first_reserved_bytes: int  # after the first step
    last_reserved_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    num_alloc_retries: int
    oom_step: int | None  # counted from 1
    reserved_bytes: tuple[int, ...]  # after each step


class _Steps(Run):
    """One shape's steps, for allocators that have the model already."""

    def go_on(self, allocator: CachingAllocator, *, is_first: bool) -> None:
        """One step; ``is_first``: the first of this allocator, which makes the optimizer's state."""
        self.allocator, self._num_steps = allocator, 0 if is_first else 1
        for name in batch_names(self.spec):
            if allocator.has(name):
                allocator.free(name)
            allocator.allocate(name, _BYTES_PER_TOKEN * self.spec.num_tokens)
        self.step()


class _Course:
    """One setting's allocator, on its way."""

    def __init__(self, setting: tuple[str, int], device: Device) -> None:
        self.alloc_conf, self.empty_cache_steps = setting
        self.allocator = counting_allocator(parse_alloc_conf(self.alloc_conf), device)
        self.reserved: list[int] = []
        self.oom_step: int | None = None

    def play(self, steps: _Steps) -> None:
        """One more step, unless it ran out of memory."""
        if self.oom_step is not None:
            return
        number = len(self.reserved)
        try:
            if not number:
                steps.allocator = self.allocator
                steps.load()
                self.allocator.empty_cache()
                self.allocator.ledger.reset_peaks()
            steps.go_on(self.allocator, is_first=not number)
        except OutOfMemory:
            self.oom_step = number + 1
            return
        if self.empty_cache_steps and (number + 1) % self.empty_cache_steps == 0:
            self.allocator.empty_cache()
        self.reserved.append(self.allocator.ledger.reserved)

    def course(self) -> Course:
        ledger, reserved = self.allocator.ledger, self.reserved or [0]
        return Course(
            alloc_conf=self.alloc_conf,
            empty_cache_steps=self.empty_cache_steps,
            num_steps=len(self.reserved),
            first_reserved_bytes=reserved[0],
            last_reserved_bytes=reserved[-1],
            peak_reserved_bytes=ledger.reserved_peak,
            peak_allocated_bytes=ledger.allocated_peak,
            num_alloc_retries=ledger.num_alloc_retries,
            oom_step=self.oom_step,
            reserved_bytes=tuple(self.reserved),
        )


def creep(
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
    card = catalog.find_gpu(gpu) if gpu is not None else None
    own = words.pop("alloc_conf", None)
    num_gpus = words.pop("num_gpus", None) or 1
    grad_accum = words.get("grad_accum") or 1
    if num_gpus > 1 or grad_accum > 1 or words.get("device") == "cpu":
        given = f"--num-gpus {num_gpus}" if num_gpus > 1 else f"--grad-accum {grad_accum}" if grad_accum > 1 else "cpu"
        raise SpecError(
            f"--replay-steps is for one GPU with one batch per step, and {given} was given: drop one of them"
        )
    device = Device()
    if card is not None:
        device = Device(total_bytes=card.total_bytes, segment_bytes=usable_bytes(card, device_is_known=False))
    chosen = [(own, 0), *settings] if own and (own, 0) not in settings else list(settings)
    chosen = [one for one in chosen if card is not None or "per_process_memory_fraction" not in one[0]]
    workspace_bytes, chip = card_of(card)
    courses = [_Course(one, device) for one in chosen]

    @lru_cache(maxsize=_MAX_LOGS)
    def steps_of(shape: Shape) -> _Steps:
        spec: CellSpec = resolved(**words | {"device": "cuda"} | words_of(shape))
        return _Steps(spec, courses[0].allocator, workspace_bytes=workspace_bytes, chip=chip)

    for number, shape in enumerate(islice(cycle(shapes), num_steps), 1):
        steps = steps_of(shape)
        for course in courses:
            course.play(steps)
        on_step(number)
        if all(course.oom_step is not None for course in courses):
            break
    return [course.course() for course in courses]
