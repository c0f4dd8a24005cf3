"""The optimizer's bytes: its state after the first step, and what a step allocates for a moment.

In: a spec and the tensors that it trains. Out: bytes. The rules follow ``torch.optim``, transformers' Adafactor and
``bitsandbytes.optim``; where the CPU's and CUDA's code differ the device decides. Never imports any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vramprobe.spec import CellSpec
from vramprobe.terms.parameters import Tensor

STEP_BYTES = 4  # torch.optim keeps one fp32 step counter per parameter
BLOCK_8BIT = 256  # elements per absmax of an 8-bit state
MIN_8BIT_ELEMENTS = 4096  # bitsandbytes' min_8bit_size: smaller tensors keep fp32 state
MIN_PAGED_ELEMENTS = 100_000  # bitsandbytes pages only larger states (Optimizer2State.get_state_buffer)
QMAP_BYTES = 256 * 4  # one code book per state, shared by all tensors


def state_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes of the optimizer's state tensors after the first step, wherever they live."""
    state = sum(_state_bytes(spec, tensor) * tensor.num_copies for tensor in trained)
    shared = any(_is_8bit(spec, tensor) for tensor in trained)
    return state + (_num_states(spec) * QMAP_BYTES if shared else 0)


def allocated_state_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes of the state as torch's statistics see them: without what a paged optimizer keeps in managed memory."""
    state = state_bytes(spec, trained)
    if spec.optim.endswith("8bit") and spec.device == "cpu":
        # The optimizer itself makes both code books on the CPU (fill_qmap), whether or not a state uses them.
        state += (2 - _num_states(spec) * any(_is_8bit(spec, tensor) for tensor in trained)) * QMAP_BYTES
    if not spec.optim.startswith("paged_"):
        return state
    large = (tensor for tensor in trained if tensor.numel >= MIN_PAGED_ELEMENTS)
    return state - sum(_paged_bytes(spec, tensor) * tensor.num_copies for tensor in large)


