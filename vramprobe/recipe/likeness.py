"""Likeness: a model's configuration → the catalog's that allocates as it does, so that both share recipes.

In: a config.json as a dict, as its author, the hub or ``PretrainedConfig.to_dict()`` wrote it. Out: the catalog's own
spelling of it, or itself where the catalog has no such shape. No torch.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from vramprobe import catalog
from vramprobe.recipe.recipe import without_values

#: What a training step's allocations do not follow: how a checkpoint was written and is decoded from, factors.
_NOT_OF_A_STEP = {
    *("use_cache", "torch_dtype", "dtype", "pad_token_id", "return_dict", "id2label", "label2id", "problem_type"),
    *("router_aux_loss_coef", "initializer_factor", "init_std", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling"),
}
#: Values that mean as much as no word: defaults of PretrainedConfig, and of its heirs.
_AS_WITHOUT = {
    **dict.fromkeys(("output_attentions", "output_hidden_states", "is_encoder_decoder", "output_router_logits"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias"), False),
    **{"chunk_size_feed_forward": 0, "pretraining_tp": 1, "attention_dropout": 0.0, "router_jitter_noise": 0.0},
}


def as_in_catalog(config: Mapping[str, Any], *, learns_positions: bool = False) -> dict[str, Any]:
    """Return the configuration of the catalog that differs from ``config`` in nothing that a step allocates by;
    ``config`` without one. ``learns_positions``: as of :func:`vramprobe.recipe.recipe.without_values`."""
    form = _form(config, learns_positions)
    return dict(next((own for other, own in _forms(learns_positions) if other == form), config))


@cache
def _forms(learns_positions: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (form, configuration) of every model of the catalog; one cell asks several times."""
    return [(_form(entry.config, learns_positions), entry.config) for entry in catalog.list_models()]


def _form(config: Mapping[str, Any], learns_positions: bool) -> dict[str, Any]:
    rope, words = config.get("rope_parameters"), dict(config)
    if isinstance(rope, Mapping) and "rope_type" in rope:
        words["rope_scaling"] = words.pop("rope_parameters")
    kept = without_values(words, learns_positions=learns_positions)
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    is_plain = isinstance(heads, int) and isinstance(width, int) and heads > 0  # some have a number for each layer
    implied = {"head_dim": width // heads} if is_plain else {}
    if all(str(one).endswith("ForCausalLM") for one in _listed(kept, "architectures")):
        kept.pop("architectures", None)  # as which a configuration without a word is trained
    if all(one == "full_attention" for one in _listed(kept, "layer_types")):
        kept.pop("layer_types", None)
    meaningless = _AS_WITHOUT | implied
    return {
        name: value
        for name, value in kept.items()
        if value is not None and name not in _NOT_OF_A_STEP and not (name in meaningless and value == meaningless[name])
    }


def _listed(config: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list of the configuration; of anything else in its place a list of that."""
    found = config.get(name) or []
    return found if isinstance(found, list) else [found]
