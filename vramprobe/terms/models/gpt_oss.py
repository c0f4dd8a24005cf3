"""gpt-oss on the tape: attention with sinks, experts with biases and a clamped gate.

In: a Model. Out: the embedding, one layer and the last norm, in the order of transformers' ``modeling_gpt_oss.py``. Its
attention is the eager one alone (transformers has no sdpa for it), whose masks, full and sliding, are of one size: all
layers are alike however long the sequence is. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import llama, routing
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.experts import Routing, grouped_experts
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value


def embed(model: Model) -> Value:
    """The tokens' rows; beside them two masks, and tables of half a head."""
    return llama.embed(model, make_tables=_half_tables)


def _half_tables(model: Model, dtype: str) -> None:
    angles = model.tape.new(model.setup.seq_len * model.arch.rotary_size // 2, "fp32")
    cos, sin = op.value_like(angles), op.value_like(angles)
    model.tables = (op.cast(cos, dtype), op.cast(sin, dtype))


def layer(model: Model, hidden: Value) -> Value:
    """A decoder layer: a llama's, with attention, experts and norm of its own."""
    return llama.layer(model, hidden, _attention, _mixture, norm)


def finish(model: Model, hidden: Value) -> Value:
    """The norm after the last layer."""
    return norm(model, "model.norm", hidden)


def norm(model: Model, name: str, value: Value) -> Value:
    """``GptOssRMSNorm``: the weight is applied in fp32."""
    weight = model.weight(f"{name}.weight")
    hidden = op.cast(value, "fp32")
    variance = op.mean_of_rows(op.power(hidden), value.numel // weight.numel)
    hidden = op.mul(hidden, op.elementwise(op.copied(variance), saves="output"), by_row=True)
    return op.cast(op.mul(weight, hidden), value.dtype)


def _attention(model: Model, prefix: str, hidden: Value) -> Value:
    query = layout.heads(model.linear(prefix + "q_proj", hidden))
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    query, key = _rotated(model, query), _rotated(model, key)
    out = _attend(model, query, key, value, model.weight(prefix + "sinks"))
    return model.linear(prefix + "o_proj", out)


def _rotated(model: Model, value: Value) -> Value:
    """``_apply_rotary_emb``: both halves of each head, turned and put together again."""
    cos, sin = model.tables
    half = value.numel // 2
    first, second = layout.parts(value, [half, half], by_heads=True)
    turned_first = _minus(op.mul(first, cos), op.mul(second, sin))
    turned_second = op.add(op.mul(second, cos), op.mul(first, sin))
    return layout.concatenate(turned_first, turned_second)


def _minus(left: Value, right: Value) -> Value:
    """``left - right``: backward hands on the gradient and its negative, summed over what was broadcast."""
    tape, numel = left.tape, right.numel
    out = op.value_like(left)

    def backward(grads: list[Value]) -> list[Value | None]:
        negative = op.value_like(grads[0])
        if numel < negative.numel:
            negative = tape.new(numel, negative.dtype)
        return [tape.view(grads[0]), negative]

    tape.record([left, right], [out], [], backward)
    return out


def _attend(model: Model, query: Value, key: Value, value: Value, sinks: Value) -> Value:
    """``eager_attention_forward`` with a column of sinks beside the scores, taken off again after the softmax."""
    setup, arch = model.setup, model.arch
    num_rows = model.num_tokens * arch.num_heads
    if key.numel != query.numel:
        single = setup.batch_size == arch.num_kv_heads == 1
        key, value = (layout.repeated(x, query.numel, as_view=single) for x in (key, value))
    scores = model.heads_product(query, key, num_rows * setup.seq_len)
    scores = op.scaled(scores)
    scores = op.add(scores, model.mask)
    combined = _with_column(scores, sinks, num_rows)
    combined = _minus(combined, _row_maximum(combined, num_rows))
    weights = op.softmax(combined, setup.device)
    weights = _without_column(weights, num_rows)
    weights = op.cast(model.dropout(weights, arch.attention_dropout), value.dtype)
    del scores
    out = model.heads_product(weights, value, query.numel)
    out.contiguous = False
    model.held_in_layer = weights
    return layout.contiguous(out)


def _with_column(scores: Value, sinks: Value, num_rows: int) -> Value:
    """``torch.cat`` of the scores and each head's sink, spread over rows; the wider dtype wins."""
    tape, num_sinks, before = scores.tape, sinks.numel, scores.dtype
    needs_sinks, sinks_dtype, numel = sinks.needs_grad, sinks.dtype, scores.numel
    out = tape.new(numel + num_rows, op.wider(scores.dtype, sinks.dtype))
    out.contiguous = False

    def backward(grads: list[Value]) -> list[Value | None]:
        grad_scores = tape.view(grads[0], numel)
        grad_scores.is_view = True
        if before != grads[0].dtype:
            grad_scores = tape.new(numel, before)
        grad_scores.contiguous = False
        return [grad_scores, tape.new(num_sinks, sinks_dtype) if needs_sinks else None]

    tape.record([scores, sinks], [out], [], backward)
    return out


def _row_maximum(value: Value, num_rows: int) -> Value:
    """``value.max(dim=-1, keepdim=True).values``: saves the indices; backward scatters into zeros of the full size."""
    tape, numel = value.tape, value.numel
    values, indices = tape.new(num_rows, value.dtype), tape.new(num_rows, "int64")
    tape.record([value], [values], [indices], lambda grads: [tape.new(numel, grads[0].dtype)])
    return values


def _without_column(value: Value, num_rows: int) -> Value:
    """``value[..., :-1]``: a view; backward makes zeros of the full size."""
    tape, numel = value.tape, value.numel
    out = tape.view(value, numel - num_rows)
    out.contiguous = False
    tape.record([value], [out], [], lambda grads: [tape.new(numel, grads[0].dtype)])
    return out


def _mixture(model: Model, prefix: str, hidden: Value) -> Value:
    routed = _route(model, f"{prefix}router", hidden)
    return grouped_experts(model, f"{prefix}experts.", hidden, routed, _gated)


def _route(model: Model, name: str, hidden: Value) -> Routing:
    """The best logits of each token, then a softmax over these alone."""
    experts = model.arch.experts
    bias = model.autocasted(model.weight(f"{name}.bias"))
    logits = model.product(hidden, model.weight(f"{name}.weight"), experts.num, bias)
    best, chosen = routing.top_k(logits, model.num_tokens * experts.per_token)
    return Routing(logits, op.elementwise(best, saves="output"), chosen)


def _gated(model: Model, both: Value) -> Value:
    """``GptOssExperts._apply_gate``: gates and ups alternate, both are clamped: ``(up + 1) * gate * σ(α gate)``."""
    gate, up = _every_second(both), _every_second(both)
    gate = _clamped(gate, num_bounds=1)
    up = _clamped(up, num_bounds=2)
    glu = op.mul(gate, op.elementwise(op.scaled(gate), saves="output"))
    return op.mul(op.copied(up), glu)


def _every_second(value: Value) -> Value:
    """``value[..., ::2]``: a view; backward makes zeros of the full size."""
    tape, numel = value.tape, value.numel
    out = tape.view(value, numel // 2)
    tape.record([value], [out], [], lambda grads: [tape.new(numel, grads[0].dtype)])
    return out


def _clamped(value: Value, num_bounds: int) -> Value:
    """``value.clamp``: saves its input; backward looks at each bound through a mask of one byte per element."""
    tape = value.tape

    def backward(grads: list[Value]) -> list[Value | None]:
        masks = [tape.new(grads[0].numel, "bool") for _ in range(num_bounds)]
        made = op.value_like(grads[0])
        del masks
        return [made]

    out = op.value_like(value)
    tape.record([value], [out], [value], backward)
    return out
