"""Llamas with one thing of their own: every parameter's name, shape and role.

In: a checked config.json. Out: its Architecture. Names and shapes follow transformers 5 (``modeling_gemma.py``,
``modeling_granite.py``, ``modeling_seed_oss.py``, ``modeling_hunyuan_v1_dense.py``, ``modeling_arcee.py``,
``modeling_ministral3.py``). Never imports torch.
"""

from __future__ import annotations

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.parts import Architecture

VARIANTS = ("gemma", "granite", "seed_oss", "hunyuan_v1_dense", "arcee", "ministral3")
#: What transformers takes where the key is absent; null, and the absent key of the others, mean as many as query heads.
_DEFAULT_KV_HEADS = {"gemma": 16, "seed_oss": 8, "ministral3": 8}
_DEFAULT_HEAD_SIZE = {"gemma": 256, "seed_oss": 128, "ministral3": 128}
#: Those whose MLP has a bias where mlp_bias says so; of the rest it has none.
_MLP_BIAS = ("granite", "seed_oss", "arcee")


def variant(config: Config) -> Architecture:
    """Return the architecture of one of VARIANTS. Raises as architecture.architecture does."""
    model_type = config.values["model_type"]
    hidden, mlp, num_heads = (config.size(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    absent_heads = num_heads if "num_key_value_heads" in config.values else _DEFAULT_KV_HEADS.get(model_type, num_heads)
    num_kv_heads = config.size("num_key_value_heads", absent_heads)
    config.require_multiple("num_attention_heads", "num_key_value_heads", num_heads, num_kv_heads)
    head_size = _head_size(config, model_type, hidden, num_heads)
    qkv_bias = config.flag("attention_bias", model_type == "seed_oss") and model_type != "ministral3"
    out_bias = config.flag("attention_out_bias", False) if model_type == "seed_oss" else qkv_bias
    mlp_bias = config.flag("mlp_bias", False) and model_type in _MLP_BIAS
    queries, keys, vocab_size = num_heads * head_size, num_kv_heads * head_size, config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", model_type == "gemma")

    inventory, layer = Inventory(), "model.layers.{layer}"
    inventory.embedding("model.embed_tokens", vocab_size, hidden)
    inventory.linear(f"{layer}.self_attn.q_proj", hidden, queries, qkv_bias)
    inventory.linear(f"{layer}.self_attn.k_proj", hidden, keys, qkv_bias)
    inventory.linear(f"{layer}.self_attn.v_proj", hidden, keys, qkv_bias)
    inventory.linear(f"{layer}.self_attn.o_proj", queries, hidden, out_bias)
    if model_type == "hunyuan_v1_dense":
        inventory.add(f"{layer}.self_attn.query_layernorm.weight", (head_size,), "norm")
        inventory.add(f"{layer}.self_attn.key_layernorm.weight", (head_size,), "norm")
    if model_type != "arcee":
        inventory.linear(f"{layer}.mlp.gate_proj", hidden, mlp, mlp_bias)
    inventory.linear(f"{layer}.mlp.up_proj", hidden, mlp, mlp_bias)
    inventory.linear(f"{layer}.mlp.down_proj", mlp, hidden, mlp_bias)
    inventory.add(f"{layer}.input_layernorm.weight", (hidden,), "norm")
    inventory.add(f"{layer}.post_attention_layernorm.weight", (hidden,), "norm")
    inventory.add("model.norm.weight", (hidden,), "norm")
    inventory.head(vocab_size, hidden, tied)
    return Architecture(
        model_type=model_type,
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=tied,
        rotary_size=head_size,
        sliding_window=config.absent_or_size("sliding_window", None) if model_type == "ministral3" else None,
        scales_embedding=model_type == "gemma",
        parameters=tuple(inventory.parameters),
    )


def _head_size(config: Config, model_type: str, hidden: int, num_heads: int) -> int:
    default = _DEFAULT_HEAD_SIZE.get(model_type)
    if default is None and config.values.get("head_dim") is None:
        config.require_multiple("hidden_size", "num_attention_heads", hidden, num_heads)
    # A head_dim of null is derived where the family's own default is none.
    if default is not None and "head_dim" in config.values and config.values["head_dim"] is None:
        return hidden // num_heads
    return config.size("head_dim", default or hidden // num_heads)
