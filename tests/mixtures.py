"""Tiny mixtures of experts, one of each family whose parameters are counted, and cells of them."""

from typing import Any

from factories import TINY_LLAMA, make_spec

from vramprobe.spec import CellSpec

#: So few words that a layer is the peak, not the head.
TINY = TINY_LLAMA | {
    "vocab_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": TINY | {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
                         "moe_intermediate_size": 40, "norm_topk_prob": True},
    "gpt_oss": TINY | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4,
                       "sliding_window": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v2": {name: value for name, value in TINY.items() if name != "head_dim"}
    | {"model_type": "deepseek_v2", "num_key_value_heads": 4, "first_k_dense_replace": 1, "kv_lora_rank": 48,
       "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 16,
       "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 40},
    "llama4_text": TINY | {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1,
                           "intermediate_size": 40, "intermediate_size_mlp": 80, "no_rope_layer_interval": 2},
}  # fmt: skip


def moe_cell(family: str, **words: Any) -> CellSpec:
    """A cell of a tiny model; gpt-oss has the eager attention alone, and Llama 4's router takes no adapter."""
    config = FAMILIES[family]
    only: dict[str, Any] = {"attn": "eager"} if family == "gpt_oss" else {}
    if config["model_type"] == "llama4_text" and words.get("method", "full") != "full":
        only = {"lora_targets": "q_proj,k_proj,v_proj,o_proj"} if "lora_targets" not in words else {}
    options = {"batch_size": 3, "seq_len": 48, "timing_steps": 0} | words | only
    return CellSpec(**(make_spec(**options).model_dump() | {"architecture": config}))
