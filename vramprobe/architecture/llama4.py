"""Llama 4's language model: every parameter's name, shape and role, and which of its layers are of which kind.

In: a checked config.json. Out: its Architecture. Names and shapes follow transformers 5 (``modeling_llama4.py``). Every
layer, or every second, has experts and one that all tokens share; three of four turn queries and keys and attend within
chunks, the fourth does neither. Never imports torch.
"""

from __future__ import annotations

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.parts import Architecture, Experts

_LAYER = "model.layers.{layer}"
_ATTENTION, _FEED = f"{_LAYER}.self_attn", f"{_LAYER}.feed_forward"


def llama4(config: Config) -> Architecture:
    """Return the architecture of a llama4_text. Raises as architecture.architecture does."""
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads if "num_key_value_heads" in config.values else 8)
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    head_size = config.size("head_dim", hidden // num_heads if "head_dim" in config.values else 128)
    num_layers, vocab_size = config.size("num_hidden_layers"), config.size("vocab_size")
    experts = Experts(
        num=config.size("num_local_experts", 16),
        width=config.size("intermediate_size", 8192),
    )
    tied = config.flag("tie_word_embeddings", False)
    dense, turned = _dense_layers(config, num_layers), _turned_layers(config, num_layers)
    inventory = Inventory()
    inventory.embedding("model.embed_tokens", vocab_size, hidden)
    _add_layer(config, inventory, experts, (num_heads * head_size, num_kv_heads * head_size), has_dense=bool(dense))
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(vocab_size, hidden, tied)
    return Architecture(
        model_type="llama4_text",
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=head_size,
        sliding_window=config.size("attention_chunk_size", 8192) if any(turned) else None,
        sliding_layers=turned,
        experts=experts,
        dense_layers=dense,
        parameters=tuple(inventory.parameters),
    )


def _add_layer(
    config: Config, inventory: Inventory, experts: Experts, widths: tuple[int, int], *, has_dense: bool
) -> None:
    hidden, bias = config.size("hidden_size"), config.flag("attention_bias", False)
    (queries, keys), num, width = widths, experts.num, experts.width
    inventory.linear(f"{_ATTENTION}.q_proj", hidden, queries, bias)
    inventory.linear(f"{_ATTENTION}.k_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.v_proj", hidden, keys, bias)
    inventory.linear(f"{_ATTENTION}.o_proj", queries, hidden, bias)
    only = "sparse" if has_dense else ""
    inventory.add(f"{_FEED}.experts.gate_up_proj", (num, hidden, 2 * width), "experts", only=only)
    inventory.add(f"{_FEED}.experts.down_proj", (num, width, hidden), "experts", only=only)
    inventory.add(f"{_FEED}.router.weight", (num, hidden), "router", only=only)
    for prefix, size, kind in (
        (f"{_FEED}.shared_expert", width, only),
        *([(_FEED, config.size("intermediate_size_mlp", 16384), "dense")] if has_dense else []),
    ):
        inventory.linear(f"{prefix}.gate_proj", hidden, size, False, only=kind)
        inventory.linear(f"{prefix}.up_proj", hidden, size, False, only=kind)
        inventory.linear(f"{prefix}.down_proj", size, hidden, False, only=kind)
    inventory.add(f"{_LAYER}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{_LAYER}.post_attention_layernorm.weight", (hidden,), "norm")


def _dense_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Those that moe_layers leaves out, or of each so many all but the last."""
    sparse, step = config.values.get("moe_layers"), config.size("interleave_moe_layer_step", 1)
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or not all(isinstance(one, int) and 0 <= one < num_layers for one in sparse):
        raise config.wrong("moe_layers", f"a list of layers from 0 to {num_layers - 1}, or null")
    return tuple(layer for layer in range(num_layers) if layer not in sparse)


def _turned_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Those that turn queries and keys; they, and no others, attend within chunks."""
    period, given = config.size("no_rope_layer_interval", 4), config.values.get("no_rope_layers")
    turned = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if given:
        if not isinstance(given, list) or len(given) < num_layers or not all(one in (0, 1) for one in given):
            raise config.wrong(
                "no_rope_layers", f"a list of {num_layers} numbers, 1 for a layer with rotations, else 0"
            )
        turned = [bool(one) for one in given[:num_layers]]
    kinds = config.values.get("layer_types")
    if kinds is not None and kinds != ["chunked_attention" if one else "full_attention" for one in turned]:
        raise config.no_arithmetic("layer_types other than chunked_attention where no_rope_layers has 1")
    return tuple(turned)
