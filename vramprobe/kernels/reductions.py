"""Sums on CUDA: the partial sums of the blocks that one output is split among.

In: a Chip, a matrix's rows, which are summed, and its width. Out: workspaces in bytes. Follows
``setReduceConfig`` of pytorch's cuda/Reduce.cuh (torch 2.13) in its order and names. Left out: inputs of over 2 GiB,
which are summed in parts. Never imports torch.
"""

from __future__ import annotations

import math

from vramprobe.kernels.chip import Chip

#: Elements that are loaded at once: ``vt0``, and the longest vector.
_VALUES_AT_ONCE = 4
_MAX_THREADS = 512  # ``mnt_wrapper``: none of the dtypes here is complex
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # that one of a block's threads adds up


def sum_of_rows(chip: Chip, num_rows: int, width: int, itemsize_bytes: int) -> list[int]:
    """Of a matrix's sum over its rows: ``global_memory_size`` and ``semaphore_size``; none where every block writes
    outputs of its own. ``itemsize_bytes``: of an element, 16 bits being summed in fp32.
    """
    vector = math.gcd(_VALUES_AT_ONCE, width)  # outputs that a thread writes at once
    block_width, height = _block(width // vector, num_rows, _MAX_THREADS // vector)
    if num_rows < min(height * _MIN_VALUES, _MAX_VALUES):
        return []
    per_thread = -(-num_rows // height)
    grid = -(-(width // vector) // block_width)
    target = chip.num_sms * (chip.threads_per_sm // (block_width * height))
    if per_thread < _MAX_VALUES or grid > target:
        return []
    num_blocks = max(min(-(-target // grid), -(-per_thread // _MIN_VALUES)), -(-per_thread // _MAX_VALUES))
    if num_blocks == 1:
        return []
    return [max(itemsize_bytes, 4) * width * num_blocks * block_width * vector, 4 * grid]


def _block(fastest: int, slowest: int, max_threads: int) -> tuple[int, int]:
    """``set_block_dimension``: the block's width and height, in threads."""
    widest, highest = (min(1 << size.bit_length() - 1, max_threads) if size else 1 for size in (fastest, slowest))
    height = min(highest, max_threads // min(widest, _WARP))
    return min(widest, max_threads // height), height
