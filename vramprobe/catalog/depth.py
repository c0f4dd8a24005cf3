"""The depth of a model: what a config.json says of it, and the same architecture with fewer layers.

In: a config as a dict. Out: a number of layers, or a new config.
"""

from typing import Any

from vramprobe.errors import SpecError

#: Where families write their depth. The first that a config has is its depth; t5 counts each of its two stacks.
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: What has one element per layer (a list, or a letter of a pattern), and lists of layer indices: both must follow the
#: depth. Some of these are one value for all layers in other families.
_PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers",
    "hybrid_override_pattern", "intermediate_size", "activation_sparsity_pattern",
)  # fmt: skip
_LAYER_INDEX_LISTS = ("mlp_only_layers", "moe_layers", "cross_attention_layers")


def cut_depth(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Cut an architecture to its first ``num_layers`` layers (t5: so many in each stack); return a new config.

    Per-layer lists are cut with it. A cut below the period of a repeating pattern (gemma 3: every 6th layer is global)
    has another mix of layers than the whole. Raises SpecError unless 1 ≤ num_layers ≤ the config's own depth.
    """
    text = config.get("text_config")
    depth_key = _depth_key(config)
    if depth_key is None:
        if isinstance(text, dict):  # a multimodal config: its language model is what is trained
            return {**config, "text_config": cut_depth(text, num_layers)}
        raise SpecError(f"this config names no depth to cut (none of {', '.join(_DEPTH_KEYS)}); leave num_layers out")
    depth = config[depth_key]
    if not 1 <= num_layers <= depth:
        raise SpecError(f"num_layers {num_layers} is not possible: this model has {depth} layers, so 1 to {depth}")
    cut = {**config, depth_key: num_layers}
    if isinstance(config.get("num_decoder_layers"), int):
        cut["num_decoder_layers"] = min(num_layers, config["num_decoder_layers"])
    for key in _PER_LAYER:
        if isinstance(config.get(key), list | str):
            cut[key] = config[key][:num_layers]
    if config.get("num_kv_shared_layers"):  # the last ones, which take the keys and values of others
        cut["num_kv_shared_layers"] = max(num_layers - depth + config["num_kv_shared_layers"], 0)
    for key in _LAYER_INDEX_LISTS:
        if isinstance(config.get(key), list):
            cut[key] = [index for index in config[key] if index < num_layers]
    return cut


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's own part of a config: the whole one where it has no other part."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def depth_of(config: dict[str, Any]) -> int | None:
    """Layers of the language model (t5: of each stack); None where the config does not say under a name we know."""
    text = config.get("text_config")
    key = _depth_key(config)
    if key is None and isinstance(text, dict):
        return depth_of(text)
    return None if key is None else config[key]


def _depth_key(config: dict[str, Any]) -> str | None:
    return next((key for key in _DEPTH_KEYS if isinstance(config.get(key), int)), None)
