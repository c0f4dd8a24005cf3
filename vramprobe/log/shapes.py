"""Sizes as exact functions of rows, length and LoRA rank, from logs of one cell at a few of them.

In: the bytes of each event at several (rows, length) or (rows, length, rank), where the events are the same ones in the
same order. Out: ShapeRules, which give the bytes at any other. A size without a rule is named, not guessed. Pure Python
and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np

Shape = tuple[int, ...]  # rows, tokens of a row and, where that is open too, the rank of LoRA's adapters

#: The memory-efficient attention's backward stages the gradients of so many blocks of keys over all heads, where these
#: are wider than 128 (torch's attention_backward.cu, ``num_splits_key``); heads of models that it runs.
_MOST_STAGED, _WIDE_HEADS = 200, (4, 8, 16, 32)
#: Tokens of a tile of TRL's fused head (trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE); a row's first has no score.
_TILE_TOKENS = 4096
#: Tokens of a row that kernels round a length up to.
_MULTIPLES = (8, 16, 32, 64, 128)


def _tokens_to(multiple: int) -> Callable[[int, int, int], int]:
    return lambda rows, length, rank: rows * -(-length // multiple) * multiple


def _staged(num_heads: int) -> Callable[[int, int, int], int]:
    return lambda rows, length, rank: rows * max(_MOST_STAGED // (rows * num_heads), 1)


_FEATURES: dict[str, Callable[[int, int, int], int]] = {
    "1": lambda rows, length, rank: 1,
    "rows": lambda rows, length, rank: rows,
    "length": lambda rows, length, rank: length,
    "tokens": lambda rows, length, rank: rows * length,
    "scores": lambda rows, length, rank: rows * length * length,
    "square": lambda rows, length, rank: length * length,
    "tile": lambda rows, length, rank: min(rows * (length - 1), _TILE_TOKENS),
    "rank": lambda rows, length, rank: rank,
    "tokens rank": lambda rows, length, rank: rows * length * rank,
    **{f"tokens to {multiple}": _tokens_to(multiple) for multiple in _MULTIPLES},
    **{f"staged of {num_heads}": _staged(num_heads) for num_heads in _WIDE_HEADS},
}
#: Which of them a size may be made of, the plainest first.
RULES = (
    ("1",),
    ("1", "tokens"),
    ("1", "rows"),
    ("1", "length"),
    ("rows", "tokens"),
    ("1", "square"),
    *(("1", f"tokens to {multiple}") for multiple in _MULTIPLES),
    ("1", "tokens", "scores"),
    ("rows", "length"),
    ("length", "tokens"),
    ("1", "length", "tokens"),
    ("1", "rows", "length", "tokens"),
    *(("tokens to 128", f"staged of {num_heads}") for num_heads in _WIDE_HEADS),
    ("tile",),
)
#: Feature of the rank → the one that it is a multiple of at a rank that does not change.
_AT_ONE_RANK = {"rank": "1", "tokens rank": "tokens"}
#: Those that adapters add, where logs of other ranks are at hand: tried after the others.
_RULES_OF_RANK = (
    ("rank",),
    ("tokens rank",),
    ("tokens", "rank"),
    ("rank", "tokens rank"),
    ("tokens", "tokens rank"),
    ("1", "rank"),
    ("1", "tokens rank"),
    ("1", "tokens", "rank"),
    ("1", "tokens", "tokens rank"),
    ("tokens", "rank", "tokens rank"),
)


@dataclass(frozen=True)
class ShapeRules:
    """``rule_of``: for each event the position of its rule; -1 where its size follows none.

    ``coefficients``: of each rule, exact, by feature of rows, length and rank.
    """

    rule_of: np.ndarray  # int32
    coefficients: tuple[Mapping[str, Fraction | int], ...]
    fallback: np.ndarray  # int64: each event's bytes at the largest shape that was recorded

    @property
    def num_unexplained(self) -> int:
        """Events whose size follows no rule."""
        return int((self.rule_of < 0).sum())

    def sizes(self, rows: int, length: int, rank: int = 0) -> np.ndarray:
        """Bytes of each event at that shape; of an event without a rule those of the largest recorded shape.

        ``rank``: of the adapters, where logs of several ranks made the rules; else it decides nothing.
        """
        at = {name: feature(rows, length, rank) for name, feature in _FEATURES.items()}
        values = [int(sum(factor * at[name] for name, factor in rule.items())) for rule in self.coefficients]
        return np.where(self.rule_of < 0, self.fallback, np.array([*values, 0], dtype=np.int64)[self.rule_of])

    def at_rank(self, rank: int) -> ShapeRules:
        """Return the rules of rows and length alone, at one rank, each with the features of one of RULES."""
        rules = []
        for rule in self.coefficients:
            plain: dict[str, Fraction] = {}
            for name, factor in rule.items():
                at_one = _AT_ONE_RANK.get(name, name)
                plain[at_one] = plain.get(at_one, Fraction(0)) + factor * (1 if at_one == name else rank)
            names = next(names for names in RULES if plain.keys() <= set(names))
            rules.append({name: plain.get(name, Fraction(0)) for name in names})
        return ShapeRules(self.rule_of, tuple(rules), self.fallback)


def shape_rules(sizes: Mapping[Shape, np.ndarray]) -> ShapeRules:
    """Return the rules that the sizes follow over all shapes, each the plainest that fits all of them exactly.

    A rule is made from as many shapes as it has features and must give the others' sizes: one shape more at least.
    """
    shapes = list(sizes)
    columns, column_of = np.unique(np.stack([sizes[shape] for shape in shapes]), axis=1, return_inverse=True)
    rules = [_rule(shapes, [int(value) for value in column]) for column in columns.T]
    known = {number: rule for number, rule in enumerate(rules) if rule is not None}
    position = np.full(len(rules), -1, dtype=np.int32)
    position[list(known)] = np.arange(len(known))
    largest = max(shapes, key=prod)
    return ShapeRules(position[column_of.ravel()], tuple(known.values()), sizes[largest])


def has_ranks(shapes: Collection[Shape]) -> bool:
    """Return True if the shapes are of several ranks, so that what adapters add follows from that."""
    return len({shape[2:] for shape in shapes}) > 1


def _rule(shapes: Sequence[Shape], values: Sequence[int]) -> Mapping[str, Fraction] | None:
    num_batches = len({shape[:2] for shape in shapes})
    num_ranks = len({shape[2:] for shape in shapes})
    for names in (*RULES, *(_RULES_OF_RANK if num_ranks > 1 else ())):
        # A line of the rank has a factor of it and one beside it: two ranks fit any, and three do not.
        least_ranks = 3 if any({*pair} <= {*names} for pair in _AT_ONE_RANK.items()) else 1
        if len(names) >= num_batches or num_ranks < least_ranks:
            continue
        if (found := _solved(shapes, values, names)) is not None:
            return found
    return None


def _solved(shapes: Sequence[Shape], values: Sequence[int], names: Sequence[str]) -> Mapping[str, Fraction] | None:
    """The coefficients that give all values exactly, or None. Gaussian elimination over all equations."""
    rows = [
        [*(Fraction(_FEATURES[name](rows, length, sum(rank))) for name in names), Fraction(value)]
        for (rows, length, *rank), value in zip(shapes, values, strict=True)
    ]
    for column in range(len(names)):
        pivot = next((row for row in range(column, len(rows)) if rows[row][column]), None)
        if pivot is None:
            return None  # these shapes do not tell the features apart
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for row in range(len(rows)):
            if row != column and (factor := rows[row][column]):
                rows[row] = [value - factor * own for value, own in zip(rows[row], rows[column], strict=True)]
    if any(row[-1] for row in rows[len(names) :]):
        return None
    return {name: rows[number][-1] for number, name in enumerate(names)}
