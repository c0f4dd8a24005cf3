"""What CUDA's sums, means and norms allocate while they run: the strides of a tensor, as torch reads them.

In: the operator, its arguments, its result, the chip. Out: sizes in bytes, from kernels/reductions.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vramprobe.kernels.chip import Chip
from vramprobe.kernels.reductions import VALUES_AT_ONCE, partial_sums


def reduction_scratch(operator: Any, args: tuple[Any, ...], result: torch.Tensor, chip: Chip) -> list[int]:
    """Of a sum, mean or norm: the input in the result's dtype where the kernel cannot cast, partial sums, locks."""
    given, taken = args[0], []
    at = 2 if operator is torch.ops.aten.linalg_vector_norm.default else 1
    dims = args[at] if len(args) > at and args[at] else range(given.dim())
    dims = {dim % given.dim() for dim in dims}
    sizes, strides = list(given.shape), list(given.stride())
    is_half = given.dtype in (torch.bfloat16, torch.float16)
    if given.dtype != result.dtype and not (is_half and result.dtype == torch.float32):
        taken.append(given.numel() * result.dtype.itemsize)  # ``make_reduction_from_out_ty``
    dtype = given.dtype if not taken else result.dtype
    if not given.numel():
        return taken
    return taken + _partial_sums(sizes, strides, dims, dtype, chip)


def _partial_sums(sizes: list[int], strides: list[int], dims: set[int], dtype: torch.dtype, chip: Chip) -> list[int]:
    """As ``setReduceConfig`` sees the tensor: what is summed, what is kept, and which lies closest in memory."""
    summed = _merged([(strides[dim], sizes[dim]) for dim in dims])
    kept = _merged([(strides[dim], sizes[dim]) for dim in range(len(sizes)) if dim not in dims])
    num_inputs, num_outputs = math.prod(size for _, size in summed), math.prod(size for _, size in kept)
    along_input = not kept or (bool(summed) and summed[0][0] < kept[0][0])
    closest = (summed if along_input else kept) or [(1, 1)]
    fastest, vector = num_inputs if along_input else num_outputs, 1
    if closest[0][0] == 1 and along_input and fastest >= 128 and len(summed) == 1:
        fastest //= VALUES_AT_ONCE
    elif closest[0][0] == 1 and not along_input:
        vector = _output_vector(kept[0][1], [stride for stride, _ in (*summed, *kept[1:])])
        fastest //= vector
    return partial_sums(chip, num_inputs, num_outputs, fastest, dtype.itemsize, vector=vector, along_input=along_input)


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, size) of dimensions by stride, those that continue each other as one (``coalesce_dimensions``)."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(one for one in dims if one[1] > 1):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _output_vector(size: int, other_strides: Sequence[int]) -> int:
    """``get_output_vec_size``, of memory that begins where vectors do."""
    vector = VALUES_AT_ONCE
    for number in (size, *other_strides):
        while number % vector:
            vector //= 2
    return vector
