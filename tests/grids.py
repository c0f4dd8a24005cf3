"""Grids of cases, of which a few stand for all in ``make test``; ``make test-all`` runs the others, too."""

from collections.abc import Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def grid(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters: those of ``always`` run in ``make test``, all others are marked ``exhaustive``."""
    cases = list(cases)
    assert [case for case in always if case not in cases] == [], "no such case"
    marked = [(case, () if case in always else (exhaustive,)) for case in cases]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in marked]
