"""A cell is skipped on two kinds of evidence only, and both are named."""

from typing import Any

import pytest
from factories import make_oom, make_spec

from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.recorded import predict_replay
from vramprobe.predict.verdict import usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card, card_named
from vramprobe.sweep.skip import (
    _COMPARED,
    _GROWING,
    _OF_LOADING,
    _WITHOUT_EFFECT,
    certain_oom,
    dominates,
    lower_bound_bytes,
)
from vramprobe.units import GIB


def cell(**options: Any) -> CellSpec:
    """A LoRA cell of a cut 8B model on CUDA, of a size that a test may make larger or smaller."""
    words = {
        "model": "llama-3.1-8b",
        "num_layers": 8,
        "method": "lora",
        "device": "cuda",
        "batch_size": 4,
        "seq_len": 1024,
        "lora_r": 16,
        "gradient_checkpointing": True,
    }
    return make_spec(**(words | options))


def predict() -> Prediction:
    """Predict a cell whose recipe ships."""
    spec = make_spec(model="smollm2-135m", method="lora", device="cuda", batch_size=4, seq_len=1024)
    return predict_replay(replay_at_hand(spec), spec)


def card_of(total_bytes: int) -> Card:
    """A card that the catalog does not know."""
    return Card(name="card", total_bytes=total_bytes, gpu=None)


@pytest.mark.parametrize(
    ("larger", "how"),
    [
        ({}, "the same sizes"),
        ({"seed": 1, "steps": 5, "timing_steps": 0, "lora_alpha": 7.0}, "the same sizes"),
        ({"batch_size": 8}, "batch_size 8 ≥ 4"),
        ({"seq_len": 4096, "lora_r": 64}, "seq_len 4096 ≥ 1024, lora_r 64 ≥ 16"),
        ({"num_layers": 16}, "the same sizes, 16 layers ≥ 8"),
        ({"num_layers": None}, "the same sizes, 32 layers ≥ 8"),
        ({"gradient_checkpointing": False}, "no gradient checkpointing"),
    ],
)
def test_what_is_at_least_as_large_in_every_way_runs_out_too(larger: dict[str, Any], how: str) -> None:
    oom = make_oom(cell())
    assert dominates(cell(**larger), oom) == how
    skipped = certain_oom(cell(**larger), [oom], None, None)
    assert (skipped.why, skipped.evidence_attempt_id) == ("dominated", oom.attempt_id)
    assert oom.cell_id in skipped.evidence
    assert "1.00 GiB requested, 23.00 GiB allocated" in skipped.evidence


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 2},
        {"batch_size": 8, "seq_len": 512},
        {"lora_r": 8},
        {"num_layers": 4},
        {"model": "qwen2.5-7b"},
        {"model": "mistral-7b-v0.3", "num_layers": None},
        {"method": "full", "lora_r": None},
        {"method": "qlora"},
        {"dtype": "fp32", "autocast": "none"},
        {"optim": "adamw_bnb_8bit"},
        {"grad_accum": 2},
        {"attn": "eager"},
        {"alloc_conf": "expandable_segments:True"},
        {"limit_vram": "16GiB"},
        {"lora_targets": "q_v"},
        {"lora_dropout": 0.1},
        {"dora": True},
    ],
)
def test_what_is_smaller_or_otherwise_different_is_run(other: dict[str, Any]) -> None:
    assert dominates(cell(**other), make_oom(cell())) is None


def test_checkpointing_saves_nothing_for_certain_with_int8_or_a_few_layers() -> None:
    for words in ({"method": "qlora", "quant": "int8"}, {"num_layers": 2}):
        assert dominates(cell(**words, gradient_checkpointing=False), make_oom(cell(**words))) is None


def test_a_higher_rank_is_not_larger_for_certain_where_small_tensors_keep_their_state_in_fp32() -> None:
    """bitsandbytes quantises the state of tensors with 4,096 elements or more: at rank 4 of width 1,024, not at 3."""
    words = {"optim": "adamw_bnb_8bit", "lora_dtype": "bf16"}
    assert dominates(cell(**words, lora_r=4), make_oom(cell(**words, lora_r=3))) is None
    assert dominates(cell(**words, batch_size=8), make_oom(cell(**words))) == "batch_size 8 ≥ 4"


def test_with_checkpointing_is_not_larger_than_without() -> None:
    assert dominates(cell(), make_oom(cell(gradient_checkpointing=False))) is None


def test_weights_that_could_not_be_loaded_are_not_loaded_again() -> None:
    oom = make_oom(cell(method="full", lora_r=None, batch_size=32), phase="load")
    assert dominates(cell(batch_size=1), oom) == "the same weights to load"
    assert dominates(cell(num_layers=9), oom) == "the same weights to load, 9 layers ≥ 8"
    assert dominates(cell(method="qlora"), oom) is None  # quantised as they come
    assert dominates(cell(num_layers=7), oom) is None


def test_a_lower_bound_above_the_card_is_evidence_and_one_below_is_not() -> None:
    prediction = predict()
    low = prediction.peak_allocated_bytes.low
    assert certain_oom(cell(), [], prediction, card_of(low)) is None
    skipped = certain_oom(cell(), [], prediction, card_of(low - 1))
    assert skipped.why == "predicted"
    assert "predicted to need at least" in skipped.evidence
    assert certain_oom(cell(), [], None, card_of(1)) is None
    assert certain_oom(cell(), [], prediction, None) is None
    near = prediction.model_copy(update={"engine": "near"})  # no lower bound
    assert certain_oom(cell(), [], near, card_of(1)) is None


def test_an_oom_on_a_card_that_others_filled_is_no_evidence() -> None:
    """23 GiB held and 1 requested fill a card of 24 GiB, not one of 80; without numbers nothing is known."""
    oom = make_oom(cell())
    card = card_of(24 * GIB)
    assert certain_oom(cell(), [oom], None, card).why == "dominated"
    assert certain_oom(cell(), [oom], None, card_of(80 * GIB)) is None
    unknown = oom.model_copy(update={"outcome": oom.outcome.model_copy(update={"requested_bytes": None})})
    assert certain_oom(cell(), [unknown], None, card) is None


@pytest.mark.parametrize("is_filled", [True, False])
def test_an_oom_fills_the_card_beside_its_own_context_and_the_driver_s_part(is_filled: bool) -> None:
    """An H100's 1.31 GiB: more than an amount of memory has set aside."""
    card = card_named("H100-SXM")
    oom = make_oom(cell())
    size = usable_bytes(card.of(cell()), device_is_known=False) - oom.outcome.requested_bytes - (not is_filled)
    oom = oom.model_copy(update={"outcome": oom.outcome.model_copy(update={"reserved_bytes": size})})
    assert size + oom.outcome.requested_bytes < card.total_bytes - GIB
    assert (certain_oom(cell(), [oom], None, card) is not None) == is_filled


def test_the_lower_bound_counts_what_sits_behind_torch_but_not_the_cache() -> None:
    def interval(gib: float) -> Interval:
        return Interval(value=round(gib * GIB), low=round(gib * GIB), high=round(gib * GIB))

    tiers = {"peak_allocated_bytes": interval(20), "reserved_bytes": interval(23), "device_bytes": interval(23.5)}
    assert lower_bound_bytes(predict().model_copy(update=tiers)) == round(20.5 * GIB)


def test_every_field_of_a_spec_is_compared_or_said_to_be_without_effect() -> None:
    known = {*_COMPARED, *_GROWING, *_WITHOUT_EFFECT, "architecture", "gradient_checkpointing"}
    assert known == set(CellSpec.model_fields)
    assert set(_OF_LOADING) <= _COMPARED
