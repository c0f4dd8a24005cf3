"""Elementwise: what the kernels beside products and attention move: norms, rotations, activations, residuals, the loss.

In: an architecture, tokens, what is fused. Out: bytes as simple kernels would move them in the time that is taken, and
kernels. Never sees a tensor.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from vramprobe.architecture import Architecture

#: What has few kernels: nothing; norms, rotations and the loss (Liger's and Unsloth's); also what lies between products
#: (a compiler's, an engine's own).
Fusion = Literal["none", "kernels", "all"]


class Moved(NamedTuple):
    """Bytes of an element: those that a forward's kernels move, and those of its backward."""

    forward: float
    backward: float


#: As many bytes as simple kernels move in the time that these take on an A100: measured by Liger-Kernel (at ead96b6;
#: transformers' kernels, torch's and its own) and, for simple ones, by te42kyfo/gpu-benches (1,759 GB/s). Reductions,
#: casts, broadcasts and strides are slower than their bytes: transformers' RMS norm moves 36 forward, its rotation 20.
_RMS_NORM, _WIDE_RMS_NORM, _LAYER_NORM, _FUSED_NORM = Moved(50, 132), Moved(15, 51), Moved(6.6, 14.6), Moved(4.8, 9.6)
_ROTARY, _FUSED_ROTARY = Moved(40, 48), Moved(4.3, 4.3)
#: Simple kernels: silu, then a product: 2→2, 2+2→2. Fused: one kernel. An MLP without a gate has its one activation.
_GATED, _FUSED_GATED, _ACTIVATION = Moved(10, 20), Moved(6, 12), Moved(4, 8)
_RESIDUAL = Moved(6, 12)
#: Linear layers that take what a layer takes, and those that take what attention and the MLP give.
FIRST_OF_LAYER = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
BESIDE_ATTENTION = ("mlp.dense_h_to_4h",)  # of GPT-NeoX and Falcon, whose MLP takes what attention takes
LAST_OF_ATTENTION = ("o_proj", "out_proj", "attention.dense", "attn.c_proj")
LAST_OF_MLP = ("down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj")
#: Per logit, forward and backward together: to fp32, log-softmax and its gradient (49.5, measured), back to 16 bit.
#: Fused: read, written once each way.
_LOSS_BYTES, _FUSED_LOSS_BYTES = 61.5, 8
#: Kernels of a layer, forward, beside its products.
_EAGER_KERNELS, _OWN_KERNELS, _FUSED_KERNELS, _PLAIN_KERNELS = 34, 16, 10, 16


def elementwise(arch: Architecture, tokens: int, widths: tuple[int, int], fused: Fusion) -> tuple[Moved, float]:
    """(bytes of a layer, kernels of its forward) beside its products and attention; ``widths`` of an element of the
    residual stream and of what is multiplied.
    """
    (wide, dense), hidden = widths, arch.head_width
    is_rms = arch.model_type not in ("gpt2", "gpt_neox", "opt", "bloom", "falcon")
    has_own = fused == "all" or (fused == "kernels" and is_rms)
    norms = sum(p.role == "norm" and p.per_layer and p.name.endswith("weight") for p in arch.parameters)
    eager_norm = (_WIDE_RMS_NORM if wide == 4 else _RMS_NORM) if is_rms else _LAYER_NORM
    per_token = arch.experts.per_token if arch.experts else 1
    inner = (arch.experts.width if arch.experts else _mlp_width(arch)) * per_token
    parts = [
        (_FUSED_NORM if has_own else eager_norm, norms * hidden * wide),
        (_RESIDUAL, 2 * hidden * wide),
        ((_FUSED_GATED if fused == "all" else _GATED) if is_rms else _ACTIVATION, inner * dense),
    ]
    if arch.rotary_size:
        rotated = (arch.num_heads + arch.num_kv_heads) * arch.head_size
        parts.append((_FUSED_ROTARY if has_own else _ROTARY, rotated * dense))
    moved = Moved(
        tokens * sum(one.forward * width / 2 for one, width in parts),
        tokens * sum(one.backward * width / 2 for one, width in parts),
    )
    kernels = _EAGER_KERNELS if is_rms else _PLAIN_KERNELS
    return moved, _FUSED_KERNELS if fused == "all" else _OWN_KERNELS if has_own else kernels


def _mlp_width(arch: Architecture) -> int:
    """Input width of the last linear layer of the MLP."""
    last = [one.num_in for one in arch.linears if one.name.endswith(LAST_OF_MLP)]
    return last[0] if last else 4 * arch.head_width


def loss_bytes(is_fused: bool) -> float:
    """Bytes moved for one logit, forward and backward together."""
    return _FUSED_LOSS_BYTES if is_fused else _LOSS_BYTES
