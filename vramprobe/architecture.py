"""Architecture: the dimensions and the parameters of a model, by arithmetic on its config.json.

In: a config.json as a dict. Out: a frozen Architecture with every parameter's name, shape and role, or a VramprobeError
that names the supported families. Never imports torch or transformers: an independent account of what they build.
The names and shapes follow transformers 5 (``modeling_llama.py``, ``modeling_gpt_neox.py``, ``modeling_gpt2.py``,
``modeling_opt.py``). Long because a config's checks and defaults stand beside the reading of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vramprobe.architecture_moe import Experts, Wrapped, mixture
from vramprobe.errors import UnsupportedArchitecture, VramprobeError

#: The last three are weights that are no linear layer's: bitsandbytes leaves them as they are.
Role = Literal["linear", "head", "embedding", "norm", "bias", "router", "experts", "sinks"]
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2")
SUPPORTED_MODEL_TYPES = (*LLAMA_LIKE, "gpt_neox", "gpt2", "opt", *MIXTURES)
#: What transformers takes where the key is absent; null, and Llama's absent key, mean as many as query heads.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor; ``{layer}`` in the name stands for the layer's number where there is one per layer."""

    name: str
    module: str  # the last part of its module's name: q_proj, c_attn, fc1, input_layernorm
    shape: tuple[int, ...]
    role: Role
    per_layer: bool
    only: Literal["", "dense", "sparse"] = ""  # in the layers before those with experts, or in those

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Linear:
    """A linear layer by its module name: a LoRA target, and what bitsandbytes replaces."""

    name: str
    num_in: int
    num_out: int
    bias: bool
    per_layer: bool
    num_copies: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Dimensions and parameters of a causal language model. Widths are elements, rates are probabilities."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool  # the head's weight is the embedding's
    activation: str
    rotary_size: int  # rotated part of a head; 0 with learned positions
    value_size: int | None = None  # of a value's head, where it is not head_size
    parallel_residual: bool = False
    norm_first: bool = True
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    sliding_window: int | None = None
    experts: Experts | None = None
    num_dense: int = 0  # layers before those with experts
    wrapped: tuple[Wrapped, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    def num_copies(self, parameter: Parameter) -> int:
        """How many tensors of this name pattern the model has."""
        if not parameter.per_layer:
            return 1
        num_dense = min(self.num_dense, self.num_layers)
        return {"": self.num_layers, "dense": num_dense, "sparse": self.num_layers - num_dense}[parameter.only]

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(parameter.numel * self.num_copies(parameter) for parameter in self.parameters)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers apart from the output head; a fused projection is one."""
        biased = {(p.name.rpartition(".")[0]) for p in self.parameters if p.role == "bias"}
        return tuple(
            Linear(p.name.removesuffix(".weight"), *_in_out(p, self.model_type),
                   p.name.removesuffix(".weight") in biased, p.per_layer, self.num_copies(p))
            for p in self.parameters
            if p.role == "linear"
        )  # fmt: skip


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The Architecture of a ``config.json``.

    Raises UnsupportedArchitecture (a VramprobeError) for a model type without arithmetic here, and VramprobeError for a
    key that is missing or has a value no such model can have.
    """
    model_type = config.get("model_type")
    checked = _Config(config)
    if model_type in LLAMA_LIKE:
        return _llama_like(checked)
    if model_type in MIXTURES:
        return Architecture(**mixture(checked, _Inventory()))
    match model_type:
        case "gpt_neox":
            return _gpt_neox(checked)
        case "gpt2":
            return _gpt2(checked)
        case "opt":
            return _opt(checked)
    raise UnsupportedArchitecture(
        f"model type {model_type!r} cannot be predicted by this version, which has arithmetic for "
        f"{', '.join(SUPPORTED_MODEL_TYPES)}; it can be measured: vramprobe measure"
    )


class _Config:
    """A config.json whose values are checked as they are read; an error says the key, what it is and what it may be.

    A default is what transformers' own config class has for an absent key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.model_type = values, values.get("model_type")

    def size(self, key: str, default: int | None = None) -> int:
        """A count or a width; null means the default, and without one the key must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise VramprobeError(
                f"the {self.model_type} config.json has no {key!r}; it is needed to count memory: a whole number of 1 "
                "or more"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "a whole number of 1 or more")
        return value

    def absent_or_size(self, key: str, default: int | None) -> int | None:
        """A size that null switches off; the default is for an absent key."""
        return None if self.values.get(key, default) is None else self.size(key, default)

    def rate(self, key: str, default: float) -> float:
        """A probability or a share."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self._wrong(key, "a number from 0 to 1")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no; null counts as no, as in the models' own code."""
        value = self.values.get(key, default)
        if not isinstance(value, bool | None):
            raise self._wrong(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        """A name."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a name in quotes")
        return value

    def part(self, key: str) -> _Config:
        """The config nested under this key, empty where there is none."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return _Config({"model_type": self.model_type, **value})

    def require_multiple(self, key: str, other: str, value: int, divisor: int) -> None:
        """Raise unless ``value``, of this key, is a multiple of ``divisor``, of the other."""
        if value % divisor:
            raise VramprobeError(
                f"the {self.model_type} config.json has {key} {value} and {other} {divisor}; {key} must be a multiple "
                f"of {other}"
            )

    def _wrong(self, key: str, allowed: str) -> VramprobeError:
        given = repr(self.values.get(key))
        given = given if len(given) <= 60 else f"{given[:60]}…"
        return VramprobeError(f"the {self.model_type} config.json has {key} {given}; it must be {allowed}")


def _in_out(parameter: Parameter, model_type: str) -> tuple[int, int]:
    """(in, out) of a linear weight: nn.Linear stores out × in, GPT-2's Conv1D in × out."""
    first, second = parameter.shape
    return (first, second) if model_type == "gpt2" else (second, first)


class _Inventory:
    """Collects parameters under a prefix, in the order in which the model's code creates them."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []

    def add(self, name: str, shape: tuple[int, ...], role: Role, *, only: Literal["", "dense", "sparse"] = "") -> None:
        module = name.split(".")[-2]
        self.parameters.append(Parameter(name, module, shape, role, "{layer}" in name, only))

    def linear(
        self, name: str, num_in: int, num_out: int, bias: bool, *, transposed: bool = False,
        only: Literal["", "dense", "sparse"] = "",
    ) -> None:  # fmt: skip
        self.add(f"{name}.weight", (num_in, num_out) if transposed else (num_out, num_in), "linear", only=only)
        if bias:
            self.add(f"{name}.bias", (num_out,), "bias", only=only)

    def layer_norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", (size,), "norm")
        self.add(f"{name}.bias", (size,), "norm")

    def embedding(self, name: str, num: int, size: int) -> None:
        self.add(f"{name}.weight", (num, size), "embedding")

    def head(self, vocab_size: int, size: int, tied: bool) -> None:
        if not tied:
            self.add("lm_head.weight", (vocab_size, size), "head")


def _llama_like(config: _Config) -> Architecture:
    model_type = config.values["model_type"]
    hidden, mlp = config.size("hidden_size"), config.size("intermediate_size")
    num_heads = config.size("num_attention_heads")
    absent_heads = num_heads if "num_key_value_heads" in config.values else _DEFAULT_KV_HEADS.get(model_type, num_heads)
    num_kv_heads = config.size("num_key_value_heads", absent_heads)
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    # Qwen3's heads are 128 wide unless its config says otherwise; Llama's config class insists even where it does.
    given = model_type == "qwen3" or config.values.get("head_dim") is not None
    if model_type == "llama" or not given:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", 128 if model_type == "qwen3" else hidden // num_heads)
    tied = config.flag("tie_word_embeddings", False)
    # Qwen2 has biases on q, k and v whatever the config says; Llama and Qwen3 ask attention_bias; Mistral has none.
    asked = config.flag("attention_bias", False) and model_type in ("llama", "qwen3")
    qkv_bias, out_bias = model_type == "qwen2" or asked, asked
    mlp_bias = config.flag("mlp_bias", False) and model_type == "llama"
    queries, keys = num_heads * head_size, num_kv_heads * head_size

    inventory, layer = _Inventory(), "model.layers.{layer}"
    inventory.embedding("model.embed_tokens", config.size("vocab_size"), hidden)
    inventory.linear(f"{layer}.self_attn.q_proj", hidden, queries, qkv_bias)
    inventory.linear(f"{layer}.self_attn.k_proj", hidden, keys, qkv_bias)
    inventory.linear(f"{layer}.self_attn.v_proj", hidden, keys, qkv_bias)
    inventory.linear(f"{layer}.self_attn.o_proj", queries, hidden, out_bias)
    if model_type == "qwen3":
        inventory.add(f"{layer}.self_attn.q_norm.weight", (head_size,), "norm")
        inventory.add(f"{layer}.self_attn.k_norm.weight", (head_size,), "norm")
    inventory.linear(f"{layer}.mlp.gate_proj", hidden, mlp, mlp_bias)
    inventory.linear(f"{layer}.mlp.up_proj", hidden, mlp, mlp_bias)
    inventory.linear(f"{layer}.mlp.down_proj", mlp, hidden, mlp_bias)
    inventory.add(f"{layer}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{layer}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(config.size("vocab_size"), hidden, tied)
    # Mistral's window is on when it is set; Qwen's needs use_sliding_window as well.
    windowed = model_type == "mistral" or config.flag("use_sliding_window", False)
    return Architecture(
        model_type=model_type, num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, vocab_size=config.size("vocab_size"),
        tied=tied, activation=config.text("hidden_act", "silu"), rotary_size=head_size,
        attention_dropout=config.rate("attention_dropout", 0.0),
        sliding_window=config.absent_or_size("sliding_window", 4096) if windowed else None,
        parameters=tuple(inventory.parameters),
    )  # fmt: skip


def _gpt_neox(config: _Config) -> Architecture:
    hidden, mlp = config.size("hidden_size"), config.size("intermediate_size")
    num_heads = config.size("num_attention_heads")
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    tied, bias = config.flag("tie_word_embeddings", False), config.flag("attention_bias", True)
    dropout = config.rate("hidden_dropout", 0.0)
    inventory, layer = _Inventory(), "gpt_neox.layers.{layer}"
    inventory.embedding("gpt_neox.embed_in", config.size("vocab_size"), hidden)
    inventory.layer_norm(f"{layer}.input_layernorm", hidden)
    inventory.layer_norm(f"{layer}.post_attention_layernorm", hidden)
    inventory.linear(f"{layer}.attention.query_key_value", hidden, 3 * hidden, bias)
    inventory.linear(f"{layer}.attention.dense", hidden, hidden, bias)
    inventory.linear(f"{layer}.mlp.dense_h_to_4h", hidden, mlp, True)
    inventory.linear(f"{layer}.mlp.dense_4h_to_h", mlp, hidden, True)
    inventory.layer_norm("gpt_neox.final_layer_norm", hidden)
    inventory.head(config.size("vocab_size"), hidden, tied)
    return Architecture(
        model_type="gpt_neox", num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads, num_kv_heads=num_heads, head_size=hidden // num_heads,
        vocab_size=config.size("vocab_size"), tied=tied, activation=config.text("hidden_act", "gelu"),
        rotary_size=int(hidden // num_heads * _partial_rotary(config)),
        parallel_residual=config.flag("use_parallel_residual", True), embedding_dropout=dropout,
        attention_dropout=config.rate("attention_dropout", 0.0), residual_dropout=dropout,
        parameters=tuple(inventory.parameters),
    )  # fmt: skip


def _partial_rotary(config: _Config) -> float:
    """Rotated share of a head: transformers 5 writes it under rope_parameters, older configs as rotary_pct."""
    return config.part("rope_parameters").rate("partial_rotary_factor", config.rate("rotary_pct", 0.25))


def _gpt2(config: _Config) -> Architecture:
    hidden, num_heads = config.size("n_embd"), config.size("n_head")
    config.require_multiple("n_embd", "n_head", hidden, num_heads)
    mlp = config.size("n_inner", 4 * hidden)
    tied = config.flag("tie_word_embeddings", True)
    inventory, layer = _Inventory(), "transformer.h.{layer}"
    inventory.embedding("transformer.wte", config.size("vocab_size"), hidden)
    inventory.embedding("transformer.wpe", config.size("n_positions"), hidden)
    inventory.layer_norm(f"{layer}.ln_1", hidden)
    inventory.linear(f"{layer}.attn.c_attn", hidden, 3 * hidden, True, transposed=True)
    inventory.linear(f"{layer}.attn.c_proj", hidden, hidden, True, transposed=True)
    inventory.layer_norm(f"{layer}.ln_2", hidden)
    inventory.linear(f"{layer}.mlp.c_fc", hidden, mlp, True, transposed=True)
    inventory.linear(f"{layer}.mlp.c_proj", mlp, hidden, True, transposed=True)
    inventory.layer_norm("transformer.ln_f", hidden)
    inventory.head(config.size("vocab_size"), hidden, tied)
    return Architecture(
        model_type="gpt2", num_layers=config.size("n_layer"), num_heads=num_heads,
        num_kv_heads=num_heads, head_size=hidden // num_heads, vocab_size=config.size("vocab_size"), tied=tied,
        activation=config.text("activation_function", "gelu_new"), rotary_size=0,
        embedding_dropout=config.rate("embd_pdrop", 0.1), attention_dropout=config.rate("attn_pdrop", 0.1),
        residual_dropout=config.rate("resid_pdrop", 0.1), parameters=tuple(inventory.parameters),
    )  # fmt: skip


def _opt(config: _Config) -> Architecture:
    hidden, mlp, num_heads = config.size("hidden_size"), config.size("ffn_dim"), config.size("num_attention_heads")
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    embedding = config.size("word_embed_proj_dim", hidden)
    tied, bias = config.flag("tie_word_embeddings", True), config.flag("enable_bias", True)
    norm_first = config.flag("do_layer_norm_before", True)
    dropout = config.rate("dropout", 0.1)
    inventory, layer = _Inventory(), "model.decoder.layers.{layer}"
    inventory.embedding("model.decoder.embed_tokens", config.size("vocab_size"), embedding)
    # OPT shifts its positions by two: OPTLearnedPositionalEmbedding.offset.
    inventory.embedding("model.decoder.embed_positions", config.size("max_position_embeddings") + 2, hidden)
    if embedding != hidden:
        inventory.linear("model.decoder.project_out", hidden, embedding, False)
        inventory.linear("model.decoder.project_in", embedding, hidden, False)
    if norm_first and not config.flag("_remove_final_layer_norm", False):
        inventory.layer_norm("model.decoder.final_layer_norm", hidden)
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        inventory.linear(f"{layer}.self_attn.{name}", hidden, hidden, bias)
    inventory.layer_norm(f"{layer}.self_attn_layer_norm", hidden)
    inventory.linear(f"{layer}.fc1", hidden, mlp, bias)
    inventory.linear(f"{layer}.fc2", mlp, hidden, bias)
    inventory.layer_norm(f"{layer}.final_layer_norm", hidden)
    inventory.head(config.size("vocab_size"), embedding, tied)
    return Architecture(
        model_type="opt", num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads, num_kv_heads=num_heads, head_size=hidden // num_heads,
        vocab_size=config.size("vocab_size"), tied=tied, rotary_size=0,
        activation=config.text("activation_function", "relu"),
        norm_first=norm_first, embedding_dropout=0.0, attention_dropout=config.rate("attention_dropout", 0.0),
        residual_dropout=dropout, parameters=tuple(inventory.parameters),
    )  # fmt: skip
