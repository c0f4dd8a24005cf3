"""Sizes as polynomials in a batch size and a sequence length that are left open.

In: how many bits a coefficient may need. Out: two numbers to count with in place of batch and length, and what such a
count comes to for a cell. Every size in a step is a sum of multiples of 1, b, s, b·s, s² and b·s². Counted with
b = 2^k and s = 2^2k, these multiples are the digits of the sum in base 2^k (Kronecker's substitution): whole numbers
carry the polynomial through sums, multiples and exact quotients, and one walk answers for every batch and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

#: 1, b, s, b·s, s² and b·s², as the digits have them from the lowest.
Monomials = tuple[int, int, int, int, int, int]
#: The multiple of each of them in a size.
Digits = tuple[int, int, int, int, int, int]
_NUM_DIGITS = 6


@dataclass(frozen=True)
class OpenSizes:
    """Stand-ins for a batch size and a sequence length above 1; 1 stands for itself.

    With a single row or token some operators make a view where they otherwise copy, so that its step takes another
    course. No coefficient may need more than ``digit_bits`` − 1 bits.
    """

    digit_bits: int
    batch_size: int
    seq_len: int

    def resolved(self, count: int, monomials: Sequence[int]) -> int:
        """What a count comes to for the cell with these monomials."""
        bits, mask, total = self.digit_bits, (1 << self.digit_bits) - 1, 0
        for monomial in monomials:
            if not count:
                break
            total += (count & mask) * monomial
            count >>= bits
        return total

    def digits(self, count: int) -> Digits:
        """The polynomial that a count stands for."""
        mask = (1 << self.digit_bits) - 1
        return tuple(count >> position * self.digit_bits & mask for position in range(_NUM_DIGITS))

    def covers(self, count: int, other: int) -> bool:
        """Whether each coefficient is at least the other's, so that ``count`` is no smaller at any batch and length.

        The highest bit of a digit is spare: set in ``count``, it is borrowed where the other's digit is larger.
        """
        spare = self._spare_bits
        return (count + spare - other) & spare == spare

    @cached_property
    def _spare_bits(self) -> int:
        positions = range(_NUM_DIGITS)
        return sum(1 << (position + 1) * self.digit_bits - 1 for position in positions)


def open_sizes(batch_size: int, seq_len: int, digit_bits: int) -> OpenSizes:
    """The stand-ins for these sizes: the same for all pairs of which the same are 1."""
    return OpenSizes(
        digit_bits=digit_bits,
        batch_size=1 if batch_size == 1 else 1 << digit_bits,
        seq_len=1 if seq_len == 1 else 1 << 2 * digit_bits,
    )


def monomials(batch_size: int, seq_len: int) -> Monomials:
    """The monomials of a cell."""
    return 1, batch_size, seq_len, batch_size * seq_len, seq_len**2, batch_size * seq_len**2
