"""Llamas with one thing of their own on the tape: a norm, a factor, a dropout, an MLP without a gate.

In: a Model. Out: one layer, as families.py runs them. Reads like transformers'
``modeling_granite.py``, ``modeling_hunyuan_v1_dense.py``, ``modeling_arcee.py`` and ``modeling_ministral3.py``; Gemma
and Seed-OSS are llamas but for what the Model knows of them. Never imports torch or the workload.
"""

from __future__ import annotations

from vramprobe.terms.models import llama
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

_LAYER = "model.layers.{layer}."


def layer(model: Model, hidden: Value) -> Value:
    """One layer of any of them."""
    match model.arch.model_type:
        case "granite":
            return _granite_layer(model, hidden)
        case "hunyuan_v1_dense":
            return llama.layer(model, hidden, attend=_normed_attention)
        case "arcee":
            return llama.layer(model, hidden, mlp=_plain_mlp)
        case "ministral3":
            return llama.layer(model, hidden, attend=_scaled_attention)
    return llama.layer(model, hidden)


def _granite_layer(model: Model, hidden: Value) -> Value:
    """Both blocks' results are multiplied by a number before they are added."""
    residual = hidden
    hidden = model.rms_norm(_LAYER + "input_layernorm", hidden)
    hidden = llama.attention(model, _LAYER + "self_attn.", hidden)
    hidden = op.add(residual, op.scaled(hidden))
    residual = hidden
    hidden = model.rms_norm(_LAYER + "post_attention_layernorm", hidden)
    hidden = llama.gated_mlp(model, _LAYER + "mlp.", hidden)
    return op.add(residual, op.scaled(hidden))


def _normed_attention(model: Model, prefix: str, hidden: Value) -> Value:
    """Hunyuan's: queries and keys are normed head by head, after they are rotated."""
    query = layout.heads(model.linear(prefix + "q_proj", hidden))
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    query, key = model.rotary(query), model.rotary(key)
    query = model.rms_norm(prefix + "query_layernorm", query)
    key = model.rms_norm(prefix + "key_layernorm", key)
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)


def _plain_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    """Arcee's: no gate, and an activation that is squared."""
    inner = model.activation(model.linear(prefix + "up_proj", hidden))
    return model.linear(prefix + "down_proj", inner)


def _scaled_attention(model: Model, prefix: str, hidden: Value) -> Value:
    """Ministral 3's: rotated queries are multiplied by a number for each position, made anew in each layer."""
    query = layout.heads(model.linear(prefix + "q_proj", hidden))
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    query, key = model.rotary(query), model.rotary(key)
    query = op.mul(query, op.cast(model.tape.new(model.setup.seq_len, "fp32"), query.dtype))
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)
