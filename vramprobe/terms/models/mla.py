"""DeepSeek's layers on the tape: attention by way of narrow latents (MLA), shared experts, a dense first layer.

In: a Model. Out: the embedding and one layer, in the order of transformers' ``modeling_deepseek_v2.py``. Queries and
keys are wider than values, and one rotated part of the keys serves all heads. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import llama, routing
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.experts import Routing, gated, grouped_experts, router_weight
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value


def embed(model: Model) -> Value:
    """The tokens' rows; beside them what every layer is handed, with rotations as complex numbers."""
    return llama.embed(model, make_tables=_complex_tables)


def _complex_tables(model: Model, dtype: str) -> None:
    """A complex number of 8 bytes for each pair of rotated elements, made by torch.polar and scaled once more, whatever
    ``dtype`` the hidden states have.
    """
    numel = model.setup.seq_len * model.arch.rotary_size
    made = model.tape.new(numel, "fp32")
    model.tables = (op.value_like(made),)


def layer(model: Model, hidden: Value) -> Value:
    """A decoder layer: a llama's, with another attention, and with experts beyond the first dense ones."""
    is_dense = model.layer in model.arch.dense_layers
    return llama.layer(model, hidden, _attention, llama.gated_mlp if is_dense else _mixture)


def _mixture(model: Model, prefix: str, hidden: Value) -> Value:
    routed = _route(model, f"{prefix}gate", hidden)
    out = grouped_experts(model, f"{prefix}experts.", layout.whole(hidden), routed, gated)  # a view by tokens
    return op.add(out, llama.gated_mlp(model, f"{prefix}shared_experts.", hidden))


def _route(model: Model, name: str, hidden: Value) -> Routing:
    """The router works in fp32, but for what autocast does to its product; its scores are scaled, not renormalised."""
    experts = model.arch.experts
    weight, _held = router_weight(model, name)
    logits = model.product(op.cast(hidden, "fp32"), op.cast(weight, "fp32"), experts.num)
    scores = op.elementwise(op.cast(logits, "fp32"), saves="output")
    scores, chosen = routing.top_k(scores, model.num_tokens * experts.per_token)
    return Routing(logits, op.scaled(scores), chosen)


def _attention(model: Model, prefix: str, hidden: Value) -> Value:
    arch, num_tokens = model.arch, model.num_tokens
    num_heads, rotated = arch.num_heads, arch.rotary_size
    still, value_size = arch.head_size - rotated, arch.value_size or arch.head_size
    if f"{prefix}q_proj.weight" in model.tensors:
        query = model.linear(prefix + "q_proj", hidden)
    else:
        query = model.linear(prefix + "q_a_proj", hidden)
        query = model.linear(prefix + "q_b_proj", model.rms_norm(prefix + "q_a_layernorm", query))
    query, num_rows = layout.heads(query), num_tokens * num_heads
    query_still, query_turned = layout.parts(query, [num_rows * still, num_rows * rotated], by_heads=True)
    latents = model.linear(prefix + "kv_a_proj_with_mqa", hidden)
    num_latent = latents.numel - num_tokens * rotated
    latent, key_turned = layout.parts(latents, [num_latent, num_tokens * rotated], by_heads=False)
    latent = model.rms_norm(prefix + "kv_a_layernorm", latent)
    query_turned, key_turned = _rotated(model, query_turned, key_turned)
    whole_query = layout.concatenate(query_still, query_turned)
    both = layout.heads(model.linear(prefix + "kv_b_proj", latent))
    key_still, value = layout.parts(both, [num_rows * still, num_rows * value_size], by_heads=True)
    del both
    key = _joined(key_still, key_turned, num_heads)
    out = model.attend(whole_query, key, value)
    return model.linear(prefix + "o_proj", out)


def _rotated(model: Model, query: Value, key: Value) -> tuple[Value, Value]:
    """``apply_rotary_emb``: as complex fp32 numbers, times the shared ones, which are all that is saved."""
    wide_query, wide_key = op.cast(query, "fp32"), op.cast(key, "fp32")
    turned_query = op.cast(times(wide_query, model.tables[0]), query.dtype)
    turned_query.contiguous = True  # only concatenated
    return turned_query, op.cast(times(wide_key, model.tables[0]), key.dtype)


def times(value: Value, table: Value) -> Value:
    """Complex numbers times the shared ones."""
    out = op.value_like(value)
    value.tape.record([value], [out], [table], lambda grads: [op.value_like(grads[0])])
    return out


def _joined(still: Value, turned: Value, num_heads: int) -> Value:
    """Keys: an empty tensor into which the heads' own parts and the one rotated part are copied.

    Backward of each copy clones the whole gradient and its slice (torch/csrc/autograd, ``CopySlices``).
    """
    tape, (num_still, num_turned) = still.tape, (still.numel, turned.numel)
    out = tape.new(num_still + num_turned * num_heads, still.dtype)
    out.contiguous = False

    def backward(grads: list[Value | None]) -> list[Value | None]:
        dtype, numel = grads[0].dtype, grads[0].numel
        last = tape.new(numel, dtype)
        grad_turned = tape.new(num_turned * num_heads, dtype)
        zeros = op.value_like(grad_turned)
        grads[0] = None
        del zeros
        first = tape.new(numel, dtype)
        grad_still = tape.new(num_still, dtype)
        grad_still.contiguous = False
        del last, first
        return [grad_still, tape.new(num_turned, dtype)]

    tape.record([still, turned], [out], [], backward)
    return out
