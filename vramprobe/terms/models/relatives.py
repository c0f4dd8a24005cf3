"""Gemma 2 and 3, Phi 3 and OLMo 2 on the tape: llamas with norms, projections or a rotation of their own.

In: a Model. Out: one layer, as families.py runs them. Reads like transformers' ``modeling_gemma2.py``,
``modeling_gemma3.py``, ``modeling_phi3.py`` and ``modeling_olmo2.py``. Never imports torch or the workload.
"""

from __future__ import annotations

from vramprobe.terms.models import llama
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

_LAYER = "model.layers.{layer}."


def gemma_layer(model: Model, hidden: Value) -> Value:
    """Gemma 2 and 3: a norm before and after both attention and MLP."""
    residual = hidden
    hidden = model.rms_norm(_LAYER + "input_layernorm", hidden)
    hidden = llama.attention(model, _LAYER + "self_attn.", hidden)
    hidden = model.rms_norm(_LAYER + "post_attention_layernorm", hidden)
    hidden = op.add(residual, hidden)
    residual = hidden
    hidden = model.rms_norm(_LAYER + "pre_feedforward_layernorm", hidden)
    hidden = llama.gated_mlp(model, _LAYER + "mlp.", hidden)
    hidden = model.rms_norm(_LAYER + "post_feedforward_layernorm", hidden)
    return op.add(residual, hidden)


def phi3_layer(model: Model, hidden: Value) -> Value:
    """Phi 3: q, k and v in one projection, gate and up in another."""
    return llama.layer(model, hidden, _phi3_attention, _phi3_mlp)


def _phi3_attention(model: Model, prefix: str, hidden: Value) -> Value:
    arch, num_tokens = model.arch, model.num_tokens
    fused = model.linear(prefix + "qkv_proj", hidden)
    keys_numel = num_tokens * arch.num_kv_heads * arch.head_size
    parts = [
        layout.part(fused, numel) for numel in (num_tokens * arch.num_heads * arch.head_size, keys_numel, keys_numel)
    ]
    query, key, value = (layout.heads(part) for part in parts)
    del parts
    (query, query_rest), (key, key_rest) = llama.rotated_part(model, query), llama.rotated_part(model, key)
    query = layout.concatenate(model.rotary(query), query_rest)
    key = layout.concatenate(model.rotary(key), key_rest)
    del query_rest, key_rest
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)


def _phi3_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    up = model.linear(prefix + "gate_up_proj", hidden)
    gate, up = layout.split(up, 2)
    up = op.mul(up, model.activation(gate))
    return model.linear(prefix + "down_proj", up)


def olmo2_layer(model: Model, hidden: Value) -> Value:
    """OLMo 2: norms only after attention and MLP."""
    residual = hidden
    hidden = _olmo2_attention(model, _LAYER + "self_attn.", hidden)
    hidden = model.rms_norm(_LAYER + "post_attention_layernorm", hidden)
    hidden = op.add(residual, hidden)
    residual = hidden
    hidden = llama.gated_mlp(model, _LAYER + "mlp.", hidden)
    hidden = model.rms_norm(_LAYER + "post_feedforward_layernorm", hidden)
    return op.add(residual, hidden)


def _olmo2_attention(model: Model, prefix: str, hidden: Value) -> Value:
    """Queries and keys are normed over their whole width, before they are heads."""
    query = model.rms_norm(prefix + "q_norm", model.linear(prefix + "q_proj", hidden))
    key = model.rms_norm(prefix + "k_norm", model.linear(prefix + "k_proj", hidden))
    value = model.linear(prefix + "v_proj", hidden)
    query, key, value = layout.heads(query), layout.heads(key), layout.heads(value)
    turned = model.rotary(query), model.rotary(key)  # in fp32, which the tables are
    query, key = (op.cast(new, old.dtype) for new, old in zip(turned, (query, key), strict=True))
    del turned
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)
