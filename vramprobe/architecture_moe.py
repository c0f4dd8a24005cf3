"""The inventories of mixture-of-experts models: what architecture.py is for dense ones.

In: a checked config.json. Out: its Architecture, or a VramprobeError. Experts are one parameter of three dimensions
each, as transformers 5 has them (``modeling_mixtral.py``, ``modeling_qwen3_moe.py``), and so is what peft makes of the
targets that transformers 4 had in their place (``peft/utils/transformers_weight_conversion.py``). Never imports torch.
"""

from __future__ import annotations

from vramprobe.architecture import Architecture, Experts, UnsupportedArchitecture, Wrapped, _Config, _Inventory

_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
#: The linear layers of transformers 4 that peft takes for a router's weight and the experts' two parameters.
_MIXTRAL_TARGETS = {"gate.weight": ("gate",), "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_QWEN_TARGETS = {"gate.weight": ("gate",), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def mixture(config: _Config) -> Architecture:
    """The Architecture of a config.json of one of architecture.MIXTURES.

    Raises UnsupportedArchitecture for what of these families has no arithmetic, VramprobeError for a wrong value.
    """
    match config.model_type:
        case "mixtral":
            return _mixtral(config)
        case "qwen3_moe":
            return _qwen3_moe(config)
    raise AssertionError(f"architecture() sends {config.model_type} here, and nothing reads it")


def _mixtral(config: _Config) -> Architecture:
    if config.values.get("router_jitter_noise"):
        raise UnsupportedArchitecture("the formula engine has no arithmetic for router_jitter_noise; set it to 0")
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.values.get("head_dim") is None:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", hidden // num_heads)
    experts = Experts(
        num=config.size("num_local_experts", 8), per_token=config.size("num_experts_per_tok", 2),
        width=config.size("intermediate_size"), renormalised=True,
    )  # fmt: skip
    absent_heads = num_heads if "num_key_value_heads" in config.values else 8
    num_kv_heads = config.size("num_key_value_heads", absent_heads)
    inventory = _start(config, num_heads, num_kv_heads, head_size, bias=False)
    inventory.add(f"{_MLP}.gate.weight", (experts.num, hidden), "router")
    _add_experts(inventory, experts, hidden)
    return _finish(
        config, inventory, experts, num_heads, num_kv_heads, head_size,
        wrapped=_wrapped(experts, hidden, _MIXTRAL_TARGETS),
        window=config.absent_or_size("sliding_window", None),
    )  # fmt: skip


def _qwen3_moe(config: _Config) -> Architecture:
    if config.values.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise UnsupportedArchitecture(
            "the formula engine has no arithmetic for a qwen3_moe of which some layers are dense (mlp_only_layers, "
            "decoder_sparse_step); it can be measured: vramprobe measure"
        )
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if "head_dim" not in config.values:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", hidden // num_heads)
    num_kv_heads = config.size("num_key_value_heads", 4)
    experts = Experts(
        num=config.size("num_experts", config.size("num_local_experts", 128)),
        per_token=config.size("num_experts_per_tok", 8), width=config.size("moe_intermediate_size", 768),
        renormalised=config.flag("norm_topk_prob", False),
    )  # fmt: skip
    inventory = _start(config, num_heads, num_kv_heads, head_size, bias=config.flag("attention_bias", False))
    inventory.add(f"{_ATTENTION}.q_norm.weight", (head_size,), "norm")
    inventory.add(f"{_ATTENTION}.k_norm.weight", (head_size,), "norm")
    _add_experts(inventory, experts, hidden)
    inventory.add(f"{_MLP}.gate.weight", (experts.num, hidden), "router")
    windowed = config.flag("use_sliding_window", False)
    return _finish(
        config, inventory, experts, num_heads, num_kv_heads, head_size,
        wrapped=_wrapped(experts, hidden, _QWEN_TARGETS),
        window=config.absent_or_size("sliding_window", 4096) if windowed else None,
    )  # fmt: skip


def _start(config: _Config, num_heads: int, num_kv_heads: int, head_size: int, *, bias: bool) -> _Inventory:
    """The embedding and a layer's four projections."""
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    hidden, queries, keys = config.size("hidden_size"), num_heads * head_size, num_kv_heads * head_size
    inventory = _Inventory()
    inventory.embedding("model.embed_tokens", config.size("vocab_size"), hidden)
    inventory.linear(f"{_ATTENTION}.q_proj", hidden, queries, bias)
    inventory.linear(f"{_ATTENTION}.k_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.v_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.o_proj", queries, hidden, bias)
    return inventory


def _add_experts(inventory: _Inventory, experts: Experts, hidden: int) -> None:
    inventory.add(f"{_MLP}.experts.gate_up_proj", (experts.num, 2 * experts.width, hidden), "experts")
    inventory.add(f"{_MLP}.experts.down_proj", (experts.num, hidden, experts.width), "experts")


def _wrapped(experts: Experts, hidden: int, targets: dict[str, tuple[str, ...]]) -> tuple[Wrapped, ...]:
    num, width = experts.num, experts.width
    return (
        Wrapped(f"{_MLP}.gate.weight", targets["gate.weight"], 1, hidden, num),
        Wrapped(f"{_MLP}.experts.gate_up_proj", targets["gate_up_proj"], num, hidden, 2 * width),
        Wrapped(f"{_MLP}.experts.down_proj", targets["down_proj"], num, width, hidden),
    )


def _finish(
    config: _Config, inventory: _Inventory, experts: Experts, num_heads: int, num_kv_heads: int, head_size: int, *,
    wrapped: tuple[Wrapped, ...], window: int | None,
) -> Architecture:  # fmt: skip
    """The layer's two norms and what follows the layers."""
    if experts.per_token > experts.num:
        config.require_multiple("num_experts_per_tok", "the number of experts", experts.per_token, experts.num)
    hidden, tied = config.size("hidden_size"), config.flag("tie_word_embeddings", False)
    inventory.add(f"{_LAYER}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{_LAYER}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(config.size("vocab_size"), hidden, tied)
    if config.flag("output_router_logits", False):
        raise UnsupportedArchitecture(
            "the formula engine has no arithmetic for the load-balancing loss of output_router_logits; set it to false"
        )
    return Architecture(
        model_type=config.model_type, num_layers=config.size("num_hidden_layers"), num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_size=head_size, vocab_size=config.size("vocab_size"), tied=tied,
        activation=config.text("hidden_act", "silu"), rotary_size=head_size,
        attention_dropout=config.rate("attention_dropout", 0.0), sliding_window=window, experts=experts,
        wrapped=wrapped, parameters=tuple(inventory.parameters),
    )  # fmt: skip
