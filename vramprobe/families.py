"""The models' own code, rewritten over the tape: one short function per family that reads like transformers' forward.

In: a spec and its Architecture. Out: calls on a Tape, in the order of the real forward. What is cast, quantised,
adapted and checkpointed follows the spec. Never imports torch or the workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vramprobe import operators as op
from vramprobe.architecture import LLAMA_LIKE, Architecture, UnsupportedArchitecture
from vramprobe.attention import attend
from vramprobe.parameters import DOUBLE_QUANTISED, NF4_BLOCK, Tensor, lora_targets, tensors
from vramprobe.spec import CellSpec
from vramprobe.tape import TEMPORARY, Tape, Value

CPU_RNG_STATE_BYTES = 5056  # torch.get_rng_state(): what torch.utils.checkpoint keeps per layer
Layer = Callable[["Model", Value], Value]


class Model:
    """A model on a tape: its weights as constants, its batch's sizes, and the rules of its linears and norms."""

    def __init__(self, tape: Tape, spec: CellSpec, arch: Architecture, num_layers: int) -> None:
        self.tape, self.spec, self.arch, self.num_layers = tape, spec, arch, num_layers
        self.num_tokens, self.device = spec.num_tokens, spec.device
        self.tensors = {tensor.name: tensor for tensor in tensors(spec, arch)}
        self.targets = lora_targets(spec, arch)
        self.layer = 0
        self._weights: dict[str, Value] = {}
        self._cast_cache: dict[str, Value] = {}
        self.tables: tuple[Value, Value] | None = None  # rotary cos and sin
        self.shared: tuple[Value, ...] = ()  # position ids and mask: alive in forward, and held by every checkpoint
        self.held: list[Value] = []  # what the model's own forward keeps in a variable until its layers are done

    # -- weights ----------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Value:
        """The weight of this name, in the current layer where there is one per layer."""
        tensor, key = self.tensors[name], name.replace("{layer}", str(self.layer))
        if key not in self._weights:
            self._weights[key] = self.tape.constant(tensor.numel, tensor.dtype, trained=tensor.trained)
        return self._weights[key]

    def _autocast_weight(self, name: str) -> Value:
        """The weight as autocast hands it to a matmul: trained fp32 weights are cast once per forward and cached."""
        weight, key = self.weight(name), name.replace("{layer}", str(self.layer))
        if self.spec.autocast == "none" or weight.dtype == self.spec.autocast:
            return weight
        with self.tape.cause("cast_copies"):
            if not weight.needs_grad:
                return op.cast(weight, self.spec.autocast)
            if key not in self._cast_cache:
                self._cast_cache[key] = op.cast(weight, self.spec.autocast)
        return self._cast_cache[key]

    def leave_autocast(self) -> None:
        """The end of the autocast block: its cache of cast weights goes."""
        self._cast_cache.clear()

    # -- modules ----------------------------------------------------------------------------------------------------

    def linear(self, name: str, value: Value) -> Value:
        """A linear layer as it was prepared: plain, quantised, with an adapter."""
        if name in self.targets:
            return self._adapted(name, value, self._base(name, value))
        return self._base(name, value)

    def _base(self, name: str, value: Value) -> Value:
        tensor = self.tensors[f"{name}.weight"]
        return self._quantised(name, value, tensor) if tensor.quantised else self._plain(name, value)

    def _plain(self, name: str, value: Value) -> Value:
        bias = self._autocast_weight(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        return self._matmul(value, f"{name}.weight", bias, self.num_out(name))

    def _matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        """``F.linear`` under the cell's autocast: each call casts its own copy of a wider input."""
        given = value if self.spec.autocast == "none" else op.cast(value, self.spec.autocast)
        return op.linear(given, self._autocast_weight(weight_name), bias, num_out)

    def num_out(self, name: str) -> int:
        """Output width of a linear layer; GPT-2's Conv1D stores in × out unless it is quantised."""
        shape = self.tensors[f"{name}.weight"].shape
        return shape[1] if self.arch.model_type == "gpt2" and name != "lm_head" else shape[0]

    def _quantised(self, name: str, value: Value, tensor: Tensor) -> Value:
        """bitsandbytes: dequantise the whole weight, multiply, save nothing for 4 bit and the input for 8 bit."""
        tape, eight_bit, autocast = self.tape, self.spec.quant == "int8", self.spec.autocast
        given = value if eight_bit else op.cast(value, tensor.dtype)
        num_out, numel = self.num_out(name), given.numel
        weight = self._dequantised(tensor, given.dtype)
        out_dtype = autocast if autocast != "none" else given.dtype
        out = tape.new(numel // (tensor.numel // num_out) * num_out, out_dtype)
        del weight

        def backward(grads: list[Value], _: tuple[Value, ...]) -> list[Value | None]:
            weight = self._dequantised(tensor, grads[0].dtype)
            made = tape.new(numel, grads[0].dtype)
            del weight
            return [made]

        tape.record([given], [out], [given] if eight_bit else [], backward)
        return out if eight_bit else op.cast(out, value.dtype)

    def _dequantised(self, tensor: Tensor, dtype: str) -> Value:
        """The whole weight in the compute dtype; under double quantisation its absmax is rebuilt in fp32 first."""
        with self.tape.cause("dequantisation"):
            if self.spec.quant not in DOUBLE_QUANTISED:
                return self.tape.new(tensor.numel, dtype)
            absmax = self.tape.new(math.ceil(tensor.numel / NF4_BLOCK), "fp32")
            shifted = op.value_like(absmax)
            del absmax
            weight = self.tape.new(tensor.numel, dtype)
            del shifted
            return weight

    def _adapted(self, name: str, value: Value, result: Value) -> Value:
        """peft's LoRA forward: ``result + B(A(dropout(x))) * scaling``; its 4-bit layer clones the result first."""
        spec, dtype, quantised = self.spec, result.dtype, self.tensors[f"{name}.weight"].quantised
        rank = self.tensors[f"{name}.lora_A"].shape[0]
        # peft's bitsandbytes layers ask torch.is_autocast_enabled() without a device, which is about CUDA: on the CPU
        # they convert to the adapter's dtype even under autocast.
        converts = not quantised or spec.device == "cpu" or spec.autocast == "none"
        if quantised and spec.quant != "int8":
            result = op.elementwise(result)
        given = op.cast(value, self.tensors[f"{name}.lora_A"].dtype) if converts else value
        dropped = op.dropout(given, spec.lora_dropout or 0.0, self.device)
        low = self._matmul(dropped, f"{name}.lora_A", None, rank)
        out = self._matmul(low, f"{name}.lora_B", None, self.num_out(name))
        out = op.scaled(out)
        if quantised and converts:
            out = op.cast(out, dtype)
        result = op.add(result, out)
        del out
        return op.cast(result, dtype)

    def rms_norm(self, name: str, value: Value) -> Value:
        """A LlamaRMSNorm over rows as wide as its weight."""
        weight = self.weight(f"{name}.weight")
        return op.rms_norm(value, weight, value.numel // weight.numel)

    def layer_norm(self, name: str, value: Value) -> Value:
        """An ``nn.LayerNorm``."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return op.layer_norm(value, weight, bias, value.numel // weight.numel, self.device, self.spec.autocast)

    def dropout(self, value: Value, rate: float) -> Value:
        """``nn.Dropout`` in training mode."""
        return op.dropout(value, rate, self.device)

    def activation(self, value: Value) -> Value:
        """The MLP's activation. Raises UnsupportedArchitecture for one that has no rule here."""
        match self.arch.activation:
            case "silu" | "gelu" | "gelu_pytorch_tanh":
                return op.elementwise(value, saves="input")
            case "relu":
                return op.elementwise(value, saves="output")
            case "gelu_new":
                return op.gelu_new(value)
        raise UnsupportedArchitecture(f"the formula engine has no rule for the activation {self.arch.activation!r}")

    def embed(self, name: str, num_ids: int, ids: Value | None = None) -> Value:
        """The rows of a table; ``ids`` where they are made in forward. Adapters under checkpointing make the tokens'
        rows need a gradient (peft's enable_input_require_grads)."""
        tensor = self.tensors[name]
        out = op.embedding(num_ids, self.weight(name), tensor.shape[1], ids)
        if self.spec.gradient_checkpointing and not tensor.trained and ids is None:
            self.tape.require_grad(out)
        return out

    def logits(self, hidden: Value) -> Value:
        """The output head; a tied one is the embedding's own table."""
        name = "lm_head.weight" if "lm_head.weight" in self.tensors else next(iter(self.tensors))
        return self._matmul(hidden, name, None, self.arch.vocab_size)

    def share(self, position_ids: Value) -> None:
        """Make what every layer is handed: the position ids, and the eager path's causal mask."""
        spec, mask = self.spec, ()
        if spec.attn == "eager":
            mask = (self.tape.new(spec.batch_size * spec.seq_len**2, spec.dtype),)
        self.shared = (position_ids, *mask)

    def attend(self, query: Value, key: Value, value: Value) -> Value:
        """The layer's attention."""
        return attend(self.spec, self.arch, query, key, value, self.shared[1] if self.spec.attn == "eager" else None)

    def end_of_layers(self) -> None:
        """The model's own forward returns: its variables go."""
        self.tables, self.shared = None, ()
        self.held.clear()

    def make_rotary_tables(self, dtype: str) -> None:
        """The rotary cos and sin, shared by every layer; the head's own half is repeated."""
        numel = self.spec.seq_len * self.arch.rotary_size
        # cos, sin and their cast copies: computed in fp32 without a graph, then cast to the hidden states' dtype.
        angles = self.tape.new(numel, "fp32")
        cos, sin = op.value_like(angles), op.value_like(angles)
        self.tables = (op.cast(cos, dtype), op.cast(sin, dtype))


# -- the step -------------------------------------------------------------------------------------------------------


def forward(model: Model) -> Value:
    """One forward with the loss, as ``model(input_ids, labels=…).loss``; returns the loss."""
    tape = model.tape
    embed, layer, finish = _family(model.arch)
    tape.at("forward", "embedding")
    hidden = embed(model)
    model.held.append(hidden)
    for index in range(model.num_layers):
        model.layer = index
        tape.at("forward", layer_place(model))
        hidden = _checkpointed(model, layer, hidden) if model.spec.gradient_checkpointing else layer(model, hidden)
    tape.at("forward", "loss")
    hidden = finish(model, hidden)
    model.end_of_layers()
    with tape.cause("logits", saved="logits"):
        logits = model.logits(hidden)
        loss = op.cross_entropy(logits, model.spec.batch_size, model.spec.seq_len)
    model.leave_autocast()
    return loss if model.spec.grad_accum == 1 else op.scaled(loss)


def layer_place(model: Model) -> str:
    """Where in the depth the current layer is; memory is linear in between."""
    if model.layer == model.num_layers - 1:
        return "last layer"
    return "first layer" if model.layer == 0 else "a middle layer"


def _checkpointed(model: Model, layer: Layer, hidden: Value) -> Value:
    """``torch.utils.checkpoint`` without re-entry: keep the layer's input, run the layer again in backward."""
    tape, index, place, tables, shared = model.tape, model.layer, layer_place(model), model.tables, model.shared
    with tape.no_grad():
        out = layer(model, hidden)

    def backward(grads: list[Value], saved: tuple[Value, ...]) -> list[Value | None]:
        model.layer, model.tables, model.shared = index, tables, shared
        tape.at("backward", place)
        leaf = tape.detached_leaf(saved[0])
        with tape.cause(TEMPORARY, saved="recomputed_layer"):
            root = layer(model, leaf).node
        model.leave_autocast()
        tape.backward(root, grads.pop())
        return [tape.take_gradient(leaf)]

    with tape.cause(TEMPORARY, saved="checkpoint_store"):
        # The CPU's random state is kept to repeat dropout; CUDA's is copied to the host.
        state = [tape.new(CPU_RNG_STATE_BYTES, "int8")] if model.device == "cpu" else []
        tape.record([hidden], [out], [hidden, *state, *tape.numbers], backward)
    tape.numbers.clear()
    return out


def _family(arch: Architecture) -> tuple[Callable[[Model], Value], Layer, Layer]:
    """(embedding, one layer, what comes after the last layer) of a family."""
    if arch.model_type in LLAMA_LIKE:
        return _llama_embed, _llama_layer, lambda model, hidden: model.rms_norm("model.norm", hidden)
    match arch.model_type:
        case "gpt_neox":
            return _neox_embed, _neox_layer, lambda model, hidden: model.layer_norm("gpt_neox.final_layer_norm", hidden)
        case "gpt2":
            return _gpt2_embed, _gpt2_layer, lambda model, hidden: model.layer_norm("transformer.ln_f", hidden)
        case "opt":
            return _opt_embed, _opt_layer, _opt_finish
    raise AssertionError(f"architecture() knows {arch.model_type}, this walk does not")


def _llama_embed(model: Model) -> Value:
    hidden = model.embed("model.embed_tokens.weight", model.num_tokens)
    model.share(model.tape.new(model.spec.seq_len, "int64"))
    model.make_rotary_tables(hidden.dtype)
    return hidden


def _llama_layer(model: Model, hidden: Value) -> Value:
    prefix = "model.layers.{layer}."
    residual = hidden
    hidden = model.rms_norm(prefix + "input_layernorm", hidden)
    hidden = _llama_attention(model, prefix + "self_attn.", hidden)
    hidden = op.add(residual, hidden)
    residual = hidden
    hidden = model.rms_norm(prefix + "post_attention_layernorm", hidden)
    hidden = _llama_mlp(model, prefix + "mlp.", hidden)
    return op.add(residual, hidden)


def _llama_attention(model: Model, prefix: str, hidden: Value) -> Value:
    query = op.heads(model.linear(prefix + "q_proj", hidden))
    key = op.heads(model.linear(prefix + "k_proj", hidden))
    value = op.heads(model.linear(prefix + "v_proj", hidden))
    if model.arch.model_type == "qwen3":
        query, key = model.rms_norm(prefix + "q_norm", query), model.rms_norm(prefix + "k_norm", key)
    query, key = op.rotary(query, *model.tables), op.rotary(key, *model.tables)
    out = model.attend(query, key, value)
    return model.linear(prefix + "o_proj", out)


def _llama_mlp(model: Model, prefix: str, x: Value) -> Value:
    gate = model.activation(model.linear(prefix + "gate_proj", x))
    product = op.mul(gate, model.linear(prefix + "up_proj", x))
    del gate
    return model.linear(prefix + "down_proj", product)


def _neox_embed(model: Model) -> Value:
    hidden = model.embed("gpt_neox.embed_in.weight", model.num_tokens)
    hidden = model.dropout(hidden, model.arch.embedding_dropout)
    model.share(model.tape.new(model.spec.seq_len, "int64"))
    model.make_rotary_tables(hidden.dtype)
    return hidden


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
    fused = op.heads(model.linear(prefix + "attention.query_key_value", hidden))
    query, key, value = op.split(fused, 3)
    query, key = _partly_rotated(model, query), _partly_rotated(model, key)
    out = model.attend(query, key, value)
    return model.linear(prefix + "attention.dense", out)


def _partly_rotated(model: Model, value: Value) -> Value:
    """GPT-NeoX rotates the first part of each head and puts the rest back behind it; both are copied."""
    rotated_numel = value.numel // model.arch.head_size * model.arch.rotary_size
    rotated, rest = op.part(value, rotated_numel), op.part(value, value.numel - rotated_numel)
    rotated = op.rotary(rotated, *model.tables)
    return op.concatenate(rotated, rest)


def _neox_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    normed = model.layer_norm(prefix + "post_attention_layernorm", hidden)
    hidden = model.linear(prefix + "mlp.dense_h_to_4h", normed)
    hidden = model.activation(hidden)
    return model.linear(prefix + "mlp.dense_4h_to_h", hidden)


def _gpt2_embed(model: Model) -> Value:
    tokens = model.embed("transformer.wte.weight", model.num_tokens)
    positions = model.tape.new(model.spec.seq_len, "int64")
    places = model.embed("transformer.wpe.weight", model.spec.seq_len, positions)
    model.held += [tokens, places]
    hidden = op.add(tokens, places)
    model.share(positions)
    return model.dropout(hidden, model.arch.embedding_dropout)


def _gpt2_layer(model: Model, hidden: Value) -> Value:
    prefix = "transformer.h.{layer}."
    residual = hidden
    hidden = model.layer_norm(prefix + "ln_1", hidden)
    attention = _gpt2_attention(model, prefix + "attn.", hidden)
    hidden = op.add(attention, residual)
    del attention
    residual = hidden
    hidden = model.layer_norm(prefix + "ln_2", hidden)
    hidden = _gpt2_mlp(model, prefix + "mlp.", hidden)
    return op.add(residual, hidden)


def _gpt2_attention(model: Model, prefix: str, hidden: Value) -> Value:
    query, key, value = (op.heads(part) for part in op.split(model.linear(prefix + "c_attn", hidden), 3))
    out = model.attend(query, key, value)
    out = model.linear(prefix + "c_proj", out)
    return model.dropout(out, model.arch.residual_dropout)


def _gpt2_mlp(model: Model, prefix: str, hidden: Value) -> Value:
    inner = model.activation(model.linear(prefix + "c_fc", hidden))
    out = model.linear(prefix + "c_proj", inner)
    return model.dropout(out, model.arch.residual_dropout)


def _opt_embed(model: Model) -> Value:
    tokens = model.embed("model.decoder.embed_tokens.weight", model.num_tokens)
    position_ids = model.tape.new(model.num_tokens, "int64")
    shifted = model.tape.new(model.num_tokens, "int64")  # OPT's positions start at 2
    places = model.embed("model.decoder.embed_positions.weight", model.num_tokens, shifted)
    if "model.decoder.project_in.weight" in model.tensors:
        tokens = model.linear("model.decoder.project_in", tokens)
    model.held += [tokens, places, model.tape.new(model.num_tokens, "fp32")]  # the mask of ones the positions come from
    model.share(position_ids)
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
    residual = hidden
    if first:
        hidden = model.layer_norm(prefix + "final_layer_norm", hidden)
    hidden = model.linear(prefix + "fc1", hidden)
    hidden = model.activation(hidden)
    hidden = model.linear(prefix + "fc2", hidden)
    hidden = model.dropout(hidden, model.arch.residual_dropout)
    hidden = op.add(residual, hidden)
    return hidden if first else model.layer_norm(prefix + "final_layer_norm", hidden)


def _opt_attention(model: Model, prefix: str, hidden: Value) -> Value:
    query = op.heads(op.scaled(model.linear(prefix + "q_proj", hidden)))
    key = op.heads(model.linear(prefix + "k_proj", hidden))
    value = op.heads(model.linear(prefix + "v_proj", hidden))
    out = model.attend(query, key, value)
    return model.linear(prefix + "out_proj", out)


def _opt_finish(model: Model, hidden: Value) -> Value:
    if "model.decoder.final_layer_norm.weight" in model.tensors:
        hidden = model.layer_norm("model.decoder.final_layer_norm", hidden)
    if "model.decoder.project_out.weight" in model.tensors:
        hidden = model.linear("model.decoder.project_out", hidden)
    return hidden
