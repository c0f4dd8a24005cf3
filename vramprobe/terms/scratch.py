"""What CUDA's kernels take from the caching allocator while they run and give back at once.

In: a Chip and sizes. Out: sizes in bytes, in the order in which they are taken. It shows in what is reserved, so
requests.py asks for it and walk.py does not. Paths are of pytorch's sources, aten/src/ATen/native unless they say more.
Never imports torch, nor what the simulation knows of the same kernels.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Fused = Literal["cudnn", "flash", "efficient"]
_Sizes = tuple[int, int, int, int, int]  # batch, heads, length, of a head, of its value

#: Threads that one multiprocessor holds, where not 2048 (CUDA C++ Programming Guide, Technical Specifications).
_THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
#: Whose blocks may have 163 KiB of shared memory and more.
_MUCH_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
_WARP = 32
_MAX_THREADS = 512  # of a sum's block
_VECTOR = 4  # elements that a sum loads at once
_MIN_VALUES, _MAX_VALUES = 16, 256  # that one of its threads adds up
_MAX_SPLITS = 128


class Chip(NamedTuple):
    """What kernels ask of a GPU; as it stands, an A100."""

    capability: tuple[int, int] = (8, 0)
    num_sms: int = 108

    @property
    def threads_per_sm(self) -> int:
        """Threads that one multiprocessor holds at most."""
        return _THREADS_PER_SM.get(self.capability, 2048)

    @property
    def prefers_cudnn(self) -> bool:
        """transformers/cuda/sdp_utils.cpp, ``check_prefer_cudnn_attention``, with cuDNN 9.15 or newer."""
        return self.capability in ((9, 0), (10, 0), (10, 3))


class AttentionScratch(NamedTuple):
    """Of a fused attention's kernels."""

    kernel: Fused
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


class Asked:
    """What a chip's kernels take, as far as it was asked: other chips may have the same answers."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._sums: dict[tuple[int, int, int], list[int]] = {}
        self._attentions: dict[tuple[_Sizes, str, bool, bool], AttentionScratch] = {}

    def sum_of_rows(self, num_rows: int, width: int, itemsize_bytes: int) -> list[int]:
        """Of a matrix's sum over its rows."""
        key = num_rows, width, itemsize_bytes
        if key not in self._sums:
            self._sums[key] = sum_of_rows(self.chip, *key)
        return self._sums[key]

    def attention(self, sizes: _Sizes, dtype: str, has_bias: bool, has_dropout: bool) -> AttentionScratch:
        """Of a fused attention."""
        key = sizes, dtype, has_bias, has_dropout
        if key not in self._attentions:
            self._attentions[key] = attention_scratch(
                self.chip, sizes, dtype, has_bias=has_bias, has_dropout=has_dropout
            )
        return self._attentions[key]

    def is_alike(self, chip: Chip) -> bool:
        """Whether this chip's kernels take the same of all that was asked."""
        return all(sum_of_rows(chip, *key) == taken for key, taken in self._sums.items()) and all(
            attention_scratch(chip, sizes, dtype, has_bias=has_bias, has_dropout=has_dropout) == taken
            for (sizes, dtype, has_bias, has_dropout), taken in self._attentions.items()
        )


def attention_scratch(chip: Chip, sizes: _Sizes, dtype: str, *, has_bias: bool, has_dropout: bool) -> AttentionScratch:
    """What the fused attention takes that runs on this chip."""
    batch_size, num_heads, seq_len, head_size, value_size = sizes
    kernel, query = fused_kernel(chip, head_size, value_size, dtype, has_bias=has_bias), sizes[:4]
    if kernel == "cudnn":
        return AttentionScratch(kernel, [], cudnn_backward(*query))
    if kernel == "flash":
        return AttentionScratch(kernel, [] if has_dropout else flash_forward(chip, *query), flash_backward(*query))
    rows = batch_size * num_heads
    forward = efficient_forward(rows * seq_len, head_size, value_size, dtype)
    return AttentionScratch(kernel, forward, efficient_backward(chip, rows, seq_len, head_size, value_size, dtype))


