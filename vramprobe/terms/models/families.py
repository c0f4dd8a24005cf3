"""The models' own code, rewritten over the tape: a few short functions per family that read like transformers' forward.

In: a Model on a Tape. Out: one forward with its loss, in the order of the real one, with checkpoints where the cell has
them. Never imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.architecture import LLAMA_LIKE, VARIANTS, Architecture
from vramprobe.terms.models import llama, relatives, variants
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.chunked_nll import chunked_nll
from vramprobe.terms.models.cut_cross_entropy import cut_cross_entropy
from vramprobe.terms.models.experts import mixture
from vramprobe.terms.models.fused_loss import fused_linear_cross_entropy
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape import layout
from vramprobe.terms.tape.graph import TEMPORARY, Checkpoint, Value
from vramprobe.terms.tape.tape import MIDDLE_LAYER

CPU_RNG_STATE_BYTES = 5056  # torch.get_rng_state(): what torch.utils.checkpoint keeps per layer
Layer = Callable[[Model, Value], Value]


def forward(model: Model) -> Value:
    """One forward with the loss, as ``model(input_ids, labels=…).loss``; returns the loss."""
    tape = model.tape
    hidden = last_hidden(model)
    with tape.cause("logits", saved="logits"):
        if model.setup.loss == "chunked_nll":
            loss = chunked_nll(model, hidden)
        elif model.setup.loss == "cut_cross_entropy":
            loss = cut_cross_entropy(model, hidden)
        elif model.setup.loss == "liger":
            loss = fused_linear_cross_entropy(model, hidden)
        else:
            logits = model.logits(hidden)
            loss = op.cross_entropy(logits, model.setup.batch_size, model.setup.seq_len)
    model.leave_autocast()
    if model.setup.loss == "nll":  # others make no logits
        outputs = logits
        if tape.raises_outputs and model.setup.autocast != "none":
            outputs = op.cast(logits, "fp32")  # accelerate hands out no other
        if tape.keeps_outputs:
            tape.kept = [loss, outputs, *model.inputs]  # and what was kept before goes
        del outputs
    return op.scaled(loss) if model.setup.accumulates else loss


def last_hidden(model: Model) -> Value:
    """What comes out of the last norm."""
    tape = model.tape
    embed, layer, finish = _family(model.arch)
    tape.at("forward", "embedding")
    hidden = embed(model)
    model.held.append(hidden)
    for index in model.layers:
        model.enter(index)
        tape.at("forward", layer_place(model.arch, index))
        hidden = _checkpointed(model, layer, hidden) if model.setup.gradient_checkpointing else layer(model, hidden)
        model.held_in_layer = None
    tape.at("forward", "loss")
    hidden = finish(model, hidden)
    model.end_of_layers()
    return hidden


def make_gradients(model: Model) -> None:
    """What an earlier micro-step leaves: a gradient of every trained weight, alive throughout this one."""
    tape = model.tape
    for index in model.layers:
        model.layer = index
        tape.at("forward", layer_place(model.arch, index))
        for name, tensor in model.tensors.items():
            if tensor.trained and (tensor.per_layer or index == 0):
                tape.make_gradient(model.weight(name))


def layer_place(arch: Architecture, layer: int) -> str:
    """Where in the depth a layer is; memory is linear between layers of one place.

    Layers that look through a window and layers that see everything are handed tables and masks of their own, and below
    the first of the others, backward has none of theirs left.
    """
    if layer == arch.num_layers - 1:
        return "last layer"
    if layer == 0:
        return "first layer"
    if len(set(arch.sliding_layers)) < 2:
        return MIDDLE_LAYER
    slides = arch.sliding_layers[layer]
    kind = "slides" if slides else "sees all"
    return f"{MIDDLE_LAYER} that {kind}" + ("" if (not slides) in arch.sliding_layers[:layer] else ", near the first")


def _checkpointed(model: Model, layer: Layer, hidden: Value) -> Value:
    """``torch.utils.checkpoint`` without re-entry: keep the layer's input, run it again in backward."""
    tape, index, tables, shared = model.tape, model.layer, model.tables, model.shared
    with tape.cause("checkpoint_store"):
        # The CPU's random state is kept to repeat dropout; CUDA's is copied to the host.
        state = tape.new(CPU_RNG_STATE_BYTES, "int8") if model.device == "cpu" else None
    tape.keep(hidden, "checkpoint_store")

    def run_again(hidden: Value = hidden, state: Value | None = state) -> Value:
        model.layer, model.tables, model.shared = index, tables, shared
        now = state and op.value_like(state)  # fork_rng puts the present state back afterwards
        try:
            return layer(model, hidden)
        finally:
            del now
            model.held_in_layer = None
            model.end_of_layers()
            model.leave_autocast()

    checkpoint = Checkpoint(tape, run_again)
    with tape.checkpointed(checkpoint), tape.cause(TEMPORARY, saved="checkpoint_store"):
        return layer(model, hidden)


