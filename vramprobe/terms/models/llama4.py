"""Llama 4's layers on the tape: experts that all tokens go through, one that they share, and two kinds of attention.

In: a Model. Out: one layer, in the order of transformers' ``modeling_llama4.py``. Every expert works on a copy of all
tokens, which its scores set to 0 where a token has not chosen it, so memory grows with the number of experts. Layers
that turn queries and keys do so with complex numbers. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import llama, mla, norms, routing
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.experts import gated
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

_LAYER = "model.layers.{layer}."
_FEED = _LAYER + "feed_forward."


def layer(model: Model, hidden: Value) -> Value:
    """A decoder layer, whose variable keeps what attention gave until it returns."""
    residual = hidden
    attended = _attention(model, _LAYER + "self_attn.", model.rms_norm(_LAYER + "input_layernorm", hidden))
    hidden = residual = op.add(residual, attended)
    hidden = model.rms_norm(_LAYER + "post_attention_layernorm", hidden)
    is_dense = model.layer in model.arch.dense_layers
    hidden = llama.gated_mlp(model, _FEED, hidden) if is_dense else _mixture(model, hidden)
    hidden = op.add(residual, hidden)
    del attended
    return hidden


def _attention(model: Model, prefix: str, hidden: Value) -> Value:
    arch = model.arch
    query = layout.heads(model.linear(prefix + "q_proj", hidden))
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    held = []
    if arch.slides(model.layer):
        query, key = _turned(model, query, key)
        if arch.norms_turned:
            query = norms.l2_norm(query, query.numel // arch.head_size)
            key = norms.l2_norm(key, key.numel // arch.head_size)
    elif arch.scales_unturned:
        held = [model.tape.new(model.setup.seq_len, "int64"), model.tape.new(model.setup.seq_len, "fp32")]
        query = op.cast(op.mul(query, held[1]), query.dtype)
    out = model.linear(prefix + "o_proj", model.attend(query, key, value))
    del held
    return out


def _turned(model: Model, query: Value, key: Value) -> tuple[Value, Value]:
    """``apply_rotary_emb``: as complex fp32 numbers, times the shared ones, which are all that is saved."""
    wide_query, wide_key = op.cast(query, "fp32"), op.cast(key, "fp32")
    turned_query = mla.times(wide_query, model.tables[0])
    turned_key = mla.times(wide_key, model.tables[0])
    return op.cast(turned_query, query.dtype), op.cast(turned_key, key.dtype)


def _mixture(model: Model, hidden: Value) -> Value:
    rows, num = layout.reshaped(hidden), model.arch.experts.num
    scores, logits = _route(model, rows)
    routed = op.mul(_repeated(rows, num), op.copied(scores), by_row=True)
    out_of_experts = _experts(model, routed)
    out = llama.gated_mlp(model, _FEED + "shared_expert.", rows)
    # CUDA's autocast sums in fp32 (autocast_mode.h); the CPU's does not.
    in_fp32 = model.device == "cuda" and model.setup.autocast != "none"
    summed = routing.summed_groups(out_of_experts, hidden.numel, "fp32" if in_fp32 else out_of_experts.dtype)
    out = op.add(out, summed, in_place=True)
    model.held_in_layer = logits
    del routed, out_of_experts, scores
    return out


def _route(model: Model, hidden: Value) -> tuple[Value, Value]:
    """(each expert's score of each token, 0 but for the best; the logits)."""
    experts, name = model.arch.experts, _FEED + "router.weight"
    logits = model.product(hidden, model.weight(name), experts.num)
    best, chosen = routing.top_k(logits, model.num_tokens * experts.per_token)
    filled = routing.scattered(best, chosen, logits.numel)
    return op.cast(op.elementwise(op.cast(filled, "fp32"), saves="output"), logits.dtype), logits


def _repeated(value: Value, times: int) -> Value:
    """``value.repeat(times, 1)``: copies, whose gradients are summed."""
    numel = value.numel
    out = value.tape.new(times * numel, value.dtype)
    value.tape.record([value], [out], [], lambda grads: [op.summed(grads[0], numel)])
    return out


def _experts(model: Model, rows: Value) -> Value:
    """``Llama4TextExperts``: two batched products, one matrix for each expert."""
    both = _product(model, rows, _FEED + "experts.gate_up_proj")
    inner = gated(model, both)
    return _product(model, inner, _FEED + "experts.down_proj")


def _product(model: Model, rows: Value, name: str) -> Value:
    num, _, num_out = model.tensors[name].shape
    weight = model.autocasted(model.weight(name))
    given = rows if model.setup.autocast == "none" else op.cast(rows, model.setup.autocast)
    out = op.batched_product(given, weight, num * model.num_tokens * num_out)
    out.contiguous = True
    return out
