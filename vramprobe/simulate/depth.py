"""Three shallow runs → the deep one, where layers repeat.

In: runs of the same cell at depths d, d + p and d + 2p. Out: the phases of any depth d + n·p. Where a phase of the
second run is the first's with blocks of events put in, and the third has each twice, the deep phase has it n times: the
events themselves, not a line through their peaks, which bends where another moment becomes the highest. A phase that
does not repeat so is continued as a line, if the third run lies on it; else NotLinear. Pure NumPy; knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramprobe.record import Composition, PhaseMemory
from vramprobe.simulate.history import CAUSES, History
from vramprobe.simulate.instrument import PhaseMark

_BITS = 3  # of an event's code that hold its cause
_WINDOWS = (64, 24, 8, 3)  # events after a block that must match, tried in turn
_TOLERANCE = 1e-3  # of the third run's value, for a phase that is continued as a line

Blocks = list[tuple[int, np.ndarray]]  # where in the first run's events, and what is put in


class NotLinear(Exception):
    """The shallow runs do not say what the deep one is."""


@dataclass
class _Totals:
    """Bytes allocated by cause, as phases go by."""

    by_cause: np.ndarray = field(default_factory=lambda: np.zeros(len(CAUSES), dtype=np.int64))

    @property
    def bytes(self) -> int:
        return int(self.by_cause.sum())


@dataclass(frozen=True)
class Deep:
    """The phases at a depth, and what is alive at the highest moment of each that repeats its events."""

    phases: list[PhaseMemory]
    at_peak: list[Composition | None]


def codes_of(history: History) -> list[np.ndarray]:
    """For each phase, its events as numbers: the size times 8, plus the cause's position in :data:`CAUSES`.

    Frees that follow each other are put in order: the libraries free some in the order of a hash table.
    """
    codes = (history.size_bytes << _BITS) | history.causes
    return [_ordered_frees(codes[mark.events.start : mark.events.stop]) for mark in history.marks]


def _ordered_frees(codes: np.ndarray) -> np.ndarray:
    ordered = codes.copy()
    edges = np.flatnonzero(np.diff(codes < 0)) + 1
    for start, stop in zip([0, *edges], [*edges, len(codes)], strict=True):
        if start < stop and codes[start] < 0:
            ordered[start:stop].sort()
    return ordered


def deepen(marks: list[PhaseMark], runs: tuple[list[np.ndarray], ...], times: int) -> Deep:
    """The phases with the repeated blocks ``times`` times; ``runs`` hold them 0, 1 and 2 times."""
    totals, shallow = _Totals(), [_Totals() for _ in runs]
    phases, at_peak = [], []
    for mark, *codes in zip(marks, *runs, strict=True):
        blocks = _repeated(*codes)
        if blocks is None:
            phase, alive = _continued(mark, codes, times, totals, shallow), None
        else:
            phase, alive = _grown(mark, _grow(codes[0], blocks, times), totals)
        for one, code in zip(shallow, codes, strict=True):
            one.by_cause += _sums(code)
        phases.append(phase)
        at_peak.append(alive)
    return Deep(phases, at_peak)


def _sums(codes: np.ndarray) -> np.ndarray:
    mask = (1 << _BITS) - 1
    return np.array([(codes[codes & mask == cause] >> _BITS).sum() for cause in range(len(CAUSES))], dtype=np.int64)


def _grown(mark: PhaseMark, codes: np.ndarray, totals: _Totals) -> tuple[PhaseMemory, Composition]:
    """A phase whose events are known; ``totals`` moves to its end."""
    before = totals.bytes
    running = before + np.cumsum(codes >> _BITS)
    top = int(running.argmax()) + 1 if len(running) and running.max() > before else 0
    alive = totals.by_cause + _sums(codes[:top])
    totals.by_cause += _sums(codes)
    phase = PhaseMemory(
        name=mark.name, step=mark.step, micro_step=mark.micro_step,
        allocated_end_bytes=totals.bytes, allocated_peak_bytes=int(alive.sum()),
    )  # fmt: skip
    parts = {f"{cause}_bytes": int(size) for cause, size in zip(CAUSES, alive, strict=True)}
    return phase, Composition(total_bytes=int(alive.sum()), **parts)


def _continued(
    mark: PhaseMark, codes: list[np.ndarray], times: int, totals: _Totals, shallow: list[_Totals]
) -> PhaseMemory:
    """A phase by lines through the first two runs' peak and end."""
    peaks = [
        one.bytes + max(0, int(np.cumsum(code >> _BITS).max(initial=0)))
        for one, code in zip(shallow, codes, strict=True)
    ]
    sums = [_sums(code) for code in codes]
    totals.by_cause += _line(sums[0], sums[1], times)
    if (totals.by_cause < 0).any():
        raise NotLinear(f"{mark.name} (step {mark.step})")
    for values in (peaks, [int(one.sum()) for one in sums]):
        if abs(_line(*values[:2], 2) - values[2]) > _TOLERANCE * peaks[2]:
            raise NotLinear(f"{mark.name} (step {mark.step})")
    peak = max(_line(*peaks[:2], times), totals.bytes)
    return PhaseMemory(
        name=mark.name, step=mark.step, micro_step=mark.micro_step,
        allocated_end_bytes=totals.bytes, allocated_peak_bytes=peak,
    )  # fmt: skip


def _line(first: Any, second: Any, times: int) -> Any:
    return first + (second - first) * times


def line_of(values: tuple[Any, ...], times: int) -> Any:
    """Numbers, or dicts and lists of them, continued from three runs; what is no number must be the same in all."""
    first, second, third = values
    if isinstance(first, dict):
        return {key: line_of((first[key], second[key], third[key]), times) for key in first}
    if isinstance(first, int) and not isinstance(first, bool):
        if _line(first, second, 2) != third:
            raise NotLinear(f"{first}, {second}, {third}")
        return _line(first, second, times)
    if not first == second == third:
        raise NotLinear(f"{first}, {second}, {third}")
    return first


def _repeated(first: np.ndarray, second: np.ndarray, third: np.ndarray) -> Blocks | None:
    """What is put into ``first`` to make ``second``, and twice to make ``third``; None where nothing is."""
    for window in _WINDOWS:
        blocks = _insertions(first, second, window)
        if blocks is not None:
            grown = _grow(first, blocks, 2)
            if len(grown) == len(third) and (grown == third).all():
                return blocks
    return None


def _insertions(first: np.ndarray, second: np.ndarray, window: int) -> Blocks | None:
    """The blocks of ``second`` that ``first`` lacks, found from the left; after each, ``window`` events must match."""
    here, there, blocks = 0, 0, []
    while True:
        same = _common(first[here:], second[there:])
        here, there = here + same, there + same
        left = len(second) - there - (len(first) - here)
        if left <= 0:
            return blocks if left == 0 and here == len(first) else None
        size = next(_sizes(first[here:], second[there:], left, window), None)
        if size is None:
            return None
        blocks.append((here, second[there : there + size]))
        there += size


def _common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _sizes(first: np.ndarray, second: np.ndarray, left: int, window: int) -> Iterator[int]:
    """Lengths of a block before which ``first`` may continue in ``second``; first of all the one that is the last."""
    if (second[left:] == first).all():
        yield left
    ahead = first[:window]
    if len(ahead):
        for size in range(1, left):
            if (second[size : size + len(ahead)] == ahead).all():
                yield size


def _grow(first: np.ndarray, blocks: Blocks, times: int) -> np.ndarray:
    parts, last = [], 0
    for position, block in blocks:
        parts += [first[last:position], *([block] * times)]
        last = position
    return np.concatenate([*parts, first[last:]])
