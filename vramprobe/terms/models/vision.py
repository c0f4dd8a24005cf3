"""Qwen 2.5 and 3 VL's vision towers on the tape, and how their features take the place of tokens.

In: a Model whose Architecture has a tower. Out: the tokens' rows with the features in them, as its first layer gets
them. Reads like transformers' ``modeling_qwen2_5_vl.py`` and ``modeling_qwen3_vl.py``; the features of single blocks
(Qwen 3) are added here and not behind the first layers, which moves what is alive for an operator alone. Left out:
positions and indices, a few bytes a patch. Never imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.terms.models import llama
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import Value

#: Runs a layer, in a checkpoint where the cell has them: the model, the layer, its input.
Checkpointed = Callable[[Model, Callable[[Model, Value], Value], Value], Value]


def embed(model: Model, checkpointed: Checkpointed) -> Value:
    """The tokens' rows, with the images' features where a cell has images, and what every layer is handed."""
    rows = model.embed("model.embed_tokens.weight", model.num_tokens)
    if model.setup.pixels is not None:
        for features in _features(model, checkpointed):
            features = op.cast(features, rows.dtype)
            model.held.append(features)
            rows = _placed(rows, features)
    model.share(model.tape.new(3 * model.num_tokens, "int64"), rows.dtype)
    model.make_rotary_tables(rows.dtype)
    return rows


def _features(model: Model, checkpointed: Checkpointed) -> list[Value]:
    """What the tower makes of all images: of its last block first, then of those that have mergers of their own."""
    tower, tape = model.arch.tower, model.tape
    hidden, pixels = _patches(model)
    # In fp32 without a graph, and in the order of the windows.
    cos, sin = (tape.new(hidden.numel // tower.num_heads, "fp32") for _ in range(2))
    if tower.is_windowed:
        cos, sin = op.value_like(cos), op.value_like(sin)
    others = []
    for index in range(tower.depth):

        def block(model: Model, hidden: Value, index: int = index) -> Value:
            return _block(model, hidden, index, cos, sin)

        hidden = checkpointed(model, block, hidden) if model.setup.gradient_checkpointing else block(model, hidden)
        if index in tower.deepstack:
            others.append(_merged(model, f"visual.deepstack_merger_list.{tower.deepstack.index(index)}", hidden))
    merged = _merged(model, "visual.merger", hidden)
    del pixels
    if tower.is_windowed:
        merged = _in_another_order(merged)
    model.held += [hidden, merged]  # of the tower's output, which the model's own forward keeps
    return [_joined(merged), *others]


def _patches(model: Model) -> tuple[Value, Value | None]:
    """A convolution whose patches do not overlap, and in Qwen 3 learned positions; the pixels in the tower's dtype."""
    tower, tape, setup = model.arch.tower, model.tape, model.setup
    name = "visual.patch_embed.proj"
    weight = model.weight(f"{name}.weight")
    num = setup.batch_size * setup.pixels.per_row
    pixels = tape.new(num * tower.patch_numel, weight.dtype) if weight.dtype != "fp32" else None
    dtype = weight.dtype if setup.autocast == "none" else setup.autocast
    copies = [tape.new(num * tower.patch_numel, dtype), model.autocasted(weight)] if weight.dtype != dtype else []
    out = tape.new(num * tower.width, dtype)
    bias = [model.weight(f"{name}.bias")] if tower.deepstack else []
    weight_dtype, sizes = weight.dtype, [weight.numel, *(one.numel for one in bias)]

    def backward(grads: list[Value]) -> list[Value | None]:
        return [tape.new(size, weight_dtype) for size in sizes]

    tape.record([weight, *bias], [out], [pixels] if pixels is not None else [], backward)
    if not weight.needs_grad and setup.gradient_checkpointing and tower.is_windowed:
        model.require_input_grad(out)  # transformers' enable_input_require_grads, which knows Qwen 2.5's patches
    del copies
    if tower.is_windowed:
        return _in_another_order(out), pixels
    return op.add(out, op.cast(_positions(model, num), dtype)), pixels


