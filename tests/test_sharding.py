"""One rank of several: states divided as by hand, activations whole, buffers in the interval, fewest GPUs."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from factories import TINY_LLAMA_PARAMS as P
from factories import make_spec

from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError
from vramprobe.formulas.papers import zero_bytes
from vramprobe.predict import CONTEXT_ALLOWANCE_BYTES, NCCL_ALLOWANCE_BYTES, Prediction, predict, verdict
from vramprobe.sharding import MAX_GPUS, Sharding, min_gpus, predict_rank, rank_moments
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import Moment, moments

#: By hand, of the tiny llama: embedding and head; one layer: q, o 64², k, v 64·32, MLP 3·64·176, norms 2·64.
EMBEDDING = 256 * 64
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64
ROOT = 2 * EMBEDDING + 64
#: Of AdamW in bf16, with a step counter of 4 bytes for each of 2 · 9 + 3 tensors; two rotary buffers of 8 fp32.
COUNTERS, BUFFERS = 4 * 21, 2 * 8 * 4


def tiny(**overrides: Any) -> CellSpec:
    return make_spec(device="cuda", **overrides)


def at(sharding: Sharding, phase: str, num_gpus: int = 4, *, all_buffers: bool = False, **overrides: Any) -> Moment:
    """The highest moment of a phase."""
    found = rank_moments(tiny(**overrides), num_gpus, sharding, all_buffers=all_buffers)
    return max((one for one in found if one.phase == phase), key=lambda one: one.total_bytes)


def test_the_hand_counts_are_the_models() -> None:
    assert 2 * LAYER + ROOT == P


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "state"),
    [
        ("zero1", 2 * P, 2 * P, P), ("zero2", 2 * P, P // 2, P), ("zero3", P // 2, P // 2, P),
        ("fsdp", P // 2, P // 2, P), ("fsdp-shard-grad-op", P // 2, P // 2, P),
    ],
)  # fmt: skip
def test_states_of_the_optimizers_step_by_hand(sharding: Sharding, weights: int, gradients: int, state: int) -> None:
    """All-bf16 AdamW, 2 + 2 + 4 B/param, over 4 GPUs; every dimension of this model is a multiple of 4."""
    terms = at(sharding, "optimizer_step").terms
    assert terms == {"weights": weights + BUFFERS, "gradients": gradients, "optimizer_state": state + COUNTERS,
                     "batch": 2 * 8 * 2 * 16}  # fmt: skip


def test_the_divisors_are_the_zero_papers() -> None:
    """What each stage divides, held against the paper's own formula, in its bytes per parameter."""
    for stage, sharding in ((1, "zero1"), (2, "zero2"), (3, "zero3")):
        paper, terms = zero_bytes(P, stage, 4), at(sharding, "optimizer_step").terms
        for cause, ours, its in (("weights", 2, 2), ("gradients", 2, 2), ("optimizer_state", 4, 12)):
            exact = terms[cause] - {"weights": BUFFERS, "optimizer_state": COUNTERS}.get(cause, 0)
            assert exact / (ours * P) == paper[cause] / (its * P)


def test_uneven_shapes_are_rounded_up_where_each_library_cuts() -> None:
    """FSDP cuts rows: 256 over 3 GPUs are 86, so 5,504 elements. ZeRO cuts elements: 16,384 over 3 are 5,462."""
    fsdp, zero = (at(sharding, "optimizer_step", 3).terms["weights"] - BUFFERS for sharding in ("fsdp", "zero3"))
    rows = 2 * 86 * 64 + 22 + 2 * (2 * 22 * 64 + 2 * 11 * 64 + 2 * 59 * 64 + 22 * 176 + 2 * 22)
    elements = 2 * 5462 + 22 + 2 * (2 * 1366 + 2 * 683 + 3 * 3755 + 2 * 22)
    assert (fsdp, zero) == (2 * rows, 2 * elements)


def test_what_is_gathered_and_reduced_by_hand() -> None:
    """ZeRO-3 the larger of a layer and the embedding; FSDP the root and a layer, or all; by at most two layers more."""
    assert max(LAYER, EMBEDDING) == LAYER
    assert at("zero3", "backward").terms["gathered_weights"] == 2 * LAYER
    assert at("fsdp", "backward").terms["gathered_weights"] == 2 * (ROOT + LAYER)
    assert at("fsdp", "backward", all_buffers=True).terms["gathered_weights"] == 2 * (ROOT + 3 * LAYER)
    assert at("fsdp-shard-grad-op", "backward").terms["gathered_weights"] == 2 * P
    assert at("zero3", "backward", all_buffers=True).terms["gathered_weights"] == 2 * P
    assert "gathered_weights" not in at("zero2", "backward").terms
    last = [one for one in rank_moments(tiny(), 4, "zero2", all_buffers=False) if one.phase == "backward"][-1]
    assert last.terms["gradient_buckets"] == 2 * LAYER
    assert not {"gathered_weights", "gradient_buckets"} & set(at("fsdp", "forward", num_gpus=1).terms)


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_activations_are_not_divided(sharding: Sharding) -> None:
    whole, ranks = moments(tiny()), rank_moments(tiny(), 8, sharding, all_buffers=False)
    for before, after in zip(whole, ranks, strict=True):
        for cause in ("saved_activations", "logits", "temporaries", "batch"):
            assert after.terms.get(cause) == before.terms.get(cause)


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_one_gpu_is_the_plain_prediction(sharding: Sharding) -> None:
    one, plain = predict_rank(tiny(), 1, sharding), predict(tiny())
    assert (one.terms, one.peak_allocated_bytes) == (plain.terms, plain.peak_allocated_bytes)


