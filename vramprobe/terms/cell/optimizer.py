"""The optimizer's bytes: its state after the first step, and the temporaries of a step.

In: a spec and the tensors that it trains. Out: bytes, by the optimizer's row (optimizers.py). The rules follow
``torch.optim``, transformers' Adafactor and ``bitsandbytes.optim``; where the CPU's and CUDA's code differ the device
decides. Never imports any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vramprobe.optimizers import OPTIMIZERS, Optimizer
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.parameters import Tensor

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


def allocated_state_parts(spec: CellSpec, tensor: Tensor) -> list[int]:
    """The state of one copy of a tensor as CUDA's allocator is asked for it, tensor by tensor."""
    row = OPTIMIZERS[spec.optim]
    if row.state == "factored" or row.counter == "state":
        return [_state_bytes(row, tensor)]
    parts = [STEP_BYTES] if row.counter == "card" else []
    is_paged = row.is_paged and tensor.numel >= MIN_PAGED_ELEMENTS
    for size, scales in _state_tensors(row, tensor):
        parts += [part for part in (0 if is_paged else size, scales) if part]
    return parts


def temporary_parts(spec: CellSpec, trained: Sequence[Tensor]) -> list[int]:
    """What a step on CUDA holds at its highest moment, tensor by tensor; ``trained`` has each copy."""
    num_lists = len(OPTIMIZERS[spec.optim].foreach_lists)
    if num_lists:
        return [tensor.num_bytes for tensor in trained] * num_lists
    total = temporaries_bytes(spec, trained)
    if not total:
        return []
    # Adafactor's, of one tensor after the other: copies of it in fp32, and what is smaller.
    copy = max(4 * tensor.numel for tensor in trained)
    return [copy] * (total // copy) + ([total % copy] if total % copy else [])


def _is_8bit(row: Optimizer, tensor: Tensor) -> bool:
    """Whether the state is quantized: not of small tensors, nor of embeddings (transformers' Trainer exempts them)."""
    return row.state == "8bit" and tensor.numel >= MIN_8BIT_ELEMENTS and tensor.role != "embedding"


def _used_code_books(row: Optimizer, trained: Sequence[Tensor]) -> int:
    return len(row.state_copies) if any(_is_8bit(row, tensor) for tensor in trained) else 0


def _state_bytes(row: Optimizer, tensor: Tensor) -> int:
    if row.state == "factored":
        return 4 * _adafactor_elements(tensor) + 4  # fp32 whatever the gradient's dtype, and one RMS
    counter_bytes = 0 if row.counter == "none" else STEP_BYTES
    return counter_bytes + sum(size + scales for size, scales in _state_tensors(row, tensor))


def _state_tensors(row: Optimizer, tensor: Tensor) -> list[tuple[int, int]]:
    """Bytes of each tensor of the state, and of its scales."""
    if row.state == "parameter":
        return [(copies * tensor.num_bytes, 0) for copies in row.state_copies]
    width, scales = (1, 4 * -(-tensor.numel // BLOCK_8BIT)) if _is_8bit(row, tensor) else (4, 0)
    return [(copies * width * tensor.numel, copies * scales) for copies in row.state_copies]


def _adafactor_elements(tensor: Tensor) -> int:
    """A matrix, or each of a stack, keeps one mean per row and per column; a vector keeps itself."""
    if len(tensor.shape) == 1:
        return tensor.numel
    return math.prod(tensor.shape[:-2]) * sum(tensor.shape[-2:])


def temporaries_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes that a step holds at its highest moment beside weights, gradients and state."""
    row = OPTIMIZERS[spec.optim]
    if spec.device == "cuda" and row.foreach_lists:  # torch's default on CUDA: whole lists at once
        return len(row.foreach_lists) * sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    is_factored = row.state == "factored"
    if not row.cpu_copies or (spec.device == "cuda" and not is_factored):
        return 0  # one kernel in place, torch's or bitsandbytes'
    # One tensor after the other; some loops hold a result of the tensor before while they work on the next.
    pairs = _in_order(trained)
    if is_factored:  # what it holds goes before the factors of the new update are made
        return max(
            (_working_bytes(row, now) + max(_held_bytes(row, before), _factors_bytes(now)) for before, now in pairs),
            default=0,
        )
    return max((_held_bytes(row, before) + _working_bytes(row, now) for before, now in pairs), default=0)


def _in_order(trained: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, Tensor]]:
    """(the one before, this one) for each tensor in the order of ``model.parameters()``; layers repeat."""
    before: Tensor | None = None
    in_layers = [tensor for tensor in trained if tensor.per_layer]
    for tensor in trained:
        yield before, tensor
        before = tensor
    if in_layers:
        yield in_layers[-1], in_layers[0]


def _working_bytes(row: Optimizer, tensor: Tensor) -> int:
    """Temporaries while one tensor is updated on the CPU (Adafactor: everywhere)."""
    if row.state == "parameter":
        return row.cpu_copies * tensor.num_bytes
    is_fp32 = tensor.dtype == "fp32"
    if row.state == "factored":  # a 16-bit tensor is raised to fp32 first, and its gradient
        return (row.cpu_copies if is_fp32 else row.cpu_copies + 2) * 4 * tensor.numel
    # bitsandbytes' CPU code (backends/cpu/ops.py) works in fp32; the parameter, too, is copied where it has 16 bits.
    copies = row.cpu_copies_8bit if _is_8bit(row, tensor) else row.cpu_copies
    return (copies if is_fp32 else copies + 1) * 4 * tensor.numel


def _factors_bytes(tensor: Tensor) -> int:
    """Adafactor's inverse roots of rows' and columns' means, from which it makes a matrix's update."""
    return 4 * _adafactor_elements(tensor) if len(tensor.shape) > 1 else 0


def _held_bytes(row: Optimizer, before: Tensor | None) -> int:
    """What the loop's variables still hold from the tensor before."""
    if before is None or row.needs_bitsandbytes:
        return 0
    return 4 * before.numel if row.state == "factored" else before.num_bytes
