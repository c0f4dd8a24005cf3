"""``scaled_dot_product_attention`` on CUDA: which kernel torch chooses, and the workspaces of each.

In: a Chip, sizes, a dtype (``bf16``, ``fp16``, ``fp32``). Out: a kernel's name; workspaces in bytes, in the order in
which they are allocated, a negative one where one is freed before the next. Paths are of pytorch's
aten/src/ATen/native/transformers/cuda. Never imports torch.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from vramprobe.kernels.chip import Chip

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_MAX_SPLITS = 128
_MAX_FLASH_SIZE = 256


class Workspaces(NamedTuple):
    """Of a fused attention, in its forward and its backward."""

    kernel: Kernel
    forward: list[int]
    backward: list[int]

    @property
    def num_seeds(self) -> list[int]:
        """Elements of the dropout's seed and offset, int64, which are kept on the card whether there is dropout or not
        (the memory-efficient kernel's are in the host's memory).
        """
        return {"flash": [2, 1], "cudnn": [1, 1], "efficient": []}[self.kernel]

    @property
    def widens_heads(self) -> bool:
        """Whether gradients of grouped heads are as wide as the query's before they are summed."""
        return self.kernel == "flash"


def chosen(
    chip: Chip,
    head_size: int,
    value_size: int,
    dtype: str,
    *,
    is_grouped: bool = False,
    has_mask: bool = False,
    dropout: float = 0.0,
    learns_mask: bool = False,
) -> Kernel:
    """The first kernel that can train this, in torch's order of preference (sdp_utils.cpp, ``select_sdp_backend``).

    ``is_grouped``: fewer heads of keys than of queries, under ``enable_gqa``; ``has_mask``: one beside causality, and
    ``learns_mask``: one that needs a gradient, as T5's positions do.
    """
    is_half = dtype != "fp32"
    if is_half and chip.capability >= (8, 0):
        drops_exactly = dropout * 16 % 1 == 0  # ``check_cudnn_dropout``
        if chip.prefers_cudnn and drops_exactly and not learns_mask and _fits_cudnn(chip, head_size, value_size):
            return "cudnn"
        if not has_mask and head_size == value_size and flash_trains(chip, head_size, dropout):
            return "flash"
    aligned_to = _alignment(chip, is_half)
    takes_dtype = chip.capability >= (8, 0) or dtype != "bf16"  # ``less_than_sm80_mem_efficient_dtypes``
    if takes_dtype and not is_grouped and head_size % aligned_to == value_size % aligned_to == 0:
        return "efficient"
    return "math"


def flash_trains(chip: Chip, head_size: int, dropout: float) -> bool:
    """Whether flash attention has a backward for heads of this size."""
    if chip.lacks_wide_flash and head_size > 192 and (head_size <= 224 or dropout > 0):
        return False
    return head_size <= _MAX_FLASH_SIZE


def _fits_cudnn(chip: Chip, head_size: int, value_size: int) -> bool:
    """``check_cudnn_tensor_shapes``: on Hopper heads up to 256, on Blackwell up to 128, or DeepSeek's."""
    major = chip.capability[0]
    widest = 256 if major == 9 else 192 if (head_size, value_size) == (192, 128) else 128
    return head_size % 8 == value_size % 8 == 0 and max(head_size, value_size) <= widest


def _alignment(chip: Chip, is_half: bool) -> int:
    """Elements that heads are a multiple of for the memory-efficient kernel (``minimum_gemm_alignment``)."""
    if is_half:
        return 8
    return 4 if chip.capability >= (8, 0) else 1


def workspaces(
    chip: Chip,
    sizes: tuple[int, int, int, int, int],
    dtype: str,
    *,
    has_mask: bool,
    dropout: float,
) -> Workspaces:
    """What the fused attention allocates that runs on this chip; ``sizes``: batch, heads, length, of a head, of its
    value.
    """
    batch_size, num_heads, seq_len, head_size, value_size = sizes
    kernel, query = chosen(chip, head_size, value_size, dtype, has_mask=has_mask, dropout=dropout), sizes[:4]
    if kernel == "cudnn":
        return Workspaces(kernel, [], cudnn_backward(*query))
    if kernel == "flash":
        return Workspaces(kernel, [] if dropout else flash_forward(chip, *query), flash_backward(*query))
    rows = batch_size * num_heads
    forward = efficient_forward(rows * seq_len, head_size, value_size, dtype)
    backward = efficient_backward(chip, rows, seq_len, seq_len, head_size, value_size, dtype)
    return Workspaces("efficient", forward, backward)


