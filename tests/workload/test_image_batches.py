"""A batch with images, of every family whose images are counted: the library's own model takes it and trains on it."""

import json
from typing import Any

import pytest
import torch
from factories import make_spec
from vision import profiled_config

from vramprobe.architecture.images import _RULES
from vramprobe.catalog import cut_depth
from vramprobe.catalog.profiled import list_profiled
from vramprobe.resolve import checked
from vramprobe.spec import CellSpec
from vramprobe.workload.images import is_vision
from vramprobe.workload.training import NOBODY, set_up, train_step

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

#: Of the published config so much is made small; keys that a family has not are left out.
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8,
    "num_global_key_value_heads": 1, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "top_k_experts": 2, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "depth": 2, "num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 16, "out_hidden_size": 64, "embed_dim": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen2-vl-2b": {"vision_config": {"hidden_size": 64}},  # of the text
    "qwen3-vl-30b-a3b": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3.5-0.8b-vl": {},
    "qwen3.5-35b-a3b-vl": {},
    "gemma-4-e2b-it": {"vision_soft_tokens_per_image": 12, "text_config": {"num_kv_shared_layers": 0}},
    "gemma-4-26b-a4b-it": {"vision_soft_tokens_per_image": 12},
    "gemma-4-12b-it": {"vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64}},
    "internvl3.5-8b": {"image_seq_length": 4, "vision_config": {"image_size": [56, 56]}},
    "llava-onevision-0.5b": {
        "image_grid_pinpoints": [[28 * high, 28 * wide] for high in range(1, 7) for wide in range(1, 7)],
        "vision_config": {"image_size": 28},
    },
    "llava-1.5-7b": {"image_seq_length": 4, "vision_config": {"image_size": 28}},
    "pixtral-12b": {"vision_config": {"image_size": 64}},
    "llava-v1.6-mistral-7b": {
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]], "vision_config": {"image_size": 28},
    },
    "mistral-small-3.1-24b": {"vision_config": {"image_size": 64}},
    "paligemma2-3b-pt-224": {"projection_dim": 64, "vision_config": {"image_size": 28, "projection_dim": 64}},
    "llama-3.2-11b-vision": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "image_size": 28, "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
    },
    "idefics2-8b": {
        "perceiver_config": {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1},
    },
}  # fmt: skip


def tiny(slug: str) -> dict[str, Any]:
    """The published config with few layers, narrow, and its special tokens within a small vocabulary."""
    config = cut_depth(profiled_config(slug), 6 if "gemma" in slug else 4)
    own, holder = OWN[slug], config.get("text_config", config)
    holder |= {key: value for key, value in TEXT.items() if holder.get(key) is not None}
    if rope := holder.get("rope_parameters"):
        if "mrope_section" in rope:
            rope |= {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    elif slug.startswith("qwen"):
        holder["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config["vision_config"] |= {key: value for key, value in VISION.items() if key in config["vision_config"]}
    for number, key in enumerate(key for key in config if key.endswith(("token_id", "token_index"))):
        config[key] = 490 + number
    for part in ("text_config", "vision_config", "perceiver_config"):
        config.get(part, {}).update(own.get(part, {}))
    return config | {key: value for key, value in own.items() if not isinstance(value, dict)}


def cell(slug: str, **options: Any) -> CellSpec:
    words = {"batch_size": 2, "seq_len": 24, "device": "cpu", "dtype": "fp32", "timing_steps": 0} | options
    own = {name: words.pop(name) for name in ("images", "freeze_vision") if name in words}
    own = {"images": 1, "image_size": "64x48"} | own
    return checked(CellSpec, make_spec(**words).model_dump() | own | {"architecture": tiny(slug), "model": slug})


@pytest.mark.parametrize("slug", OWN)
def test_the_model_takes_the_images_and_its_tower_learns(slug: str) -> None:
    spec = cell(slug, images=1 if "llava" in slug else 2)
    work = set_up(spec, NOBODY)
    assert work.batch["input_ids"].shape == (2, spec.row_tokens)
    work.optimizer.zero_grad = lambda set_to_none: None  # gradients stay, to be looked at
    train_step(work, NOBODY, 1)
    towers = [one for name, one in work.model.named_parameters() if is_vision(name)]
    assert towers
    assert any(one.grad is not None and torch.count_nonzero(one.grad) for one in towers)


def test_what_a_checkpoint_would_bring_beside_parameters_starts_as_the_library_starts_it() -> None:
    tower = set_up(cell("gemma-4-26b-a4b-it"), NOBODY).model.get_submodule("model.vision_tower")
    assert torch.equal(tower.std_scale, torch.ones_like(tower.std_scale))
    assert torch.equal(tower.std_bias, torch.zeros_like(tower.std_bias))


@pytest.mark.parametrize("slug", ["gemma-4-e2b-it", "internvl3.5-8b", "qwen3.5-0.8b-vl"])
def test_a_frozen_tower_has_no_adapters(slug: str) -> None:
    work = set_up(cell(slug, method="lora", freeze_vision=True), NOBODY)
    adapted = [name for name, one in work.model.named_parameters() if one.requires_grad]
    assert adapted
    assert not any(is_vision(name) for name in adapted)


def test_every_family_whose_images_are_counted_is_a_model_here_or_tried_elsewhere() -> None:
    tried = {profiled_config(slug)["model_type"] for slug in OWN}
    assert tried | {"qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm", "llama4"} == set(_RULES)
    shipped = {json.loads(one.config.read_text())["model_type"] for one in list_profiled() if one.has_counted_images}
    assert shipped == set(_RULES)
