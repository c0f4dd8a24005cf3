"""Scratch: what a chip's kernels allocate while they run, as far as a run has asked for it.

In: a Chip and sizes. Out: workspaces in bytes (kernels/), each worked out once. They show in what is reserved, so
requests.py asks for them and walk.py does not.
"""

from __future__ import annotations

from vramprobe.kernels.attention import Workspaces, workspaces
from vramprobe.kernels.chip import Chip
from vramprobe.kernels.reductions import sum_of_rows

_Sizes = tuple[int, int, int, int, int]  # batch, heads, length, of a head, of its value


class Asked:
    """The workspaces that a chip was asked for: another chip may have the same ones."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._sums: dict[tuple[int, int, int], list[int]] = {}
        self._attentions: dict[tuple[_Sizes, str, bool, float], Workspaces] = {}

    def sum_of_rows(self, num_rows: int, width: int, itemsize_bytes: int) -> list[int]:
        """Of a matrix's sum over its rows."""
        key = num_rows, width, itemsize_bytes
        if key not in self._sums:
            self._sums[key] = sum_of_rows(self.chip, *key)
        return self._sums[key]

    def attention(self, sizes: _Sizes, dtype: str, has_mask: bool, dropout: float) -> Workspaces:
        """Of a fused attention."""
        key = sizes, dtype, has_mask, dropout
        if key not in self._attentions:
            self._attentions[key] = workspaces(self.chip, sizes, dtype, has_mask=has_mask, dropout=dropout)
        return self._attentions[key]
