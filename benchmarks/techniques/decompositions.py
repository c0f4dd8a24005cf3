"""Matrix decompositions by their shapes, for an emulated GPU: ``train.py --patch "import decompositions"``.

How much workspace cuSOLVER wants is known to cuSOLVER alone, so the emulated driver ends a run that asks for it. After
this import, torch.linalg.svd and qr return uncomputed tensors of the right shapes beside a copy of their input, and
solve multiplies. A run has the bytes of every step but cuSOLVER's workspace, and no time of the decomposition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Svd(NamedTuple):
    """As torch.linalg.svd names its results."""

    U: torch.Tensor
    S: torch.Tensor
    Vh: torch.Tensor


class Qr(NamedTuple):
    """As torch.linalg.qr names its results."""

    Q: torch.Tensor
    R: torch.Tensor


def svd(matrix: torch.Tensor, full_matrices: bool = True, **_: object) -> Svd:
    """Factors of ``matrix``, (…, m, n): U, the singular values and Vh, uncomputed."""
    copy = matrix.detach().clone()
    *batch, num_rows, num_columns = matrix.shape
    least = min(num_rows, num_columns)
    left, right = (num_rows, num_columns) if full_matrices else (least, least)
    return Svd(
        copy.new_empty(*batch, num_rows, left),
        copy.new_empty(*batch, least),
        copy.new_empty(*batch, right, num_columns),
    )


def qr(matrix: torch.Tensor, mode: str = "reduced") -> Qr:
    """Factors of ``matrix``, (…, m, n): Q and R, uncomputed."""
    assert mode == "reduced", mode
    copy = matrix.detach().clone()
    *batch, num_rows, num_columns = matrix.shape
    least = min(num_rows, num_columns)
    return Qr(copy.new_empty(*batch, num_rows, least), copy.new_empty(*batch, least, num_columns))


def solve(matrix: torch.Tensor, other: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    """A tensor of the solution's shape that keeps both inputs for backward, as the solution does."""
    return matrix @ other if left else other @ matrix


torch.linalg.svd, torch.linalg.qr, torch.linalg.solve = svd, qr, solve
