"""The table of losses: what arithmetic says today of the cells that ran."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_the_page_is_what_arithmetic_says_of_the_cells_that_ran(script: Callable[[str], ModuleType]) -> None:
    losses = script("truth.losses")
    rows = losses.read_csv(losses.TABLE)
    assert losses.TABLE.with_suffix(".md").read_text() == losses.page(rows)
