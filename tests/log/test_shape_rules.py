"""Sizes as exact functions of rows and length."""

from fractions import Fraction

import numpy as np
import pytest

from vramprobe.log.shapes import RULES, shape_rules

SHAPES = [(2, 1024), (3, 1024), (2, 1536), (3, 2560), (5, 1536), (4, 2048)]
SIZES = {
    "a constant": lambda rows, length: 4096,
    "tokens": lambda rows, length: 8192 * rows * length,
    "a constant and tokens": lambda rows, length: 16 + 3 * rows * length,
    "rows": lambda rows, length: 8 * rows,
    "length": lambda rows, length: 4 * length,
    "scores": lambda rows, length: 32 * rows * length * length,
    "half a byte": lambda rows, length: rows * length // 2,
    "tiles of wide heads": lambda rows, length: (
        8 * rows * (-(-length // 128) * 4 * 32784 + 4 * max(200 // (8 * rows), 1) * 64 * 512)
    ),
    "tiles of TRL's head": lambda rows, length: 65536 * min(rows * (length - 1), 4096),
    "rows, length and tokens": lambda rows, length: 1 + 2 * rows + 3 * length + 5 * rows * length,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_found_and_continued_exactly(name: str) -> None:
    size = SIZES[name]
    rules = shape_rules({shape: np.array([size(*shape), 7]) for shape in SHAPES})
    assert rules.num_unexplained == 0
    assert rules.sizes(64, 8192).tolist() == [size(64, 8192), 7]


def test_a_size_without_a_rule_is_named_and_keeps_the_largest_shapes_bytes() -> None:
    odd = {shape: np.array([shape[0] * shape[1], (shape[1] // 1000) ** 3]) for shape in SHAPES}
    rules = shape_rules(odd)
    assert rules.num_unexplained == 1
    assert rules.sizes(64, 8192).tolist() == [64 * 8192, odd[4, 2048][1]]


def test_rules_of_one_length_know_rows_alone() -> None:
    rules = shape_rules({(rows, 512): np.array([100 + 3 * rows * 512]) for rows in (2, 3, 5, 8)})
    assert rules.sizes(70, 512).tolist() == [100 + 3 * 70 * 512]
    assert rules.coefficients == ({"1": Fraction(100), "tokens": Fraction(3)},)


def test_a_rule_must_give_a_shape_that_it_was_not_made_from() -> None:
    """Two shapes fit any line: nothing would be held against it."""
    rules = shape_rules({(2, 512): np.array([1000]), (3, 512): np.array([1700])})
    assert rules.num_unexplained == 1


#: The last are of other ranks.
RANKED = [*((*shape, 16) for shape in SHAPES), (2, 1024, 64), (2, 1024, 8)]
OF_RANK = {
    "weights": lambda rows, length, rank: 8192 * rank,
    "activations": lambda rows, length, rank: 2 * rows * length * rank,
    "both read at once": lambda rows, length, rank: 2 * rows * length * rank + 4096 * rank,
    "tokens and weights": lambda rows, length, rank: 4 * rows * length + 4096 * rank,
    "a factor and weights": lambda rows, length, rank: 4 * 100 + 4096 * rank,
    "nothing": lambda rows, length, rank: 12 + rows * length,
}


@pytest.mark.parametrize("name", OF_RANK)
def test_what_adapters_add_follows_from_runs_at_other_ranks(name: str) -> None:
    size = OF_RANK[name]
    rules = shape_rules({shape: np.array([size(*shape)]) for shape in RANKED})
    assert rules.num_unexplained == 0
    assert rules.sizes(7, 3000, 256).tolist() == [size(7, 3000, 256)]
    at_one = rules.at_rank(32)
    assert at_one.sizes(7, 3000).tolist() == [size(7, 3000, 32)]
    assert all(tuple(rule) in RULES for rule in at_one.coefficients)


def test_a_line_of_the_rank_is_held_against_a_third() -> None:
    sizes = {shape: np.array([400 + 4096 * shape[2]]) for shape in RANKED}
    del sizes[RANKED[-1]]
    assert shape_rules(sizes).num_unexplained == 1
    assert shape_rules(sizes | {RANKED[-1]: np.array([400])}).num_unexplained == 1


def test_a_second_rank_of_one_batch_is_no_other_batch() -> None:
    """A rule of two features is held against nothing by two batches, whatever their ranks."""
    shapes = [(2, 512, 16), (3, 512, 16), (3, 512, 64)]
    rules = shape_rules({shape: np.array([100 + 7 * shape[0]]) for shape in shapes})
    assert rules.num_unexplained == 1
