"""The modules of a model on the tape: its weights, linears (plain, quantised, adapted), norms, embeddings.

In: a Setup. Out: a Model whose methods do on the tape what the libraries' modules do, under the cell's dtypes,
autocast, quantisation (bitsandbytes) and adapters (peft). Never imports torch or the workload. Long because a linear's
rules, the plain one's and the quantised and the adapted one's, work on one set of weights and one autocast cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.terms import norms
from vramprobe.terms import operators as op
from vramprobe.terms.activations import gelu_new
from vramprobe.terms.attention import attend, product
from vramprobe.terms.graph import Leaf, Value
from vramprobe.terms.parameters import DOUBLE_QUANTISED, NF4_BLOCK, Tensor
from vramprobe.terms.setup import Setup
from vramprobe.terms.tape import Tape


class Model:
    """A model on a tape: its weights as constants, its batch's sizes, and the rules of its linears and norms."""

    def __init__(self, tape: Tape, setup: Setup, layers: Sequence[int]) -> None:
        self.tape, self.setup, self.arch, self.layers = tape, setup, setup.arch, layers
        self.num_tokens, self.device = setup.num_tokens, setup.device
        tape.device = setup.device
        self.tensors = {tensor.name: tensor for tensor in setup.tensors}
        self._only = {parameter.name: parameter.only for parameter in setup.arch.parameters}
        self.layer = 0
        self._weights: dict[tuple[str, int], Value] = {}
        self._cast_cache: dict[Value, Value] = {}
        self._inputs: list[Value] = []  # required to have a gradient, and so held by the graph
        # What the layer is handed, and what its checkpoint holds: rotary cos and sin; position ids and mask.
        self.tables: tuple[Value, ...] | None = None
        self.shared: tuple[Value, ...] = ()
        self._handed: tuple[tuple[Value, ...] | None, tuple[Value, ...]] | None = None  # both, where layers get copies
        self._all_tables: list[tuple[Value, Value]] = []  # alive in forward, for layers of each kind
        self._masks: dict[bool, Value] = {}  # by whether the layer slides
        self.held_in_layer: Value | None = None  # the attention's weights, which a layer's code has in a variable
        self.held: list[Value] = []  # what the model's own forward keeps in a variable until its layers are done
        self.cache: list[Value] = []  # keys and values that the model's own forward returns with its output
        self.returned: Value | None = None  # what a layer returns beside its output; kept until the next one returns

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

    def autocasted(self, weight: Value, *, is_cached: bool = True) -> Value:
        """A weight as autocast hands it to a matmul: trained fp32 weights are cast once per forward and cached."""
        if self.setup.autocast == "none" or weight.dtype == self.setup.autocast:
            return weight
        if weight in self._cast_cache:
            return self._cast_cache[weight]
        with self.tape.cause("cast_copies"):
            copy = op.cast(weight, self.setup.autocast)
        if is_cached and isinstance(weight.node, Leaf):
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
        bias = f"{name}.bias" if f"{name}.bias" in self.tensors else None
        if bias and self.arch.own_linears:
            out = self._matmul(value, f"{name}.weight", None, self.num_out(name))
            return op.add(out, self.weight(bias))
        bias = self.autocasted(self.weight(bias)) if bias else None
        return self._matmul(value, f"{name}.weight", bias, self.num_out(name))

    def _matmul(self, value: Value, weight_name: str, bias: Value | None, num_out: int) -> Value:
        # A linear class of its own multiplies by weight.T, a view, and autocast's cache takes none.
        is_view = self.arch.own_linears and "{layer}" in weight_name and ".lora_" not in weight_name
        return self.product(value, self.weight(weight_name), num_out, bias, is_cached=not is_view)

    def product(
        self, value: Value, weight: Value, num_out: int, bias: Value | None = None, *, is_cached: bool = True
    ) -> Value:
        """``F.linear`` under the cell's autocast: each call casts its own copy of a wider input, after the weight's, as
        g++ evaluates arguments.
        """
        cast = self.autocasted(weight, is_cached=is_cached)
        given = value if self.setup.autocast == "none" else op.cast(value, self.setup.autocast)
        return op.linear(given, cast, bias, num_out, self.setup.linears_save_inputs)

    def num_out(self, name: str) -> int:
        """Output width of a linear layer; GPT-2's Conv1D stores in × out unless it is quantised."""
        tensor = self.tensors[f"{name}.weight"]
        return tensor.shape[1] if self.arch.model_type == "gpt2" and not tensor.quantised else tensor.shape[0]

    def _quantised(self, name: str, value: Value, tensor: Tensor) -> Value:
        """bitsandbytes: dequantise the whole weight, multiply, save nothing for 4 bit and the input for 8 bit."""
        tape, eight_bit, autocast = self.tape, self.setup.quant == "int8", self.setup.autocast
        if eight_bit and self.device == "cuda":
            return self._in_8_bit(name, value, tensor)
        habits = self.arch.habits
        self.weight(f"{name}.weight")  # is in use
        given = value if eight_bit or habits.computes_in_fp32 else op.cast(value, tensor.dtype)
        num_out, numel, before = self.num_out(name), given.numel, given.dtype
        whole = self._dequantised(tensor, given.dtype, is_forward=True)
        # The product is an F.linear within bitsandbytes' own: autocast casts what is wider, the whole weight included.
        out_dtype = autocast if autocast != "none" else given.dtype
        narrow = self._cast_operands(name, numel, tensor.numel, given.dtype, out_dtype)
        out = tape.new(numel // (tensor.numel // num_out) * num_out, out_dtype)
        tape.multiplied()
        del whole, narrow

        def backward(grads: list[Value]) -> list[Value | None]:
            weight = self._dequantised(tensor, grads[0].dtype)[0]  # here the scales go before the product
            made = tape.new(numel, grads[0].dtype)
            tape.multiplied()
            del weight
            return [op.cast(made, before)]

        # MatMul8bitFp and MatMul8bitLt keep the input as an attribute of ctx, not by save_for_backward: a checkpoint
        # cannot drop it, nor does its own backward.
        tape.record([given], [out], [], backward, kept=[given] if eight_bit or habits.keeps_inputs else [])
        return out if eight_bit else op.cast(out, value.dtype)

    def _in_8_bit(self, name: str, value: Value, tensor: Tensor) -> Value:
        """bitsandbytes' MatMul8bitLt, in integers: the input in 8 bits, its outliers looked for, the product in int32,
        then fp16, then the input's dtype. Its backward makes the weight whole in that. Left out: outliers' own product.
        """
        tape, numel, dtype = self.tape, value.numel, value.dtype
        num_rows = numel // (tensor.numel // self.num_out(name))
        num_results = num_rows * self.num_out(name)
        narrow = None if dtype == "fp16" else tape.new(numel, "fp16")
        scales, codes = tape.new(num_rows, "fp32"), tape.new(numel, "int8")
        magnitudes = tape.new(numel, "fp16")
        outliers = tape.new(numel, "bool")
        del magnitudes
        del outliers, narrow
        sums = tape.new(num_results, "int32")
        out = tape.new(num_results, "fp16")
        out = out if dtype == "fp16" else tape.new(num_results, dtype)
        del sums, scales, codes

        def backward(grads: list[Value]) -> list[Value | None]:
            weight = tape.new(tensor.numel, dtype, "dequantisation")
            made = tape.new(numel, dtype)
            tape.multiplied()
            del weight
            return [made]

        tape.record([value], [out], [], backward, kept=[value])  # an attribute of ctx, which no checkpoint drops
        return out

    def _cast_operands(self, name: str, num_in: int, num_weight: int, before: str, after: str) -> tuple[Value, ...]:
        """Autocast's copies of input, dequantised weight and bias, alive for the product alone."""
        if before == after:
            return ()
        bias = self.tensors.get(f"{name}.bias")
        sizes = [*([bias.numel] if bias is not None else []), num_weight, num_in]  # as g++ evaluates arguments
        return tuple([self.tape.new(size, after, "dequantisation") for size in sizes])

    def _dequantised(self, tensor: Tensor, dtype: str, *, is_forward: bool = False) -> tuple[Value, ...]:
        """The whole weight in this dtype; under double quantisation its fp32 scales are rebuilt first.

        4 bit: ``dequantize_4bit(B, state).to(dtype)``, by way of the dtype that the weight was quantised from. On CUDA
        forward has ``gemm_4bit``, which adds the offset to a copy of the scales and holds both (bitsandbytes 0.50,
        backends/cuda/ops.py, ``_dequant_linear_fallback``; left out: the fused kernel that takes few tokens).
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
        if self.device == "cpu":
            scales = tape.new(num_scales, "fp32", cause)  # plus the offset, which CUDA's adds in place in backward
        shifted = tape.new(num_scales, "fp32", cause) if is_forward and self.device == "cuda" else None
        whole = tape.new(tensor.numel, dtype, cause)
        return (whole, scales) if shifted is None else (whole, scales, shifted)

    def _adapted(self, name: str, value: Value, result: Value) -> Value:
        """peft's LoRA forward: ``result + B(A(dropout(x))) * scaling``; its 4-bit layer clones the result first."""
        setup, dtype, quantised = self.setup, result.dtype, self.tensors[f"{name}.weight"].quantised
        rank = self.tensors[f"{name}.lora_A"].shape[0]
        # peft's bitsandbytes layers ask torch.is_autocast_enabled() without a device, which is about CUDA: on the CPU
        # they convert to the adapter's dtype even under autocast.
        converts = not quantised or setup.device == "cpu" or setup.autocast == "none"
        if quantised and setup.quant != "int8":
            result = op.copied(result)
        given = wide = value
        if converts:
            wide = op.cast(value, setup.adapter_input or self.tensors[f"{name}.lora_A"].dtype)
            given = op.cast(wide, self.tensors[f"{name}.lora_A"].dtype)
        if setup.dora:
            result = self._with_dora(name, given, result)
            return op.cast(result, dtype) if converts or not quantised else result
        low = self._matmul(op.dropout(given, setup.lora_dropout, self.device), f"{name}.lora_A", None, rank)
        if setup.adapter_input:  # FSDP1's own copy
            del given
        out = self._matmul(low, f"{name}.lora_B", None, self.num_out(name))
        del low
        out = op.scaled(out)
        if quantised and converts:
            out = op.cast(out, dtype)
        result = op.add(result, out)
        if not quantised:  # where the update has no name
            del out
        return op.cast(result, dtype)

    def _with_dora(self, name: str, x: Value, result: Value) -> Value:
        """peft's DoraLinearLayer: ``result + (m - 1) * base + m * B(A(x)) * scaling``, ``m`` the magnitude over the
        norm of each row of the adapted weight, which is made anew in each forward, without a gradient.

        Left out: on the CPU a product of two dtypes copies the narrower operand, up to 4 bytes an element of the
        output, which shows where a recomputed bf16 layer is the peak.
        """
        setup, rank, num_out = self.setup, self.tensors[f"{name}.lora_A"].shape[0], self.num_out(name)
        x = op.dropout(x, setup.lora_dropout, self.device)
        weight, *others = self._dora_weight(name, x.dtype)
        scale = op.divided(self.weight(f"{name}.lora_magnitude_vector"), self.tape.new(num_out, x.dtype))
        low = self._matmul(x, f"{name}.lora_A", None, rank)
        adapted = self._matmul(low, f"{name}.lora_B", None, num_out)
        if setup.lora_dropout:  # the layer's own result is of another input
            dtype = x.dtype if setup.autocast == "none" else setup.autocast
            base = op.linear(op.cast(x, dtype), op.cast(weight, dtype), None, num_out)
        else:
            has_bias = f"{name}.bias" in self.tensors
            base = op.add(result, self.weight(f"{name}.bias")) if has_bias else result
        change = op.mul(op.elementwise(scale), base)
        change = op.add(change, op.scaled(op.mul(scale, adapted)))
        del weight, others  # its variables go
        return op.add(result, change)

    def _dora_weight(self, name: str, dtype: str) -> tuple[Value, ...]:
        """The base weight in ``dtype``, and what else lives as long: B(A(identity)) and what its product saves."""
        tape, tensor, adapter = self.tape, self.tensors[f"{name}.weight"], self.tensors[f"{name}.lora_A"]
        rank, num_in = adapter.shape
        given = self.autocasted(self.weight(f"{name}.lora_A")).dtype
        self.autocasted(self.weight(f"{name}.lora_B"))  # autocast keeps both
        made = tape.new(num_in**2, adapter.dtype)
        identity = op.cast(made, given)
        low, product = tape.new(num_in * rank, given), tape.new(tensor.numel, given)
        del made
        product = op.cast(product, dtype)
        base = self._dequantised(tensor, tensor.dtype)[0] if tensor.quantised else self.weight(f"{name}.weight")
        base = op.cast(base, dtype)
        scaled, total = op.value_like(product), op.value_like(product)
        del scaled, total
        return (base, product) if tape.drops_what_is_saved else (base, product, identity, low)

    def rms_norm(self, name: str, value: Value) -> Value:
        """The family's RMSNorm over rows as wide as its weight."""
        weight = self.weight(f"{name}.weight")
        match self.arch.model_type:
            case "gemma" | "gemma2" | "gemma3_text":
                norm = norms.rms_norm_around_one
            case "olmo2" | "olmo3":
                norm = norms.rms_norm_weighted_in_fp32
            case _:
                norm = norms.rms_norm
        return norm(value, weight, value.numel // weight.numel)

    def layer_norm(self, name: str, value: Value) -> Value:
        """An ``nn.LayerNorm``."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return norms.layer_norm(value, weight, bias, value.numel // weight.numel, self.device, self.setup.autocast)

    def dropout(self, value: Value, rate: float) -> Value:
        """``nn.Dropout`` in training mode."""
        return op.dropout(value, rate, self.device)

    @property
    def powers_in_fp32(self) -> bool:
        """Whether autocast computes powers in fp32: CUDA's does (autocast_mode.h)."""
        return self.device == "cuda" and self.setup.autocast != "none"

    def activation(self, value: Value) -> Value:
        """The MLP's activation. Raises UnsupportedArchitecture for one that has no rule here."""
        match self.arch.activation:
            case "silu" | "gelu" | "gelu_pytorch_tanh":
                return op.elementwise(value, saves="input")
            case "relu":
                return op.elementwise(value, saves="output")
            case "relu2":
                value = op.elementwise(value, saves="output")
                return op.power(op.cast(value, "fp32") if self.powers_in_fp32 else value)
            case "gelu_new":
                return gelu_new(value, fp32_power=self.powers_in_fp32)
        raise UnsupportedArchitecture(f"the formula engine has no rule for the activation {self.arch.activation!r}")

    def embed(self, name: str, num_ids: int, ids: Value | None = None) -> Value:
        """The rows of a table; ``ids`` where they are made in forward. Adapters under checkpointing make the tokens'
        rows need a gradient (peft's enable_input_require_grads)."""
        tensor = self.tensors[name]
        of_tokens = self.setup.sorted_ids if ids is None else "none"
        num_sorted = {"none": 0, "tokens": num_ids, "words": tensor.shape[0]}[of_tokens]
        out = op.embedding(num_ids, self.weight(name), tensor.shape[1], ids, num_sorted)
        if self.arch.scales_embedding:
            out = op.elementwise(out)
        if self.setup.gradient_checkpointing and not tensor.trained and ids is None:
            self.tape.require_grad(out)
            self._inputs.append(out)
        return out

    @property
    def head(self) -> str:
        """The name of the output head's weight; a tied one is the embedding's own table."""
        return "lm_head.weight" if "lm_head.weight" in self.tensors else next(iter(self.tensors))

    def logits(self, hidden: Value) -> Value:
        """The output head."""
        logits = self._matmul(hidden, self.head, None, self.arch.vocab_size)
        if self.arch.scales_residuals:
            logits = op.scaled(logits)
        if self.arch.caps_logits:
            logits = op.scaled(logits)
            logits = op.elementwise(logits, saves="output")
            logits = op.scaled(logits)
        return logits

    def enter(self, layer: int) -> None:
        """Go on to this layer, with what the model's own forward hands it."""
        slides = self.arch.slides(layer)
        self.layer = layer
        if self._all_tables:
            self.tables = self._all_tables[slides and len(self._all_tables) > 1]
        mask = self._masks.get(slides)
        self.shared = self.shared[:1] if mask is None else (self.shared[0], mask)

    def share(self, first: Value, dtype: str) -> None:
        """Make what layers are handed: ``first`` (position ids, or what is there instead) and masks, each for layers
        that slide or for those that do not: bools where SDPA needs one, eager in the embeddings' dtype.
        """
        setup, arch, numel = self.setup, self.arch, self.setup.seq_len**2
        self.shared = (first,)
        kinds = {arch.slides(layer) for layer in range(arch.num_layers)}
        if setup.attn == "eager":
            if arch.model_type in ("gemma2", "gemma3_text") or arch.sliding_layers:
                kinds = {True, False}  # these make both
            for slides in sorted(kinds):
                allowed = self._allowed(setup.batch_size * numel, slides=slides)
                self._masks[slides] = self.tape.new(allowed.numel, dtype)
                del allowed
        elif self.tape.leaps:
            self._masks = {False: self._of_packed(setup.batch_size * numel)}
        elif setup.attn == "sdpa" and (arch.model_type == "falcon" or setup.beyond_window):
            # Falcon asks for a mask always (allow_is_causal_skip=False).
            slides = arch.model_type != "falcon"
            self._masks = {slides: self._allowed(numel, slides=slides)}

    def _of_packed(self, numel: int) -> Value:
        """The bools of a mask of several sequences in one: which are the same one's, and which are before."""
        tape = self.tape
        same = tape.new(numel, "bool")
        allowed = tape.new(numel, "bool")
        del same
        before = tape.new(numel, "bool")
        allowed = tape.new(numel, "bool")
        del before
        return allowed

    def _allowed(self, numel: int, *, slides: bool) -> Value:
        """The bools of a mask; of one that slides in the window, and behind (masking_utils.py, ``and_masks``)."""
        tape = self.tape
        allowed = tape.new(numel, "bool")
        if slides:
            allowed = tape.new(numel, "bool")  # copied: all of them, and these
            causal = tape.new(numel, "bool")
            allowed = tape.new(numel, "bool")
            del causal
        return allowed

    @property
    def mask(self) -> Value | None:
        """The mask that the layer is handed."""
        return self.shared[1] if len(self.shared) > 1 else None

    def attend(self, query: Value, key: Value, value: Value) -> Value:
        """The layer's attention. Heads that are repeated come from a cache, which training fills, too, unless it has
        checkpoints."""
        if self.arch.habits.repeats_heads and not self.setup.gradient_checkpointing:
            self.cache += [key, value]
        out, self.held_in_layer = attend(self.setup, query, key, value, None if self.tape.has_parts else self.mask)
        return out

    def heads_product(self, left: Value, right: Value, numel: int) -> Value:
        """``torch.matmul`` of two values laid out by heads, under the cell's autocast."""
        return product(left, right, numel, self.setup.batch_size, self.setup.autocast)

    def brought(self, hidden: Value) -> Value:
        """The layer's input where the layer lies, and there what else it is handed."""
        tape = self.tape
        if not tape.is_spread:
            return hidden
        self._handed = self.tables, self.shared
        hidden = tape.brought(hidden)
        self.tables = self.tables and tuple([tape.brought(one) for one in self.tables])
        self.shared = tuple([tape.brought(one) for one in self.shared])
        return hidden

    def leave_layer(self) -> None:
        """What was brought to the layer goes, but for what backward holds."""
        if self._handed is not None:
            self.tables, self.shared = self._handed
            self._handed = None

    def end_of_layers(self) -> None:
        """The model's own forward returns: its variables go."""
        self.tables, self.shared = None, ()
        self._all_tables.clear()
        self._masks.clear()
        self.held.clear()
        self.returned = None

    def end_of_step(self) -> None:
        """The graph goes, and with it what it holds."""
        self._inputs.clear()

    def leaves(self) -> Iterator[Leaf]:
        """Where gradients end, of the trained weights that were used."""
        return (weight.node for weight in self._weights.values() if isinstance(weight.node, Leaf))

    def names_in_use(self) -> list[str]:
        """The names of weights in the order in which forward first asked for them."""
        return list(dict.fromkeys([name for name, _ in self._weights]))

    def leaf_names(self) -> list[tuple[Leaf, str, int]]:
        """The same with the names of their weights and the layer, 0 for what is outside them."""
        return [(weight.node, name, layer) for (name, layer), weight in self._weights.items()
                if isinstance(weight.node, Leaf)]  # fmt: skip

    def make_rotary_tables(self, dtype: str) -> None:
        """The rotary cos and sin, shared by every layer of a kind; the head's own half is repeated."""
        rows = self.setup.batch_size if self.tape.has_parts else 1  # as position ids have them
        numel = rows * self.setup.seq_len * self.arch.rotary_size
        if self.arch.model_type in ("olmo2", "olmo3"):  # which turn heads in fp32
            dtype = "fp32"
        self.tape.come_to_part("rotary")
        for _ in range(self.arch.num_rotary_tables):
            # In fp32 without a graph: each position's angles, twice, and cos and sin of these, scaled, then cast to the
            # hidden states' dtype.
            half = self.tape.new(numel // 2, "fp32")
            angles = self.tape.new(numel, "fp32")
            cos = op.value_like(op.value_like(angles))
            sin = op.value_like(op.value_like(angles))
            self._all_tables.append((op.cast(cos, dtype), op.cast(sin, dtype)))
            del half, angles, cos, sin

    def rotary(self, value: Value) -> Value:
        """Queries or keys, rotated by the tables."""
        return op.rotary(value, *self.tables, self.arch.rotary_size)
