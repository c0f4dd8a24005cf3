"""The inventory by arithmetic equals the verified parameter counts of every model of a supported family."""

import json
import re

import pytest

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture, architecture, families
from vramprobe.catalog.profiled import list_profiled
from vramprobe.errors import VramprobeError

ENTRIES = [entry for entry in catalog.list_models() if entry.model_type in families()]

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_parameter_count_equals_the_verified_one(entry: catalog.ModelEntry) -> None:
    assert architecture(entry.config).num_params == entry.n_params


def test_every_family_has_a_verified_model() -> None:
    with_towers = {json.loads(one.config.read_text()).get("model_type") for one in list_profiled()}
    assert {entry.model_type for entry in ENTRIES} | with_towers >= set(families())


def test_a_tiny_llama_by_hand() -> None:
    arch = architecture(TINY_LLAMA)
    # embedding and head 10 × 8; per layer q, o 8 × 8, k, v 4 × 8, MLP 3 × 12 × 8, two norms of 8; the last norm
    assert arch.num_params == 2 * 80 + 2 * (2 * 64 + 2 * 32 + 3 * 96 + 16) + 8
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size) == (4, 2, 2)
    assert [(linear.name.rpartition(".")[2], linear.num_in, linear.num_out) for linear in arch.linears] == [
        ("q_proj", 8, 8),
        ("k_proj", 8, 4),
        ("v_proj", 8, 4),
        ("o_proj", 8, 8),
        ("gate_proj", 8, 12),
        ("up_proj", 8, 12),
        ("down_proj", 12, 8),
    ]


def test_tied_embeddings_count_once() -> None:
    assert (
        architecture(TINY_LLAMA).num_params - architecture(TINY_LLAMA | {"tie_word_embeddings": True}).num_params == 80
    )


def test_gpt2_linears_know_in_from_out() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 10}
    assert [(linear.num_in, linear.num_out) for linear in architecture(config).linears] == [
        (8, 24),
        (8, 8),
        (8, 32),
        (32, 8),
    ]


def test_an_unknown_family_is_recorded_or_measured() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"'t5' are not counted here; vramprobe predict records"):
        architecture({"model_type": "t5"})


SIZES = {
    "llama": TINY_LLAMA,
    "gpt_neox": {name: size for name, size in TINY_LLAMA.items() if name != "num_key_value_heads"},
    "gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 10},
    "opt": {
        "hidden_size": 8,
        "ffn_dim": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 10,
        "max_position_embeddings": 16,
    },
}
REQUIRED = [
    (family, key)
    for family, config in SIZES.items()
    for key in config
    if key not in ("model_type", "num_key_value_heads")
]


@pytest.mark.parametrize(("family", "key"), REQUIRED)
def test_missing_dimension_is_named(family: str, key: str) -> None:
    config = {name: size for name, size in SIZES[family].items() if name != key}
    with pytest.raises(
        VramprobeError, match=f"^the {family} config.json has no '{key}'; .* a whole number of 1 or more$"
    ):
        architecture(config | {"model_type": family})


@pytest.mark.parametrize("wrong", ["x", 0, -64, 8.0, True, [8], float("nan")])
@pytest.mark.parametrize(("family", "key"), [*REQUIRED, ("llama", "num_key_value_heads"), ("llama", "head_dim")])
def test_wrong_dimension_says_what_was_given_and_what_is_allowed(family: str, key: str, wrong: object) -> None:
    message = f"^the {family} config.json has {key} {re.escape(repr(wrong))}; it must be a whole number of 1 or more$"
    with pytest.raises(VramprobeError, match=message):
        architecture(SIZES[family] | {"model_type": family, key: wrong})


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "llama",
            {"hidden_size": 9},
            "hidden_size 9 and num_attention_heads 4; hidden_size must be a multiple of num_a",
        ),
        ("qwen2", {"hidden_size": 9}, "must be a multiple"),
        ("gpt_neox", {"hidden_size": 9}, "must be a multiple"),
        ("gpt2", {"n_head": 3}, "n_embd 8 and n_head 3; n_embd must be a multiple of n_head"),
        ("opt", {"num_attention_heads": 3}, "must be a multiple"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; it must be true or false"),
        ("gpt_neox", {"rope_parameters": "x"}, "rope_parameters 'x'; it must be an object"),
        ("llama", {"vocab_size": "y" * 10_000}, "vocab_size 'y{59}…; it must be"),
    ],
)
def test_wrong_values_are_one_clear_error(family: str, options: dict[str, object], message: str) -> None:
    config = SIZES.get(family, TINY_LLAMA) | {"model_type": family} | options
    with pytest.raises(VramprobeError, match=message):
        architecture(config)


def test_a_head_size_of_its_own_frees_the_width_but_for_llama() -> None:
    wide = TINY_LLAMA | {"hidden_size": 9, "head_dim": 4}
    assert architecture(wide | {"model_type": "mistral"}).head_size == 4
    with pytest.raises(VramprobeError, match="must be a multiple"):
        architecture(wide)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    bare = {name: size for name, size in TINY_LLAMA.items() if name != "num_key_value_heads"}
    assert architecture(bare).num_kv_heads == architecture(bare | {"num_key_value_heads": None}).num_kv_heads == 4
    many = bare | {"num_attention_heads": 64, "hidden_size": 128}
    for family, num_kv_heads, head_size, window in (
        ("mistral", 8, 2, 4096),
        ("qwen2", 32, 2, None),
        ("qwen3", 32, 128, None),
    ):
        arch = architecture(many | {"model_type": family})
        assert (arch.num_kv_heads, arch.head_size, arch.sliding_window) == (num_kv_heads, head_size, window)
    assert architecture(many | {"model_type": "mistral", "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_more_layers_than_can_be_looked_at_are_refused(model_type: str) -> None:
    config = catalog.find_model({"llama": "llama-3.1-8b", "gemma2": "gemma-2-9b"}[model_type]).config
    with pytest.raises(VramprobeError, match=r"num_hidden_layers 1000000000; it must be a whole number up to 100,000"):
        architecture(config | {"num_hidden_layers": 10**9})
