"""What CUDA's kernels take from the caching allocator while they run and give back. The CPU's: kernels.py.

In: an operator, its arguments and its result, the chip. Out: sizes in bytes, in the order in which they are taken.
Paths are of pytorch's sources, aten/src/ATen/native unless they say more. Left out: the workspace that cuDNN's own
engines want, what sorting takes (cub), and sums over more than 2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramprobe.simulate.cuda import Chip, is_16_bit
from vramprobe.simulate.reductions import reduction_scratch

_aten = torch.ops.aten
_A100 = Chip()

#: Embedding gradients of more tokens than this are summed by sorting (aten/src/ATen/native/cuda/Embedding.cu).
_MAX_UNSORTED_TOKENS = 3072
#: EmbeddingBackwardKernel.cu, ``NROWS_PER_THREAD``.
_ROWS_PER_THREAD = 10


#: Sums of a whole tensor or of some dimensions.
_REDUCTIONS = frozenset({
    _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.linalg_vector_norm.default,
})  # fmt: skip


def cuda_scratch(func: Any, args: tuple[Any, ...], result: Any, chip: Chip = _A100) -> list[int]:
    """Sizes in bytes of what a CUDA kernel allocates and frees within one call."""
    if func in _REDUCTIONS:
        return reduction_scratch(func, args, result, chip)
    rule = _SCRATCH.get(func)
    return rule(args, chip) if rule else []


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """transformers/cuda/flash_attn/flash_api.cpp, ``mha_bwd``: row sums, an fp32 dQ, and dK, dV per query head."""
    batch, heads, length, size = args[1].shape
    rows = batch * heads * _round_up(length, 128)
    taken = [4 * rows, 4 * rows * _round_up(size, 32)]
    key_heads, key_length = args[2].shape[1:3]
    if key_heads != heads:
        taken += [args[2].dtype.itemsize * batch * key_length * heads * size] * 2
    return taken


def _cudnn_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """cudnn-frontend's own part of the workspace (scaled_dot_product_flash_attention.h): an fp32 dQ and row sums.

    What cuDNN's engine takes beside it is not known.
    """
    batch, heads, length, size = args[1].shape
    return [4 * batch * heads * length * (size + 1)]


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


def _flash_forward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """flash_api.cpp, ``mha_fwd``: two numbers of the generator, where there is dropout."""
    return [16] if len(args) > 3 and args[3] else []


def _as_int64(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """A running count of booleans is one of their copy (ReduceOps.cpp, ``cumsum_out``)."""
    return [] if args[0].dtype.is_floating_point or args[0].dtype == torch.int64 else [8 * args[0].numel()]


def _efficient_forward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """kernel_forward.h: the result once more in fp32, where heads of 16 bits are too wide for registers."""
    query, value = args[0], args[2]
    wide = is_16_bit(query) and max(query.shape[-1], value.shape[-1]) > 128
    return [4 * query[..., :1].numel() * value.shape[-1]] if wide else []


def _efficient_backward(args: tuple[Any, ...], chip: Chip) -> list[int]:
    """mem_eff_attention/kernel_backward.h, ``workspace_size``: row sums, and one buffer for sums in fp32.

    dQ always, in tiles with a lock each, as blocks of keys add to it side by side; dK and dV where heads are too
    wide for registers, for the blocks that are worked on at once (attention_backward.cu, ``num_splits_key``).
    The row sums of fp32 are torch's own: a product that is gone before the buffer is made, and its sum.
    """
    batch, heads, length, size = args[1].shape
    num_heads, key_length, value_size = batch * heads, args[2].shape[-2], args[3].shape[-1]
    rows, columns, staged = _tile(is_16_bit(args[1]), max(size, value_size), chip)
    num_tiles = -(-length // rows) * -(-size // columns)
    num_bytes = num_tiles * (4 * rows * columns + 16)
    if staged:
        num_blocks = min(-(-key_length // 64), max(200 // num_heads, 1))
        num_bytes += 4 * num_blocks * 64 * (_round_up(size, 128) + _round_up(value_size, 128))
    row_sums = 4 * num_heads * length
    if is_16_bit(args[1]):
        return [row_sums, num_heads * num_bytes]
    product = 4 * num_heads * length * value_size
    return [product, row_sums, row_sums, -row_sums, -product, num_heads * num_bytes]


def _tile(is_half: bool, size: int, chip: Chip) -> tuple[int, int, bool]:
    """Rows and columns of a tile of dQ, and whether dK and dV are staged (kernels/cutlassB.h, ``dispatch_cutlassB``).

    By how much shared memory a block may have: 163 KiB and more on data centres' cards from the A100 on.
    """
    much_shared_memory = (chip.major, chip.minor) in ((8, 0), (9, 0), (10, 0), (10, 3))
    if size <= 64:
        return 64, 64, False
    if not is_half:
        return 128 if much_shared_memory else 64, 64, False
    if size > 128:
        return 128, 64, True
    if much_shared_memory:
        return 128, 128, False
    if size > 96 and chip.major >= 8:
        return 64, 64, True
    return 128, 64, False


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
