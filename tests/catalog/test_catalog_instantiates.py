"""Every shipped architecture builds through transformers, on the meta device, with exactly its verified parameters."""

import json
import re
from collections import Counter

import pytest
import torch
from grids import grid
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from vramprobe import catalog
from vramprobe.catalog.profiled import ProfiledModel, list_profiled
from vramprobe.resolve import resolve
from vramprobe.rules.cell import NO_SDPA, lora_target_names
from vramprobe.workload.model import model_class
from vramprobe.workload.model_config import config_from_dict

MODELS = catalog.list_models()
#: One of each family stands for the others in ``make test``.
EACH_FAMILY = {entry.model_type: entry for entry in MODELS}.values()


def build_on_meta(architecture: dict[str, object]) -> PreTrainedModel:
    config = config_from_dict(architecture)
    with torch.device("meta"), no_init_weights():
        model = model_class(config).from_config(config)
    model.tie_weights()  # no_init_weights leaves it out
    return model


def count_params(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones come once


COUNTED = [(one, found) for one in list_profiled() if (found := re.search(r"count: (\d+) on meta", one.source))]


@pytest.mark.parametrize(("model", "found"), COUNTED, ids=[model.name for model, _ in COUNTED])
def test_a_model_with_images_has_the_parameters_that_its_row_names(model: ProfiledModel, found: re.Match[str]) -> None:
    built = build_on_meta(json.loads(model.config.read_text()))
    assert count_params(built) == int(found[1])
    assert type(built).__name__ == built.config.architectures[0]


_OF_A_LAYER = re.compile(r"\.(?:layers|h|block)\.(\d+)\.")


def sizes_of_layers(model: PreTrainedModel) -> tuple[int, Counter[int]]:
    """Parameters outside of layers, and of each layer by its number (t5: of both stacks together)."""
    outside, layers = 0, Counter[int]()
    for name, parameter in model.named_parameters():
        if found := _OF_A_LAYER.search(name):
            layers[int(found[1])] += parameter.numel()
        else:
            outside += parameter.numel()
    return outside, layers


@pytest.mark.parametrize("entry", grid(MODELS, *EACH_FAMILY), ids=[entry.name for entry in MODELS])
def test_a_model_has_the_verified_parameters_the_cuts_of_its_first_layers_and_the_modules_of_q_v(
    entry: catalog.ModelEntry,
) -> None:
    """Attention or Mamba, dense or sparse: each layer as it stands there. Of some the first have no attention."""
    model = build_on_meta(entry.config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert (count_params(model), model.config.model_type) == (entry.n_params, entry.model_type)
    cell = resolve(model=entry.name, method="lora", lora_targets="q_v", device="cpu", batch_size=1, seq_len=8)
    assert set(lora_target_names(cell)) <= {name.split(".")[-1] for name, _ in model.named_modules()}
    outside, layers = sizes_of_layers(model)
    depth = catalog.depth_of(entry.config)
    assert sorted(layers) == list(range(depth))
    for cut in (1, 2, 3):
        found_outside, found = sizes_of_layers(build_on_meta(catalog.cut_depth(entry.config, cut)))
        if entry.model_type == "gemma3n_text":  # its table of rows for each layer is as wide as there are layers
            outside = found_outside
        wanted = [layers[index] for index in range(cut)]
        if entry.model_type == "gemma4_text":  # transformers makes the last layer see everything, as the whole's does
            wanted[-1] = layers[depth - 1]
        assert (found_outside, list(found.values())) == (outside, wanted)


def test_families_without_sdpa_are_the_ones_the_spec_knows() -> None:
    """Completeness over the catalog: a family that transformers gives SDPA later must leave the list."""
    without = set()
    for entry in MODELS:
        config = AutoConfig.for_model(entry.model_type)
        if not model_class(config)._model_mapping[type(config)]._supports_sdpa:
            without.add(entry.model_type)
    assert without | {"gemma2"} == set(NO_SDPA)  # transformers 5.17 gives gemma2 SDPA, 5.23 does not


def test_building_a_config_leaves_the_architecture_as_it_was() -> None:
    """transformers writes defaults into nested dicts; a spec whose architecture changes has another fingerprint."""
    for entry in MODELS:
        before = json.dumps(entry.config)
        config_from_dict(entry.config)
        assert json.dumps(entry.config) == before, entry.name
