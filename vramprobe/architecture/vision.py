"""The vision towers of Qwen 2.5 and 3 VL: their parameters beside those of their language models.

In: a checked config.json. Out: the Architecture of the language model, as Qwen 2's and 3's, with a tower and its
parameters behind the embedding's. The names and shapes follow transformers 5 (``modeling_qwen2_5_vl.py``,
``modeling_qwen3_vl.py``), less ``model.`` and ``language_model.``. Never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.families import llama_like
from vramprobe.architecture.parts import Architecture, Tower

#: Model type → that of its language model by itself.
_TEXT = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
VISION_LANGUAGE = tuple(_TEXT)


def vision_language(config: Config) -> Architecture:
    model_type = config.values["model_type"]
    text = llama_like(Config(_text_values(config, _TEXT[model_type])))
    vision = config.part("vision_config")
    is_windowed = model_type == "qwen2_5_vl"
    merge = vision.size("spatial_merge_size", 2) ** 2
    depth = vision.size("depth", 32 if is_windowed else 27)
    width = vision.size("hidden_size", 3584 if is_windowed else 1152)
    patch = vision.size("patch_size", 14 if is_windowed else 16)
    tower = Tower(
        depth=depth,
        width=width,
        num_heads=vision.size("num_heads", 16),
        patch=patch,
        patch_numel=3 * vision.size("temporal_patch_size", 2) * patch**2,
        merge=merge,
        window=vision.size("window_size", 112) // patch if is_windowed else None,
        whole_blocks=tuple(vision.values.get("fullatt_block_indexes", (7, 15, 23, 31))) if is_windowed else (),
        deepstack=() if is_windowed else tuple(vision.values.get("deepstack_visual_indexes", (8, 16, 24))),
    )
    if len(tower.deepstack) > text.num_layers:
        raise config.no_arithmetic("fewer layers than its tower has features for them")
    inventory = Inventory()
    mlp = vision.size("intermediate_size", 3420 if is_windowed else 4304)
    (_windowed if is_windowed else _stacked)(inventory, tower, mlp, vision)
    first, *others = text.parameters
    return replace(text, tower=tower, parameters=(first, *inventory.parameters, *others))


def _text_values(config: Config, model_type: str) -> dict[str, Any]:
    """The language model's own keys: under text_config, or beside the tower's as Qwen 2.5's files have them."""
    own = {key: value for key, value in config.values.items() if key not in ("text_config", "vision_config")}
    text = {**own, **(config.values.get("text_config") or {})}
    tied = config.values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": model_type, "tie_word_embeddings": tied}


def _windowed(inventory: Inventory, tower: Tower, mlp: int, vision: Config) -> None:
    """Qwen 2.5's: RMS norms, a gated MLP."""
    width, wide = tower.width, tower.width * tower.merge
    inventory.add("visual.patch_embed.proj.weight", (width, tower.patch_numel), "router")
    for index in range(tower.depth):
        block = f"visual.blocks.{index}"
        inventory.add(f"{block}.norm1.weight", (width,), "norm")
        inventory.add(f"{block}.norm2.weight", (width,), "norm")
        inventory.linear(f"{block}.attn.qkv", width, 3 * width, True)
        inventory.linear(f"{block}.attn.proj", width, width, True)
        inventory.linear(f"{block}.mlp.gate_proj", width, mlp, True)
        inventory.linear(f"{block}.mlp.up_proj", width, mlp, True)
        inventory.linear(f"{block}.mlp.down_proj", mlp, width, True)
    inventory.add("visual.merger.ln_q.weight", (width,), "norm")
    inventory.linear("visual.merger.mlp.0", wide, wide, True)
    inventory.linear("visual.merger.mlp.2", wide, vision.size("out_hidden_size", 3584), True)


def _stacked(inventory: Inventory, tower: Tower, mlp: int, vision: Config) -> None:
    """Qwen 3's: layer norms, learned positions, and features of some blocks for the first layers of the text."""
    width, wide, out = tower.width, tower.width * tower.merge, vision.size("out_hidden_size", 3584)
    inventory.add("visual.patch_embed.proj.weight", (width, tower.patch_numel), "router")
    inventory.add("visual.patch_embed.proj.bias", (width,), "router")
    inventory.embedding("visual.pos_embed", vision.size("num_position_embeddings", 2304), width)
    for index in range(tower.depth):
        block = f"visual.blocks.{index}"
        inventory.layer_norm(f"{block}.norm1", width)
        inventory.layer_norm(f"{block}.norm2", width)
        inventory.linear(f"{block}.attn.qkv", width, 3 * width, True)
        inventory.linear(f"{block}.attn.proj", width, width, True)
        inventory.linear(f"{block}.mlp.linear_fc1", width, mlp, True)
        inventory.linear(f"{block}.mlp.linear_fc2", mlp, width, True)
    mergers = {"visual.merger": width} | {
        f"visual.deepstack_merger_list.{i}": wide for i, _ in enumerate(tower.deepstack)
    }
    for merger, normed in mergers.items():
        inventory.layer_norm(f"{merger}.norm", normed)
        inventory.linear(f"{merger}.linear_fc1", wide, wide, True)
        inventory.linear(f"{merger}.linear_fc2", wide, out, True)
