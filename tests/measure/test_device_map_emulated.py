"""Layers on several emulated cards, beside from_pretrained(device_map="auto") and Trainer, which know nothing of us."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from emulated import measured
from factories import TINY_LLAMA, TINY_LLAMA_PATH
from grids import exhaustive

from vramprobe.records.record import RunRecord

pytestmark = pytest.mark.timeout(900)  # whoever is first runs the cells of all

METHODS = ("full", "lora", "qlora")
SIX_LAYERS = json.dumps(TINY_LLAMA | {"num_hidden_layers": 6})


@pytest.fixture(scope="module")
def records(few_of_each: list[RunRecord]) -> dict[str, RunRecord]:
    return {record.spec.method: record for record in few_of_each if record.spec.sharding == "device-map"}


def test_each_card_closes_and_the_highest_speaks_for_all(records: dict[str, RunRecord]) -> None:
    assert set(records) == set(METHODS)
    for record in records.values():
        assert record.outcome.kind == "ok", record.outcome
        assert [card.rank for card in record.ranks] == [0, 1]
        assert record.peak.allocated_bytes == max(card.peak.allocated_bytes for card in record.ranks)
        assert record.facts.num_trainable_params > 0
        for card in record.ranks:
            assert card.ledger.at_peak is not None
            assert min(card.ledger.weights_bytes, card.ledger.gradients_bytes, card.ledger.optimizer_state_bytes) > 0
        assert [card.ledger.batch_bytes for card in record.ranks] == [2 * 2 * 32 * 8, 0]  # ids and labels, on the first


def test_the_weights_are_divided_between_the_cards_and_not_copied(records: dict[str, RunRecord]) -> None:
    record = records["full"]
    buffers = 2 * 8 * 4  # the rotary frequencies, and their original; of 16 to a head, in fp32
    held = [card.ledger.weights_bytes for card in record.ranks]
    assert sum(held) == 2 * record.facts.num_params + buffers
    modules = [name for card in record.ranks for name in card.modules]
    layers = [f"model.layers.{index}" for index in range(6)]
    assert modules == ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]


@exhaustive
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_as_from_pretrained_places_it_and_as_trainer_trains_it(
    method: str, records: dict[str, RunRecord], trained_by_user: Callable, tmp_path: Path
) -> None:
    """The second and third step, which repeat. Trainer has a count of tokens on the first card beside the batch."""
    (tmp_path / "config.json").write_text(SIX_LAYERS)
    (seen,) = trained_by_user(tmp_path, method, "cards")
    cards = records[method].ranks
    assert [[name for name, at in seen["map"].items() if at == card.rank] for card in cards] == [
        card.modules for card in cards
    ]
    ours = [max(phase.requested_peak_bytes for phase in card.phases if phase.step == 3) for card in cards]
    for steps in seen["steps"][1:]:
        assert 0 <= steps[0] - ours[0] <= 32
        assert steps[1] == ours[1]


@exhaustive
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "llama-3.1-70b"}, "the weights do not fit on 2 cards"),
        ({"model": "qwen2.5-0.5b", "num_layers": 4}, "puts the whole of this model on one"),
    ],
)
def test_one_that_does_not_fit_and_one_that_needs_no_second_card(
    words: dict[str, object], said: str, tmp_path: Path
) -> None:
    common = {"method": "lora", "batch_size": 1, "seq_len": 32, "num_gpus": 2, "sharding": "device-map"}
    outcome = measured(tmp_path, "RTX-4090", **words, **common).outcome
    assert (outcome.kind, outcome.phase, outcome.traceback) == ("error", "load", None)
    assert said in outcome.message


@exhaustive
def test_out_of_memory_of_a_card_is_the_cells(tmp_path: Path) -> None:
    words = {"model": TINY_LLAMA_PATH, "method": "full", "batch_size": 256, "seq_len": 1024, "limit_vram": "1GiB"}
    record = measured(tmp_path, "RTX-4090", **words, num_gpus=2, sharding="device-map")
    assert record.outcome.kind == "oom", record.outcome
    assert record.outcome.requested_bytes > 0
    assert len(record.ranks) == 2
