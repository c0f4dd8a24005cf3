"""Attention on the tape: which kernel runs for a cell, and what it keeps.

In: query, key and value after the rotation. Out: the attention's output, laid out by tokens. The fused kernels are
linear in the sequence; the math and eager paths hold batch × heads × length² scores. Never imports torch.
"""

from __future__ import annotations

from typing import Literal

from vramprobe.kernels import attention as kernels
from vramprobe.kernels.chip import A100
from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models import operators as op
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

Kernel = Literal["fused", "math", "eager"]


def kernel(setup: Setup, dtype: str, *, masked: bool = False) -> Kernel:
    """Which implementation runs on q, k and v of this dtype; ``masked``: with a mask beside causality.

    CPU: the flash kernel takes no dropout (``use_flash_attention_cpp``), which means math. CUDA: as torch chooses
    (kernels/attention.py). With a mask transformers repeats grouped heads (``use_gqa_in_sdpa``).
    """
    arch = setup.arch
    if setup.attn == "eager":
        return "eager"
    is_grouped = arch.num_kv_heads != arch.num_heads
    if setup.device == "cpu":
        return "math" if arch.attention_dropout > 0 else "fused"
    found = _chosen(setup, dtype, is_grouped=is_grouped and not masked, masked=masked)
    return "math" if found == "math" else "fused"


def _chosen(setup: Setup, dtype: str, *, masked: bool, is_grouped: bool = False) -> kernels.Kernel:
    """Torch's kernel on the setup's chip; flash-attn, a library of its own, has none of torch's gaps."""
    arch = setup.arch
    return kernels.chosen(
        A100 if setup.attn == "flash_attention_2" else setup.chip,
        arch.head_size,
        arch.head_size,
        dtype,
        is_grouped=is_grouped,
        has_mask=masked,
        dropout=arch.attention_dropout,
    )


def attend(setup: Setup, query: Value, key: Value, value: Value, mask: Value | None) -> tuple[Value, Value | None]:
    """The attention of one layer, and its weights, which the eager path hands out and the layer's code holds.

    ``mask`` is made once per forward: the eager path's, or one of bools.
    """
    if setup.attn == "eager":
        return _eager(setup, query, key, value, mask)
    if mask is not None:
        key, value = _repeated(query, key, value, as_view=setup.arch.num_kv_heads == 1)
    return layout.contiguous(_sdpa(setup, query, key, value, is_masked=mask is not None)), None


def _sdpa(setup: Setup, query: Value, key: Value, value: Value, *, is_masked: bool) -> Value:
    """``scaled_dot_product_attention``; what it casts and adds goes as it returns."""
    if setup.autocast != "none":  # it is on autocast's list of 16-bit operators
        value, key, query = (op.cast(x, setup.autocast) for x in (value, key, query))  # as g++ evaluates arguments
    bias = query.tape.new(setup.batch_size * setup.seq_len**2, query.dtype) if is_masked else None
    if kernel(setup, query.dtype, masked=is_masked) == "math":
        return _math(setup, query, key, value, bias)
    # The memory-efficient kernel rounds the length up to a multiple of 32 for its log-sum-exps, which is not counted.
    arch = setup.arch
    sizes = setup.batch_size, arch.num_heads, setup.seq_len, arch.head_size, arch.head_size
    scratch = query.tape.scratch_of_attention(sizes, query.dtype, is_masked, arch.attention_dropout)
    out = op.fused_attention(
        query, key, value, _num_out(setup), setup.num_tokens * setup.arch.num_heads, setup.device, bias, scratch
    )
    if scratch is not None:
        runs = scratch.kernel
    elif setup.device == "cuda":
        runs = _chosen(setup, query.dtype, masked=is_masked)
    else:
        return out
    out.contiguous = runs == "efficient" or query.contiguous  # which writes by tokens, whatever the query's layout
    return out


def _num_out(setup: Setup) -> int:
    return setup.num_tokens * setup.arch.num_heads * setup.arch.head_size


