"""The CPU's view: what an operator's own kernel takes while it runs, where its result does not show it. GPUs: cuda.py.

Left out, because they depend on the processor and stay under 2 MiB however large the model is: the operands
that oneDNN packs for a 16-bit product, and the tiles of ``_scaled_dot_product_flash_attention_for_cpu``; and a number
that meets a tensor (8 bytes, kept if it is saved for backward).
"""

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


def _common_dtype(args: tuple[Any, ...], result: torch.Tensor) -> list[int]:
    """Operands of two dtypes are copied into the wider, and so is a result that is written into the narrower.

    aten/src/ATen/TensorIterator.cpp, ``compute_types``, on the CPU; CUDA's kernels cast as they read and write.
    """
    left, right = args[0], args[1]
    if not isinstance(right, torch.Tensor) or left.dtype == right.dtype or not (left.dim() and right.dim()):
        return []
    common = torch.promote_types(left.dtype, right.dtype)
    return [tensor.numel() * common.itemsize for tensor in (left, right, result) if tensor.dtype != common]


_CPU: dict[Any, Callable[[tuple[Any, ...], Any], list[int]]] = {
    _aten.index.Tensor: _indices_as_int64,
    **{
        getattr(_aten, name).Tensor: _common_dtype
        for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
    },
}


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The experts' products; torch knows their shapes for bf16 alone (aten/src/ATen/native/GroupedMMUtils.h)."""
    match (left.dim(), right.dim()):
        case (2, 2):
            shape = (offs.numel(), left.shape[0], right.shape[1])
        case (2, 3):
            shape = (left.shape[0], right.shape[2])
        case (3, 2):
            shape = (left.shape[1], right.shape[1])
        case _:
            shape = (left.shape[0], left.shape[1], right.shape[2])
    return torch.empty(shape, dtype=out_dtype or left.dtype)


#: Operators for which fake tensors have no answer, or a wrong one, on any device.
KERNELS: dict[str, Callable[..., Any]] = {"aten::_grouped_mm": _grouped_mm}
