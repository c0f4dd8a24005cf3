"""Vision-language models small enough to train here, one of each family."""

from __future__ import annotations

from typing import Any

H = 64
_TEXT = {
    "hidden_size": H,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": H}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

#: Model type → config.json.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 500,
        "video_token_id": 501,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE},
        "vision_config": {**_QWEN, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "image_token_id": 500,
        "video_token_id": 501,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        "vision_config": {
            **_QWEN,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": 500,
        "mm_tokens_per_image": 4,
        "text_config": {**_TEXT, "model_type": "gemma3_text", "sliding_window": 32, "query_pre_attn_scalar": 16},
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "llama4": {
        "model_type": "llama4",
        "image_token_index": 500,
        "text_config": {**_TEXT, "model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 80},
        "vision_config": {
            **_SIGLIP,
            "intermediate_size": 128,  # four pixels of one, as they are joined
            "model_type": "llama4_vision_model",
            "image_size": 32,
            "patch_size": 8,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "image_token_id": 500,
        "pad_token_id": 0,
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "smolvlm_vision", "image_size": 32, "patch_size": 8},
    },
}