def _family(arch: Architecture) -> tuple[Callable[[Model], Value], Layer, Layer]:
    """(embedding, one layer, what comes after the last layer) of a family."""
    if arch.model_type in LLAMA_LIKE:
        return llama.embed, llama.layer, llama.finish
    if arch.model_type in VARIANTS:
        return llama.embed, variants.layer, llama.finish
    match arch.model_type:
        case "mixtral" | "qwen3_moe":
            return llama.embed, _mixture_layer, llama.finish
        case "gpt_neox":
            return _neox_embed, _neox_layer, lambda model, hidden: model.layer_norm("gpt_neox.final_layer_norm", hidden)
        case "gpt2":
            return _gpt2_embed, _gpt2_layer, lambda model, hidden: model.layer_norm("transformer.ln_f", hidden)
        case "opt":
            return _opt_embed, _opt_layer, _opt_finish
        case "gemma2" | "gemma3_text":
            return llama.embed, relatives.gemma_layer, llama.finish
        case "phi3":
            return llama.embed, relatives.phi3_layer, llama.finish
        case "olmo2" | "olmo3":
            return llama.embed, relatives.olmo2_layer, llama.finish
    raise AssertionError(f"architecture() knows {arch.model_type}, this walk does not")


def _mixture_layer(model: Model, hidden: Value) -> Value:
    """Mixtral's and Qwen3's: experts in place of the MLP."""
    return llama.layer(model, hidden, mlp=mixture)


def _neox_embed(model: Model) -> Value:
    return llama.embed(model, "gpt_neox.embed_in.weight")


def _neox_layer(model: Model, hidden: Value) -> Value:
    prefix, rate = "gpt_neox.layers.{layer}.", model.arch.residual_dropout
    attention = _neox_attention(model, prefix, model.layer_norm(prefix + "input_layernorm", hidden))
    attention = model.dropout(attention, rate)
    if not model.arch.parallel_residual:
        attention = op.add(attention, hidden)
        mlp = model.dropout(_neox_mlp(model, prefix, attention), rate)
        return op.add(mlp, attention)
    mlp = model.dropout(_neox_mlp(model, prefix, hidden), rate)
    return op.add(op.add(mlp, attention), hidden)


