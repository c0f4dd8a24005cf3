"""The inventory by arithmetic equals the verified parameter counts of every model of a supported family."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vramprobe import catalog
from vramprobe.architecture import SUPPORTED_MODEL_TYPES, UnsupportedArchitecture, architecture
from vramprobe.errors import VramprobeError

ENTRIES = [entry for entry in catalog.list_models() if entry.model_type in SUPPORTED_MODEL_TYPES]

TINY_LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
              "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 10}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_parameter_count_equals_the_verified_one(entry: catalog.ModelEntry) -> None:
    assert architecture(entry.config).num_params == entry.n_params


def test_every_family_has_a_verified_model() -> None:
    assert {entry.model_type for entry in ENTRIES} == set(SUPPORTED_MODEL_TYPES)


def test_a_tiny_llama_by_hand() -> None:
    arch = architecture(TINY_LLAMA)
    # embedding and head 10 × 8; per layer q, o 8 × 8, k, v 4 × 8, MLP 3 × 12 × 8, two norms of 8; the last norm
    assert arch.num_params == 2 * 80 + 2 * (2 * 64 + 2 * 32 + 3 * 96 + 16) + 8
    assert (arch.query_size, arch.kv_size, arch.head_size) == (8, 4, 2)
    assert [(linear.name.rpartition(".")[2], linear.num_in, linear.num_out) for linear in arch.linears] == [
        ("q_proj", 8, 8), ("k_proj", 8, 4), ("v_proj", 8, 4), ("o_proj", 8, 8),
        ("gate_proj", 8, 12), ("up_proj", 8, 12), ("down_proj", 12, 8),
    ]  # fmt: skip


def test_tied_embeddings_count_once() -> None:
    assert (
        architecture(TINY_LLAMA).num_params - architecture(TINY_LLAMA | {"tie_word_embeddings": True}).num_params == 80
    )


def test_gpt2_linears_know_in_from_out() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 10}
    assert [(linear.num_in, linear.num_out, linear.bias) for linear in architecture(config).linears] == [
        (8, 24, True), (8, 8, True), (8, 32, True), (32, 8, True),
    ]  # fmt: skip


def test_unsupported_family_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"'bloom'.*llama, mistral, .*gpt_neox, gpt2, opt"):
        architecture({"model_type": "bloom"})


def test_missing_dimension_is_named() -> None:
    with pytest.raises(VramprobeError, match="'hidden_size'"):
        architecture({"model_type": "llama"})


@pytest.mark.parametrize("module", ["architecture", "terms", "fit", "predict"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "numpy", "scipy", "pandas")
    code = f"import sys, vramprobe.{module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
