"""Stands in for flash-attn 2.7.3, which has no wheel: the same kernels, as torch has them, so the same allocations.

After ../shared/emulator/try/flash_attn. Packed rows of one length never reach the functions for varying lengths.
"""

import torch

__version__ = "2.7.3"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal):
        out, logsumexp, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, seed, offset)
        ctx.given = dropout_p, scale, causal
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsumexp, seed, offset = ctx.saved_tensors
        dropout_p, scale, causal = ctx.given
        grads = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            logsumexp,
            None,
            None,
            q.shape[1],
            k.shape[1],
            dropout_p,
            causal,
            seed,
            offset,
            scale=scale,
        )
        return *grads, None, None, None


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return _Attention.apply(q, k, v, dropout_p, softmax_scale or q.shape[-1] ** -0.5, causal)


def flash_attn_varlen_func(*args, **kwargs):
    raise NotImplementedError("rows of varying length")
