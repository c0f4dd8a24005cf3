"""Pair each free with its allocation, without naming blocks, so that it can be continued to deeper models.

In: Logs of one cell at several depths. Out: each phase's events as a Script: what each is (a kind) and, for a free, how
many living blocks of its kind are newer (its rank). And back: Scripts → a Log. Knows no torch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vramprobe.allocator.compiled import paired
from vramprobe.errors import VramprobeError
from vramprobe.log.log import OUTSIDE, Log, PhaseMark

_VISITS = ("", "forward", "backward", "after")  # of a layer (log.py, LayerMark)


class Unpaired(VramprobeError):
    """A free that no living block answers to."""

    def __init__(self, free: str) -> None:
        super().__init__(f"a recipe does not pair {free}: a fault of vramprobe's; report it")


@dataclass(frozen=True)
class Kinds:
    """Kinds of an event's block, one row each: its bytes, its cause (a position in :data:`ALL_CAUSES`), its stream.

    Blocks of one size and cause that are made at different places of a layer, or in different kinds of layers, are
    different kinds.
    """

    size_bytes: np.ndarray  # int64
    causes: np.ndarray  # int8
    streams: np.ndarray  # int8


@dataclass(frozen=True)
class Script:
    """One phase's events; two arrays of one length. Frees that follow each other stand in order of age.

    The libraries free some in the order of a hash table; the caching allocator comes to the same either way.
    ``codes``: 1 plus the position of the block's kind; negative for a free. ``ranks``: for a free, the number of living
    blocks of its kind that were allocated later; else 0. ``sizes``: of each event's block, where they are not its
    kind's bytes.
    """

    kinds: Kinds
    codes: np.ndarray  # int64
    ranks: np.ndarray  # int64
    sizes: np.ndarray | None = None  # int64

    @cached_property
    def size_bytes(self) -> np.ndarray:
        """Bytes of each event, negative for a free."""
        sizes = self.kinds.size_bytes[np.abs(self.codes) - 1] if self.sizes is None else self.sizes
        return np.sign(self.codes) * sizes

    @cached_property
    def causes(self) -> np.ndarray:
        """The cause of each event's block, as a position in :data:`ALL_CAUSES`."""
        return self.kinds.causes[np.abs(self.codes) - 1]

    @cached_property
    def streams(self) -> np.ndarray:
        """The stream of each event's block."""
        return self.kinds.streams[np.abs(self.codes) - 1]


def scripts_of(logs: Sequence[Log], kind_of_layer: Callable[[int], int] = lambda layer: 0) -> list[list[Script]]:
    """Return each log's phases as Scripts over the same kinds. Events between phases are none of them.

    ``kind_of_layer``: a number that layers of the same kind share, whatever the depth.
    """
    places = [_places(log, kind_of_layer) for log in logs]
    rows, number = np.unique(np.concatenate(places), axis=0, return_inverse=True)
    kinds = Kinds(rows[:, 0].copy(), rows[:, 1].astype(np.int8), rows[:, 2].astype(np.int8))
    numbers = np.split(number.ravel() + 1, np.cumsum([len(log) for log in logs])[:-1])
    return [
        _scripts(log, np.where(log.size_bytes < 0, -codes, codes), kinds)
        for log, codes in zip(logs, numbers, strict=True)
    ]


def log_from(scripts: Sequence[Script], marks: Sequence[PhaseMark]) -> Log:
    """Return the events of phases that follow each other; blocks are numbered in order. Raises Unpaired."""
    names = ("codes", "ranks", "size_bytes", "causes", "streams")
    codes, ranks, sizes, causes, streams = (np.concatenate([getattr(one, name) for one in scripts]) for name in names)
    stops = np.cumsum([len(script.codes) for script in scripts])
    return Log(
        size_bytes=sizes,
        blocks=_blocks(codes, ranks, sizes),
        causes=causes,
        streams=streams,
        marks=tuple(
            replace(mark, events=range(int(stop) - len(script.codes), int(stop)))
            for mark, script, stop in zip(marks, scripts, stops, strict=True)
        ),
    )