def allocated_state_parts(spec: CellSpec, tensor: Tensor) -> list[int]:
    """The state of one copy of a tensor as CUDA's allocator is asked for it, tensor by tensor."""
    match spec.optim:
        case "adamw_torch_fused":
            return [STEP_BYTES, tensor.num_bytes, tensor.num_bytes]
        case "adamw_torch":  # whose counters are in the host's memory
            return [tensor.num_bytes, tensor.num_bytes]
        case "adagrad" | "rmsprop" | "sgd" | "adafactor":
            size_bytes = _state_bytes(spec, tensor)
            return [size_bytes] if size_bytes else []
    if spec.optim.startswith("paged_") and tensor.numel >= MIN_PAGED_ELEMENTS:
        scales = _state_bytes(spec, tensor) - _paged_bytes(spec, tensor)
        return [scales // _num_states(spec)] * _num_states(spec) if scales else []
    if _is_8bit(spec, tensor):
        return [tensor.numel, 4 * -(-tensor.numel // BLOCK_8BIT)] * _num_states(spec)
    return [4 * tensor.numel] * _num_states(spec)


def temporary_parts(spec: CellSpec, trained: Sequence[Tensor]) -> list[int]:
    """What a step on CUDA holds at its highest moment, tensor by tensor; ``trained`` has each copy."""
    if spec.optim in ("adamw_torch", "adagrad", "rmsprop"):
        return [tensor.num_bytes for tensor in trained] * (2 if spec.optim == "adagrad" else 1)
    total = temporaries_bytes(spec, trained)
    if not total:
        return []
    # Adafactor's, of one tensor after the other: copies of it in fp32, and what is smaller.
    copy = max(4 * tensor.numel for tensor in trained)
    return [copy] * (total // copy) + ([total % copy] if total % copy else [])


def _paged_bytes(spec: CellSpec, tensor: Tensor) -> int:
    return tensor.numel * _num_states(spec) * (1 if _is_8bit(spec, tensor) else 4)


def _num_states(spec: CellSpec) -> int:
    """Moments that a bitsandbytes optimizer keeps: Lion one, AdamW two."""
    return 1 if spec.optim.startswith("lion") else 2


def _is_8bit(spec: CellSpec, tensor: Tensor) -> bool:
    """Whether the state is quantised: not of small tensors, nor of embeddings (transformers' Trainer exempts them)."""
    return spec.optim.endswith("8bit") and tensor.numel >= MIN_8BIT_ELEMENTS and tensor.role != "embedding"


def _state_bytes(spec: CellSpec, tensor: Tensor) -> int:
    match spec.optim:
        case "adamw_torch" | "adamw_torch_fused":
            return 2 * tensor.num_bytes + STEP_BYTES
        case "adagrad" | "rmsprop":
            return tensor.num_bytes + STEP_BYTES
        case "sgd":
            return 0  # without momentum
        case "adafactor":
            return 4 * _adafactor_elements(tensor) + 4  # fp32 whatever the gradient's dtype, and one RMS
    per_state = tensor.numel * 4
    if _is_8bit(spec, tensor):
        per_state = tensor.numel + 4 * -(-tensor.numel // BLOCK_8BIT)
    return _num_states(spec) * per_state


def _adafactor_elements(tensor: Tensor) -> int:
    """A matrix, or each of a stack, keeps one mean per row and per column; a vector keeps itself."""
    if len(tensor.shape) == 1:
        return tensor.numel
    return math.prod(tensor.shape[:-2]) * sum(tensor.shape[-2:])


def temporaries_bytes(spec: CellSpec, trained: Sequence[Tensor]) -> int:
    """Bytes that a step holds at its highest moment beside weights, gradients and state."""
    if spec.device == "cuda" and spec.optim in ("adamw_torch", "adagrad", "rmsprop"):
        # foreach, torch's default on CUDA: whole lists at once. AdamW and RMSprop keep one list of denominators
        # (_foreach_sqrt); Adagrad a second one of numerators (torch/optim/adagrad.py, _multi_tensor_adagrad).
        lists = 2 if spec.optim == "adagrad" else 1
        return lists * sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    if spec.optim in ("adamw_torch_fused", "sgd") or (spec.device == "cuda" and spec.optim != "adafactor"):
        return 0  # one kernel in place, torch's or bitsandbytes'
    # One tensor after the other; some loops hold a result of the tensor before while they work on the next.
    pairs = _in_order(trained)
    if spec.optim == "adafactor":  # what it holds goes before the factors of the new update are made
        return max((_working_bytes(spec, now) + max(_held_bytes(spec, before), _factors_bytes(now))
                    for before, now in pairs), default=0)  # fmt: skip
    return max((_held_bytes(spec, before) + _working_bytes(spec, now) for before, now in pairs), default=0)


def _in_order(trained: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, Tensor]]:
    """(the one before, this one) for each tensor in the order of ``model.parameters()``; layers repeat."""
    before: Tensor | None = None
    in_layers = [tensor for tensor in trained if tensor.per_layer]
    for tensor in trained:
        yield before, tensor
        before = tensor
    if in_layers:
        yield in_layers[-1], in_layers[0]


def _working_bytes(spec: CellSpec, tensor: Tensor) -> int:
    """Temporaries while one tensor is updated on the CPU (Adafactor: everywhere)."""
    fp32_bytes, is_fp32 = 4 * tensor.numel, tensor.dtype == "fp32"
    match spec.optim:
        case "adamw_torch":
            return 2 * tensor.num_bytes  # sqrt, and its quotient
        case "adagrad" | "rmsprop":
            return tensor.num_bytes
        case "adafactor":
            # grad² and its sum with eps, or that and the new update; a 16-bit tensor is raised first, and its gradient.
            return (2 if is_fp32 else 4) * fp32_bytes
    # bitsandbytes' CPU code (backends/cpu/ops.py): the scaled gradient, and two copies of the update (sqrt and
    # quotient; Lion: the mixed moment and its sign); the parameter too where it is 16 bit. An 8-bit state is
    # dequantised beside them, and Lion's 8-bit update has three copies: both scaled terms and their sum.
    copies = 3 + (not is_fp32)
    if _is_8bit(spec, tensor):
        copies += 2  # AdamW: two states; Lion: one state, and one copy more
    return copies * fp32_bytes


def _factors_bytes(tensor: Tensor) -> int:
    """Adafactor's inverse roots of rows' and columns' means, from which it makes a matrix's update."""
    return 4 * _adafactor_elements(tensor) if len(tensor.shape) > 1 else 0


def _held_bytes(spec: CellSpec, before: Tensor | None) -> int:
    """What the loop's variables still hold from the tensor before."""
    if before is None:
        return 0
    match spec.optim:
        case "adamw_torch" | "adagrad" | "rmsprop":
            return before.num_bytes
        case "adafactor":
            return 4 * before.numel
    return 0
