"""More dense families: every parameter's name, shape and role.

In: a checked config.json. Out: its Architecture. Names and shapes follow
transformers 5 (``modeling_gemma2.py``, ``modeling_gemma3.py``, ``modeling_phi3.py``, ``modeling_olmo2.py``,
``modeling_olmo3.py``, ``modeling_falcon.py``, ``modeling_bloom.py``). Never imports torch.
"""

from __future__ import annotations

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.parts import Architecture

#: transformers' sliding_window_pattern where a Gemma 3 config has none: every sixth layer sees everything.
_GEMMA3_PERIOD = 6
_OLMO3_PERIOD = 4


def sliding_layers(config: Config, period: int, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer if it looks through the window: as layer_types says, else all but each period's last."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        if config.model_type == "gemma3_text":
            period = config.size("sliding_window_pattern", period)
        return tuple((index + 1) % period != 0 for index in range(num_layers))
    allowed = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in allowed for kind in kinds):
        raise config.wrong("layer_types", f"a list of {num_layers} names, each one of {', '.join(allowed)}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def window_of(config: Config, sliding: tuple[bool, ...], default: int) -> int | None:
    """The window that these layers look through, None where none does."""
    window = config.absent_or_size("sliding_window", default)
    if any(sliding) and window is None:
        raise config.wrong("sliding_window", "a whole number of 1 or more: some of its layers are sliding_attention")
    return window if any(sliding) else None


def _gemma(config: Config) -> Architecture:
    model_type = config.values["model_type"]
    is_third = model_type == "gemma3_text"
    hidden, mlp = config.size("hidden_size"), config.size("intermediate_size")
    num_heads, num_kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads", 4)
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size, num_layers = config.size("head_dim", 256), config.size("num_hidden_layers")
    tied, bias = config.flag("tie_word_embeddings", True), config.flag("attention_bias", False)
    queries, keys = num_heads * head_size, num_kv_heads * head_size
    inventory, layer = Inventory(), "model.layers.{layer}"
    inventory.embedding("model.embed_tokens", config.size("vocab_size"), hidden)
    inventory.linear(f"{layer}.self_attn.q_proj", hidden, queries, bias)
    inventory.linear(f"{layer}.self_attn.k_proj", hidden, keys, bias)
    inventory.linear(f"{layer}.self_attn.v_proj", hidden, keys, bias)
    inventory.linear(f"{layer}.self_attn.o_proj", queries, hidden, bias)
    if is_third:
        inventory.add(f"{layer}.self_attn.q_norm.weight", (head_size,), "norm")
        inventory.add(f"{layer}.self_attn.k_norm.weight", (head_size,), "norm")
    for name, num_in, num_out in (("gate_proj", hidden, mlp), ("up_proj", hidden, mlp), ("down_proj", mlp, hidden)):
        inventory.linear(f"{layer}.mlp.{name}", num_in, num_out, False)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        inventory.add(f"{layer}.{name}_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(config.size("vocab_size"), hidden, tied)
    sliding = sliding_layers(config, _GEMMA3_PERIOD if is_third else 2, num_layers)
    return Architecture(
        model_type=model_type,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=head_size,
        sliding_window=window_of(config, sliding, 4096),
        sliding_layers=sliding,
        scales_embedding=True,
        num_rotary_tables=len(set(sliding)) if is_third else 1,
        parameters=tuple(inventory.parameters),
    )


def _phi3(config: Config) -> Architecture:
    hidden, mlp, num_heads = (config.size(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    if config.values.get("head_dim") is None:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size, vocab_size = config.size("head_dim", hidden // num_heads), config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", False)
    queries, keys = num_heads * head_size, num_kv_heads * head_size
    inventory, layer = Inventory(), "model.layers.{layer}"
    inventory.embedding("model.embed_tokens", vocab_size, hidden)
    inventory.linear(f"{layer}.self_attn.o_proj", queries, hidden, False)
    inventory.linear(f"{layer}.self_attn.qkv_proj", hidden, queries + 2 * keys, False)
    inventory.linear(f"{layer}.mlp.gate_up_proj", hidden, 2 * mlp, False)
    inventory.linear(f"{layer}.mlp.down_proj", mlp, hidden, False)
    inventory.add(f"{layer}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{layer}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(vocab_size, hidden, tied)
    share = config.part("rope_parameters").rate("partial_rotary_factor", config.rate("partial_rotary_factor", 1.0))
    return Architecture(
        model_type="phi3",
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=int(head_size * share),
        sliding_window=config.absent_or_size("sliding_window", None),
        parameters=tuple(inventory.parameters),
    )


def _olmo(config: Config) -> Architecture:
    """OLMo 2, and OLMo 3, of whose layers all but every fourth look through a window."""
    model_type, num_layers = config.values["model_type"], config.size("num_hidden_layers")
    hidden, mlp, num_heads = (config.size(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    num_kv_heads, vocab_size = config.size("num_key_value_heads", num_heads), config.size("vocab_size")
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size = config.size("head_dim", hidden // num_heads)
    tied, bias = config.flag("tie_word_embeddings", False), config.flag("attention_bias", False)
    queries, keys = num_heads * head_size, num_kv_heads * head_size
    inventory, layer = Inventory(), "model.layers.{layer}"
    inventory.embedding("model.embed_tokens", vocab_size, hidden)
    for name, num_in, num_out in (
        ("q_proj", hidden, queries),
        ("k_proj", hidden, keys),
        ("v_proj", hidden, keys),
        ("o_proj", queries, hidden),
    ):
        inventory.linear(f"{layer}.self_attn.{name}", num_in, num_out, bias)
    inventory.add(f"{layer}.self_attn.q_norm.weight", (queries,), "norm")
    inventory.add(f"{layer}.self_attn.k_norm.weight", (keys,), "norm")
    for name, num_in, num_out in (("gate_proj", hidden, mlp), ("up_proj", hidden, mlp), ("down_proj", mlp, hidden)):
        inventory.linear(f"{layer}.mlp.{name}", num_in, num_out, False)
    inventory.add(f"{layer}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{layer}.post_feedforward_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(vocab_size, hidden, tied)
    sliding = sliding_layers(config, _OLMO3_PERIOD, num_layers) if model_type == "olmo3" else ()
    return Architecture(
        model_type=model_type,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=head_size,
        sliding_window=window_of(config, sliding, 4096) if sliding else None,
        sliding_layers=sliding,
        num_rotary_tables=max(len(set(sliding)), 1),
        parameters=tuple(inventory.parameters),
    )


def _falcon(config: Config) -> Architecture:
    """Falcon 7B's: one key and value head for all, attention beside the MLP, rotated heads."""
    for key, allowed in (
        ("alibi", False),
        ("new_decoder_architecture", False),
        ("multi_query", True),
        ("parallel_attn", True),
    ):
        config.require_flag(key, allowed, ", which knows Falcon 7B's architecture alone")
    if config.values.get("num_ln_in_parallel_attn") not in (None, 1):
        raise config.no_arithmetic("num_ln_in_parallel_attn other than 1 or null has no arithmetic")
    config.rate("attention_dropout", 0.0)  # which transformers applies with alibi alone
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    head_size, vocab_size = hidden // num_heads, config.size("vocab_size")
    mlp, bias = config.size("ffn_hidden_size", 4 * hidden), config.flag("bias", False)
    tied = config.flag("tie_word_embeddings", True)
    inventory, layer = Inventory(), "transformer.h.{layer}"
    inventory.embedding("transformer.word_embeddings", vocab_size, hidden)
    inventory.linear(f"{layer}.self_attention.query_key_value", hidden, hidden + 2 * head_size, bias)
    inventory.linear(f"{layer}.self_attention.dense", hidden, hidden, bias)
    inventory.linear(f"{layer}.mlp.dense_h_to_4h", hidden, mlp, bias)
    inventory.linear(f"{layer}.mlp.dense_4h_to_h", mlp, hidden, bias)
    inventory.layer_norm(f"{layer}.input_layernorm", hidden)
    inventory.layer_norm("transformer.ln_f", hidden)
    inventory.head(vocab_size, hidden, tied)
    return Architecture(
        model_type="falcon",
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=head_size,
        own_linears=True,
        parameters=tuple(inventory.parameters),
    )


def _bloom(config: Config) -> Architecture:
    hidden, num_heads = config.size("hidden_size"), config.size("n_head")
    config.require_multiple("hidden_size", "n_head", hidden, num_heads)
    vocab_size, tied = config.size("vocab_size"), config.flag("tie_word_embeddings", True)
    inventory, layer = Inventory(), "transformer.h.{layer}"
    inventory.embedding("transformer.word_embeddings", vocab_size, hidden)
    inventory.layer_norm("transformer.word_embeddings_layernorm", hidden)
    inventory.layer_norm(f"{layer}.input_layernorm", hidden)
    inventory.linear(f"{layer}.self_attention.query_key_value", hidden, 3 * hidden, True)
    inventory.linear(f"{layer}.self_attention.dense", hidden, hidden, True)
    inventory.layer_norm(f"{layer}.post_attention_layernorm", hidden)
    inventory.linear(f"{layer}.mlp.dense_h_to_4h", hidden, 4 * hidden, True)
    inventory.linear(f"{layer}.mlp.dense_4h_to_h", 4 * hidden, hidden, True)
    inventory.layer_norm("transformer.ln_f", hidden)
    inventory.head(vocab_size, hidden, tied)
    return Architecture(
        model_type="bloom",
        num_layers=config.size("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=0,
        parameters=tuple(inventory.parameters),
    )


#: Model type → its inventory.
RELATIVES = {
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "olmo2": _olmo,
    "olmo3": _olmo,
    "falcon": _falcon,
    "bloom": _bloom,
}