def _repeated(query: Value, key: Value, value: Value, *, as_view: bool) -> tuple[Value, Value]:
    """transformers' ``repeat_kv``, whose expand and reshape of a single head is a view."""
    if key.numel == query.numel:
        return key, value
    return layout.repeated(key, query.numel, as_view=as_view), layout.repeated(value, query.numel, as_view=as_view)


def num_scores(setup: Setup) -> int:
    return setup.batch_size * setup.arch.num_heads * setup.seq_len**2


def _math(setup: Setup, query: Value, key: Value, value: Value, bias: Value | None) -> Value:
    """``_scaled_dot_product_attention_math``: fp32 inside; q and k are scaled and copied for the batched product."""
    q, k, v = (op.cast(x, "fp32") for x in (query, key, value))
    scaled_query = op.elementwise(q)
    mask = _causal_mask(setup, query) if bias is None else bias
    if k.numel != q.numel:
        k, v = layout.repeated(k, q.numel), layout.repeated(v, q.numel)
    scaled_key = op.elementwise(k)
    scores = product(scaled_query, scaled_key, num_scores(setup), setup.batch_size)
    del scaled_key
    scores = _safe_softmax(scores, setup.device)
    scores = op.dropout(scores, setup.arch.attention_dropout, setup.device)
    weights = op.cast(scores, query.dtype)  # the other thing that it returns
    out = op.cast(product(scores, v, _num_out(setup), setup.batch_size), query.dtype)
    del q, k, v, scaled_query, scores, mask, bias, weights  # its variables go as it returns
    out.contiguous = False
    return out


def _causal_mask(setup: Setup, query: Value) -> Value:
    """Ones, their lower triangle, and what is added, in fp32; on the CPU the first two are not told apart."""
    tape, numel = query.tape, setup.seq_len**2
    allowed = tape.new(numel, "bool") if tape.asked else None
    allowed = tape.new(numel, "bool") if tape.asked else None
    mask = tape.new(numel, "fp32")
    del allowed
    return mask


def _safe_softmax(scores: Value, device: str) -> Value:
    """``_safe_softmax``: saves its output; looks for rows of −inf through a mask of one byte per score."""
    out = op.softmax(scores, device)
    infinite = scores.tape.new(scores.numel, "bool")
    del infinite
    return out


def _eager(setup: Setup, query: Value, key: Value, value: Value, mask: Value | None) -> tuple[Value, Value]:
    """transformers' ``eager_attention_forward``: scores, scale, mask, softmax in fp32, product.

    GPT-2 takes the softmax as the scores come.
    """
    # The view of a single head is a bmm's operand only for a single row.
    key, value = _repeated(query, key, value, as_view=setup.batch_size == setup.arch.num_kv_heads == 1)
    dtype = query.dtype
    scores = product(query, key, num_scores(setup), setup.batch_size, setup.autocast)
    scores = op.scaled(scores)
    if setup.arch.caps_scores:
        scores = op.scaled(scores)
        scores = op.elementwise(scores, saves="output")
        scores = op.scaled(scores)
    scores = op.add(scores, mask) if mask is not None else scores
    if setup.arch.model_type == "gpt2":
        scores = op.cast(op.softmax(scores, setup.device), value.dtype)
    else:
        scores = op.cast(op.softmax_in_fp32(scores, setup.device), dtype)
    scores = op.dropout(scores, setup.arch.attention_dropout, setup.device)
    out = product(scores, value, _num_out(setup), setup.batch_size, setup.autocast)
    out.contiguous = False
    return layout.contiguous(out), scores


def product(left: Value, right: Value, numel: int, batch_size: int, autocast: str = "none") -> Value:
    """``torch.matmul`` of two values laid out by heads."""
    if autocast != "none":
        right, left = op.cast(right, autocast), op.cast(left, autocast)  # as g++ evaluates arguments
        return product(left, right, numel, batch_size)
    return op.batched_product(layout.by_heads(left, batch_size), layout.by_heads(right, batch_size), numel)
