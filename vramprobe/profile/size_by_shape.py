"""The sizes of requests as functions of a batch's shape, learnt from those of the shapes that ran.

In: a table of sizes, shapes by requests, NaN where a shape does not make it. Out: a SizeByShape. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Shape = tuple[int, int]  # rows, tokens by row after padding

_MULTIPLES = (8, 16, 32, 64, 128)  # that kernels round a length up to
_TOLERANCE_BYTES = 1.0  # what least squares leaves of an exact fit
_BY_TOKENS = 1  # the rule that is taken where none holds


def _rules(shape: Shape) -> list[list[float]]:
    """The terms of each rule, the plainest first: constant, tokens, tokens of rounded lengths, rows and length, the
    square of the length."""
    rows, width = shape
    tokens = rows * width
    rounded = [[1, rows * -(-width // multiple) * multiple] for multiple in _MULTIPLES]
    return [[1], [1, tokens], *rounded, [1, rows, width, tokens], [1, tokens, tokens * width]]


_NUM_RULES, _MOST_TERMS = len(_rules((1, 1))), 4


class SizeByShape:
    """For each request the plainest rule that all shapes follow which make it; ``is_exact``: whether there is one that
    more shapes follow than it has terms. Else its tokens, by least squares.
    """

    def __init__(self, shapes: Sequence[Shape], table: np.ndarray) -> None:
        num_requests = table.shape[1]
        self._coefficients = np.zeros((_NUM_RULES, _MOST_TERMS, num_requests))
        self.is_exact = np.zeros(num_requests, bool)
        is_made = ~np.isnan(table)
        terms = [_rules(shape) for shape in shapes]
        for mask in np.unique(is_made, axis=1).T:
            columns = np.flatnonzero((is_made == mask[:, None]).all(axis=0))
            if mask.any():
                self._learn(
                    columns, table[mask][:, columns], [one for one, is_own in zip(terms, mask, strict=True) if is_own]
                )

    def _learn(self, columns: np.ndarray, sizes: np.ndarray, terms: Sequence[list[list[float]]]) -> None:
        left = np.arange(len(columns))
        for rule in range(_NUM_RULES):
            given = np.array([one[rule] for one in terms], float)
            if len(left) and len(given) > given.shape[1]:
                found, worst = _fitted(given, sizes[:, left])
                holds = worst <= _TOLERANCE_BYTES
                self._keep(rule, columns[left[holds]], found[:, holds])
                self.is_exact[columns[left[holds]]] = True
                left = left[~holds]
        widths = {tuple(one[_BY_TOKENS]) for one in terms}
        rule = _BY_TOKENS if len(widths) > 1 else 0
        given = np.array([one[rule] for one in terms], float)
        self._keep(rule, columns[left], _fitted(given, sizes[:, left])[0])

    def _keep(self, rule: int, columns: np.ndarray, found: np.ndarray) -> None:
        self._coefficients[rule, : len(found), columns] = found.T

    def __call__(self, shape: Shape) -> np.ndarray:
        """Bytes of every request on a batch of this shape."""
        found = np.zeros(self._coefficients.shape[2])
        for rule, terms in enumerate(_rules(shape)):
            found += np.array(terms, float) @ self._coefficients[rule, : len(terms)]
        return np.maximum(np.rint(found), 1).astype(np.int64)


def _fitted(given: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients by least squares, and the largest difference of each request; of terms that cannot be told apart the
    difference is without end."""
    if np.linalg.matrix_rank(given) < given.shape[1]:
        return np.zeros((given.shape[1], sizes.shape[1])), np.full(sizes.shape[1], np.inf)
    scale = np.abs(given).max(axis=0)
    found = np.linalg.lstsq(given / scale, sizes, rcond=None)[0] / scale[:, None]
    return found, np.abs(given @ found - sizes).max(axis=0, initial=0)
