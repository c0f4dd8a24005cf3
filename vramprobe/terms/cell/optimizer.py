"""The temporaries of an optimizer's step.

In: a spec and the tensors that it trains. Out: bytes, by the optimizer's row (optimizers.py). The rules follow
``torch.optim``, transformers' Adafactor and ``bitsandbytes.optim``; where the CPU's and CUDA's code differ the device
decides. Never imports any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vramprobe.bounds.states import factored_elements, is_8bit
from vramprobe.bounds.tensors import Tensor
from vramprobe.optimizers import OPTIMIZERS, Optimizer
from vramprobe.spec import CellSpec


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
    copies = row.cpu_copies_8bit if is_8bit(row, tensor) else row.cpu_copies
    return (copies if is_fp32 else copies + 1) * 4 * tensor.numel


def _factors_bytes(tensor: Tensor) -> int:
    """Adafactor's inverse roots of rows' and columns' means, from which it makes a matrix's update."""
    return 4 * factored_elements(tensor) if len(tensor.shape) > 1 else 0


def _held_bytes(row: Optimizer, before: Tensor | None) -> int:
    """What the loop's variables still hold from the tensor before."""
    if before is None or row.needs_bitsandbytes:
        return 0
    return 4 * before.numel if row.state == "factored" else before.num_bytes
