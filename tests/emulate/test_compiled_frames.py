"""Frames of the mode's own code, which Dynamo is told to leave alone: in every release of torch by its own function."""

import torch

from vramprobe.emulate.values.compiled import _skip_code


def test_a_frame_that_dynamo_skips_is_not_compiled() -> None:
    seen = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    _skip_code()(inner.__code__)
    torch.compile(inner, backend="eager")(torch.zeros(1))
    assert seen == [False]
