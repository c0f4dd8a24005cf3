"""Libraries load for a simulation without compiling, and torch.compile is torch's own again afterwards."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from vramprobe.simulate import run


def test_a_function_is_compiled_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiling(model: object, **options: object) -> object:
        asked.append((model, options))
        return lambda number: number + 1

    monkeypatch.setattr(torch, "compile", compiling)

    def double(number: int) -> int:
        return 2 * number

    with run._compile_at_first_call():
        compiled = torch.compile(double, dynamic=False)
    assert torch.compile is compiling
    assert (asked, compiled.__name__) == ([], "double")
    assert (compiled(3), compiled(4)) == (4, 5)
    assert asked == [(double, {"dynamic": False})]
