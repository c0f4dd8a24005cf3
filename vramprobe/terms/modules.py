"""The modules of a model on the tape: its weights, linears (plain, quantised, adapted), norms, embeddings.

In: a Setup. Out: a Model whose methods do on the tape what the libraries' modules do, under the cell's dtypes,
autocast, quantisation (bitsandbytes) and adapters (peft). Never imports torch or the workload.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.terms import operators as op
from vramprobe.terms.attention import attend, product
from vramprobe.terms.parameters import DOUBLE_QUANTISED, NF4_BLOCK, Tensor
from vramprobe.terms.setup import Setup
from vramprobe.terms.tape import Leaf, Tape, Value


class Model:
    """A model on a tape: its weights as constants, its batch's sizes, and the rules of its linears and norms."""

    def __init__(self, tape: Tape, setup: Setup, num_layers: int) -> None:
        self.tape, self.setup, self.arch, self.num_layers = tape, setup, setup.arch, num_layers
        self.num_tokens, self.device = setup.num_tokens, setup.device
        self.tensors = {tensor.name: tensor for tensor in setup.tensors}
        self._only = {parameter.name: parameter.only for parameter in setup.arch.parameters}
        self.layer = 0
        self._weights: dict[tuple[str, int], Value] = {}
        self._cast_cache: dict[Value, Value] = {}
        self._inputs: list[Value] = []  # required to have a gradient, and so held by the graph
        self.tables: tuple[Value, ...] | None = None  # rotary cos and sin
        self.shared: tuple[Value, ...] = ()  # position ids and mask: alive in forward, and held by every checkpoint
        self.held_in_layer: Value | None = None  # the attention's weights, which a layer's code has in a variable
        self.held: list[Value] = []  # what the model's own forward keeps in a variable until its layers are done

    # -- weights ----------------------------------------------------------------------------------------------------

    def weight(self, name: str) -> Value:
        """The weight of this name, in the current layer where there is one per layer."""
        key = (name, self.layer if "{layer}" in name else 0)
        if key not in self._weights:
            tensor = self.tensors[name]
            self._weights[key] = self.tape.constant(tensor.numel, tensor.dtype, trained=tensor.trained)
        return self._weights[key]

    def has(self, name: str) -> bool:
        """Whether the current layer has its own of this name, where some layers are dense and others have experts."""
        is_dense = self.layer < self.arch.num_dense
        return self._only.get(name.removesuffix(".lora_A").removesuffix(".lora_B"), "") in (
            "",
            "dense" if is_dense else "sparse",
        )

    def autocasted(self, weight: Value) -> Value:
        """A weight as autocast hands it to a matmul: trained fp32 weights are cast once per forward and cached."""
        if self.setup.autocast == "none" or weight.dtype == self.setup.autocast:
            return weight
        if weight in self._cast_cache:
            return self._cast_cache[weight]
        with self.tape.cause("cast_copies"):
            copy = op.cast(weight, self.setup.autocast)
        if isinstance(weight.node, Leaf):
            self._cast_cache[weight] = copy
        return copy

    def leave_autocast(self) -> None:
        """The end of the autocast block: its cache of cast weights goes."""
        self._cast_cache.clear()

    # -- modules ----------------------------------------------------------------------------------------------------

    def linear(self, name: str, value: Value) -> Value:
        """A linear layer as it was prepared: plain, quantised, with an adapter."""
        if f"{name}.lora_A" in self.tensors:
            return self._adapted(name, value, self._base(name, value))
        return self._base(name, value)

    def _base(self, name: str, value: Value) -> Value:
        tensor = self.tensors[f"{name}.weight"]
        return self._quantised(name, value, tensor) if tensor.quantised else self._plain(name, value)

    def _plain(self, name: str, value: Value) -> Value:
        bias = self.autocasted(self.weight(f"{name}.bias")) if f"{name}.bias" in self.tensors else None
        return self._matmul(value, f"{name}.weight", bias, self.num_out(name))

    def _matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        return self.product(value, self.weight(weight_name), num_out, bias)

    def product(self, value: Value, weight: Value, num_out: int, bias: Value | None = None) -> Value:
        """``F.linear`` under the cell's autocast: each call casts its own copy of a wider input."""
        given = value if self.setup.autocast == "none" else op.cast(value, self.setup.autocast)
        return op.linear(given, self.autocasted(weight), bias, num_out)

    def num_out(self, name: str) -> int:
        """Output width of a linear layer; GPT-2's Conv1D stores in × out unless it is quantised."""
        tensor = self.tensors[f"{name}.weight"]
        return tensor.shape[1] if self.arch.model_type == "gpt2" and not tensor.quantised else tensor.shape[0]

    def _quantised(self, name: str, value: Value, tensor: Tensor) -> Value:
        """bitsandbytes: dequantise the whole weight, multiply, save nothing for 4 bit and the input for 8 bit."""
        tape, eight_bit, autocast = self.tape, self.setup.quant == "int8", self.setup.autocast
        given = value if eight_bit else op.cast(value, tensor.dtype)
        num_out, numel, before = self.num_out(name), given.numel, given.dtype
        whole = self._dequantised(tensor, given.dtype)
        # The product is an F.linear within bitsandbytes' own: autocast casts what is wider, the whole weight included.
        out_dtype = autocast if autocast != "none" else given.dtype
        narrow = self._cast_operands(name, numel, tensor.numel, given.dtype, out_dtype)
        out = tape.new(numel // (tensor.numel // num_out) * num_out, out_dtype)
        del whole, narrow

        def backward(grads: list[Value]) -> list[Value | None]:
            weight = self._dequantised(tensor, grads[0].dtype)[0]  # here the scales go before the product
            made = tape.new(numel, grads[0].dtype)
            del weight
            return [op.cast(made, before)]

        # MatMul8bitFp and MatMul8bitLt keep the input as an attribute of ctx, not by save_for_backward: a checkpoint
        # cannot drop it, nor does its own backward.
        tape.record([given], [out], [], backward, kept=[given] if eight_bit else [])
        return out if eight_bit else op.cast(out, value.dtype)

    def _cast_operands(self, name: str, num_in: int, num_weight: int, before: str, after: str) -> tuple[Value, ...]:
        """Autocast's copies of input, dequantised weight and bias, alive for the product alone."""
        if before == after:
            return ()
        bias = self.tensors.get(f"{name}.bias")
        sizes = [num_in, num_weight, *([bias.numel] if bias is not None else [])]
        return tuple([self.tape.new(size, after, "dequantisation") for size in sizes])

    def _dequantised(self, tensor: Tensor, dtype: str) -> tuple[Value, ...]:
        """The whole weight in this dtype; under double quantisation its fp32 scales are rebuilt first.

        4 bit: ``dequantize_4bit(B, state).to(dtype)``, by way of the dtype that the weight was quantised from.
        """
        tape, cause = self.tape, "dequantisation"
        if self.setup.quant != "int8" and dtype != tensor.dtype:
            whole = self._dequantised(tensor, tensor.dtype)[0]
            copy = tape.new(tensor.numel, dtype, cause)
            del whole
            return (copy,)
        if self.setup.quant not in DOUBLE_QUANTISED:
            return (tape.new(tensor.numel, dtype, cause),)
        num_scales = -(-tensor.numel // NF4_BLOCK)
        scales = tape.new(num_scales, "fp32", cause)
        scales = tape.new(num_scales, "fp32", cause)  # plus the offset
        return tape.new(tensor.numel, dtype, cause), scales

    def _adapted(self, name: str, value: Value, result: Value) -> Value:
        """peft's LoRA forward: ``result + B(A(dropout(x))) * scaling``; its 4-bit layer clones the result first."""
        setup, dtype, quantised = self.setup, result.dtype, self.tensors[f"{name}.weight"].quantised
        rank = self.tensors[f"{name}.lora_A"].shape[0]
        # peft's bitsandbytes layers ask torch.is_autocast_enabled() without a device, which is about CUDA: on the CPU
        # they convert to the adapter's dtype even under autocast.
        converts = not quantised or setup.device == "cpu" or setup.autocast == "none"
        if quantised and setup.quant != "int8":
            result = op.elementwise(result)
        given = op.cast(value, self.tensors[f"{name}.lora_A"].dtype) if converts else value
        low = self._matmul(op.dropout(given, setup.lora_dropout, self.device), f"{name}.lora_A", None, rank)
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
        return op.layer_norm(value, weight, bias, value.numel // weight.numel, self.device, self.setup.autocast)

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
                return op.gelu_new(value, fp32_power=self.device == "cuda" and self.setup.autocast != "none")
        raise UnsupportedArchitecture(f"the formula engine has no rule for the activation {self.arch.activation!r}")

    def embed(self, name: str, num_ids: int, ids: Value | None = None) -> Value:
        """The rows of a table; ``ids`` where they are made in forward. Adapters under checkpointing make the tokens'
        rows need a gradient (peft's enable_input_require_grads)."""
        tensor = self.tensors[name]
        out = op.embedding(num_ids, self.weight(name), tensor.shape[1], ids)
        if self.setup.gradient_checkpointing and not tensor.trained and ids is None:
            self.tape.require_grad(out)
            self._inputs.append(out)
        return out

    def logits(self, hidden: Value) -> Value:
        """The output head; a tied one is the embedding's own table."""
        name = "lm_head.weight" if "lm_head.weight" in self.tensors else next(iter(self.tensors))
        return self._matmul(hidden, name, None, self.arch.vocab_size)

    def share(self, position_ids: Value, dtype: str) -> None:
        """Make what every layer is handed: the position ids, and the eager path's mask in the embeddings' dtype."""
        setup, mask = self.setup, ()
        if setup.attn == "eager":
            mask = (self.tape.new(setup.batch_size * setup.seq_len**2, dtype),)
        self.shared = (position_ids, *mask)

    def attend(self, query: Value, key: Value, value: Value) -> Value:
        """The layer's attention."""
        mask = self.shared[1] if self.setup.attn == "eager" else None
        out, self.held_in_layer = attend(self.setup, query, key, value, mask)
        return out

    def heads_product(self, left: Value, right: Value, numel: int) -> Value:
        """``torch.matmul`` of two values laid out by heads, under the cell's autocast."""
        return product(left, right, numel, self.setup.batch_size, self.setup.autocast)

    def shared_with_layer(self) -> tuple[Value, ...]:
        """What of the shared values the current layer is handed: of two masks a layer takes one.

        Of several middle layers some take the one and some the other, so that both stay for as long as any is left.
        """
        position_ids, *masks = self.shared
        if len(masks) == 2 and (self.layer == 0 or self.num_layers == 2):
            masks = [masks[self.layer]]
        return (position_ids, *masks)

    def end_of_layers(self) -> None:
        """The model's own forward returns: its variables go."""
        self.tables, self.shared = None, ()
        self.held.clear()

    def make_rotary_tables(self, dtype: str) -> None:
        """The rotary cos and sin, shared by every layer; the head's own half is repeated."""
        numel = self.setup.seq_len * self.arch.rotary_size
        # cos, sin and their cast copies: computed in fp32 without a graph, then cast to the hidden states' dtype.
        angles = self.tape.new(numel, "fp32")
        cos, sin = op.value_like(angles), op.value_like(angles)
        self.tables = (op.cast(cos, dtype), op.cast(sin, dtype))

    def rotary(self, value: Value) -> Value:
        """Queries or keys, rotated by the tables."""
        return op.rotary(value, *self.tables, self.arch.rotary_size)
