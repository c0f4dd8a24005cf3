"""Ranks whose states lie in host memory: what is left on the card, what is there, and what cannot be, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS as P
from factories import make_spec, on_ranks

from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.predict.host_memory import loaded_bytes, of_machine_bytes
from vramprobe.predict.predict import predict as predict_cell
from vramprobe.predict.questions import predict
from vramprobe.predict.what_fits import min_gpus
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.sharding.ranks import host_bytes, rank_moments
from vramprobe.terms.sharding.zero.course import BUCKET_ELEMENTS

#: Of the tiny llama: embedding or head, the largest tensors; AdamW's counters of 21 tensors; two rotary buffers.
LARGEST, COUNTERS, BUFFERS = 256 * 64, 4 * 21, 2 * 8 * 4
BATCH = {"batch": 2 * 8 * 2 * 16}
ASKED = {"model": "smollm2-135m", "method": "full", "batch_size": 1, "seq_len": 64}


def tiny(**overrides: Any) -> CellSpec:
    return make_spec(device="cuda", recipe="mixed", **overrides)


def by_place(sharding: Sharding, offload: str, **overrides: Any) -> dict[tuple[str, str], Moment]:
    found = rank_moments(tiny(**overrides), 4, sharding, all_buffers=False, offload=offload)
    return {(one.phase, one.label): one for one in found}


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-shard-grad-op", "fsdp1", "fsdp1-shard-grad-op"])
def test_fsdp_leaves_nothing_on_the_card_but_what_it_computes_with(sharding: Sharding) -> None:
    here, there = by_place(sharding, "none"), by_place(sharding, "params")
    assert there["optimizer_step", "optimizer"].terms == {"weights": BUFFERS} | BATCH
    assert here["forward", "loss"].total_bytes - there["forward", "loss"].total_bytes == pytest.approx(3 * P, abs=200)
    assert "optimizer_state" not in there["forward", "loss"].terms
    first = ("backward", "first layer")
    assert there[first].terms.get("gradients", 0) < here[first].terms["gradients"]
    assert host_bytes(tiny(), 4, sharding, "params") == pytest.approx(4 * P, abs=100)
    assert host_bytes(tiny(), 4, sharding, "none") == 0


def test_fsdp1_keeps_what_came_from_the_host_as_it_is_beside_what_it_gathered() -> None:
    """Original parameters are views of it; of mixed precision, which is cast, they are not."""
    root = 2 * LARGEST + 64

    def more(recipe: str) -> int:
        spec = make_spec(device="cuda", recipe=recipe)
        found = [rank_moments(spec, 4, "fsdp1", all_buffers=False, offload=offload) for offload in ("none", "params")]
        here, there = (
            one.terms["gathered_weights"]
            for moments in found
            for one in moments
            if (one.phase, one.label) == ("forward", "loss")
        )
        return there - here

    assert (more("all-bf16"), more("mixed")) == (2 * root // 4, 0)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_1_and_2_have_a_buffer_of_the_largest_tensor_here_and_there(sharding: Sharding) -> None:
    step = by_place(sharding, "optimizer")["optimizer_step", "optimizer"].terms
    assert step == {"weights": 2 * P + BUFFERS, "gradients": 2 * LARGEST} | BATCH
    assert host_bytes(tiny(), 4, sharding, "optimizer") == 18 * P // 4 + 2 * LARGEST


def test_zero_2_accumulates_whole_gradients_on_the_host_of_the_weights_that_a_rank_has_any_of() -> None:
    """Of the first rank of four: the embedding, and of the first layer what comes before its part ends."""
    once, twice = (host_bytes(tiny(grad_accum=number), 4, "zero2", "optimizer") for number in (1, 2))
    assert 2 * P // 4 <= twice - once <= 2 * (P // 4 + 64 * 176)
    assert host_bytes(tiny(grad_accum=2), 4, "zero1", "optimizer") == once


def test_zero_3_moves_its_optimizer_and_then_its_parts() -> None:
    """Every tensor of this model is so small that the card has it whole all the same."""
    bucket, part = {"gradient_buckets": 2 * BUCKET_ELEMENTS} | BATCH, P // 4
    step = by_place("zero3", "optimizer")["optimizer_step", "optimizer"].terms
    assert step == {"weights": 2 * part + 2 * P + BUFFERS} | bucket
    assert host_bytes(tiny(), 4, "zero3", "optimizer") == 18 * part
    step = by_place("zero3", "params")["optimizer_step", "optimizer"].terms
    assert step == {"weights": 2 * P + BUFFERS, "optimizer_temporaries": 2 * part} | bucket
    assert host_bytes(tiny(), 4, "zero3", "params") == 20 * part


def test_a_machine_holds_its_ranks_or_what_rank_0_loads() -> None:
    assert of_machine_bytes(on_ranks(tiny(), 4, "zero3", offload="params")) == 20 * P
    assert of_machine_bytes(on_ranks(tiny(), 64, "zero3", offload="params")) == 8 * host_bytes(
        tiny(), 64, "zero3", "params"
    )
    assert loaded_bytes(on_ranks(tiny(), 2, "fsdp")) == 4 * P + BUFFERS
    assert loaded_bytes(on_ranks(tiny(), 2, "zero3")) == 0
    lora = make_spec(device="cuda", method="lora")
    assert (
        of_machine_bytes(on_ranks(lora, 64, "fsdp", offload="params")) == 2 * P + BUFFERS
    )  # more than eight parts of little


def test_a_prediction_says_what_lies_on_the_host() -> None:
    found = predict_cell(on_ranks(tiny(), 16, "fsdp-hybrid", shard_size=4, offload="params"))
    assert found.host_bytes == host_bytes(tiny(), 4, "fsdp", "params")
    assert found.cell_id.endswith("fsdp-hybrid4-x16_offload-params")
    assert "on the host: " in " ".join(found.warnings)
    asked = {"model": "llama-3.1-8b", "method": "full", "recipe": "mixed", "batch_size": 1, "seq_len": 512}
    plain = predict(sharding="zero2", num_gpus=8, **asked)
    moved = predict(sharding="zero2", num_gpus=8, offload="optimizer", **asked)
    assert moved.peak_allocated_bytes.value < plain.peak_allocated_bytes.value
    assert plain.host_bytes is None


def test_fewer_cards_are_enough_where_the_host_has_the_states() -> None:
    asked = {"model": "llama-3.1-8b", "method": "full", "recipe": "mixed", "batch_size": 1, "seq_len": 512}
    on_cards, on_host = (
        min_gpus(gpu="RTX-4090", sharding="fsdp", offload=offload, **asked) for offload in ("none", "params")
    )
    assert (on_host.num_gpus or 0) < (on_cards.num_gpus or 0)
    assert on_host.host_bytes == pytest.approx(16 * 8_030_261_248, rel=1e-3)
    assert (on_cards.host_bytes, on_host.offload) == (None, "params")


@pytest.mark.parametrize(
    ("sharding", "offload", "message"),
    [
        ("fsdp", "optimizer", "FSDP keeps parameters, gradients and state on the host, or none of them"),
        ("zero2", "params", "DeepSpeed keeps parameters on the host under zero3 alone"),
        ("ddp", "params", "DistributedDataParallel keeps all on the GPU"),
        ("zero3", "weights", "offload: 'weights' given; allowed: none, optimizer, params"),
    ],
)
def test_what_no_library_offloads_is_refused(sharding: str, offload: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        predict(**ASKED, sharding=sharding, num_gpus=2, offload=offload)


def test_nothing_is_offloaded_from_one_card() -> None:
    with pytest.raises(
        SpecError, match=r"give num_gpus 2 or more, .*on one GPU is not predicted: vramprobe profile --emulate"
    ):
        predict(**ASKED, sharding="fsdp", num_gpus=1, offload="params")
    with pytest.raises(SpecError, match="offload params is for several GPUs; give sharding and num_gpus"):
        predict(**ASKED, offload="params")
