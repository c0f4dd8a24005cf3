"""Frontier: a GPU and a cell without batch and length -> the longest sequence that fits for each number of rows.

In: a GPU's name, a cell's words or the folder of a profiled run. Out: a frozen Frontier, its rows 1, 2, 4 … for as long
as a sequence fits.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict.from_run import largest_of_run
from vramprobe.predict.largest import Largest
from vramprobe.predict.what_fits import max_seq_len
from vramprobe.records.frozen import FrozenModel

#: Rows whose longest sequence has fewer tokens are left out: nobody trains on them.
LEAST_TOKENS = 64
_MOST_ROWS = 1024


class FrontierRow(FrozenModel):
    """Longest sequences of so many rows, in tokens: one that fits, and beyond it one that is tight; null where none."""

    batch_size: int
    fits: int | None
    tight: int | None


class Frontier(FrozenModel):
    """Rows by number of sequences; ``notes``: what else bounds them, and how they were predicted."""

    gpu: str
    rows: list[FrontierRow]
    notes: list[str]


def frontier(*, gpu: str, **options: Any) -> Frontier:
    """The longest sequence on ``gpu`` for 1, 2, 4 … rows; ``options`` are those of predict without both.

    Each is answered as by max_seq_len, which says how. Raises VramprobeError where not even one row fits.
    """
    if given := next((name for name in ("batch_size", "seq_len") if options.get(name) is not None), None):
        raise SpecError(f"a frontier is over rows and length, and {given} was given: drop it, or ask max_seq_len")
    return _frontier(gpu, lambda number: max_seq_len(gpu=gpu, batch_size=number, **options))


def frontier_of_run(run: str | Path, *, gpu: str) -> Frontier:
    """The longest sequence on ``gpu`` for 1, 2, 4 … rows of the command of ``run``.

    Each is answered as by largest_of_run. Raises VramprobeError where not even one row fits, StoreError for a folder
    without a recipe.
    """
    return _frontier(gpu, lambda number: largest_of_run(run, "seq_len", gpu=gpu, batch_size=number))


def _frontier(gpu: str, longest: Callable[[int], Largest]) -> Frontier:
    """The answers of ``longest`` for a number of rows, until none fits. Raises VramprobeError where the first does."""
    rows: list[FrontierRow] = []
    name, notes = gpu, {}
    for number in (2**power for power in count()):
        try:
            found = longest(number)
        except VramprobeError:
            if not rows:
                raise
            break
        fits, tight = (int(one.value) if one else None for one in (found.fits, found.tight))
        if rows and (tight or fits or 0) < LEAST_TOKENS:
            break
        rows.append(FrontierRow(batch_size=number, fits=fits, tight=tight))
        shown = found.fits or found.tight
        name, notes = found.gpu, notes | dict.fromkeys([*found.notes, *(shown.prediction.warnings if shown else [])])
        if number >= _MOST_ROWS:
            break
    return Frontier(gpu=name, rows=rows, notes=list(notes))
