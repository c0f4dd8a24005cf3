"""The inventories of mixture-of-experts models: what families.py is for dense ones.

In: a checked config.json. Out: its Architecture, or a VramprobeError. Experts are one parameter of three dimensions
each, as transformers 5 has them (``modeling_mixtral.py``, ``modeling_qwen3_moe.py``), and so is what peft makes of the
targets that transformers 4 had in their place (``peft/utils/transformers_weight_conversion.py``). Never imports torch.
"""

from __future__ import annotations

from typing import Literal

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.llama4 import llama4
from vramprobe.architecture.parts import Architecture, Experts, UnsupportedArchitecture, Wrapped
from vramprobe.architecture.relatives import sliding_layers, window_of
from vramprobe.errors import VramprobeError

_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
#: The linear layers of transformers 4 that peft takes for a router's weight and the experts' two parameters.
_MIXTRAL_TARGETS = {"gate.weight": ("gate",), "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_QWEN_TARGETS = {"gate.weight": ("gate",), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _mixtral(config: Config) -> Architecture:
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.values.get("head_dim") is None:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", hidden // num_heads)
    experts = Experts(
        num=config.size("num_local_experts", 8),
        width=config.size("intermediate_size"),
    )
    absent_heads = num_heads if "num_key_value_heads" in config.values else 8
    num_kv_heads = config.size("num_key_value_heads", absent_heads)
    inventory = _start(config, num_heads, num_kv_heads, head_size, bias=False)
    inventory.add(f"{_MLP}.gate.weight", (experts.num, hidden), "router")
    _add_experts(inventory, experts, hidden)
    return _finish(
        config,
        inventory,
        experts,
        num_heads,
        num_kv_heads,
        head_size,
        wrapped=_wrapped(experts, hidden, _MIXTRAL_TARGETS),
        window=config.absent_or_size("sliding_window", None),
    )


def _qwen3_moe(config: Config) -> Architecture:
    if config.values.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise UnsupportedArchitecture(
            "a qwen3_moe of which some layers are dense (mlp_only_layers, decoder_sparse_step) is not counted here; "
            "vramprobe predict records a step of it"
        )
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if "head_dim" not in config.values:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", hidden // num_heads)
    num_kv_heads = config.size("num_key_value_heads", 4)
    experts = Experts(
        num=config.size("num_experts", config.size("num_local_experts", 128)),
        width=config.size("moe_intermediate_size", 768),
    )
    inventory = _start(config, num_heads, num_kv_heads, head_size, bias=config.flag("attention_bias", False))
    inventory.add(f"{_ATTENTION}.q_norm.weight", (head_size,), "norm")
    inventory.add(f"{_ATTENTION}.k_norm.weight", (head_size,), "norm")
    _add_experts(inventory, experts, hidden)
    inventory.add(f"{_MLP}.gate.weight", (experts.num, hidden), "router")
    window = config.absent_or_size("sliding_window", 4096)
    return _finish(
        config,
        inventory,
        experts,
        num_heads,
        num_kv_heads,
        head_size,
        wrapped=_wrapped(experts, hidden, _QWEN_TARGETS),
        window=window if config.flag("use_sliding_window", False) else None,
    )


def _gpt_oss(config: Config) -> Architecture:
    hidden, width = config.size("hidden_size", 2880), config.size("intermediate_size", 2880)
    num_heads, num_kv_heads = config.size("num_attention_heads", 64), config.size("num_key_value_heads", 8)
    head_size = config.size("head_dim", 64)
    experts = Experts(
        num=config.size("num_local_experts", 128),
        width=width,
    )
    inventory = _start(config, num_heads, num_kv_heads, head_size, bias=config.flag("attention_bias", True), sinks=True)
    inventory.add(f"{_MLP}.router.weight", (experts.num, hidden), "router")
    inventory.add(f"{_MLP}.router.bias", (experts.num,), "router")
    for name, shape in {
        "gate_up_proj": (hidden, 2 * width),
        "gate_up_proj_bias": (2 * width,),
        "down_proj": (width, hidden),
        "down_proj_bias": (hidden,),
    }.items():
        inventory.add(f"{_MLP}.experts.{name}", (experts.num, *shape), "experts")
    sliding = sliding_layers(config, 2, config.size("num_hidden_layers"))
    window_of(config, sliding, 128)
    # The window is only in a mask's values: the eager path, the only one, makes a mask of the same size without it.
    return _finish(
        config,
        inventory,
        experts,
        num_heads,
        num_kv_heads,
        head_size,
        wrapped=(),
        window=None,
        sliding=sliding,
    )


def _deepseek_v2(config: Config) -> Architecture:
    num_dense = config.count("first_k_dense_replace", 0)
    if config.values.get("moe_layer_freq", 1) not in (None, 1):
        raise config.wrong("moe_layer_freq", "1: transformers makes every layer after the dense ones a mixture")
    hidden, num_heads, rotated = (
        config.size("hidden_size"),
        config.size("num_attention_heads"),
        config.size("qk_rope_head_dim", 64),
    )
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    if config.size("num_key_value_heads", num_heads) != num_heads:
        raise VramprobeError(
            f"the deepseek_v2 config.json has num_key_value_heads {config.size('num_key_value_heads')} and "
            f"num_attention_heads {num_heads}; latent attention makes as many keys as queries, so they must be equal"
        )
    head_size, value_size = config.size("qk_nope_head_dim", 128) + rotated, config.size("v_head_dim", 128)
    experts = Experts(
        num=config.size("n_routed_experts", 64),
        width=config.size("moe_intermediate_size", 1407),
    )
    inventory = Inventory()
    inventory.embedding("model.embed_tokens", config.size("vocab_size"), hidden)
    _add_latent_attention(config, inventory, num_heads, head_size, value_size)
    _add_experts(inventory, experts, hidden, only="sparse")
    inventory.add(f"{_MLP}.gate.weight", (experts.num, hidden), "router", only="sparse")
    shared = experts.width * config.size("n_shared_experts", 2)
    _add_mlp(config, inventory, f"{_MLP}.shared_experts", shared, only="sparse")
    if num_dense:
        _add_mlp(config, inventory, _MLP, config.size("intermediate_size", 11008), only="dense")
    return _finish(
        config,
        inventory,
        experts,
        num_heads,
        num_heads,
        head_size,
        rotary_size=rotated,
        dense_layers=tuple(range(num_dense)),
        value_size=value_size if value_size != head_size else None,
        wrapped=_wrapped(experts, hidden, _QWEN_TARGETS),
        window=None,
    )


def _add_latent_attention(
    config: Config, inventory: Inventory, num_heads: int, head_size: int, value_size: int
) -> None:
    """Queries, keys and values by way of narrow latents (MLA)."""
    hidden, latent = config.size("hidden_size"), config.size("kv_lora_rank", 512)
    bias, queries = config.flag("attention_bias", False), num_heads * head_size
    rotated = config.size("qk_rope_head_dim", 64)
    query_latent = config.absent_or_size("q_lora_rank", 1536)
    if query_latent is None:
        inventory.linear(f"{_ATTENTION}.q_proj", hidden, queries, False)
    else:
        inventory.linear(f"{_ATTENTION}.q_a_proj", hidden, query_latent, bias)
        inventory.add(f"{_ATTENTION}.q_a_layernorm.weight", (query_latent,), "norm")
        inventory.linear(f"{_ATTENTION}.q_b_proj", query_latent, queries, False)
    inventory.linear(f"{_ATTENTION}.kv_a_proj_with_mqa", hidden, latent + rotated, bias)
    inventory.add(f"{_ATTENTION}.kv_a_layernorm.weight", (latent,), "norm")
    keys_and_values = num_heads * (head_size - rotated + value_size)
    inventory.linear(f"{_ATTENTION}.kv_b_proj", latent, keys_and_values, False)
    inventory.linear(f"{_ATTENTION}.o_proj", num_heads * value_size, hidden, bias)


def _add_mlp(
    config: Config, inventory: Inventory, prefix: str, width: int, *, only: Literal["dense", "sparse"]
) -> None:
    hidden, bias = config.size("hidden_size"), config.flag("mlp_bias", False)
    for name, num_in, num_out in (
        ("gate_proj", hidden, width),
        ("up_proj", hidden, width),
        ("down_proj", width, hidden),
    ):
        inventory.linear(f"{prefix}.{name}", num_in, num_out, bias, only=only)


def _start(
    config: Config, num_heads: int, num_kv_heads: int, head_size: int, *, bias: bool, sinks: bool = False
) -> Inventory:
    """The embedding and a layer's four projections."""
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    hidden, queries, keys = config.size("hidden_size"), num_heads * head_size, num_kv_heads * head_size
    inventory = Inventory()
    inventory.embedding("model.embed_tokens", config.size("vocab_size"), hidden)
    if sinks:
        inventory.add(f"{_ATTENTION}.sinks", (num_heads,), "sinks")
    inventory.linear(f"{_ATTENTION}.q_proj", hidden, queries, bias)
    inventory.linear(f"{_ATTENTION}.k_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.v_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.o_proj", queries, hidden, bias)
    return inventory


def _add_experts(inventory: Inventory, experts: Experts, hidden: int, only: Literal["", "sparse"] = "") -> None:
    num, width = experts.num, experts.width
    inventory.add(f"{_MLP}.experts.gate_up_proj", (num, 2 * width, hidden), "experts", only=only)
    inventory.add(f"{_MLP}.experts.down_proj", (num, hidden, width), "experts", only=only)


def _wrapped(experts: Experts, hidden: int, targets: dict[str, tuple[str, ...]]) -> tuple[Wrapped, ...]:
    num, width = experts.num, experts.width
    return (
        Wrapped(f"{_MLP}.gate.weight", targets["gate.weight"], 1, hidden, num),
        Wrapped(f"{_MLP}.experts.gate_up_proj", targets["gate_up_proj"], num, hidden, 2 * width),
        Wrapped(f"{_MLP}.experts.down_proj", targets["down_proj"], num, width, hidden),
    )


def _finish(
    config: Config,
    inventory: Inventory,
    experts: Experts,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    wrapped: tuple[Wrapped, ...],
    window: int | None,
    sliding: tuple[bool, ...] = (),
    rotary_size: int | None = None,
    value_size: int | None = None,
    dense_layers: tuple[int, ...] = (),
) -> Architecture:
    """The layer's two norms and what follows the layers."""
    hidden, tied = config.size("hidden_size"), config.flag("tie_word_embeddings", False)
    inventory.add(f"{_LAYER}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{_LAYER}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(config.size("vocab_size"), hidden, tied)
    return Architecture(
        model_type=config.model_type,
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=rotary_size or head_size,
        value_size=value_size,
        dense_layers=dense_layers,
        sliding_window=window,
        sliding_layers=sliding,
        experts=experts,
        wrapped=wrapped,
        parameters=tuple(inventory.parameters),
    )


#: Model type → its inventory.
MIXTURES = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "llama4_text": llama4,
}
