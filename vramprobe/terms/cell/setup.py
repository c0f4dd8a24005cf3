"""Setup: all that the course of a step depends on, and nothing else, so that cells with the same one share a walk.

In: a spec, its Architecture and the tensors of its prepared model. Out: a frozen, hashable Setup, whose batch size and
sequence length are left open. The walk sees nothing of the spec but this: no optimizer, no seed, no name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vramprobe.architecture import Architecture, UnsupportedArchitecture
from vramprobe.bounds.tensors import Tensor
from vramprobe.errors import SpecError
from vramprobe.kernels.chip import A100, Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.tape.sizes import OpenSizes, open_sizes
from vramprobe.trainers import LOOPS

#: Bits of a coefficient above those of the number of parameters. No value is wider than all parameters together, and
#: what else a coefficient counts is far below 2^64: bytes per element, the RNG's state, values alive, a spare bit.
_ROOM_BITS = 64


#: How many ids an embedding's gradient is made from by sorting: none, all tokens, or as many as there are words.
Sorted = Literal["none", "tokens", "words"]
#: More tokens than this are sorted on CUDA (aten/src/ATen/native/cuda/Embedding.cu).
MAX_UNSORTED_TOKENS = 3072
#: Tokens of one of TRL's tiles (trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE).
TOKENS = 4096
#: Whether the length is beyond a sliding window, a fused loss's chunk, and what an embedding's gradient sorts: all that
#: batch and length decide but sizes.
Branch = tuple[bool, int | None, Sorted]


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
    dora: bool
    gradient_checkpointing: bool
    accumulates: bool  # more than one micro-step per step
    loss: str  # of spec.py, or "liger"
    beyond_window: bool  # so long that a sliding window hides something
    sorted_ids: Sorted
    loss_chunk: int | None  # tokens whose logits a fused loss makes at once; null: all of them, or no fused loss
    chip: Chip = A100  # whose attention kernels run
    linears_save_inputs: bool = False  # also of frozen weights: ZeRO-3's own (deepspeed/runtime/zero/linear.py)
    adapter_input: str | None = None  # a dtype that an adapter's input is raised to before FSDP1 lowers it again
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


def setup_of(
    spec: CellSpec,
    arch: Architecture,
    tensors: tuple[Tensor, ...],
    chip: Chip = A100,
) -> Setup:
    """The Setup of a cell; ``chip``: whose attention kernels run.

    Raises UnsupportedArchitecture for what there is no arithmetic for: padding, a compiled model, some attention; and
    SpecError for flash_attention_2 on a card without.
    """
    if spec.attn == "flash_attention_2" and chip.capability < (8, 0):
        raise SpecError("flash_attention_2 needs an Ampere GPU or a newer one; use attn sdpa or eager")
    for option, name, others in (
        (spec.padding, "padding masks", "take --engine recipe, or measure the cell"),
        (spec.torch_compile, "compiled models", "measure the cell"),
        (LOOPS[spec.loop].frees_gradients_late, "gradients that stand through a forward", "take --engine recipe"),
    ):
        if option:
            raise UnsupportedArchitecture(f"the formula engine has no arithmetic for {name}; {others}")
    beyond_window, loss_chunk, sorted_ids = branch_of(spec, arch)
    num_elements = sum(tensor.numel * tensor.num_copies for tensor in tensors)
    sizes = open_sizes(spec.batch_size, spec.row_tokens, num_elements.bit_length() + _ROOM_BITS)
    return Setup(
        arch=arch,
        tensors=tensors,
        sizes=sizes,
        device=spec.device,
        quant=spec.quant,
        autocast=spec.autocast,
        attn=spec.attn,
        lora_dropout=spec.lora_dropout or 0.0,
        dora=spec.dora,
        gradient_checkpointing=spec.gradient_checkpointing,
        accumulates=spec.grad_accum > 1,
        loss="liger" if spec.fused_linear_cross_entropy else spec.loss,
        beyond_window=beyond_window,
        loss_chunk=loss_chunk,
        sorted_ids=sorted_ids,
        chip=chip,
        scales_adapters=bool(arch.wrapped) and spec.lora_alpha != spec.lora_r,
    )


def branch_of(spec: CellSpec, arch: Architecture) -> Branch:
    """What batch and length decide beside the sizes.

    Whether transformers makes a mask for the sliding window: from its own length on, though that hides nothing yet
    (masking_utils._ignore_causal_mask_sdpa). A fused loss's chunk of tokens, as in :attr:`Setup.loss_chunk`, and what
    the gradient of a trained embedding sorts.
    """
    beyond_window = arch.sliding_window is not None and spec.row_tokens >= arch.sliding_window
    loss_chunk = None
    if spec.fused_linear_cross_entropy:
        loss_chunk = _loss_chunk(arch, spec.num_tokens)
    elif spec.fuses_head and spec.num_tokens - spec.num_rows > TOKENS:  # a row's last one has no label
        loss_chunk = TOKENS
    return beyond_window, loss_chunk, _sorted_ids(spec, arch)


def _sorted_ids(spec: CellSpec, arch: Architecture) -> Sorted:
    if spec.device != "cuda" or spec.method != "full" or spec.num_tokens <= MAX_UNSORTED_TOKENS:
        return "none"
    return "tokens" if spec.num_tokens <= arch.vocab_size else "words"


def _loss_chunk(arch: Architecture, num_tokens: int) -> int | None:
    """As many tokens as have no more logits than all have hidden states, rounded up to a power of 2 (liger_kernel,
    ops/fused_linear_cross_entropy.py).
    """
    num_chunks = -(-arch.vocab_size // arch.head_width)
    chunk = 2 ** (-(-num_tokens // num_chunks) - 1).bit_length()
    return chunk if chunk < num_tokens else None
