"""Llama and its closest, GPT-NeoX, GPT-2 and OPT: every parameter's name, shape and role.

In: a checked config.json. Out: its Architecture. The names and shapes follow transformers 5 (``modeling_llama.py``,
``modeling_mistral.py``, ``modeling_qwen2.py``, ``modeling_qwen3.py``, ``modeling_gpt_neox.py``, ``modeling_gpt2.py``,
``modeling_opt.py``). Never imports torch.
"""

from __future__ import annotations

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.parts import Architecture
from vramprobe.architecture.relatives import sliding_layers

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
#: What transformers takes where the key is absent; null, and Llama's absent key, mean as many as query heads.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


def llama_like(config: Config) -> Architecture:
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

    inventory, layer = Inventory(), "model.layers.{layer}"
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
    window, sliding = _window(config, model_type)
    return Architecture(
        model_type=model_type,
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=head_size,
        sliding_window=window,
        sliding_layers=sliding,
        parameters=tuple(inventory.parameters),
    )


def _window(config: Config, model_type: str) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers look through it where not all do.

    Mistral's is on when it is set. Qwen's needs use_sliding_window as well, and the layers are those of layer_types,
    else those after the first max_window_layers. Llama has none.
    """
    if model_type == "llama":
        return None, ()
    window = config.absent_or_size("sliding_window", 4096)
    if model_type == "mistral":
        return window, ()
    window = window if config.flag("use_sliding_window", False) else None
    num_layers, num_full = config.size("num_hidden_layers"), config.count("max_window_layers", 28)
    if config.values.get("layer_types") is not None:
        sliding = sliding_layers(config, 1, num_layers)
        if window is None and any(sliding):
            raise config.wrong("layer_types", "full_attention alone unless use_sliding_window is true and there is one")
    else:
        sliding = tuple(window is not None and index >= num_full for index in range(num_layers))
    return (window, sliding) if any(sliding) else (None, ())


def _gpt_neox(config: Config) -> Architecture:
    hidden, mlp = config.size("hidden_size"), config.size("intermediate_size")
    num_heads = config.size("num_attention_heads")
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    tied, bias = config.flag("tie_word_embeddings", False), config.flag("attention_bias", True)
    inventory, layer = Inventory(), "gpt_neox.layers.{layer}"
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
        model_type="gpt_neox",
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=int(hidden // num_heads * _partial_rotary(config)),
        parameters=tuple(inventory.parameters),
    )


def _partial_rotary(config: Config) -> float:
    """Rotated share of a head: transformers 5 writes it under rope_parameters, older configs as rotary_pct."""
    return config.part("rope_parameters").rate("partial_rotary_factor", config.rate("rotary_pct", 0.25))


def _gpt2(config: Config) -> Architecture:
    hidden, num_heads = config.size("n_embd"), config.size("n_head")
    config.require_multiple("n_embd", "n_head", hidden, num_heads)
    config.require_flag("add_cross_attention", False)
    mlp = config.size("n_inner", 4 * hidden)
    tied = config.flag("tie_word_embeddings", True)
    inventory, layer = Inventory(), "transformer.h.{layer}"
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
        model_type="gpt2",
        num_layers=config.size("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=0,
        parameters=tuple(inventory.parameters),
    )


def _opt(config: Config) -> Architecture:
    hidden, mlp, num_heads = config.size("hidden_size"), config.size("ffn_dim"), config.size("num_attention_heads")
    config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    config.require_flag("layer_norm_elementwise_affine", True)
    embedding = config.size("word_embed_proj_dim", hidden)
    tied, bias = config.flag("tie_word_embeddings", True), config.flag("enable_bias", True)
    inventory, layer = Inventory(), "model.decoder.layers.{layer}"
    inventory.embedding("model.decoder.embed_tokens", config.size("vocab_size"), embedding)
    # OPT shifts its positions by two: OPTLearnedPositionalEmbedding.offset.
    inventory.embedding("model.decoder.embed_positions", config.size("max_position_embeddings") + 2, hidden)
    if embedding != hidden:
        inventory.linear("model.decoder.project_out", hidden, embedding, False)
        inventory.linear("model.decoder.project_in", embedding, hidden, False)
    if config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False):
        inventory.layer_norm("model.decoder.final_layer_norm", hidden)
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        inventory.linear(f"{layer}.self_attn.{name}", hidden, hidden, bias)
    inventory.layer_norm(f"{layer}.self_attn_layer_norm", hidden)
    inventory.linear(f"{layer}.fc1", hidden, mlp, bias)
    inventory.linear(f"{layer}.fc2", mlp, hidden, bias)
    inventory.layer_norm(f"{layer}.final_layer_norm", hidden)
    inventory.head(config.size("vocab_size"), embedding, tied)
    return Architecture(
        model_type="opt",
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        vocab_size=config.size("vocab_size"),
        tied=tied,
        rotary_size=0,
        parameters=tuple(inventory.parameters),
    )


#: Model type → its inventory.
OLDER = {"gpt_neox": _gpt_neox, "gpt2": _gpt2, "opt": _opt}
