"""The llamas on the tape, and what many other families share with them: embedding, layer and last norm.

In: a Model; of another family also its attention, MLP or norm, where these are its own. Out: the embedding, one
layer and what comes after the last one, as families.py runs them. Reads like transformers' ``modeling_llama.py``. Never
imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

Block = Callable[[Model, str, Value], Value]  # an attention, an MLP or a norm: its weights' prefix or name, its input

_LAYER = "model.layers.{layer}."


def embed(model: Model, name: str = "model.embed_tokens.weight") -> Value:
    """The tokens' rows, and what every layer is handed: position ids, masks, the rotary tables."""
    hidden = model.embed(name, model.num_tokens)
    if model.arch.scales_residuals:
        hidden = op.scaled(hidden)
    hidden = model.dropout(hidden, model.arch.embedding_dropout)
    model.share(model.tape.new(model.setup.seq_len, "int64"), hidden.dtype)
    model.make_rotary_tables(hidden.dtype)
    return hidden


def rms_norm(model: Model, name: str, value: Value) -> Value:
    """The family's RMSNorm."""
    return model.rms_norm(name, value)


def attention(model: Model, prefix: str, hidden: Value) -> Value:
    """Three projections, rotated; queries and keys are normed head by head where the family does so."""
    is_normed = f"{prefix}q_norm.weight" in model.tensors
    norms_at_once = is_normed and model.arch.model_type in ("qwen3", "qwen3_moe")  # as each is made
    query = layout.heads(model.linear(prefix + "q_proj", hidden))
    if norms_at_once:
        query = model.rms_norm(prefix + "q_norm", query)
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    if norms_at_once:
        key = model.rms_norm(prefix + "k_norm", key)
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    if is_normed and not norms_at_once:
        query = model.rms_norm(prefix + "q_norm", query)
        key = model.rms_norm(prefix + "k_norm", key)
    query, key = model.rotary(query), model.rotary(key)
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)


def rotated_part(model: Model, value: Value) -> tuple[Value, Value]:
    """(the part of each head that is to be rotated, the rest, which is copied behind it even where it is empty)."""
    numel = value.numel // model.arch.head_size * model.arch.rotary_size
    # The slice that is the whole makes no zeros in backward, but the empty rest does.
    first = layout.part(value, numel) if numel < value.numel else layout.whole(value)
    return first, layout.part(value, value.numel - numel)


def gated_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    """``down(act(gate(x)) * up(x))``."""
    gate = model.activation(model.linear(prefix + "gate_proj", hidden))
    product = op.mul(gate, model.linear(prefix + "up_proj", hidden))
    del gate
    return model.linear(prefix + "down_proj", product)


def layer(
    model: Model, hidden: Value, attend: Block = attention, mlp: Block = gated_mlp, norm: Block = rms_norm
) -> Value:
    """A norm before attention and before the MLP, each added to the residual, after a dropout where there is one."""
    rate = model.arch.residual_dropout
    residual = hidden
    hidden = norm(model, _LAYER + "input_layernorm", hidden)
    hidden = attend(model, _LAYER + "self_attn.", hidden)
    hidden = op.add(residual, model.dropout(hidden, rate))
    residual = hidden
    hidden = norm(model, _LAYER + "post_attention_layernorm", hidden)
    hidden = mlp(model, _LAYER + "mlp.", hidden)
    return op.add(residual, model.dropout(hidden, rate))


def finish(model: Model, hidden: Value) -> Value:
    """The norm after the last layer."""
    return model.rms_norm("model.norm", hidden)