def sum_of_rows(chip: Chip, num_rows: int, width: int, itemsize_bytes: int) -> list[int]:
    """Of a matrix's sum over its rows, where these are split among blocks: their partial sums and locks.

    cuda/Reduce.cuh, ``setReduceConfig``, in its order; ``itemsize_bytes`` of an element, which is summed in fp32.
    """
    vector = math.gcd(_VECTOR, width)
    threads = _MAX_THREADS // vector
    block_width, block_height = (min(1 << size.bit_length() - 1, threads) for size in (width // vector, num_rows))
    block_height = min(block_height, threads // min(block_width, _WARP))
    block_width = min(block_width, threads // block_height)
    if num_rows < min(block_height * _MIN_VALUES, _MAX_VALUES):
        return []
    per_thread = -(-num_rows // block_height)
    grid = -(-(width // vector) // block_width)
    target = chip.num_sms * (chip.threads_per_sm // (block_width * block_height))
    if per_thread < _MAX_VALUES or grid > target:
        return []
    num_blocks = max(min(-(-target // grid), -(-per_thread // _MIN_VALUES)), -(-per_thread // _MAX_VALUES))
    if num_blocks == 1:
        return []
    return [max(itemsize_bytes, 4) * width * num_blocks * block_width * vector, 4 * grid]


def fused_kernel(chip: Chip, head_size: int, value_size: int, dtype: str, *, has_bias: bool) -> Fused:
    """Which of the fused attentions runs (transformers/cuda/sdp_utils.cpp); attention.py knows where none does.

    cuDNN's ``check_cudnn_tensor_shapes``: on Hopper heads up to 256, on Blackwell up to 128, or DeepSeek's.
    """
    is_half, major = dtype != "fp32" and chip.capability >= (8, 0), chip.capability[0]
    widest = 256 if major == 9 else 192 if (head_size, value_size) == (192, 128) else 128
    fits = head_size % 8 == value_size % 8 == 0 and max(head_size, value_size) <= widest
    if chip.prefers_cudnn and is_half and fits:
        return "cudnn"
    return "flash" if is_half and not has_bias and head_size == value_size and head_size <= 256 else "efficient"


def flash_forward(chip: Chip, batch_size: int, num_heads: int, seq_len: int, head_size: int) -> list[int]:
    """Each split's log-sum-exps and output in fp32, where keys are split among blocks since there are too few of
    queries (transformers/cuda/flash_attn/flash_api.cpp, ``set_params_splitkv``; never with dropout).
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
    """flash_api.cpp, ``mha_bwd``: row sums and the query's gradient in fp32, both of whole blocks of rows."""
    rows = batch_size * num_heads * _whole(seq_len, 128)
    return [4 * rows, 4 * rows * _flash_size(head_size)]


def _flash_size(head_size: int) -> int:
    return _whole(head_size, 32) if head_size <= 192 else 256


def cudnn_backward(batch_size: int, num_heads: int, seq_len: int, head_size: int) -> list[int]:
    """cudnn-frontend's own part of the workspace: the query's gradient in fp32 and row sums."""
    return [4 * batch_size * num_heads * seq_len * (head_size + 1)]


def efficient_forward(num_rows: int, head_size: int, value_size: int, dtype: str) -> list[int]:
    """mem_eff_attention/kernel_forward.h: the result in fp32, where 16-bit heads are too wide for registers."""
    return [4 * num_rows * value_size] if dtype != "fp32" and max(head_size, value_size) > 128 else []


def efficient_backward(
    chip: Chip, num_heads: int, seq_len: int, head_size: int, value_size: int, dtype: str
) -> list[int]:
    """mem_eff_attention/kernel_backward.h, ``workspace_size``: row sums, then the query's gradient in tiles of fp32
    with a lock each, and where heads are wide those of keys and values for the blocks that are worked on at once.

    ``num_heads``: of all rows of the batch. The row sums of fp32 are a product and its sum, before the rest.
    """
    rows, columns, is_staged = _tile(chip, dtype, max(head_size, value_size))
    num_bytes = -(-seq_len // rows) * -(-head_size // columns) * (4 * rows * columns + 16)
    if is_staged:
        num_blocks = min(-(-seq_len // 64), max(200 // num_heads, 1))
        num_bytes += 4 * num_blocks * 64 * (_whole(head_size, 128) + _whole(value_size, 128))
    row_sums = 4 * num_heads * seq_len
    if dtype != "fp32":
        return [row_sums, num_heads * num_bytes]
    product = row_sums * value_size
    return [product, row_sums, row_sums, -row_sums, -product, num_heads * num_bytes]


def _tile(chip: Chip, dtype: str, head_size: int) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether keys' and values' gradients are staged (kernels/cutlassB.h)."""
    if head_size <= 64:
        return 64, 64, False
    has_much = chip.capability in _MUCH_SHARED_MEMORY
    if dtype == "fp32":
        return 128 if has_much else 64, 64, False
    if head_size > 128:
        return 128, 64, True
    if has_much:
        return 128, 128, False
    if head_size > 96 and chip.capability >= (8, 0):
        return 64, 64, True
    return 128, 64, False


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
