"""Three shallow runs → the deep one, where layers repeat.

In: runs of the same cell at depths d, d + p and d + 2p. Out: the phases of any depth d + n·p. Where a phase of the
second run is the first's with blocks of events put in, and the third has each twice, the deep phase has it n times: the
events themselves, not a line through their peaks, which bends where another moment becomes the highest. Pure NumPy;
knows no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vramprobe.log.log import ALL_CAUSES, Log
from vramprobe.log.pairing import Kinds, Script
from vramprobe.records.phase_memory import PhaseMemory

_WINDOWS = (64, 24, 8, 3)  # events after a block that must match, tried in turn

Blocks = list[tuple[int, np.ndarray]]  # where in the first run's events, and what is put in


class NotLinear(Exception):
    """The shallow runs do not say what the deep one is."""


@dataclass(frozen=True)
class Deep:
    """The phases at a depth, and the number of events until the highest moment of each."""

    phases: list[PhaseMemory]
    tops: list[int]
    log: Log

    def alive(self, top: int) -> dict[str, int]:
        """Return what so many events leave alive, in bytes by cause."""
        alive = np.bincount(self.log.causes[:top], weights=self.log.size_bytes[:top], minlength=len(ALL_CAUSES))
        return {cause: int(size) for cause, size in zip(ALL_CAUSES, alive, strict=True) if size}  # exact below 2**53


@dataclass(frozen=True, eq=False)
class Growth:
    """One phase at any depth: the shallowest run's events and, after them, those of each block that a period puts in.

    ``blocks``: (position among the shallowest run's events, number of events). ``ranks``: three rows: each event's rank
    with one copy, what each further copy adds, and what it adds in each later copy; None where none continue.
    """

    kinds: Kinds
    codes: np.ndarray  # int64
    blocks: tuple[tuple[int, int], ...]
    ranks: np.ndarray | None  # (3, len(codes)) int64

    def at(self, times: int, sizes: np.ndarray | None = None) -> Script:
        """The phase with each block in it ``times`` times; ranks are -1 where they do not continue.

        ``sizes``: the number of each event of :attr:`codes` in place of its kind's bytes.
        """
        origin, copy = self.layout(times)
        sizes = None if sizes is None else sizes[origin]
        if self.ranks is None:
            return Script(self.kinds, self.codes[origin], np.full(len(origin), -1), sizes)
        once, more_copies, later_copy = self.ranks[:, origin]
        ranks = once + more_copies * (times - 1) + later_copy * copy
        return Script(self.kinds, self.codes[origin], ranks, sizes)

    def layout(self, times: int) -> tuple[np.ndarray, np.ndarray]:
        """For each event of the phase with so many copies, its position in :attr:`codes` and the number of its copy."""
        length = len(self.codes) - sum(size for _, size in self.blocks)
        return _layout(length, self.blocks, times)


def growth_of(runs: Sequence[Script]) -> Growth | None:
    """Return the growth of one phase, from its runs with the repeated layers 0, 1 and 2 times; None where it does not
    repeat.
    """
    blocks = _repeated(*(run.codes for run in runs))
    return None if blocks is None else _growth(list(runs), blocks)


def deep_of(log: Log) -> Deep:
    """Return the phases of a log, which follow each other."""
    running = np.concatenate([[0], np.cumsum(log.size_bytes)])
    tops = [mark.events.start + int(running[mark.events.start : mark.events.stop + 1].argmax()) for mark in log.marks]
    phases = [
        PhaseMemory(
            name=mark.name,
            step=mark.step,
            micro_step=mark.micro_step,
            allocated_end_bytes=int(running[mark.events.stop]),
            allocated_peak_bytes=int(running[top]),
        )
        for mark, top in zip(log.marks, tops, strict=True)
    ]
    return Deep(phases, tops, log)


def _line(first: Any, second: Any, times: int) -> Any:
    return first + (second - first) * times


def line_of(values: tuple[Any, ...], times: int) -> Any:
    """Numbers, or dicts of them, continued from three runs; what is no number must be the same in all."""
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
    """Return the blocks that inserted once into ``first`` make ``second``, and twice ``third``; None where none do."""
    for window in _WINDOWS:
        blocks = _insertions(first, second, third, window)
        if blocks is not None and np.array_equal(_grow(first, blocks, 2), third):
            return blocks
    return None


def _insertions(first: np.ndarray, second: np.ndarray, third: np.ndarray, window: int) -> Blocks | None:
    """The blocks that ``first`` lacks, found from the left; after each, ``window`` events must match in all three."""
    blocks: Blocks = []
    while True:
        same = _common(first, second)
        position = same + (blocks[-1][0] if blocks else 0)
        first, second, third = first[same:], second[same:], third[same:]
        left = len(second) - len(first)
        if left <= 0:
            return blocks if left == 0 and len(first) == 0 else None
        size = next(_sizes(first, second, third, window), None)
        if size is None:
            return None
        blocks.append((position, second[:size]))
        second, third = second[size:], third[2 * size :]


def _common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _sizes(first: np.ndarray, second: np.ndarray, third: np.ndarray, window: int) -> Iterator[int]:
    """Lengths of a block before which ``first`` may continue in ``second``, and in ``third`` after two of it."""
    left = len(second) - len(first)
    ahead = first[:window]
    sizes = np.flatnonzero(second[: left + 1] == ahead[0]) if len(ahead) else [left]
    for size in map(int, sizes):
        block = second[:size]
        parts = (second[size:], ahead), (third, block), (third[size:], block), (third[2 * size :], ahead)
        if size and all(np.array_equal(whole[: len(part)], part) for whole, part in parts):
            yield size


def _grow(first: np.ndarray, blocks: Blocks, times: int) -> np.ndarray:
    parts, last = [], 0
    for position, block in blocks:
        parts += [first[last:position], *([block] * times)]
        last = position
    return np.concatenate([*parts, first[last:]])


def _growth(runs: list[Script], blocks: Blocks) -> Growth:
    """Return the growth of a phase: the first run's events and the blocks; without ranks where they are not on a line.

    A free's rank is linear in the number of copies and, within a block, in the copy's number: a temporary finds nothing
    newer, backward finds all that the layers after this one saved gone, and zero_grad finds all that they got there.
    """
    first, ranks = runs[0].codes, None
    while len(off_line := _off_line(by_origin := _ranks_by_origin(runs, blocks), len(first))):
        shifted = _shifted(first, blocks, int(off_line[0]))
        if shifted is None:
            break
        blocks = shifted
    else:
        (once,), twice = by_origin[1], by_origin[2]
        is_first = np.arange(len(once)) < len(first)
        more_copies = np.where(is_first, once - by_origin[0][0], twice[0] - once)
        ranks = np.stack([once, more_copies, np.where(is_first, 0, twice[1] - twice[0])])
    return Growth(
        kinds=runs[0].kinds,
        codes=np.concatenate([first, *(block for _, block in blocks)]),
        blocks=tuple((position, len(block)) for position, block in blocks),
        ranks=ranks,
    )


def _off_line(ranks: list[np.ndarray], length: int) -> np.ndarray:
    """Events of the first run whose rank in the third is not what the first two say."""
    none, once, twice = (one[0, :length] for one in ranks)
    return np.flatnonzero(_line(none, once, 2) != twice)


def _shifted(first: np.ndarray, blocks: Blocks, position: int) -> Blocks | None:
    """The next block turned to begin at ``position``, where that grows the same events; else None.

    Blocks are found from the left, and so as far to the right as can be: too far, if an event stands before a block
    that is like the block's last in size and not in what it takes back.
    """
    number = next((number for number, (at, _) in enumerate(blocks) if at > position), None)
    if number is None:
        return None
    at, block = blocks[number]
    both = np.concatenate([first[position:at], block])
    if not np.array_equal(both[len(block) :], first[position:at]):
        return None
    return [*blocks[:number], (position, both[: len(block)]), *blocks[number + 1 :]]


def _ranks_by_origin(runs: list[Script], blocks: Blocks) -> list[np.ndarray]:
    """Per run, the ranks by copy and origin (as :func:`_layout` says); the first run has no copies."""
    length = len(runs[0].codes)
    shape = length + sum(len(block) for _, block in blocks)
    ranks = [np.zeros((max(times, 1), shape), dtype=np.int64) for times in range(len(runs))]
    for times, run in enumerate(runs):
        origin, copy = _layout(length, [(position, len(block)) for position, block in blocks], times)
        ranks[times][copy, origin] = run.ranks
    return ranks


def _layout(length: int, blocks: Sequence[tuple[int, int]], times: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the origin of each event, as a position in the first run's events and then the blocks', and its copy's
    number.
    """
    origin, copy, last, start = [], [], 0, length
    for position, size in blocks:
        origin += [np.arange(last, position), np.tile(np.arange(start, start + size), times)]
        copy += [np.zeros(position - last, dtype=np.int64), np.repeat(np.arange(times), size)]
        last, start = position, start + size
    return np.concatenate([*origin, np.arange(last, length)]), np.concatenate([*copy, np.zeros(length - last, int)])
