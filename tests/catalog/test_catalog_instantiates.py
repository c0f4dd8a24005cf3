"""Every shipped architecture builds through transformers, on the meta device, with exactly its verified parameters."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from vramprobe import catalog
from vramprobe.spec import _NO_SDPA, lora_target_names, resolve
from vramprobe.workload.model import config_from_dict, model_class

MODELS = catalog.list_models()
EVERY_MODEL = pytest.mark.parametrize("entry", MODELS, ids=[entry.name for entry in MODELS])


def build_on_meta(architecture: dict[str, object]) -> PreTrainedModel:
    config = config_from_dict(architecture)
    with torch.device("meta"), no_init_weights():
        model = model_class(config).from_config(config)
    model.tie_weights()  # no_init_weights leaves it out
    return model


def count_params(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones come once


@EVERY_MODEL
def test_parameters_are_exactly_the_verified_ones(entry: catalog.ModelEntry) -> None:
    model = build_on_meta(entry.config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert count_params(model) == entry.n_params
    assert model.config.model_type == entry.model_type


@EVERY_MODEL
def test_cut_depths_build_and_extrapolate_to_the_whole(entry: catalog.ModelEntry) -> None:
    one, two, three = (count_params(build_on_meta(catalog.cut_depth(entry.config, depth))) for depth in (1, 2, 3))
    depth = catalog.depth_of(entry.config)
    assert one < two < three
    # From the second layer on, all layers of every catalog model have the same size (deepseek's first one is dense).
    assert two + (depth - 2) * (three - two) == entry.n_params


@pytest.mark.parametrize("slug", {entry.model_type: entry.name for entry in MODELS}.values())
def test_q_v_names_modules_that_every_family_has(slug: str) -> None:
    cell = resolve(model=slug, method="lora", lora_targets="q_v", num_layers=1, device="cpu", batch_size=1, seq_len=8)
    modules = {name.split(".")[-1] for name, _ in build_on_meta(cell.architecture).named_modules()}
    assert set(lora_target_names(cell)) <= modules


def test_families_without_sdpa_are_the_ones_the_spec_knows() -> None:
    """Completeness over the catalog: a family that transformers gives SDPA later must leave the list."""
    without = set()
    for entry in MODELS:
        config = AutoConfig.for_model(entry.model_type)
        if not model_class(config)._model_mapping[type(config)]._supports_sdpa:
            without.add(entry.model_type)
    assert without | {"gemma2"} == set(_NO_SDPA)  # transformers 5.17 gives gemma2 SDPA, 5.23 does not


@EVERY_MODEL
def test_building_a_config_leaves_the_architecture_as_it_was(entry: catalog.ModelEntry) -> None:
    """transformers writes defaults into nested dicts; a spec whose architecture changes has another fingerprint."""
    before = json.dumps(entry.config)
    config_from_dict(entry.config)
    assert json.dumps(entry.config) == before
