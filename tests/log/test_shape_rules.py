"""Sizes as exact functions of rows and length."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from vramprobe.log.shapes import shape_rules

SHAPES = [(2, 1024), (3, 1024), (2, 1536), (3, 2560), (5, 1536), (4, 2048)]
SIZES = {
    "a constant": lambda rows, length: 4096,
    "tokens": lambda rows, length: 8192 * rows * length,
    "a constant and tokens": lambda rows, length: 16 + 3 * rows * length,
    "rows": lambda rows, length: 8 * rows,
    "length": lambda rows, length: 4 * length,
    "scores": lambda rows, length: 32 * rows * length * length,
    "half a byte": lambda rows, length: rows * length // 2,
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
