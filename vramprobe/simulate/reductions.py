"""What CUDA's sums, means and norms take while they run: partial sums of the blocks that one output is split among.

In: the operator, its arguments, its result, the chip. Out: sizes in bytes. Follows
``setReduceConfig`` of torch's ATen/native/cuda/Reduce.cuh (torch 2.13) in its own order and names; a known bias of 1024
tokens takes 7 MiB there. Left out: inputs of over 2 GiB, which are summed in parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vramprobe.simulate.cuda import Chip

_MAX_THREADS = 512  # ``mnt_wrapper``: none of the dtypes here is complex
_WARP = 32
_VALUES_AT_ONCE = 4  # vt0, and the longest vector that is loaded
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread


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
    """``global_memory_size`` and ``semaphore_size``; none where every block writes outputs of its own."""
    summed = _merged([(strides[dim], sizes[dim]) for dim in dims])
    kept = _merged([(strides[dim], sizes[dim]) for dim in range(len(sizes)) if dim not in dims])
    num_inputs, num_outputs = math.prod(size for _, size in summed), math.prod(size for _, size in kept)
    along_input = not kept or (bool(summed) and summed[0][0] < kept[0][0])
    dim0, dim1 = (num_inputs, num_outputs) if along_input else (num_outputs, num_inputs)
    fastest = (summed if along_input else kept) or [(1, 1)]
    vector = 1
    if fastest[0][0] == 1 and along_input and dim0 >= 128 and len(summed) == 1:
        dim0 //= _VALUES_AT_ONCE
    elif fastest[0][0] == 1 and not along_input:
        vector = _output_vector(kept[0][1], [stride for stride, _ in (*summed, *kept[1:])])
        dim0 //= vector
    width, height = _block(dim0, dim1, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    splits_warps = -(-num_inputs // step_input) >= min(height * 16, _MAX_VALUES)
    if splits_warps:
        step_input *= height
    else:
        step_output *= height
    per_thread = -(-num_inputs // step_input)
    grid, target = -(-(num_outputs // vector) // step_output), chip.num_sms * (chip.threads_per_sm // (width * height))
    if not splits_warps or per_thread < _MAX_VALUES or grid > target:
        return []
    num_blocks = max(min(-(-target // grid), -(-per_thread // _MIN_VALUES)), -(-per_thread // _MAX_VALUES))
    if num_blocks == 1:
        return []
    item = 4 if dtype in (torch.bfloat16, torch.float16) else dtype.itemsize
    return [item * num_outputs * num_blocks * (1 if along_input else width * vector), 4 * grid]


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
    vector = _VALUES_AT_ONCE
    for number in (size, *other_strides):
        while number % vector:
            vector //= 2
    return vector


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    """``set_block_dimension``: the block's width and height, in threads."""
    width0, height0 = (1 << min(dim, max_threads).bit_length() - 1 if dim else 1 for dim in (dim0, dim1))
    height = min(height0, max_threads // min(width0, _WARP))
    return min(width0, max_threads // height), height
