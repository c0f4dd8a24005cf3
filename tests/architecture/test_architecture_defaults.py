"""Defaults of a config.json: an absent key means what it means to transformers, and wrong values are refused."""

import json
from typing import Any

import pytest

from vramprobe import catalog
from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture, families
from vramprobe.errors import VramprobeError

#: So many heads that defaults for keys and values differ from them; a whole Qwen window; a Phi's own padding token.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 64,
    "num_hidden_layers": 30,
    "vocab_size": 32_064,
}
BARE: dict[str, dict[str, Any]] = dict.fromkeys(families(), SIZES) | {
    "gpt2": {"n_embd": 128, "n_head": 64, "n_layer": 2, "n_positions": 16, "vocab_size": 50_257},
    "opt": SIZES | {"ffn_dim": 96, "max_position_embeddings": 16},
    "bloom": {"hidden_size": 128, "n_head": 64, "n_layer": 2, "vocab_size": 50},
    "deepseek_v2": SIZES | {"num_experts_per_tok": 6},
    "granitemoehybrid": SIZES | {"mamba_n_heads": 4, "mamba_d_head": 64},
    "helium": SIZES | {"num_attention_heads": 40},
}
#: Keys whose defaults transformers refuses beside the others' values.
AGREEING = {"granitemoehybrid": {"mamba_n_heads", "mamba_d_head", "mamba_expand"}}


def told(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes of this one: every key that its config class has."""
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    given = {key: value for key, value in config.items() if key != "model_type"}
    return json.loads(json.dumps(mapping[config["model_type"]](**given).to_dict()))


def outcome(config: dict[str, Any]) -> Architecture | str:
    """Return the architecture that the arithmetic reads from ``config``, or the text of its error."""
    try:
        return architecture(config)
    except VramprobeError as error:
        return str(error)


@pytest.mark.parametrize("family", [name for name, family in families().items() if "text" not in family])
def test_an_absent_key_means_what_it_means_to_transformers(family: str) -> None:
    published = next(entry.config for entry in catalog.list_models() if entry.model_type == family)
    bare = BARE[family] | {"model_type": family}
    assert architecture(bare) == architecture(told(bare))
    for config in (published, told(bare)):
        num_counted = 0
        for key in config.keys() - {"model_type"} - AGREEING.get(family, set()):
            left = {name: value for name, value in config.items() if name != key}
            ours = outcome(left)
            if not isinstance(ours, str) or f"has no {key!r}" not in ours:
                assert ours == outcome(told(left)), key
                num_counted += isinstance(ours, Architecture)
        assert num_counted >= 8


def test_layers_that_a_qwen_names_go_before_the_first_full_ones() -> None:
    kinds = ["sliding_attention", "full_attention"] * 15
    config = SIZES | {"model_type": "qwen3", "use_sliding_window": True, "layer_types": kinds}
    assert architecture(config).sliding_layers == (True, False) * 15
    assert architecture(config | {"layer_types": ["full_attention"] * 30}).sliding_window is None
    assert architecture(config | {"layer_types": None, "sliding_window": None}).sliding_layers == ()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma2", {"sliding_window": None}, "sliding_window None; it must be a whole number of 1 or more: some of"),
        ("gpt_oss", {"sliding_window": "x"}, "sliding_window 'x'; it must be a whole number of 1 or more"),
        ("qwen2", {"sliding_window": "x"}, "sliding_window 'x'; it must be a whole number of 1 or more"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers -1; it must be a whole number of 0 or more"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 30}, "layer_types .*; it must be full_attention alone"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types 'full_attention'; it must be a list of 30 names"),
        ("deepseek_v2", {"first_k_dense_replace": True}, "first_k_dense_replace True; it must be a whole number of 0"),
    ],
)
def test_what_transformers_cannot_take_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VramprobeError, match=f"^the {family} config.json has {message}"):
        architecture(BARE[family] | {"model_type": family} | options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"add_cross_attention": True}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("deepseek_v2", {"moe_layer_freq": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)
def test_what_would_be_counted_wrongly_is_left_to_a_recording(family: str, options: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedArchitecture, match=f"{family} with {next(iter(options))} .* vramprobe predict records"
    ):
        architecture(BARE[family] | {"model_type": family} | options)
