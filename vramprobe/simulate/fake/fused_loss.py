"""Liger's fused linear cross entropy on fake tensors: its own code, with the Triton kernels taken out.

In: the chip, or none for the CPU. Out: a context. Liger asks each tensor whether it is on CUDA, and fake ones say that
they are not: for a chip its forward stands here once more, as it goes there. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vramprobe.kernels.chip import Chip
from vramprobe.workload import fused_loss

#: Whether the loss's own gradient is 1, which is asked of its value: where it is not, gradients are scaled in place.
KERNELS: dict[str, Callable[..., Any]] = {"aten::equal": lambda left, right: True}


class _NoKernel:
    """In place of a Triton kernel, all of which write into what they are given."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None


@contextmanager
def liger_on_fake_tensors(chip: Chip | None) -> Iterator[None]:
    """While open, the fused loss runs on fake tensors as on ``chip``; None: as on the CPU.

    Raises MissingDependency where liger-kernel is not installed.
    """
    fused_loss.load_liger()
    from liger_kernel.ops import fused_linear_cross_entropy as liger

    with ExitStack() as stack:
        stack.enter_context(patch.object(fused_loss, "require_kernels", lambda device: None))
        for name in ("liger_cross_entropy_kernel", "element_mul_kernel"):
            stack.enter_context(patch.object(liger, name, _NoKernel()))
        if chip is not None:
            forward = _forward_on(chip)
            stack.enter_context(patch.object(liger, "fused_linear_cross_entropy_forward", forward))
        yield


def _forward_on(chip: Chip) -> Callable[..., Any]:
    """``fused_linear_cross_entropy_forward`` of liger-kernel 0.8.5 as CUDA takes it, in what it allocates.

    ``mean`` over the tokens, no bias: what the models' own forwards ask for.
    """

    def forward(_input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
        assert options["bias"] is None
        assert options["reduction"] == "mean"
        num_tokens, vocab_size = _input.shape[0], weight.shape[0]
        num_chunks = -(-vocab_size // (options["chunk_mem_const"] * _input.shape[1]))
        chunk_size = min(1 << (-(-num_tokens // num_chunks) - 1).bit_length(), num_tokens)  # to a power of 2
        grad_input = torch.zeros_like(_input)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss_1d = torch.zeros(num_tokens, dtype=torch.float32)
        target_mask = target != options["ignore_index"]
        target_mask.sum().item()
        in_place = _multiplies_in_place(_input, weight)
        logits_storage = _input.new_empty(chunk_size, vocab_size) if in_place else None
        for start in range(0, num_tokens, chunk_size):
            chunk = _input[start : start + chunk_size]
            logits = logits_storage[: len(chunk)] if logits_storage is not None else chunk @ weight.t()
            if logits_storage is None or logits.dtype != grad_input.dtype:
                grad_input[start : start + chunk_size] = logits @ weight
            if grad_weight is not None:
                _add_to(grad_weight, logits, chunk, chip)
            del logits, chunk
        del logits_storage
        return loss_1d.sum(), None, None, None, grad_input, grad_weight, None

    return forward


def _multiplies_in_place(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """``_can_use_mm_out``: autocast would change neither operand, so that the product may be written where it is."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    return hidden.dtype == weight.dtype == autocast


def _add_to(grad_weight: torch.Tensor, logits: torch.Tensor, chunk: torch.Tensor, chip: Chip) -> None:
    """The chunk's part of the weight's gradient: ``addmm`` into it where the dtypes let it, else by way of fp32."""
    is_16_bit = logits.dtype in (torch.bfloat16, torch.float16)
    if chip.capability >= (8, 0) and is_16_bit and grad_weight.dtype in (torch.float32, logits.dtype):
        chunk.to(logits.dtype)
        return
    grad_weight += torch.mm(logits.t(), chunk).float()
