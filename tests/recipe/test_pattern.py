"""Layers that are alike, and depths that show it: over the configs that ship, and by hand."""

from typing import Any

import numpy as np
import pytest

from vramprobe import catalog
from vramprobe.log.log import Log, PhaseMark
from vramprobe.recipe.pattern import LayerPattern, layer_kinds, layer_pattern
from vramprobe.recipe.recipe import NotOneBranch, own_branch, rules_over

SLIDING = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 32}, LayerPattern(32, 0, 1)),
        ({"num_hidden_layers": 34, "layer_types": (SLIDING * 6)[:34]}, LayerPattern(34, 0, 6)),
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3}, LayerPattern(61, 3, 1)),
        ({"n_layer": 24, "decoder_sparse_step": 2}, LayerPattern(24, 0, 2)),
        ({"num_hidden_layers": 8, "layer_types": [str(layer) for layer in range(8)]}, None),
        ({"num_hidden_layers": 35, "num_kv_shared_layers": 10}, None),
        ({"text_config": {"num_hidden_layers": 8, "layer_types": ["a", "b"] * 4}}, LayerPattern(8, 0, 2)),
        (
            {"text_config": {"num_hidden_layers": 48}, "vision_config": {"deepstack_visual_indexes": [8, 16, 24]}},
            LayerPattern(48, 3, 1),
        ),
        ({"num_hidden_layers": 24, "num_dense_layers": 2}, LayerPattern(24, 2, 1)),
    ],
)
def test_the_pattern_of_a_config(config: dict[str, Any], expected: LayerPattern | None) -> None:
    assert layer_pattern(config) == expected


def test_depths_keep_the_remainder_and_what_comes_first() -> None:
    assert LayerPattern(34, 0, 6).depths(4) == []  # 10 + 16 + 22 + 28 layers: the whole model costs less
    assert LayerPattern(64, 0, 4).depths(4) == [4, 8, 12, 16]
    assert LayerPattern(61, 3, 1).depths(4) == [5, 6, 7, 8]
    assert LayerPattern(32, 0, 1).depths(4) == [2, 3, 4, 5]
    assert LayerPattern(32, 0, 1).depths(4, deeper=2) == [4, 5, 6, 7]
    assert LayerPattern(22, 0, 1).depths(4, deeper=2) == []
    assert LayerPattern(32, 0, 4).depths(4) == []  # 4 + 8 + 12 + 16 layers
    assert LayerPattern(32, 0, 4).depths(4, at_any_cost=True) == [4, 8, 12, 16]  # a recipe of a tenth of the bytes
    assert LayerPattern(16, 0, 4).depths(4, at_any_cost=True) == []  # the deepest would be the whole model


@pytest.mark.parametrize("entry", catalog.list_models(), ids=lambda entry: entry.name)
def test_every_shallow_model_has_layers_of_the_same_kinds(entry: catalog.ModelEntry) -> None:
    """A cut config's layers are of the kinds that the pattern says, at each depth that would be recorded."""
    pattern = layer_pattern(entry.config)
    if pattern is None:
        return
    whole = layer_kinds(entry.config)
    assert len({(pattern.kind(layer), kind) for layer, kind in enumerate(whole)}) == pattern.num_first + pattern.period
    for depth in pattern.depths(4):
        assert (pattern.num_layers - depth) % pattern.period == 0
        assert layer_kinds(catalog.cut_depth(entry.config, depth)) == whole[:depth]


def test_another_branch_names_its_shape_and_the_cells_own() -> None:
    def log(*sizes: int) -> Log:
        events, zeros = np.array([*sizes, *(-size for size in sizes)]), np.zeros(2 * len(sizes), dtype=np.int8)
        marks = (PhaseMark("forward", 1, None, range(len(events))),)
        return Log(events, np.tile(np.arange(len(sizes)), 2), zeros, marks)

    logs = {(2, 1024): log(4096, 8192), (1, 512): log(1024, 2048, 512)}
    with pytest.raises(NotOneBranch, match=r"at 1 x 512 the events are not those at 2 x 1024"):
        rules_over(logs, [], None, 0)
    assert list(own_branch(logs | {(3, 9): log(1, 2)}, None)) == [(2, 1024), (3, 9)]
