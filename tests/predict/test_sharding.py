"""One rank of several: states divided as by hand, activations whole, buffers in the interval, fewest GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS as P
from factories import TINY_LLAMA_PATH, make_spec, on_ranks
from grids import grid

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.literature.formulas import FORMULAS, facts_of
from vramprobe.predict.fewest import min_gpus
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predict as ask
from vramprobe.predict.verdict import NCCL_ALLOWANCE_BYTES, verdict
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import Moment, moments
from vramprobe.terms.replayed import replayed
from vramprobe.terms.sharding.rank import stored_tensors
from vramprobe.terms.sharding.ranks import rank_moments
from vramprobe.terms.sharding.zero.course import BUCKET_ELEMENTS

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


def test_ranks_that_are_run_and_not_counted_say_so() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no arithmetic for offload params of nf4 weights; run it"):
        predict(on_ranks(tiny(method="qlora", quant="nf4", kbit_prep="none"), 2, "fsdp", offload="params"))


def test_a_hybrid_s_groups_share_and_keep_what_they_add_up_by_hand() -> None:
    """In groups of 4, as 4 ranks do; of mixed precision FSDP2 keeps the reduced 16-bit shares until backward has ended:
    as the first layer has its gradients, the head's, the last norm's and the last layer's."""
    for sharding, within in (("fsdp-hybrid", "fsdp"), ("fsdp1-hybrid", "fsdp1")):
        one, alike = (predict(on_ranks(tiny(), 16, sharding, shard_size=4)), predict(on_ranks(tiny(), 4, within)))
        assert (one.terms, one.peak_allocated_bytes) == (alike.terms, alike.peak_allocated_bytes)
        assert (one.sharding, one.num_gpus) == (sharding, 16)
        assert f"one rank of 16 under {sharding}, 4 to a group, by arithmetic" in " ".join(one.warnings)

    def first_layer(*, is_replicated: bool) -> dict[str, int]:
        found = rank_moments(tiny(recipe="mixed"), 4, "fsdp", all_buffers=False, is_replicated=is_replicated)
        return next(one.terms for one in found if (one.phase, one.label) == ("backward", "first layer"))

    kept = first_layer(is_replicated=True)["gradient_buckets"] - first_layer(is_replicated=False)["gradient_buckets"]
    assert kept == 2 * (EMBEDDING + 64 + LAYER) // 4
    at_the_step = {
        one: rank_moments(tiny(recipe="mixed"), 4, "fsdp", all_buffers=False, is_replicated=one)[-1].terms
        for one in (False, True)
    }
    assert at_the_step[True] == at_the_step[False]


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-shard-grad-op", "fsdp1", "fsdp1-shard-grad-op"])
def test_accumulated_gradients_are_whole_until_the_last_micro_step(sharding: Sharding) -> None:
    """In the dtype of the computation on any number of ranks; then this rank's fp32 shares alone are left."""
    words = {"recipe": "mixed", "grad_accum": 4}
    for num_gpus in (2, 4):
        first = at(sharding, "forward", num_gpus, **words).terms["gradients"]
        assert first == 2 * P
        assert at(sharding, "forward", num_gpus, recipe="mixed").terms.get("gradients", 0) == 0
        assert at(sharding, "optimizer_step", num_gpus, **words).terms["gradients"] == 4 * P // num_gpus


def test_fsdp1_keeps_weights_between_micro_steps_where_it_keeps_them_from_forward_to_backward() -> None:

    def at_first(sharding: Sharding, grad_accum: int) -> int:
        found = rank_moments(tiny(recipe="mixed", grad_accum=grad_accum), 4, sharding, all_buffers=False)
        return next(
            one.terms["gathered_weights"] for one in found if (one.phase, one.label) == ("forward", "embedding")
        )

    assert at_first("fsdp1-shard-grad-op", 1) < at_first("fsdp1-shard-grad-op", 2) == 2 * P
    assert at_first("fsdp1", 1) == at_first("fsdp1", 2) < 2 * P