def _places(log: Log, kind_of_layer: Callable[[int], int]) -> np.ndarray:
    """A row per event: bytes, cause and stream of its block, and where that was made: stack, kind of layer, visit,
    number."""
    layers = [OUTSIDE, *log.layers]
    starts = np.array([mark.position for mark in layers])
    positions = np.arange(len(log))
    segment = np.searchsorted(starts, positions, side="right") - 1
    at = np.array(
        [
            (mark.stack, -1 if mark.stack < 0 else kind_of_layer(mark.layer), _VISITS.index(mark.visit))
            for mark in layers
        ]
    )
    made_before = np.concatenate([[0], np.cumsum(log.size_bytes > 0)])  # not frees: what autocast casts goes at once
    number = np.where(at[segment, 0] < 0, 0, made_before[positions] - made_before[starts[segment]])
    made = np.column_stack([np.abs(log.size_bytes), log.causes, log.each_stream(), at[segment], number]).astype(
        np.int64
    )
    is_free = log.size_bytes < 0
    made_at = np.zeros(int(log.blocks.max(initial=0)) + 1, dtype=np.int64)
    is_alloc = log.size_bytes > 0
    made_at[log.blocks[is_alloc]] = positions[is_alloc]
    return made[np.where(is_free, made_at[log.blocks], positions)]


def _scripts(log: Log, codes: np.ndarray, kinds: Kinds) -> list[Script]:
    order = [_in_order(codes, log.blocks, mark.events) for mark in log.marks]
    flat = np.concatenate([*order, np.zeros(0, dtype=np.int64)])
    codes = codes[flat]
    ranks = _ranks(codes, log.blocks[flat])
    stops = np.cumsum([len(one) for one in order])[:-1]
    return [Script(kinds, *pair) for pair in zip(np.split(codes, stops), np.split(ranks, stops), strict=True)]


def _in_order(codes: np.ndarray, blocks: np.ndarray, events: range) -> np.ndarray:
    """Positions of a phase's events, with consecutive frees sorted by age."""
    positions = np.arange(events.start, events.stop)
    codes = codes[positions]
    is_free = codes < 0
    runs = np.cumsum(np.diff(is_free, prepend=False))
    return positions[np.lexsort((np.where(is_free, blocks[positions], positions), runs))]


def _ranks(codes: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    ranks = np.zeros(len(codes), dtype=np.int64)
    alive: defaultdict[int, list[int]] = defaultdict(list)
    for position, (code, block) in enumerate(zip(codes.tolist(), blocks.tolist(), strict=True)):
        same = alive[abs(code)]
        if code > 0:
            same.append(block)
        elif same[-1] == block:
            same.pop()
        else:
            at = same.index(block)
            del same[at]
            ranks[position] = len(same) - at
    return ranks


def _blocks(codes: np.ndarray, ranks: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    if paired is not None:
        arrays = (np.ascontiguousarray(one) for one in (codes, ranks, sizes))
        try:
            return np.frombuffer(paired(*arrays), dtype=np.int64)
        except ValueError as error:
            raise Unpaired(f"a free ({error})") from None
    blocks: list[int] = []
    alive: list[list[int]] = [[] for _ in range(int(np.abs(codes).max(initial=0)) + 1)]
    count = 0
    for code, rank, size in zip(codes.tolist(), ranks.tolist(), sizes.tolist(), strict=True):
        if code > 0:
            count += 1
            alive[code].append(count)
            blocks.append(count if size else 0)  # the cache is emptied
            continue
        same = alive[-code]
        if not 0 <= rank < len(same):
            raise Unpaired(f"a free of kind {-code}")
        blocks.append(same.pop(-1 - rank))
    return np.array(blocks, dtype=np.int64)
