"""The modules of a model on the tape: its weights, linears (plain, quantised, adapted), norms, embeddings.

In: a Setup. Out: a Model whose methods do on the tape what the libraries' modules do, under the cell's dtypes and
autocast. Quantized layers are quantized.py's, adapters adapters.py's. Never imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models import adapters, norms, quantized
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.activations import gelu_new
from vramprobe.terms.models.attention import attend
from vramprobe.terms.models.weights import Weights
from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.tape import Tape


class Model(Weights):
    """A model on a tape: its weights, its batch's sizes, and the rules of its linears and norms."""

    def __init__(self, tape: Tape, setup: Setup, layers: Sequence[int]) -> None:
        super().__init__(tape, setup, layers)
        self.inputs: list[Value] = []  # required to have a gradient, and so held by the graph
        # What the layer is handed, and what its checkpoint holds: rotary cos and sin; position ids and mask.
        self.tables: tuple[Value, ...] | None = None
        self.shared: tuple[Value, ...] = ()
        self._all_tables: list[tuple[Value, Value]] = []  # alive in forward, for layers of each kind
        self._masks: dict[bool, Value] = {}  # by whether the layer slides
        self.held_in_layer: Value | None = None  # the attention's weights, which a layer's code has in a variable
        self.held: list[Value] = []  # what the model's own forward keeps in a variable until its layers are done

    # -- modules ----------------------------------------------------------------------------------------------------

    def linear(self, name: str, value: Value) -> Value:
        """A linear layer as it was prepared: plain, quantised, with an adapter."""
        if f"{name}.lora_A" in self.tensors:
            return adapters.adapted(self, name, value, self._base(name, value))
        return self._base(name, value)

    def _base(self, name: str, value: Value) -> Value:
        tensor = self.tensors[f"{name}.weight"]
        return quantized.linear(self, name, value, tensor) if tensor.quantised else self.plain(name, value)

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
            self.require_input_grad(out)
        return out

    def require_input_grad(self, out: Value) -> None:
        """Make what comes out of an input's embedding need a gradient."""
        self.tape.require_grad(out)
        self.inputs.append(out)

    @property
    def head(self) -> str:
        """The name of the output head's weight; a tied one is the embedding's own table."""
        return "lm_head.weight" if "lm_head.weight" in self.tensors else next(iter(self.tensors))

    def logits(self, hidden: Value) -> Value:
        """The output head."""
        logits = self.matmul(hidden, self.head, None, self.arch.num_outputs)
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
        elif setup.attn == "sdpa" and setup.beyond_window:
            self._masks = {True: self._allowed(numel, slides=True)}

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
        """The layer's attention."""
        out, self.held_in_layer = attend(self.setup, query, key, value, self.mask)
        return out

    def end_of_layers(self) -> None:
        """The model's own forward returns: its variables go."""
        self.tables, self.shared = None, ()
        self._all_tables.clear()
        self._masks.clear()
        self.held.clear()

    def end_of_step(self) -> None:
        """The graph goes, and with it what it holds."""
        self.inputs.clear()

    def make_rotary_tables(self, dtype: str) -> None:
        """The rotary cos and sin, shared by every layer of a kind; the head's own half is repeated."""
        numel = self.setup.seq_len * self.arch.rotary_size
        if self.arch.model_type in ("olmo2", "olmo3"):  # which turn heads in fp32
            dtype = "fp32"
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
