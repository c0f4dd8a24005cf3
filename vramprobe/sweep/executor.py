"""Executor: where the cells of a sweep run. ``here`` is this machine, cell after cell; others run many at once.

In: the bookkeeping of a planned sweep. Out: started and ended attempts, told to the bookkeeping alone, which keeps the
one journal. An executor decides neither what is run nor what a limit allows.
"""

from collections.abc import Iterable
from typing import Protocol

from vramprobe.records.record import Environment, Instrument
from vramprobe.spec import CellSpec
from vramprobe.sweep.bookkeeping import Bookkeeping


class Executor(Protocol):
    """Runs what the bookkeeping hands out, in the order of the plan, and reports every attempt to it."""

    num_slots: int  # cells of one GPU (or one core) that run at once

    def context_of(self, spec: CellSpec) -> Environment | None:
        """The environment in which a cell would run, as far as it is known without running it."""

    def instrument_of(self, spec: CellSpec) -> Instrument:
        """Return the instrument that would observe a cell."""

    def require(self, specs: Iterable[CellSpec]) -> None:
        """Raise MissingDependency or SpecError for a package, a device or a resource that one of these cells needs."""

    def run(self, books: Bookkeeping) -> None:
        """Take the rows of the plan one by one, until the end or a signal."""
