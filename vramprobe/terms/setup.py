"""Setup: all that the course of a step depends on, and nothing else, so that cells with the same one share a walk.

In: a spec, its Architecture and the tensors of its prepared model. Out: a frozen, hashable Setup, whose batch size and
sequence length are left open. The walk sees nothing of the spec but this: no optimizer, no seed, no name.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramprobe.architecture import Architecture, UnsupportedArchitecture
from vramprobe.spec import CellSpec
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.sizes import OpenSizes, open_sizes

#: Bits of a coefficient above those of the number of parameters. No value is wider than all parameters together, and
#: what else a coefficient counts is far below 2^64: bytes per element, the RNG's state, values alive, a spare bit.
_ROOM_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A prepared model and how a step of it runs."""

    arch: Architecture
    tensors: tuple[Tensor, ...]
    sizes: OpenSizes
    device: str
    quant: str
    autocast: str
    attn: str
    lora_dropout: float
    gradient_checkpointing: bool
    accumulates: bool  # more than one micro-step per step
    scales_adapters: bool = False  # whether a factor other than 1 is applied to what is folded into experts

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch, or what stands for them."""
        return self.sizes.batch_size

    @property
    def seq_len(self) -> int:
        """Tokens of a row, or what stands for them."""
        return self.sizes.seq_len

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch: batch × length."""
        return self.batch_size * self.seq_len


def setup_of(spec: CellSpec, arch: Architecture, tensors: tuple[Tensor, ...]) -> Setup:
    """The Setup of a cell.

    Raises UnsupportedArchitecture where it is longer than a sliding window, or its attention is not covered.
    """
    require_in_window(arch, spec.seq_len)
    _require_attention(arch, spec.attn)
    num_elements = sum(tensor.numel * tensor.num_copies for tensor in tensors)
    sizes = open_sizes(spec.batch_size, spec.seq_len, num_elements.bit_length() + _ROOM_BITS)
    return Setup(
        arch=arch, tensors=tensors, sizes=sizes, device=spec.device, quant=spec.quant, autocast=spec.autocast,
        attn=spec.attn, lora_dropout=spec.lora_dropout or 0.0, gradient_checkpointing=spec.gradient_checkpointing,
        accumulates=spec.grad_accum > 1, scales_adapters=bool(arch.wrapped) and spec.lora_alpha != spec.lora_r,
    )  # fmt: skip


def _require_attention(arch: Architecture, attn: str) -> None:
    """Raise UnsupportedArchitecture where transformers runs something else for this family than the walk does."""
    covered = ("sdpa", "eager", "flash_attention_2")
    if arch.model_type == "gpt_oss":
        covered = ("eager",)
    elif arch.value_size is not None:
        covered = ("sdpa", "eager")  # for flash-attn it pads values to the size of queries
    if attn not in covered:
        raise UnsupportedArchitecture(
            f"the formula engine has no arithmetic for attn {attn} of a {arch.model_type}; use "
            f"{' or '.join(covered)}, or the trace engine"
        )


def require_in_window(arch: Architecture, seq_len: int) -> None:
    """Raise UnsupportedArchitecture for a sequence that is longer than the model's sliding window."""
    if arch.sliding_window is not None and seq_len > arch.sliding_window:
        raise UnsupportedArchitecture(
            f"seq_len {seq_len} is longer than the model's sliding window of {arch.sliding_window}: the mask "
            "that makes is not in the formula engine; measure the cell, or use a shorter sequence"
        )
