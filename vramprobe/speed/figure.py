"""Figure: a predicted number and its interval.

A type alone, which loads nothing: whoever shows an estimate need not load what estimates.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Figure(BaseModel):
    """A number and where 80 % of the truths should lie."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    value: float
    low: float
    high: float
