"""What CUDA's kernels allocate while they run and free again. The CPU's: cpu.py.

In: an operator, its arguments and its result, the chip. Out: sizes in bytes, in the order in which they are allocated;
of attention and sums by the table of kernels (kernels/). Paths are of pytorch's sources, aten/src/ATen/native unless
they say more. Left out: the workspace that cuDNN's own engines want, what sorting takes (cub), and sums over more than
2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramprobe.kernels import attention
from vramprobe.kernels.chip import Chip
from vramprobe.simulate.kernels.cuda import dtype_name
from vramprobe.simulate.kernels.reductions import reduction_scratch

_aten = torch.ops.aten
_A100 = Chip()

#: Embedding gradients of more tokens than this are summed by sorting (aten/src/ATen/native/cuda/Embedding.cu).
_MAX_UNSORTED_TOKENS = 3072
#: EmbeddingBackwardKernel.cu, ``NROWS_PER_THREAD``.
_ROWS_PER_THREAD = 10

#: Sums of a whole tensor or of some dimensions.
_REDUCTIONS = frozenset(
    {
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.linalg_vector_norm.default,
    }
)


def cuda_scratch(func: Any, args: tuple[Any, ...], result: Any, chip: Chip = _A100) -> list[int]:
    """Sizes in bytes of what a CUDA kernel allocates and frees within one call."""
    if func in _REDUCTIONS:
        return reduction_scratch(func, args, result, chip)
    rule = _SCRATCH.get(func)
    return rule(args, chip) if rule else []


def _flash_forward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """Two numbers of the generator where there is dropout, else what splitting keys among blocks takes."""
    return [16] if len(args) > 3 and args[3] else attention.flash_forward(chip, *args[0].shape)


def _flash_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """Row sums, an fp32 dQ, and dK and dV of each head of the queries where heads are grouped."""
    query, key = args[1:3]
    taken = attention.flash_backward(*query.shape)
    if key.shape[1] != query.shape[1]:
        batch, heads, _, size = query.shape
        taken += [key.dtype.itemsize * batch * key.shape[2] * heads * size] * 2
    return taken


def _cudnn_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    return attention.cudnn_backward(*args[1].shape)


def _efficient_forward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    query, value_size = args[0], args[2].shape[-1]
    return attention.efficient_forward(query[..., :1].numel(), query.shape[-1], value_size, dtype_name(query))


def _efficient_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    query, key, value = args[1:4]
    batch, heads, length, size = query.shape
    num_keys, value_size = key.shape[-2], value.shape[-1]
    return attention.efficient_backward(chip, batch * heads, length, num_keys, size, value_size, dtype_name(query))


def _product(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """cuda/Blas.cpp, ``prepare_batch_matrix_for_cublas``: a copy of each operand that has gaps both ways."""
    return [one.numel() * one.dtype.itemsize for one in args[-2:] if not _is_a_matrix(one)]


def _is_a_matrix(tensor: torch.Tensor) -> bool:
    """Whether cuBLAS takes its last two dimensions as they lie, in either order."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _softmax_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """cuda/SoftMax.cu, ``softmax_backward_cuda_out``: the gradient times the result, before the kernel."""
    return [args[0].numel() * args[0].dtype.itemsize]


def _layer_norm_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """cuda/layer_norm_kernel.cu, ``layer_norm_backward_cuda``: contiguous copies of the gradient and the input."""
    return [one.numel() * one.dtype.itemsize for one in args[:2] if not one.is_contiguous()]


def _as_int64(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """A running count of booleans is one of their copy (ReduceOps.cpp, ``cumsum_out``)."""
    return [] if args[0].dtype.is_floating_point or args[0].dtype == torch.int64 else [8 * args[0].numel()]


def _embedding_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: the sorted tokens, and partial sums of rows in fp32."""
    gradient, indices, num_weights = args[:3]
    num_tokens, width = indices.numel(), gradient.shape[-1]
    if num_tokens <= _MAX_UNSORTED_TOKENS:
        return []
    num_parts = num_tokens // _ROWS_PER_THREAD + min(num_tokens, num_weights)
    return [8 * num_tokens] * 4 + [4 * num_parts * width]


_SCRATCH: dict[Any, Callable[[tuple[Any, ...], Chip], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.bmm.default: _product,
    _aten.baddbmm.default: _product,
    _aten._scaled_dot_product_flash_attention.default: _flash_forward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.cumsum.default: _as_int64,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.pow.Scalar: lambda args, chip: [8],  # the base, as a tensor
}

# -- which results are made, and in which order ------------------------------------------------------------------------

#: Where they are not all the results, as they are given: the mask before what it masks (cuda/Dropout.cu), the numbers
#: for dropout before all or in the host's memory (transformers/cuda/attention.cu).
MADE: dict[Any, Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = {
    _aten.native_dropout.default: lambda results: results[::-1],
    _aten._scaled_dot_product_cudnn_attention.default: lambda results: (*results[-3:-1], *results[:2]),
    _aten._scaled_dot_product_efficient_attention.default: lambda results: results[:2],
}
