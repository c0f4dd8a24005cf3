"""What an operator's own kernel takes while it runs, where the operator's result does not show it; by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def cpu_scratch(func: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Sizes in bytes of what a CPU kernel allocates and frees within one call."""
    rule = _CPU.get(func)
    return rule(args, result) if rule else []


def _indices_as_int64(args: tuple[Any, ...], result: torch.Tensor) -> list[int]:
    """Indices of 32 bits are widened first (aten/src/ATen/native/IndexingUtils.h, ``expandTensors``)."""
    return [8 * index.numel() for index in args[1] if index is not None and index.dtype == torch.int32]


_CPU: dict[Any, Callable[[tuple[Any, ...], Any], list[int]]] = {_aten.index.Tensor: _indices_as_int64}
