"""Figure: a predicted number and its interval.

A type alone, which loads nothing: whoever shows an estimate need not load what estimates.
"""

from vramprobe.records.frozen import FrozenModel


class Figure(FrozenModel):
    """A number and where 80 % of the truths should lie."""

    value: float
    low: float
    high: float
