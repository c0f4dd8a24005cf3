"""A configuration in anybody's spelling finds the recipes of the catalog's model that has its shape."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from vramprobe import api, catalog
from vramprobe.predict import recorded
from vramprobe.recipe import book
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.likeness import as_in_catalog
from vramprobe.recipe.packed import pack
from vramprobe.recipe.recorder import Surroundings
from vramprobe.recipe.shipped import shipped_recipe

transformers = pytest.importorskip("transformers")

#: Llama 3.1 8B's as its hub has it, with what a fine-tune changes: token ids, the length, the dtype.
HUB: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tuned-llama.json").read_text())
OWN = catalog.find_model("llama-3.1-8b").config


def spelled(slug: str) -> dict[str, Any]:
    """The catalog's configuration with all that transformers adds to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers knows by others
        config = transformers.AutoConfig.for_model(**catalog.find_model(slug).config)
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("slug", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b-v0.3", "phi-4", "qwen3.5-9b"])
def test_what_transformers_adds_changes_no_shape(slug: str) -> None:
    written = spelled(slug)
    assert written != catalog.find_model(slug).config
    assert as_in_catalog(written) == catalog.find_model(slug).config


def test_a_tuned_model_has_its_base_s_shape() -> None:
    assert as_in_catalog(HUB) == OWN


@pytest.mark.parametrize(
    "other",
    [
        {"vocab_size": 128258},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"head_dim": 64},
        {"num_hidden_layers": 31},
        {"quantization_config": {"quant_method": "gptq"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"layer_types": ["sliding_attention"] * 32},
        # what nobody would write
        {"num_attention_heads": "32"},
        {"num_attention_heads": [32, 32]},
        {"hidden_size": None},
        {"rope_scaling": "linear"},
        {"rope_scaling": ["linear"]},
        {"rope_parameters": {"rope_type": ["x"]}},
        {"layer_types": [{"a": 1}]},
        {"layer_types": 5},
        {"architectures": 3},
    ],
    ids=str,
)
def test_what_allocates_otherwise_stays_as_it_is(other: dict[str, Any]) -> None:
    assert as_in_catalog(HUB | other) == HUB | other


def test_the_catalog_s_own_configurations_are_all_apart() -> None:
    """Each finds a model with its very shape, the first of those alike."""
    for entry in catalog.list_models():
        found = as_in_catalog(entry.config)
        assert as_in_catalog(found) == found, entry.name
        assert found["model_type"] == entry.config["model_type"]


@pytest.mark.usefixtures("shipped_alone")
def test_a_folder_with_a_tuned_model_is_answered_by_the_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte as its base, with nothing recorded."""
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    monkeypatch.setattr(recorded, "find_recipe", None)
    words = {"method": "lora", "batch_size": 3, "seq_len": 1500, "gradient_checkpointing": True, "gpu": "RTX-4090"}
    base, tuned = (api.predict(model=model, **words) for model in ("llama-3.1-8b", str(tmp_path)))
    assert tuned.engine == base.engine == "recipe"
    assert (tuned.peak_allocated_bytes, tuned.reserved_bytes) == (base.peak_allocated_bytes, base.reserved_bytes)


def test_a_cell_is_recorded_with_the_catalog_s_spelling(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    spec = api.cell(model=str(tmp_path), method="lora", device="cuda", batch_size=1, seq_len=64)
    assert spec.architecture != OWN
    assert recorded_as(spec).architecture == OWN


def test_what_a_model_s_recording_kept_answers_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name the shape is asked: the second is not recorded again."""
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    words = {"method": "lora", "device": "cuda", "batch_size": 1, "seq_len": 2048}
    base, tuned = (api.cell(model=model, **words) for model in ("llama-3.1-8b", str(tmp_path)))
    gpu = catalog.find_gpu("A100-80GB-SXM")
    shipped = shipped_recipe(recorded_as(base), gpu)
    assert shipped is not None
    monkeypatch.setattr(Surroundings, "key", lambda self: ["torch 2.13.0"])
    monkeypatch.setattr(book, "record_packed", lambda *given, **more: pack(shipped.recipe))
    assert book.kept_recipe(tuned, gpu, print, folder=tmp_path / "kept") is None
    book.find_recipe(base, gpu, folder=tmp_path / "kept")
    assert book.kept_recipe(tuned, gpu, print, folder=tmp_path / "kept") is not None