def flash_forward(chip: Chip, batch_size: int, num_heads: int, seq_len: int, head_size: int) -> list[int]:
    """Each split's log-sum-exps and output in fp32, where keys are split among blocks since there are too few of
    queries (flash_attn/flash_api.cpp, ``set_params_splitkv``; never with dropout).
    """
    columns = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    num_blocks = batch_size * num_heads * -(-seq_len // 64)
    splits = _num_splits(num_blocks, 2 * chip.num_sms, -(-seq_len // columns))
    rows = batch_size * num_heads * seq_len
    return [4 * splits * rows, 4 * splits * rows * _flash_size(head_size)] if splits > 1 else []


def _num_splits(num_blocks: int, num_sms: int, num_columns: int) -> int:
    """``num_splits_heuristic``: the fewest that keep the multiprocessors nearly as busy as any number does."""
    if num_blocks >= 0.8 * num_sms:
        return 1
    busy = {}
    for splits in range(1, min(_MAX_SPLITS, num_sms, num_columns) + 1):
        if splits == 1 or -(-num_columns // splits) != -(-num_columns // (splits - 1)):
            waves = num_blocks * splits / num_sms
            busy[splits] = waves / math.ceil(waves)
    most = max(busy.values())
    return next(splits for splits, share in busy.items() if share >= 0.85 * most)


def flash_backward(batch_size: int, num_heads: int, seq_len: int, head_size: int) -> list[int]:
    """flash_api.cpp, ``mha_bwd``: row sums and the query's gradient in fp32, both of whole blocks of rows.

    The gradients of grouped heads, as wide as the query's, are its caller's.
    """
    rows = batch_size * num_heads * _whole(seq_len, 128)
    return [4 * rows, 4 * rows * _flash_size(head_size)]


def _flash_size(head_size: int) -> int:
    """``head_size_rounded``."""
    return _whole(head_size, 32 if head_size <= 128 else 64)


def cudnn_backward(batch_size: int, num_heads: int, seq_len: int, head_size: int) -> list[int]:
    """cudnn-frontend's own part of the workspace (scaled_dot_product_flash_attention.h): the query's gradient in fp32
    and row sums. What cuDNN's engine takes beside it is not known.
    """
    return [4 * batch_size * num_heads * seq_len * (head_size + 1)]


def efficient_forward(num_rows: int, head_size: int, value_size: int, dtype: str) -> list[int]:
    """mem_eff_attention/kernel_forward.h: the result in fp32, where 16-bit heads are too wide for registers."""
    return [4 * num_rows * value_size] if dtype != "fp32" and max(head_size, value_size) > 128 else []


def efficient_backward(
    chip: Chip, num_heads: int, seq_len: int, num_keys: int, head_size: int, value_size: int, dtype: str
) -> list[int]:
    """mem_eff_attention/kernel_backward.h, ``workspace_size``: row sums, then the query's gradient in tiles of fp32
    with a lock each, as blocks of keys add to it side by side; where heads are wide also the gradients of keys and
    values for the blocks that are worked on at once (attention_backward.cu, ``num_splits_key``).

    ``num_heads``: of all rows of the batch. The row sums of fp32 are a product and its sum, before the rest.
    """
    rows, columns, is_staged = _tile(chip, dtype, max(head_size, value_size))
    num_bytes = -(-seq_len // rows) * -(-head_size // columns) * (4 * rows * columns + 16)
    if is_staged:
        num_blocks = min(-(-num_keys // 64), max(200 // num_heads, 1))
        num_bytes += 4 * num_blocks * 64 * (_whole(head_size, 128) + _whole(value_size, 128))
    row_sums = 4 * num_heads * seq_len
    if dtype != "fp32":
        return [row_sums, num_heads * num_bytes]
    product = row_sums * value_size
    return [product, row_sums, row_sums, -row_sums, -product, num_heads * num_bytes]


def _tile(chip: Chip, dtype: str, head_size: int) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether keys' and values' gradients are staged (mem_eff_attention/kernels/
    cutlassB.h, ``dispatch_cutlassB``).
    """
    if head_size <= 64:
        return 64, 64, False
    if dtype == "fp32":
        return 128 if chip.has_much_shared_memory else 64, 64, False
    if head_size > 128:
        return 128, 64, True
    if chip.has_much_shared_memory:
        return 128, 128, False
    if head_size > 96 and chip.capability >= (8, 0):
        return 64, 64, True
    return 128, 64, False


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