def _neox_attention(model: Model, prefix: str, hidden: Value) -> Value:
    fused = layout.heads(model.linear(prefix + "attention.query_key_value", hidden))
    query, key, value = layout.parts(fused, [fused.numel // 3] * 3, by_heads=True)
    (query, query_rest), (key, key_rest) = llama.rotated_part(model, query), llama.rotated_part(model, key)
    query, key = model.rotary(query), model.rotary(key)
    query = layout.concatenate(query, query_rest)
    key = layout.concatenate(key, key_rest)
    del query_rest, key_rest
    out = model.attend(query, key, value)
    return model.linear(prefix + "attention.dense", out)


def _neox_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    normed = model.layer_norm(prefix + "post_attention_layernorm", hidden)
    hidden = model.linear(prefix + "mlp.dense_h_to_4h", normed)
    hidden = model.activation(hidden)
    return model.linear(prefix + "mlp.dense_4h_to_h", hidden)


def _gpt2_embed(model: Model) -> Value:
    tokens = model.embed("transformer.wte.weight", model.num_tokens)
    positions = model.tape.new(model.setup.seq_len, "int64")
    places = model.embed("transformer.wpe.weight", model.setup.seq_len, positions)
    model.held += [tokens, places]
    hidden = op.add(tokens, places)
    model.share(positions, tokens.dtype)
    return model.dropout(hidden, model.arch.embedding_dropout)


def _gpt2_layer(model: Model, hidden: Value) -> Value:
    prefix = "transformer.h.{layer}."
    residual = hidden
    hidden = model.layer_norm(prefix + "ln_1", hidden)
    attention = _gpt2_attention(model, prefix + "attn.", hidden)
    hidden = op.add(attention, residual)
    residual = hidden
    hidden = model.layer_norm(prefix + "ln_2", hidden)
    fed = _gpt2_mlp(model, prefix + "mlp.", hidden)
    hidden = op.add(residual, fed)
    return hidden


def _gpt2_attention(model: Model, prefix: str, hidden: Value) -> Value:
    query, key, value = (layout.heads(part) for part in layout.split(model.linear(prefix + "c_attn", hidden), 3))
    out = model.attend(query, key, value)
    out = model.linear(prefix + "c_proj", out)
    return model.dropout(out, model.arch.residual_dropout)


def _gpt2_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    hidden = model.linear(prefix + "c_fc", hidden)
    hidden = model.activation(hidden)
    hidden = model.linear(prefix + "c_proj", hidden)
    return model.dropout(hidden, model.arch.residual_dropout)


def _opt_embed(model: Model) -> Value:
    tokens = model.embed("model.decoder.embed_tokens.weight", model.num_tokens)
    position_ids = model.tape.new(model.num_tokens, "int64")
    shifted = model.tape.new(model.num_tokens, "int64")  # OPT's positions start at 2
    places = model.embed("model.decoder.embed_positions.weight", model.num_tokens, shifted)
    dtype = tokens.dtype
    if "model.decoder.project_in.weight" in model.tensors:
        tokens = model.linear("model.decoder.project_in", tokens)
    model.held += [tokens, places, model.tape.new(model.num_tokens, "fp32")]  # the mask of ones the positions come from
    model.share(position_ids, dtype)
    return op.add(tokens, places)


def _opt_layer(model: Model, hidden: Value) -> Value:
    prefix, first = "model.decoder.layers.{layer}.", model.arch.norm_first
    residual = hidden
    if first:
        hidden = model.layer_norm(prefix + "self_attn_layer_norm", hidden)
    hidden = _opt_attention(model, prefix + "self_attn.", hidden)
    hidden = model.dropout(hidden, model.arch.residual_dropout)
    hidden = op.add(residual, hidden)
    if not first:
        hidden = model.layer_norm(prefix + "self_attn_layer_norm", hidden)
    hidden = residual = layout.reshaped(hidden)  # one row a token
    if first:
        hidden = model.layer_norm(prefix + "final_layer_norm", hidden)
    hidden = model.linear(prefix + "fc1", hidden)
    hidden = model.activation(hidden)
    hidden = model.linear(prefix + "fc2", hidden)
    hidden = model.dropout(hidden, model.arch.residual_dropout)
    hidden = layout.reshaped(op.add(residual, hidden))
    return hidden if first else model.layer_norm(prefix + "final_layer_norm", hidden)


def _opt_attention(model: Model, prefix: str, hidden: Value) -> Value:
    query = layout.heads(op.scaled(model.linear(prefix + "q_proj", hidden)))
    key = layout.heads(model.linear(prefix + "k_proj", hidden))
    value = layout.heads(model.linear(prefix + "v_proj", hidden))
    out = model.attend(query, key, value)
    return model.linear(prefix + "out_proj", out)


def _opt_finish(model: Model, hidden: Value) -> Value:
    if "model.decoder.final_layer_norm.weight" in model.tensors:
        hidden = model.layer_norm("model.decoder.final_layer_norm", hidden)
    if "model.decoder.project_out.weight" in model.tensors:
        hidden = model.linear("model.decoder.project_out", hidden)
    return hidden