def test_of_two_micro_steps_none_begins_and_ends_with_whole_gradients() -> None:
    """So that as the first layer's come in, a third one's, which has them already, is the highest."""
    two, three, four = (
        max(
            one.total_bytes
            for one in rank_moments(tiny(grad_accum=number), 4, "fsdp", all_buffers=False)
            if (one.phase, one.label) == ("backward", "first layer")
        )
        for number in (2, 3, 4)
    )
    assert two < three == four


def test_hybrids_that_cannot_be_are_refused() -> None:
    with pytest.raises(SpecError, match="num_gpus 16 under fsdp-hybrid is no multiple of shard_size 3"):
        predict(on_ranks(tiny(), 16, "fsdp-hybrid", shard_size=3))
    with pytest.raises(SpecError, match="shard_size 8 under fsdp-hybrid makes all 8 ranks one group"):
        predict(on_ranks(tiny(), 8, "fsdp-hybrid"))
    with pytest.raises(SpecError, match="shard_size 2: zero3 makes all ranks one group"):
        predict(on_ranks(tiny(), 8, "zero3", shard_size=2))
    with pytest.raises(SpecError, match="quant int8 under fsdp1-hybrid"):
        predict(on_ranks(tiny(method="qlora", quant="int8", kbit_prep="none"), 16, "fsdp1-hybrid"))
    with pytest.raises(UnsupportedArchitecture, match="more GPUs make more groups"):
        min_gpus(on_ranks(tiny(), 1, "fsdp1-hybrid"), find_gpu("H100-SXM"))


