"""The requests of steps on batches of several shapes, under common names, and the rule that each one's bytes follow.

In: the micro-steps of steps that ran, and the shape of each. Out: NamedSteps: which request of one step is which of
another, and its bytes as an exact function of rows and length (log/shapes.py), learnt from the steps not held out.
"""

import difflib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vramprobe.log.shapes import Shape, ShapeRules, shape_rules
from vramprobe.profile.analyzed_rank import AnalyzedRank, MicroStep

ONCE = -1  # the name of what no step requests
_NOT_MADE = -1


@dataclass(frozen=True)
class NamedSteps:
    """``of_block``: the name of each block's request, ONCE for one outside the steps. By name: ``tokens``, what asks;
    ``rules``, none where no shape makes it; ``loose``, of those whose bytes follow no rule: the most of them by token.
    """

    of_block: np.ndarray
    tokens: np.ndarray
    rules: ShapeRules
    loose: Mapping[int, Fraction]

    def rule_of(self, name: int) -> Mapping[str, Fraction]:
        """The rule of one name; empty where it has none."""
        number = int(self.rules.rule_of[name])
        return self.rules.coefficients[number] if number >= 0 else {}


def named_steps(
    seen: AnalyzedRank,
    units: Mapping[int, Sequence[MicroStep]],
    shapes: Mapping[int, Shape],
    held: set[int],
    constant_at: Shape | None = None,
) -> NamedSteps:
    """Name the requests of these steps' micro-steps.

    ``shapes``: of the steps where it is known; ``held``: steps that no rule is made from. What is made at the shape
    ``constant_at`` alone, as in the first steps, is taken for constant; at another alone, for loose.
    """
    learnt = {step: shape for step, shape in shapes.items() if step not in held}
    of_block, tokens = _named(seen, units, shapes, learnt)
    every = list(dict.fromkeys(learnt.values()))
    table = np.full((len(every), len(tokens)), _NOT_MADE, np.int64)
    for step, shape in learnt.items():
        for unit in units[step]:
            table[every.index(shape), of_block[unit.requested]] = unit.sizes
    return NamedSteps(of_block, tokens, *_rules(every, table, constant_at))


def _rules(
    shapes: Sequence[Shape], table: np.ndarray, constant_at: Shape | None
) -> tuple[ShapeRules, dict[int, Fraction]]:
    """(the rule of each column; of those that follow none, the most bytes by token of any shape, which is their rule).

    ``table``: bytes, a row for each shape and a column for each name.
    """
    rule_of, loose = np.full(table.shape[1], -1, np.int32), {}
    known: dict[tuple[tuple[str, Fraction], ...], int] = {}
    is_made = table != _NOT_MADE
    for mask in np.unique(is_made, axis=1).T:
        columns = np.flatnonzero((is_made == mask[:, None]).all(axis=0))
        own = [shape for shape, has in zip(shapes, mask, strict=True) if has]
        if not own:
            continue
        found = shape_rules({shape: table[shapes.index(shape), columns] for shape in own})
        for name, number in zip(columns.tolist(), found.rule_of.tolist(), strict=True):
            if number >= 0:
                rule = found.coefficients[number]
            elif own == [constant_at]:
                rule = {"1": Fraction(int(table[shapes.index(own[0]), name]))}
            else:
                sizes = ((int(table[shapes.index(shape), name]), shape) for shape in own)
                loose[name] = max(Fraction(size, rows * length) for size, (rows, length) in sizes)
                rule = {"tokens": loose[name]}
            rule_of[name] = known.setdefault(tuple(rule.items()), len(known))
    rules = ShapeRules(rule_of, tuple(dict(one) for one in known), np.zeros(len(rule_of), np.int64))
    return rules, loose


@dataclass(frozen=True)
class _Order:
    """Micro-steps that request in one order; of each request its name, and the bytes by shape."""

    tokens: np.ndarray
    names: np.ndarray
    sizes: Mapping[Shape, np.ndarray]
    rules: ShapeRules

    def at(self, shape: Shape) -> np.ndarray:
        """Bytes of each request, -1 where no rule says."""
        known = self.sizes.get(shape)
        return np.where(self.rules.rule_of < 0, _NOT_MADE, self.rules.sizes(*shape)) if known is None else known


def _named(
    seen: AnalyzedRank,
    units: Mapping[int, Sequence[MicroStep]],
    shapes: Mapping[int, Shape],
    learnt: Mapping[int, Shape],
) -> tuple[np.ndarray, np.ndarray]:
    """(the name of each block, the token of each name).

    Requests of two orders have one name where their lines come in one order, and the rules of the order with more
    shapes give the other's bytes.
    """
    of_block, tokens = np.full(len(seen.lives.sizes), ONCE), np.zeros(0, np.int64)
    for number in range(len(next(iter(units.values())))):
        groups: defaultdict[bytes, list[int]] = defaultdict(list)
        for step, own in units.items():
            groups[own[number].tokens.tobytes()].append(step)
        fitted = {
            key: [step for step in steps if step in learnt] or [step for step in steps if step in shapes]
            for key, steps in groups.items()
        }
        known: list[_Order] = []
        for key in sorted(groups, key=lambda key: -len({shapes[step] for step in fitted[key]})):
            sizes = {shapes[step]: units[step][number].sizes for step in fitted[key]}
            its = units[groups[key][0]][number].tokens
            names = max((_matched(one, its, sizes) for one in known), key=_num_named, default=np.full(len(its), -1))
            is_new = names < 0
            names[is_new] = len(tokens) + np.arange(is_new.sum())
            tokens = np.concatenate([tokens, its[is_new]])
            if sizes:
                known.append(_Order(its, names, sizes, shape_rules(sizes)))
            for step in groups[key]:
                of_block[units[step][number].requested] = names
    return of_block, tokens


def _matched(one: _Order, tokens: np.ndarray, sizes: Mapping[Shape, np.ndarray]) -> np.ndarray:
    """The names of requests that are also those of ``one``, by line and bytes at all shapes; -1 for the others."""
    theirs = np.stack([one.tokens, *(one.at(shape) for shape in sizes)], axis=1)
    ours = np.stack([tokens, *sizes.values()], axis=1)
    _, keys = np.unique(np.concatenate([theirs, ours]), axis=0, return_inverse=True)
    own, other = _in_order(keys.ravel()[: len(theirs)], keys.ravel()[len(theirs) :])
    names = np.full(len(tokens), -1)
    names[other] = one.names[own]
    ends = np.stack([np.append(own, len(one.tokens)), np.append(other, len(tokens))], axis=1)
    for (start, first), (stop, last) in zip([(-1, -1), *ends.tolist()], ends.tolist(), strict=False):
        if np.array_equal(
            one.tokens[start + 1 : stop], tokens[first + 1 : last]
        ):  # as many, of bytes that no rule says
            names[first + 1 : last] = one.names[start + 1 : stop]
    return names


def _num_named(names: np.ndarray) -> int:
    return int((names >= 0).sum())


def _in_order(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
