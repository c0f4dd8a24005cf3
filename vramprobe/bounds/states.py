"""Bytes of the optimizer's state after the first step, by tensor.

In: a spec and the tensors that it trains. Out: bytes, by the optimizer's row (optimizers.py). The rules follow
``torch.optim``, transformers' Adafactor and ``bitsandbytes.optim``. Never imports any of them.
"""

import math
from collections.abc import Sequence

from vramprobe.bounds.tensors import Tensor
from vramprobe.optimizers import OPTIMIZERS, Optimizer
from vramprobe.spec import CellSpec

STEP_BYTES = 4  # torch.optim keeps one fp32 step counter per parameter
BLOCK_8BIT = 256  # elements per absmax of an 8-bit state
MIN_8BIT_ELEMENTS = 4096  # bitsandbytes' min_8bit_size: smaller tensors keep fp32 state
MIN_PAGED_ELEMENTS = 100_000  # bitsandbytes pages only larger states (Optimizer2State.get_state_buffer)
QMAP_BYTES = 256 * 4  # one code book per state, shared by all tensors
_NUM_CODE_BOOKS = 2  # that an 8-bit optimizer makes on the CPU (fill_qmap), whether or not a state uses them


def state_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes of the optimizer's state tensors after the first step, wherever they live."""
    row = OPTIMIZERS[spec.optim]
    state = sum(_state_bytes(row, tensor) * tensor.num_copies for tensor in trained)
    return state + _used_code_books(row, trained) * QMAP_BYTES


def allocated_state_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes of the state as torch's statistics see them: without what a paged optimizer keeps in managed memory."""
    row, state = OPTIMIZERS[spec.optim], state_bytes(spec, trained)
    if row.state == "8bit" and spec.device == "cpu":
        state += (_NUM_CODE_BOOKS - _used_code_books(row, trained)) * QMAP_BYTES
    if not row.is_paged:
        return state
    large = (tensor for tensor in trained if tensor.numel >= MIN_PAGED_ELEMENTS)
    return state - sum(size * tensor.num_copies for tensor in large for size, _ in _state_tensors(row, tensor))


def is_8bit(row: Optimizer, tensor: Tensor) -> bool:
    """Return True if the state is quantized: not of small tensors, nor of embeddings (transformers exempts them)."""
    return row.state == "8bit" and tensor.numel >= MIN_8BIT_ELEMENTS and tensor.role != "embedding"


def factored_elements(tensor: Tensor) -> int:
    """A matrix, or each of a stack, keeps one mean per row and per column; a vector keeps itself."""
    if len(tensor.shape) == 1:
        return tensor.numel
    return math.prod(tensor.shape[:-2]) * sum(tensor.shape[-2:])


def _used_code_books(row: Optimizer, trained: Sequence[Tensor]) -> int:
    return len(row.state_copies) if any(is_8bit(row, tensor) for tensor in trained) else 0


def _state_bytes(row: Optimizer, tensor: Tensor) -> int:
    if row.state == "factored":
        return 4 * factored_elements(tensor) + 4  # fp32 whatever the gradient's dtype, and one RMS
    counter_bytes = 0 if row.counter == "none" else STEP_BYTES
    return counter_bytes + sum(size + scales for size, scales in _state_tensors(row, tensor))


def _state_tensors(row: Optimizer, tensor: Tensor) -> list[tuple[int, int]]:
    """Bytes of each tensor of the state, and of its scales."""
    if row.state == "parameter":
        return [(copies * tensor.num_bytes, 0) for copies in row.state_copies]
    width, scales = (1, 4 * -(-tensor.numel // BLOCK_8BIT)) if is_8bit(row, tensor) else (4, 0)
    return [(copies * width * tensor.numel, copies * scales) for copies in row.state_copies]