def test_the_hand_counts_are_the_models() -> None:
    assert 2 * LAYER + ROOT == P


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "state"),
    [
        ("ddp", 2 * P, 2 * P, 4 * P),
        ("fsdp", P // 2, P // 2, P),
        ("fsdp-shard-grad-op", P // 2, P // 2, P),
    ],
)
def test_states_of_the_optimizers_step_by_hand(sharding: Sharding, weights: int, gradients: int, state: int) -> None:
    """All-bf16 AdamW, 2 + 2 + 4 B/param, over 4 GPUs; every dimension of this model is a multiple of 4.

    Blocks' remainders are counted of whole tensors alone, so of DDP's as of one GPU's.
    """
    terms = at(sharding, "optimizer_step").terms
    alone = next(one for one in moments(tiny()) if one.phase == "optimizer_step").terms
    buckets = {"gradient_buckets": 2 * P} if sharding == "ddp" else {}
    rests = {"block_remainders": alone["block_remainders"]} if sharding == "ddp" else {}
    assert terms == buckets | rests | {
        "weights": weights + BUFFERS,
        "gradients": gradients,
        "optimizer_state": state + COUNTERS,
        "batch": 2 * 8 * 2 * 16,
    }


@pytest.mark.parametrize("recipe", ["all-bf16", "mixed"])
@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_1_and_2_at_the_optimizers_step_by_hand(sharding: Sharding, recipe: str) -> None:
    """Over 4 GPUs, whose first has the embedding and, of the last layer's tensors, q to gate in part or whole.

    A 16-bit model that DeepSpeed is not told of is averaged in fp32, ZeRO-1's in the bucket, which then stays; else
    what is kept are those tensors in bf16, joined and raised to fp32 for the step. The norm is taken in double.
    """
    of_first = EMBEDDING + 2 * 64 * 64 + 2 * 64 * 32 + 176 * 64  # 31,312 of them are the first quarter
    assert of_first - 176 * 64 < P // 4 < of_first
    told = recipe == "mixed"
    terms = at(sharding, "optimizer_step", recipe=recipe).terms
    buckets = {"gradient_buckets": 4 * BUCKET_ELEMENTS} if sharding == "zero1" and not told else {}
    assert terms == buckets | {
        "weights": 2 * P + P + BUFFERS,
        "gradients": 2 * of_first if told else P,
        "optimizer_state": 2 * P + 4,
        "optimizer_temporaries": 6 * P // 4 if told else 8 * EMBEDDING,
        "batch": 2 * 8 * 2 * 16,
    }


@pytest.mark.parametrize("recipe", ["all-bf16", "mixed"])
def test_zero_3_at_the_optimizers_step_by_hand(recipe: str) -> None:
    """Over 4 GPUs: every tensor of this model is so small that each rank keeps it whole beside its part, but while it
    steps, which takes less. A 16-bit model that DeepSpeed is not told of is made in fp32."""
    width = 2 if recipe == "mixed" else 4
    assert at("zero3", "optimizer_step", recipe=recipe).terms == {
        "weights": width * P // 4 + width * P + P + BUFFERS,
        "gradients": width * P // 4,
        "optimizer_state": 2 * P + 4,
        "gradient_buckets": width * BUCKET_ELEMENTS,
        "batch": 2 * 8 * 2 * 16,
    }


def test_packed_weights_are_kept_small_or_gathered_by_what_they_are_stored_in() -> None:
    """Of 16 bits, so a quarter of their elements: of 64 × 64 all are whole on each rank; and the same, gathered, where
    none is so small."""
    spec = tiny(method="qlora", quant="nf4", kbit_prep="none")
    packed = (P - 2 * EMBEDDING - 64 - 2 * 2 * 64) // 2
    adapters = sum(one.numel * one.num_copies for one in stored_tensors(spec) if one.role == "adapter")
    first = rank_moments(spec, 4, "zero3", all_buffers=False)[0].terms
    scales = (
        rank_moments(spec, 4, "ddp", all_buffers=False)[0].terms["weights"]
        - BUFFERS
        - packed
        - 2 * (P - 2 * packed)
        - 4 * adapters
    )
    whole = packed + 2 * (P - 2 * packed) + 2 * adapters
    assert first["weights"] == whole + whole // 4 + 4 * adapters // 4 + scales + BUFFERS


def zero_paper(sharding: Sharding) -> dict[str, int]:
    (formula,) = (one for one in FORMULAS if one.name == "zero-paper")
    answer = formula.apply(facts_of(on_ranks(tiny(recipe="mixed"), 4, sharding)))
    assert not isinstance(answer, str)
    return answer.terms


def test_the_divisors_are_the_zero_papers() -> None:
    """What each stage divides, held against the paper's own formula, in its bytes per parameter."""
    paper, terms = zero_paper("zero3"), at("zero3", "optimizer_step", recipe="mixed").terms
    divided = terms["weights"] - 2 * P - BUFFERS + terms["gradients"] + terms["optimizer_state"] - 4
    assert divided == sum(paper.values())
    for sharding in ("zero1", "zero2"):  # the paper's state includes the copy in fp32
        paper, terms = zero_paper(sharding), at(sharding, "optimizer_step", recipe="mixed").terms
        assert terms["weights"] - BUFFERS + terms["optimizer_state"] - 4 == paper["weights"] + paper["optimizer_state"]


def test_uneven_shapes_are_rounded_up_where_each_library_cuts() -> None:
    """FSDP cuts rows: 256 over 3 GPUs are 86, so 5,504 elements. ZeRO cuts elements: 16,384 over 3 are 5,462."""
    fsdp = at("fsdp", "optimizer_step", 3).terms["weights"] - BUFFERS
    zero = at("zero3", "optimizer_step", 3, recipe="mixed").terms["weights"] - BUFFERS - 2 * P
    rows = 2 * 86 * 64 + 22 + 2 * (2 * 22 * 64 + 2 * 11 * 64 + 2 * 59 * 64 + 22 * 176 + 2 * 22)
    elements = 2 * 5462 + 22 + 2 * (2 * 1366 + 2 * 683 + 3 * 3755 + 2 * 22)
    assert (fsdp, zero) == (2 * rows, 2 * elements + 4 * elements)


def test_what_is_gathered_and_reduced_by_hand() -> None:
    """ZeRO-3: of a small model all but what is kept whole anyhow. FSDP: a layer, and the flat
    buffer it came in (forward) or the next one is coming in (backward); with the root as one unit, that beside; without
    resharding, all of it."""
    assert "gathered_weights" not in at("zero3", "backward").terms
    one = resolve(model="smollm2-135m", method="full", recipe="mixed", device="cuda", batch_size=1, seq_len=512)
    assert predict(on_ranks(one, 4, "zero3")).terms["gathered_weights"] == 2 * (134_515_008 - 61 * 576)
    for phase in ("forward", "backward"):
        assert at("fsdp", phase).terms["gathered_weights"] == 2 * (LAYER + LAYER)
        assert at("fsdp", phase, all_buffers=True).terms["gathered_weights"] == 2 * (ROOT + LAYER + LAYER)
    assert at("fsdp-shard-grad-op", "backward").terms["gathered_weights"] == 2 * P
    assert "gathered_weights" not in at("zero2", "backward").terms
    assert at("zero2", "backward", recipe="mixed").terms["gradient_buckets"] == 2 * (BUCKET_ELEMENTS + P)
    assert not {"gathered_weights", "gradient_buckets"} & set(at("fsdp", "forward", num_gpus=1).terms)


def test_gradients_of_fsdp_are_whole_in_a_layer_and_shards_behind_it_by_hand() -> None:
    """At the first layer of the step's backward (the last): the head's shard, and the buffer it was reduced from."""
    found = {
        one.label: one.terms for one in rank_moments(tiny(), 4, "fsdp", all_buffers=False) if one.phase == "backward"
    }
    head_and_norm = EMBEDDING + 64
    assert found["last layer"]["gradient_buckets"] == 2 * head_and_norm
    assert found["first layer"]["gradient_buckets"] == 2 * LAYER
    assert found["last layer"]["gradients"] - 2 * head_and_norm // 4 <= 2 * LAYER


def test_flat_parameters_are_gathered_once_and_the_next_one_beside_by_hand() -> None:
    """FSDP1: the root's stays, a layer's is no copy; in backward the next layer's comes before this one's is freed,
    which waits for its gradients, and for these joined to one."""
    for sharding, forward in (("fsdp1", ROOT + LAYER), ("fsdp1-shard-grad-op", P)):
        found = rank_moments(tiny(), 4, sharding, all_buffers=False)
        highest = {
            phase: max(one.terms["gathered_weights"] for one in found if one.phase == phase)
            for phase in ("forward", "backward")
        }
        assert highest == {"forward": 2 * forward, "backward": 2 * P}
    joined = {one.label: one.terms.get("gradient_buckets", 0) for one in found if one.phase == "backward"}
    assert (joined["last layer"], joined["loss"]) == (2 * LAYER, 0)
    assert rank_moments(tiny(), 4, "fsdp1", all_buffers=False)[-1].terms["gradients"] == P // 2


def test_each_adapter_of_fsdp1_saves_its_own_copy_of_its_input() -> None:
    """Of q, k and v, and of gate and up, two and one more than those of FSDP2, which share; and o's, which attention
    saves anyhow: 4 of 64 elements in bf16, for 128 tokens and two layers."""
    flat, own = (
        next(
            one
            for one in rank_moments(tiny(method="lora", seq_len=64), 4, sharding, all_buffers=False)
            if (one.phase, one.label) == ("forward", "loss")
        ).terms["saved_activations"]
        for sharding in ("fsdp1", "fsdp")
    )
    assert flat - own == 2 * 128 * 4 * 64 * 2


def test_ddp_holds_the_gradients_twice() -> None:
    for plain, one in zip(moments(tiny()), rank_moments(tiny(), 2, "ddp", all_buffers=False), strict=True):
        assert one.terms == plain.terms | {"gradient_buckets": 2 * P}


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-shard-grad-op"])
def test_mixed_precision_computes_in_16_bit_and_keeps_a_divided_fp32_copy(sharding: Sharding) -> None:
    """fp32 weights under bf16 autocast, 4 GPUs: no copies by autocast, activations of 16-bit weights, 16 B/param."""
    mixed, plain = (
        {one.label + one.phase: one.terms for one in rank_moments(tiny(recipe=recipe), 4, sharding, all_buffers=False)}
        for recipe in ("mixed", "all-bf16")
    )
    assert all("cast_copies" not in terms for terms in mixed.values())
    assert mixed["lossforward"]["saved_activations"] == plain["lossforward"]["saved_activations"]
    step = mixed["optimizeroptimizer_step"]
    assert (step["weights"], step["gradients"]) == (P + BUFFERS, P)
    assert step["optimizer_state"] == 2 * P + COUNTERS


@pytest.mark.parametrize("sharding", ONE_GROUP)
def test_activations_are_not_divided(sharding: Sharding) -> None:
    in_one_unit = sharding.startswith("fsdp")  # else a rank's loss may be highest where its head is gathered
    spec = tiny(recipe="fp32") if sharding == "zero3" else tiny()  # which else makes a 16-bit model in fp32
    whole, ranks = moments(spec), rank_moments(spec, 8, sharding, all_buffers=in_one_unit)
    assert [(one.phase, one.label) for one in ranks] == [(one.phase, one.label) for one in whole]
    for before, after in zip(whole, ranks, strict=True):
        if sharding.startswith("zero") and after.phase == "backward":
            continue  # the highest moment of the loss's backward is where the bucket has been taken
        if (after.phase, after.label) == ("forward", "loss") or not in_one_unit:
            for cause in ("saved_activations", "logits", "temporaries", "batch"):
                assert after.terms.get(cause) == before.terms.get(cause)


@pytest.mark.parametrize("sharding", ONE_GROUP)
def test_one_gpu_is_the_plain_prediction(sharding: Sharding) -> None:
    one, plain = predict(on_ranks(tiny(), 1, sharding)), predict(tiny())
    assert (one.terms, one.peak_allocated_bytes) == (plain.terms, plain.peak_allocated_bytes)


def test_adapters_leave_the_frozen_weights_whole_under_zero2_and_divide_all_but_the_scales_under_zero3() -> None:
    spec = resolve(model="llama-3.1-8b", method="qlora", kbit_prep="none", device="cuda", batch_size=1, seq_len=512)
    num_params, linear = 8_030_261_248, 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    adapters = spec.lora_r * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    packed, rest = linear // 2, 2 * (num_params - linear) + 2 * adapters
    scales = 4 * adapters + predict(spec).terms["weights"] - packed - 2 * (num_params - linear) - 8 * adapters
    buffers = 2 * 64 * 4
    assert scales - buffers == pytest.approx(linear * (1 / 64 + 4 / (64 * 256)), rel=5e-3)  # and code books
    assert predict(on_ranks(spec, 8, "zero2")).terms["weights"] == packed + scales + rest + 4 * adapters // 8
    assert predict(on_ranks(spec, 8, "fsdp")).terms["weights"] == (packed + rest + 2 * adapters) // 8 + scales
    # Kept whole: norms, and 16-bit adapters of fewer than 100,000 elements: all but gate's and up's B, down's A.
    small = 2 * 65 * 4096 + 2 * 32 * (6 * 65_536 + 3 * 65_536 + 2 * 16_384)
    divided = packed + rest + 4 * adapters  # the adapters in 16 bits, and the copy that is stepped
    assert predict(on_ranks(spec, 8, "zero3")).terms["weights"] == divided // 8 + scales + small


@pytest.mark.parametrize("sharding", ONE_GROUP)
def test_a_rank_says_what_it_is_and_its_interval_has_room_for_the_buffers(sharding: Sharding) -> None:
    spec = resolve(model="llama-3.1-8b", method="full", device="cuda", batch_size=1, seq_len=2048)
    one = predict(on_ranks(spec, 8, sharding))
    assert (one.num_gpus, one.sharding) == (8, sharding)
    assert f"one rank of 8 under {sharding}, by arithmetic, per rank, not measured" in one.warnings
    few, many = (
        max(moment.total_bytes for moment in rank_moments(spec, 8, sharding, all_buffers=yes)) for yes in (False, True)
    )
    peak = one.peak_allocated_bytes
    assert (peak.value, one.constant_bytes) == (sum(one.terms.values()), 0)
    assert peak.value - one.terms["workspaces"] == few
    assert one.terms["workspaces"] == 2 * 8_519_680  # cuBLAS's, as on an A100
    assert peak.high == round(peak.value * 1.10) + max(many - few, 0)
    assert sharding == "fsdp-shard-grad-op" or many >= few  # whose root of one unit is gathered without copies of parts


def test_verdicts_set_nccls_buffers_aside() -> None:
    card = find_gpu("RTX-4090")
    found = verdict(predict(on_ranks(tiny(), 2, "fsdp")), card)
    assert found.usable_bytes == card.cuda_total_bytes - card.context_bytes - NCCL_ALLOWANCE_BYTES
    assert "for NCCL, on each rank" in found.reason


@pytest.mark.parametrize("sharding", grid(["zero3", "fsdp"], "fsdp"))
def test_the_fewest_gpus_fit_and_one_fewer_does_not(sharding: Sharding) -> None:
    spec = resolve(
        model="llama-3.1-70b", method="full", device="cuda", batch_size=1, seq_len=2048, gradient_checkpointing=True
    )
    card = find_gpu("H100-SXM")

    def answer(num_gpus: int) -> str:
        ranks = on_ranks(spec, num_gpus, sharding)
        return verdict(predict(ranks, gpu=card, replays=True, retries=True), card).verdict

    found = min_gpus(on_ranks(spec, 1, sharding), card)
    assert found.num_gpus is not None
    assert found.num_gpus > 2
    assert [answer(found.num_gpus - 1) == "fits", answer(found.num_gpus)] == [False, "fits"]
    assert found.verdict.verdict == "fits"
    assert found.tight_num_gpus is not None
    assert found.tight_num_gpus < found.num_gpus
    assert [answer(found.tight_num_gpus - 1), answer(found.tight_num_gpus)] == ["does not fit", "tight"]


def test_where_no_number_is_enough_a_machines_rank_is_told() -> None:
    spec = resolve(model="llama-3.1-70b", method="full", device="cuda", batch_size=1, seq_len=2048)
    found = min_gpus(on_ranks(spec, 1, "zero1"), find_gpu("RTX-4090"))
    assert (found.num_gpus, found.verdict.verdict) == (None, "does not fit")
    needed = replayed(
        spec.model_copy(update={"num_gpus": found.verdict_num_gpus, "sharding": "zero1"}), find_gpu("RTX-4090")
    )
    assert found.verdict.needed_bytes.value == needed.reserved_bytes


def test_a_cell_that_fits_one_gpu_needs_one() -> None:
    assert min_gpus(on_ranks(tiny(), 1, "zero2"), find_gpu("RTX-4090")).num_gpus == 1


def test_more_gpus_never_need_more() -> None:
    spec = resolve(model="llama-3.2-1b", method="full", device="cuda", batch_size=1, seq_len=128)

    def peaks(sharding: Sharding) -> list[int]:
        # Of numbers that divide no dimension, one more may need more: every tensor is padded to a multiple.
        ranks: list[Prediction] = [predict(on_ranks(spec, 2**power, sharding)) for power in range(1, 10)]
        return [one.peak_allocated_bytes.value for one in ranks]

    for sharding in ONE_GROUP:
        found = peaks(sharding)
        assert found == sorted(found, reverse=True), sharding


@pytest.mark.parametrize(
    ("num_gpus", "sharding", "message"),
    [
        (0, "zero1", "num_gpus: 0 given; must be from 1 to"),
        (-3, "ddp", "num_gpus: -3 given; must be from 1 to"),
        (2, "zero4", "'zero4' given; allowed: ddp, zero1, zero2, zero3"),
        (2, "FSDPX", "'FSDPX' given; allowed: .* fsdp, fsdp-shard-grad-op"),
    ],
)
def test_what_cannot_be_is_a_clear_error(num_gpus: int, sharding: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ask(model=str(TINY_LLAMA_PATH), method="full", batch_size=1, seq_len=8, num_gpus=num_gpus, sharding=sharding)


def test_int8_is_refused_where_fsdp_would_divide_it_and_nowhere_else() -> None:
    spec = tiny(method="qlora", quant="int8", kbit_prep="none")
    for sharding in ("fsdp", "fsdp-shard-grad-op"):
        with pytest.raises(SpecError, match=r"quant int8 under fsdp.* use quant nf4, or sharding ddp, zero1 or zero2"):
            predict(on_ranks(spec, 2, sharding))
        assert predict(on_ranks(spec, 1, sharding)).num_gpus == 1
    for sharding in ("ddp", "zero1", "zero2"):
        assert predict(on_ranks(spec, 2, sharding)).terms["weights"] <= predict(spec).terms["weights"] * 1.2


def test_ddp_is_no_answer_to_how_many_gpus() -> None:
    with pytest.raises(SpecError, match=r"ddp divides nothing.*use zero1, zero2, zero3, fsdp"):
        min_gpus(on_ranks(tiny(), 1, "ddp"), find_gpu("RTX-4090"))


@pytest.mark.parametrize(
    ("words", "sharding", "warning"),
    [
        ({"optim": "adamw_bnb_8bit"}, "fsdp", "DTensors, which adamw_bnb_8bit does not take"),
        ({"optim": "paged_adamw_8bit"}, "fsdp", "DTensors, which paged_adamw_8bit does not take"),
        ({"optim": "adafactor"}, "fsdp-shard-grad-op", "DTensors, which adafactor does not take"),
        ({"method": "qlora", "quant": "nf4"}, "fsdp", "bnb_4bit_quant_storage bf16; as uint8, its default"),
    ],
)
def test_what_the_libraries_do_not_do_is_said(words: dict[str, Any], sharding: Sharding, warning: str) -> None:
    assert warning in " ".join(predict(on_ranks(tiny(**words), 2, sharding)).warnings)
    assert not any("does not take" in one for one in predict(on_ranks(tiny(**words), 2, "zero2")).warnings)


@pytest.mark.parametrize("num_gpus", [3, 5, 7, 12, 300])
@pytest.mark.parametrize("sharding", ONE_GROUP)
def test_any_number_of_gpus_will_do(sharding: Sharding, num_gpus: int) -> None:
    """Also more than a tensor has rows: each rank then has one."""
    weights = predict(on_ranks(tiny(), num_gpus, sharding)).terms["weights"] - BUFFERS
    assert weights >= (2 * P if sharding in ("ddp", "zero1", "zero2") else -(-2 * P // num_gpus))


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp1", "fsdp-shard-grad-op", "fsdp1-shard-grad-op"])
def test_mixed_precision_raises_what_fsdp_trains(sharding: str) -> None:
    """accelerate 1.15 does so for both; without autocast 16 bits stay 16 bits."""
    words = {"device": "cuda", "model": "qwen2.5-0.5b", "method": "full", "batch_size": 1, "seq_len": 64}
    raised, whole, kept = (
        predict(on_ranks(resolve(dtype=dtype, autocast=autocast, **words), 4, sharding)).terms
        for dtype, autocast in (("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "none"))
    )
    assert raised["optimizer_state"] == whole["optimizer_state"] > 1.9 * kept["optimizer_state"]
    assert raised["weights"] == pytest.approx(whole["weights"], rel=1e-5)
    assert kept["weights"] == pytest.approx(whole["weights"] / 2, rel=1e-3)
