"""The vision towers of Qwen 2.5 and 3 VL: their parameters beside those of their language models.

In: a checked config.json. Out: the Architecture of the language model, as Qwen 2's and 3's, with the parameters of its
tower behind the embedding's. The names and shapes follow transformers 5 (``modeling_qwen2_5_vl.py``,
``modeling_qwen3_vl.py``), less ``model.`` and ``language_model.``. Never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vramprobe.architecture.config import Config, Inventory
from vramprobe.architecture.families import llama_like
from vramprobe.architecture.parts import Architecture

#: Model type → that of its language model by itself.
_TEXT = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
VISION_LANGUAGE = tuple(_TEXT)


def vision_language(config: Config) -> Architecture:
    model_type = config.values["model_type"]
    text = llama_like(Config(_text_values(config, _TEXT[model_type])))
    inventory, vision = Inventory(), config.part("vision_config")
    if model_type == "qwen2_5_vl":
        _add_windowed(inventory, vision)
    elif _add_stacked(inventory, vision) > text.num_layers:
        raise config.no_arithmetic("fewer layers than its tower has features for them")
    first, *others = text.parameters
    return replace(text, parameters=(first, *inventory.parameters, *others))


def _text_values(config: Config, model_type: str) -> dict[str, Any]:
    """The language model's own keys: under text_config, or beside the tower's as Qwen 2.5's files have them."""
    own = {key: value for key, value in config.values.items() if key not in ("text_config", "vision_config")}
    text = {**own, **(config.values.get("text_config") or {})}
    tied = config.values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": model_type, "tie_word_embeddings": tied}


def _patch_numel(vision: Config, side: int) -> int:
    """Elements of a patch, as the processor cuts it; ``side``: its pixels by default."""
    return 3 * vision.size("temporal_patch_size", 2) * vision.size("patch_size", side) ** 2


def _merged_width(vision: Config, width: int) -> int:
    """Elements of the patches that become a token."""
    return width * vision.size("spatial_merge_size", 2) ** 2


def _add_windowed(inventory: Inventory, vision: Config) -> None:
    """Qwen 2.5's: RMS norms, a gated MLP."""
    width, mlp = vision.size("hidden_size", 3584), vision.size("intermediate_size", 3420)
    wide = _merged_width(vision, width)
    inventory.add("visual.patch_embed.proj.weight", (width, _patch_numel(vision, 14)), "router")
    for index in range(vision.size("depth", 32)):
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


def _add_stacked(inventory: Inventory, vision: Config) -> int:
    """Qwen 3's: layer norms, learned positions, and features of some blocks for the first layers of the text, whose
    number is returned.
    """
    width, mlp = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    wide, out = _merged_width(vision, width), vision.size("out_hidden_size", 3584)
    inventory.add("visual.patch_embed.proj.weight", (width, _patch_numel(vision, 16)), "router")
    inventory.add("visual.patch_embed.proj.bias", (width,), "router")
    inventory.embedding("visual.pos_embed", vision.size("num_position_embeddings", 2304), width)
    for index in range(vision.size("depth", 27)):
        block = f"visual.blocks.{index}"
        inventory.layer_norm(f"{block}.norm1", width)
        inventory.layer_norm(f"{block}.norm2", width)
        inventory.linear(f"{block}.attn.qkv", width, 3 * width, True)
        inventory.linear(f"{block}.attn.proj", width, width, True)
        inventory.linear(f"{block}.mlp.linear_fc1", width, mlp, True)
        inventory.linear(f"{block}.mlp.linear_fc2", mlp, width, True)
    num_fed = len(vision.values.get("deepstack_visual_indexes", (8, 16, 24)))
    mergers = {"visual.merger": width} | {f"visual.deepstack_merger_list.{i}": wide for i in range(num_fed)}
    for merger, normed in mergers.items():
        inventory.layer_norm(f"{merger}.norm", normed)
        inventory.linear(f"{merger}.linear_fc1", wide, wide, True)
        inventory.linear(f"{merger}.linear_fc2", wide, out, True)
    return num_fed
