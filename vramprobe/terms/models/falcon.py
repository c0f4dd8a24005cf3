"""Falcon and BLOOM on the tape: fused projections, their own eager attention, dropout before the residual.

In: a Model. Out: the embedding, one layer and what comes after the last one, as families.py runs them. Reads like
transformers' ``modeling_falcon.py`` (Falcon 7B's branches) and ``modeling_bloom.py``. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import llama
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.activations import bloom_gelu
from vramprobe.terms.models.attention import num_scores, product
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

_LAYER = "transformer.h.{layer}."


def falcon_embed(model: Model) -> Value:
    """The embedding, and what every layer is handed."""
    return llama.embed(model, "transformer.word_embeddings.weight")


def falcon_layer(model: Model, hidden: Value) -> Value:
    """Attention and MLP beside each other, on one norm."""
    residual = hidden
    normed = model.layer_norm(_LAYER + "input_layernorm", hidden)
    attention, scores = _falcon_attention(model, _LAYER + "self_attention.", normed)
    inner = model.activation(model.linear(_LAYER + "mlp.dense_h_to_4h", normed))
    mlp = model.linear(_LAYER + "mlp.dense_4h_to_h", inner)
    del inner
    mlp = op.add(mlp, attention, in_place=True)
    hidden = op.add(residual, model.dropout(mlp, model.arch.residual_dropout))
    model.returned = scores
    return hidden


def _falcon_attention(model: Model, prefix: str, hidden: Value) -> tuple[Value, Value | None]:
    numel = model.num_tokens * model.arch.head_size
    fused = model.linear(prefix + "query_key_value", hidden)
    query = layout.part(fused, numel * model.arch.num_heads, by_heads=False)
    key, value = layout.heads(layout.chosen(fused, numel)), layout.heads(layout.chosen(fused, numel))
    query, key = model.rotary(query), model.rotary(key)
    if model.setup.attn == "eager":
        out, scores = _falcon_eager(model, query, key, value, hidden.dtype)
    else:
        out, scores = model.attend(query, key, value), None
    return model.linear(prefix + "dense", out), scores


def _falcon_eager(model: Model, query: Value, key: Value, value: Value, dtype: str) -> tuple[Value, Value]:
    """Scores scaled in place; the softmax in the hidden states' dtype."""
    setup, single = model.setup, model.setup.batch_size == 1
    if setup.autocast != "none":
        query, key = op.cast(query, setup.autocast), op.cast(key, setup.autocast)
    query = layout.by_heads(query, setup.batch_size)
    key = layout.repeated(key, query.numel, as_view=single)
    scores = product(query, key, num_scores(setup), setup.batch_size)
    scores = op.scaled(scores, in_place=True)
    scores = op.softmax(op.cast(op.add(scores, model.mask), dtype), setup.device)
    if setup.autocast != "none":
        value = op.cast(value, setup.autocast)
    value = layout.repeated(value, query.numel, as_view=single)
    out = product(scores, value, query.numel, setup.batch_size, setup.autocast)
    out.contiguous = False
    return layout.contiguous(out), scores


def finish(model: Model, hidden: Value) -> Value:
    """After the last layer."""
    return model.layer_norm("transformer.ln_f", hidden)


def bloom_embed(model: Model) -> Value:
    """The embedding with its norm; ALiBi's biases instead of positions, one per row, head and token."""
    setup, tape = model.setup, model.tape
    tokens = model.embed("transformer.word_embeddings.weight", model.num_tokens)
    hidden = model.layer_norm("transformer.word_embeddings_layernorm", tokens)
    model.held.append(tokens)
    alibi = tape.new(setup.batch_size * model.arch.num_heads * setup.seq_len, hidden.dtype)
    model.share(alibi, tokens.dtype)
    return hidden


def bloom_layer(model: Model, hidden: Value) -> Value:
    """One BloomBlock."""
    arch = model.arch
    normed = model.layer_norm(_LAYER + "input_layernorm", hidden)
    residual = hidden if arch.norm_first else normed
    attention, probabilities = _bloom_attention(model, _LAYER + "self_attention.", normed, residual)
    normed = model.layer_norm(_LAYER + "post_attention_layernorm", attention)
    inner = bloom_gelu(model.linear(_LAYER + "mlp.dense_h_to_4h", normed))
    out = model.dropout(model.linear(_LAYER + "mlp.dense_4h_to_h", inner), arch.residual_dropout)
    hidden = op.add(attention if arch.norm_first else normed, out)
    model.returned = probabilities
    return hidden


def _bloom_attention(model: Model, prefix: str, hidden: Value, residual: Value) -> tuple[Value, Value]:
    """With the residual, which is added here."""
    setup, alibi = model.setup, model.shared[0]
    fused = model.linear(prefix + "query_key_value", hidden)
    numel, dtype = fused.numel // 3, fused.dtype
    parts = [layout.part(fused, numel, by_heads=False) for _ in range(3)]
    query, key, value = (layout.by_heads(part, setup.batch_size) for part in parts)
    del parts
    if setup.autocast != "none":
        alibi, query, key = (op.cast(x, setup.autocast) for x in (alibi, query, key))
    scores = op.batched_product(query, key, num_scores(setup), is_scaled=True)  # baddbmm, which saves no biases
    weights = op.add(scores, model.mask)
    probabilities = op.cast(op.softmax_in_fp32(weights, setup.device), dtype)
    probabilities = op.dropout(probabilities, model.arch.attention_dropout, model.device)
    out = product(probabilities, value, numel, setup.batch_size, setup.autocast)
    out.contiguous = False  # scores and weights stay in variables, unlike elsewhere
    out = layout.contiguous(out)
    attention = model.dropout(model.linear(prefix + "dense", out), model.arch.residual_dropout)
    attention = op.add(residual, attention)
    return attention, probabilities
