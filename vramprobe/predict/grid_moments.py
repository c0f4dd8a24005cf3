"""The moments of a course as matrices: the highest of each of many cells at once, by cause.

In: a Course, whose sizes are polynomials in batch size and length (terms/tape/sizes.py), and a fit's coefficients. Out:
arrays with an element per cell, to the byte what Walk.highest and peak_moment say of each. Never imports NumPy before
it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramprobe.errors import VramprobeError
from vramprobe.terms import CAUSES, Course

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: Sizes up to here are exact as floats, which NumPy multiplies fastest.
EXACT_BYTES = 2**53
#: Rounding every term to whole bytes moves a sum by less than this, and floats by a share of 2e-16 each.
_ROUNDING_BYTES = len(CAUSES) + 4
_ROUNDING_SHARE = 1e-14


class MomentMatrices:
    """The polynomials of a course as matrices: rows are moments or causes, columns 1, b, s, b·s, s² and b·s²."""

    def __init__(self, course: Course, coefficients: dict[str, float]) -> None:
        import numpy as np

        found = course.polynomials()
        self.places = tuple(place for place, _ in found)
        present = {cause for _, peaks in found for _, by_cause in peaks for cause in by_cause}
        self.causes = [cause for cause in CAUSES if cause in present]
        self.scale = np.array([coefficients.get(cause, 1.0) for cause in self.causes])
        self.walked = [np.array([total for total, _ in peaks], float) for _, peaks in found]
        self.by_cause = [
            np.array([[by_cause.get(cause, (0,) * 6) for cause in self.causes] for _, by_cause in peaks], float)
            for _, peaks in found
        ]
        self.scaled = [np.einsum("c,pcm->pm", self.scale, one) for one in self.by_cause]

    def require_exact(self, batch_size: int, seq_len: int) -> None:
        """Raise where the largest of the cells leaves the range in which floats hold whole bytes."""
        tops = [1, batch_size, seq_len, batch_size * seq_len, seq_len**2, batch_size * seq_len**2]
        factor = max(1.0, *self.scale)
        for one in self.by_cause:
            columns = one.sum(axis=1).max(axis=0)
            if sum(int(most) * top for most, top in zip(columns, tops, strict=True)) * factor >= EXACT_BYTES:
                raise VramprobeError(
                    f"cells up to batch_size {batch_size} and seq_len {seq_len} would need more than 8 PiB; leave out "
                    "what no machine could hold"
                )

    def highest(self, batch: Ints, length: Ints, total: NDArray, place: Ints, terms: NDArray) -> None:
        """Fill in the highest scaled moment of each cell: bytes in all, the place's index, bytes by cause.

        A place's moment is chosen as the walk counts it, the place by its scaled terms in whole bytes, and the first of
        equals wins: as Walk.highest and peak_moment do. Floats find who may win, then these few are counted exactly.
        """
        import numpy as np

        b, s = batch.astype(float), length.astype(float)
        monomials = np.stack([np.ones_like(b), b, s, b * s, s * s, b * s * s])
        chosen, about = [], np.empty((len(self.places), b.size))
        for index, (walked, scaled) in enumerate(zip(self.walked, self.scaled, strict=True)):
            if len(walked) == 1:
                chosen.append(None)
                about[index] = scaled[0] @ monomials
            else:
                chosen.append((walked @ monomials).argmax(axis=0))
                about[index] = np.take_along_axis(scaled @ monomials, chosen[-1][None], axis=0)[0]
        top = about.max(axis=0)
        may_win = about >= top - (_ROUNDING_BYTES + _ROUNDING_SHARE * top)
        total.fill(-1.0)
        for index, (alternatives, choice) in enumerate(zip(self.by_cause, chosen, strict=True)):
            for number, coefficients in enumerate(alternatives):
                wanted = may_win[index] if choice is None else may_win[index] & (choice == number)
                where = np.flatnonzero(wanted)
                if not where.size:
                    continue
                rows = np.rint(self.scale[:, None] * (coefficients @ monomials[:, where]))
                sums = rows.sum(axis=0)
                wins = sums > total[where]
                where = where[wins]
                total[where], place[where], terms[:, where] = sums[wins], index, rows[:, wins]
