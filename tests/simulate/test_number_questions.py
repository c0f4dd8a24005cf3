"""What is answered for PyTorch's symbolic shapes is what PyTorch answers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from vramprobe.simulate.number_questions import KNOWN

torch = pytest.importorskip("torch")

VALUES = (True, False, 0, 1, 7, 0.5, "words", None, (2, 3), [2, 3], (2, 4), ((1, 2), 3), (True, 2))


def values() -> list[Any]:
    return [*VALUES, torch.empty(2, 3, device="meta"), [torch.empty(4), None], torch.eye(3).to_sparse()]


def answer(function: Any, arguments: tuple) -> Any:
    """As something that can be compared; the sort of error where there is one."""
    try:
        found = function(*arguments)
    except (AssertionError, TypeError, AttributeError) as error:
        return type(error)
    return list(found) if hasattr(found, "__iter__") else found


@pytest.mark.filterwarnings("ignore:guard_size_oblivious:FutureWarning")
@pytest.mark.parametrize("name", KNOWN)
def test_numbers_are_answered_as_by_torch(name: str) -> None:
    from torch.fx.experimental import symbolic_shapes

    known = KNOWN[name]
    if known is None:
        assert callable(getattr(symbolic_shapes, name))
        return
    answered = 0
    for arguments in [*((one,) for one in values()), *itertools.product(VALUES, repeat=2)]:
        try:
            ours = known(*arguments)
        except TypeError:  # another number of arguments
            continue
        if ours is NotImplemented:
            continue
        answered += 1
        ours = list(ours) if hasattr(ours, "__iter__") else ours
        theirs = answer(getattr(symbolic_shapes, name), arguments)
        assert (type(ours), ours) == (type(theirs), theirs), arguments
    assert answered
    symbol = symbolic_shapes.ShapeEnv().create_unbacked_symint()
    for arguments in ((symbol,), (symbol, symbol), (symbol > 2,), ((symbol, 1), (symbol, 1))):
        try:
            assert known(*arguments) is NotImplemented
        except TypeError:
            continue
