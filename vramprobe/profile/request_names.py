"""Requests of several steps under common names: which one of one step is which of another.

In: MicroSteps (step_requests.py), and the shapes of some. Out: RequestNames. Pure NumPy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import numpy as np

from vramprobe.profile.size_by_shape import Shape, SizeByShape
from vramprobe.profile.step_requests import MicroStep

_OF_TOKEN, _OF_RATIO = 1 << 42, 1 << 41  # above all sizes
_ENOUGH = 0.99  # of the requests
_COMMON_SHARE, _COMMON_REQUESTS = 0.05, 64  # of a unit's requests, of one stack
_STEPS_OF_RATIO = 50  # by e-fold


class RequestNames:
    """Requests have one name where what asks for them comes in the same order and their sizes follow one rule.

    ``tokens``: what asks, of each name; ``by_unit``: by a MicroStep's id, the names of its requests.
    """

    def __init__(self, units: Sequence[MicroStep], shaped: Sequence[tuple[Shape, MicroStep]]) -> None:
        alike: dict[bytes, list[MicroStep]] = {}
        for unit in units:
            alike.setdefault(unit.tokens.tobytes(), []).append(unit)
        shapes = {id(unit): shape for shape, unit in shaped}
        groups = sorted(alike.values(), key=lambda group: -sum(id(one) in shapes for one in group))
        self._name(groups, [_same(groups[0], group, shapes) for group in groups])

    def _name(self, groups: Sequence[Sequence[MicroStep]], pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Name the requests of each group, whose units make the same ones, by the first group's where they match; all
        others get new names.
        """
        self.tokens, self.by_unit = groups[0][0].tokens, {}
        for group, (theirs, ours) in zip(groups, pairs, strict=True):
            own = group[0].tokens
            names = np.full(len(own), -1)
            names[ours] = theirs
            is_new = names < 0
            names[is_new] = len(self.tokens) + np.arange(is_new.sum())
            self.tokens = np.concatenate([self.tokens, own[is_new]])
            self.by_unit |= {id(unit): names for unit in group}


def learnt_sizes(seen: Sequence[tuple[Shape, np.ndarray, MicroStep]], num_names: int) -> SizeByShape:
    """``seen``: shapes, and the names of their units' requests."""
    shapes = list(dict.fromkeys(shape for shape, *_ in seen))
    table = np.full((len(shapes), num_names), np.nan)
    for shape, names, unit in seen:
        table[shapes.index(shape), names] = unit.sizes
    return SizeByShape(shapes, table)


def _same(
    first: Sequence[MicroStep], group: Sequence[MicroStep], shapes: dict[int, Shape]
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the requests that units of two orders have in common, by size too as far as shapes are known."""
    best = np.zeros(0, np.int64), np.zeros(0, np.int64)
    one, other = (next((one for one in units if id(one) in shapes), units[0]) for units in (first, group))
    for theirs, ours in matches(one, shapes.get(id(one)), other, shapes.get(id(other))):
        seen = [(shapes[id(unit)], np.arange(len(unit.tokens)), unit) for unit in first if id(unit) in shapes]
        names = np.full(len(other.tokens), len(one.tokens))  # one more, for those that are not the first's
        names[ours] = theirs
        seen += [(shapes[id(unit)], names, unit) for unit in group if id(unit) in shapes]
        is_same = learnt_sizes(seen, len(one.tokens) + 1).is_exact[theirs] if first is not group else theirs >= 0
        if is_same.sum() > len(best[0]):
            best = theirs[is_same], ours[is_same]
        if is_same.sum() > _ENOUGH * min(len(one.tokens), len(other.tokens)):
            break
    return best


def matches(
    one: MicroStep, shape: Shape | None, other: MicroStep, other_shape: Shape | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions in both of the requests that come in the same order: by what asks, then by sizes, too."""
    yield in_order(one.tokens, other.tokens)
    if np.array_equal(one.tokens, other.tokens):
        return
    if shape is not None and other_shape is not None:
        yield in_order(_keys(one, shape, other), _keys(other, other_shape, one))


def _keys(unit: MicroStep, shape: Shape, other: MicroStep) -> np.ndarray:
    """Return a key for each request's origin. Where one stack makes many, as for all of a backward, also a size that
    the other unit has too, else bytes by token.
    """
    sizes, tokens = unit.sizes, shape[0] * shape[1]
    by_token = _OF_RATIO + np.rint(_STEPS_OF_RATIO * np.log(sizes / tokens)).astype(np.int64)
    of_size = np.where(np.isin(sizes, other.sizes), sizes, by_token)
    _, kinds, counts = np.unique(unit.tokens, return_inverse=True, return_counts=True)
    is_common = counts[kinds] > max(_COMMON_SHARE * len(sizes), _COMMON_REQUESTS)
    return unit.tokens * _OF_TOKEN + np.where(is_common, of_size, 0)


def in_order(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions in both of what comes in the same order."""
    shortest = min(len(one), len(other))
    head = _num_alike(one[:shortest], other[:shortest])
    tail = _num_alike(one[::-1][: shortest - head], other[::-1][: shortest - head])
    middle = one[head : len(one) - tail].tolist(), other[head : len(other) - tail].tolist()
    pairs = [np.stack([np.arange(head)] * 2)]
    for ours, theirs, size in difflib.SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        pairs.append(np.stack([head + ours + np.arange(size), head + theirs + np.arange(size)]))
    pairs.append(np.stack([len(one) - tail + np.arange(tail), len(other) - tail + np.arange(tail)]))
    found = np.concatenate(pairs, axis=1)
    return found[0], found[1]


def _num_alike(one: np.ndarray, other: np.ndarray) -> int:
    """Number of equal elements from the first on."""
    differs = np.flatnonzero(one != other)
    return int(differs[0]) if len(differs) else len(one)
