"""Limits: the time, money and cells that a sweep may use, and the clock that keeps them."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vramprobe.errors import SpecError
from vramprobe.sweep.card import Rate
from vramprobe.sweep.plan import START_SECONDS

#: Slow enough for a 70B model to load and train its steps on one card; a hung cell costs no more than this.
DEFAULT_TIMEOUT_SECONDS = 900.0
#: What is left must do for so many times the expected duration of a cell before it is started.
_TIME_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class SweepLimits:
    """Limits of a sweep: per cell, and in total. ``limited_by`` names the source of ``max_seconds``."""

    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    max_seconds: float = math.inf
    limited_by: Literal["max-time", "budget"] = "max-time"
    max_cells: int | None = None


def limits(
    rate: Rate | None = None,
    *,
    timeout_seconds: float | None = None,
    max_seconds: float = math.inf,
    max_dollars: float | None = None,
    max_cells: int | None = None,
) -> SweepLimits:
    """Limits from a user's words; what is left out does not limit. Raises SpecError for what cannot be."""
    if timeout_seconds is None:
        timeout_seconds = DEFAULT_TIMEOUT_SECONDS
    if not 0 < timeout_seconds < math.inf:
        raise SpecError(f"a cell's time-out must be more than 0 seconds, {timeout_seconds} given")
    if max_cells is not None and max_cells < 1:
        raise SpecError(f"the limit of cells to run must be at least 1, {max_cells} given")
    limited_by: Literal["max-time", "budget"] = "max-time"
    if max_dollars is not None:
        if not 0 < max_dollars < math.inf:
            raise SpecError(f"a budget must be more than 0 dollars, {max_dollars} given")
        if rate is None:
            raise SpecError("a budget needs a price, and none is known here; give --price in dollars per hour")
        seconds = max_dollars / rate.usd_per_hour * 3600
        if seconds < max_seconds:
            max_seconds, limited_by = seconds, "budget"
    return SweepLimits(
        timeout_seconds=timeout_seconds, max_seconds=max_seconds, limited_by=limited_by, max_cells=max_cells
    )


class Clock:
    """The time a sweep has and has used."""

    def __init__(self, limits: SweepLimits) -> None:
        self._timeout_seconds = limits.timeout_seconds
        self._began = time.monotonic()
        self._deadline = self._began + limits.max_seconds
        self.num_cells = 0
        self.last_seconds = 0.0

    @property
    def elapsed_seconds(self) -> float:
        """Since the sweep began."""
        return time.monotonic() - self._began

    @property
    def left_seconds(self) -> float:
        """Until the sweep must have ended; never below 0."""
        return max(self._deadline - time.monotonic(), 0.0)

    def allows(self, seconds: float, *, is_loaded: bool = False) -> bool:
        """Return True if a cell that should take so many seconds would end in time; the first one also waits for the
        libraries.
        """
        needed = _TIME_MARGIN * seconds + (0 if self.num_cells or is_loaded else START_SECONDS)
        return self.left_seconds > needed

    def begin(self) -> float:
        """Count a cell that begins now; the seconds it may take."""
        self.num_cells += 1
        return min(self._timeout_seconds, self.left_seconds)

    @contextlib.contextmanager
    def timing(self) -> Iterator[float]:
        """Around one cell: gives the seconds it may take, and notes those it took."""
        began = time.monotonic()
        yield self.begin()
        self.last_seconds = time.monotonic() - began