def _positions(model: Model, num: int) -> Value:
    """The learned positions of as many patches: of each the four nearest rows of the table, weighted and added up."""
    tape, width = model.tape, model.arch.tower.width
    table = model.weight("visual.pos_embed.weight")
    num_sorted = min(4 * num, table.numel // width) if tape.device == "cuda" else 0
    rows = op.embedding(4 * num, table, width, tape.new(4 * num, "int64"), num_sorted)
    weighted = op.mul(rows, tape.new(4 * num, "fp32"))
    del rows
    out, numel = tape.new(num * width, "fp32"), weighted.numel
    tape.record([weighted], [out], [], lambda grads: [tape.view(grads[0], numel)])
    return out


def _in_another_order(value: Value) -> Value:
    """``value[index]``: a copy, and zeros of the full size in backward."""
    out = op.value_like(value)
    value.tape.record([value], [out], [], lambda grads: [op.value_like(grads[0])])
    return out


def _block(model: Model, hidden: Value, index: int, cos: Value, sin: Value) -> Value:
    prefix = f"visual.blocks.{index}."
    hidden = op.add(hidden, _attention(model, prefix, _norm(model, prefix + "norm1", hidden), index, cos, sin))
    return op.add(hidden, _mlp(model, prefix, _norm(model, prefix + "norm2", hidden)))


def _norm(model: Model, name: str, hidden: Value) -> Value:
    return model.rms_norm(name, hidden) if model.arch.tower.is_windowed else model.layer_norm(name, hidden)


def _attention(model: Model, prefix: str, hidden: Value, index: int, cos: Value, sin: Value) -> Value:
    """Queries and keys are rotated in fp32; each image, or each window, is attended to by itself."""
    head = model.arch.tower.width // model.arch.tower.num_heads
    fused = layout.heads(model.linear(prefix + "attn.qkv", hidden))
    query, key, value = layout.parts(fused, [fused.numel // 3] * 3, by_heads=True)
    dtype = query.dtype
    wide, wide_key = op.cast(query, "fp32"), op.cast(key, "fp32")
    query = op.rotary(wide, cos, sin, head)
    key = op.rotary(wide_key, cos, sin, head)
    query = op.cast(query, dtype)
    key = op.cast(key, dtype)
    del wide, wide_key
    return model.linear(prefix + "attn.proj", _attended(model, query, key, value, index))


def _attended(model: Model, query: Value, key: Value, value: Value, index: int) -> Value:
    """The windows' attention, as they are cut and joined again."""
    setup, tower, tape = model.setup, model.arch.tower, model.tape
    longest = (
        setup.pixels.per_window if tower.is_windowed and index not in tower.whole_blocks else setup.pixels.per_image
    )
    head = tower.width // tower.num_heads
    query, key, value = (layout.parts(one, [one.numel], by_heads=False)[0] for one in (query, key, value))
    if setup.autocast != "none":
        value, key, query = (op.cast(one, setup.autocast) for one in (value, key, query))  # as g++ evaluates arguments
    scratch = tape.scratch_of_attention((1, tower.num_heads, longest, head, head), query.dtype, False, 0.0)
    out = op.fused_attention(query, key, value, query.numel, query.numel // head, model.device, None, scratch)
    return op.copied(out)


def _mlp(model: Model, prefix: str, hidden: Value) -> Value:
    if model.arch.tower.is_windowed:
        return llama.gated_mlp(model, prefix + "mlp.", hidden)
    wide = op.elementwise(model.linear(prefix + "mlp.linear_fc1", hidden), saves="input")
    return model.linear(prefix + "mlp.linear_fc2", wide)


def _merged(model: Model, name: str, hidden: Value) -> Value:
    """Four patches to a token, as wide as the text's."""
    first, second, norm = (
        ("mlp.0", "mlp.2", "ln_q") if model.arch.tower.is_windowed else ("linear_fc1", "linear_fc2", "norm")
    )
    wide = op.elementwise(model.linear(f"{name}.{first}", _norm(model, f"{name}.{norm}", hidden)), saves="input")
    return model.linear(f"{name}.{second}", wide)


def _joined(value: Value) -> Value:
    """The features of each image, joined; backward joins their gradients."""
    out = op.value_like(value)
    value.tape.record([value], [out], [], lambda grads: [op.value_like(grads[0])])
    return out


def _placed(rows: Value, features: Value) -> Value:
    """``rows.masked_scatter(mask, features)``; on CUDA its backward finds each feature's place once more."""
    tape, num_features, num_rows = rows.tape, features.numel, rows.numel
    out = op.value_like(rows)
    needs = rows.needs_grad, features.needs_grad

    def backward(grads: list[Value]) -> list[Value | None]:
        kept = op.value_like(grads[0]) if needs[0] else None
        chosen = None
        if needs[1]:
            mask = tape.new(num_rows, "bool") if tape.device == "cuda" else None
            places = tape.new(3 * num_features, "int64") if tape.device == "cuda" else None
            del mask
            chosen = tape.new(num_features, grads[0].dtype)
            del places
        return [kept, chosen]

    tape.record([rows, features], [out], [], backward)
    return out