def test_adapters_leave_the_frozen_weights_whole_under_zero2_and_divide_them_under_zero3() -> None:
    spec = resolve(model="llama-3.1-8b", method="qlora", device="cuda", batch_size=1, seq_len=512)
    whole = predict(spec).terms["weights"]
    assert predict_rank(spec, 8, "zero2").terms["weights"] == whole
    third = predict_rank(spec, 8, "zero3")
    assert third.terms["weights"] == pytest.approx(whole / 8, rel=1e-4)
    assert any("nf4 weights under zero3 is not checked" in warning for warning in third.warnings)


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_a_rank_says_what_it_is_and_its_interval_has_room_for_the_buffers(sharding: Sharding) -> None:
    spec = resolve(model="llama-3.1-8b", method="full", device="cuda", batch_size=1, seq_len=2048)
    one = predict_rank(spec, 8, sharding)
    assert (one.num_gpus, one.sharding) == (8, sharding)
    assert f"one rank of 8 under {sharding}, by arithmetic, per rank, not measured" in one.warnings
    few, many = (
        max(moment.total_bytes for moment in rank_moments(spec, 8, sharding, all_buffers=yes)) for yes in (False, True)
    )
    peak = one.peak_allocated_bytes
    assert peak.value == few == sum(one.terms.values())
    assert peak.high == round(few * 1.10) + many - few
    assert many >= few


def test_verdicts_set_nccls_buffers_aside() -> None:
    card = find_gpu("RTX-4090")
    found = verdict(predict_rank(tiny(), 2, "fsdp"), card)
    assert found.usable_bytes == card.total_bytes - CONTEXT_ALLOWANCE_BYTES - NCCL_ALLOWANCE_BYTES
    assert "for NCCL, on each rank" in found.reason


@pytest.mark.parametrize("sharding", ["zero3", "fsdp"])
def test_the_fewest_gpus_fit_and_one_fewer_does_not(sharding: Sharding) -> None:
    spec = resolve(model="llama-3.1-70b", method="full", device="cuda", batch_size=1, seq_len=2048,
                   gradient_checkpointing=True)  # fmt: skip
    card = find_gpu("H100-SXM")

    def answer(num_gpus: int) -> str:
        return verdict(predict_rank(spec, num_gpus, sharding), card).verdict

    found = min_gpus(spec, card, sharding)
    assert found.num_gpus is not None
    assert found.num_gpus > 2
    assert [answer(found.num_gpus - 1) == "fits", answer(found.num_gpus)] == [False, "fits"]
    assert found.verdict.verdict == "fits"


def test_where_no_number_is_enough_the_rest_of_the_largest_is_told() -> None:
    spec = resolve(model="llama-3.1-70b", method="full", device="cuda", batch_size=1, seq_len=2048)
    found = min_gpus(spec, find_gpu("RTX-4090"), "zero1")
    assert (found.num_gpus, found.verdict.verdict) == (None, "does not fit")
    assert found.verdict.needed_bytes == predict_rank(spec, MAX_GPUS, "zero1").peak_allocated_bytes


def test_a_cell_that_fits_one_gpu_needs_one() -> None:
    assert min_gpus(tiny(), find_gpu("RTX-4090"), "zero2").num_gpus == 1


def test_more_gpus_never_need_more() -> None:
    spec = resolve(model="llama-3.2-1b", method="full", device="cuda", batch_size=1, seq_len=128)

    def peaks(sharding: Sharding) -> list[int]:
        ranks: list[Prediction] = [predict_rank(spec, n, sharding) for n in (*range(2, 40), 64, 1000)]
        return [one.peak_allocated_bytes.value for one in ranks]

    for sharding in get_args(Sharding):
        found = peaks(sharding)
        assert found == sorted(found, reverse=True), sharding


@pytest.mark.parametrize(
    ("num_gpus", "sharding", "message"),
    [
        (0, "zero1", "num_gpus: 0 given; must be at least 1"),
        (2, "zero4", "'zero4' given; allowed: zero1, zero2, zero3"),
    ],
)
def test_what_cannot_be_is_a_clear_error(num_gpus: int, sharding: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        predict_rank(tiny(), num_gpus, sharding)
