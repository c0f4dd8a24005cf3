"""Shares of one GPU's recorded step: states divided by hand, activations whole, near to emulated ranks as is said."""

from typing import Any

import pytest
from command_line import vramprobe
from emulated import require_emulation
from factories import TINY_LLAMA_PARAMS as P
from factories import TINY_LLAMA_PATH, make_spec, on_ranks
from grids import exhaustive

from benchmarks.truth import shares as page_of_shares
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import find_gpu
from vramprobe.choices import Sharding
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import SpecError
from vramprobe.predict import one_gpu_step, recorded
from vramprobe.predict.at_hand import NotAtHand
from vramprobe.predict.host_memory import loaded_bytes, of_machine_bytes, of_rank_bytes
from vramprobe.predict.one_gpu_step import Moment, Step, step_at_hand
from vramprobe.predict.prediction import Interval
from vramprobe.predict.questions import cell_on_ranks, changes, predict
from vramprobe.predict.shares import _KINDS, near, rank_moments
from vramprobe.predict.verdict import NCCL_ALLOWANCE_BYTES, verdict
from vramprobe.recipe.book import recorded_as
from vramprobe.resolve import resolve
from vramprobe.rules.not_sharded import reasons_not_run
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

#: By hand, of the tiny llama: the embedding, or the head; AdamW's counters of 21 tensors; two rotary buffers.
LARGEST, COUNTERS, BUFFERS = 256 * 64, 4 * 21, 2 * 8 * 4
BUCKET = 500_000_000
ASKED = {"model": str(TINY_LLAMA_PATH), "method": "full", "batch_size": 1, "seq_len": 8}
#: A cell whose step on one GPU ships.
WORDS = {"model": "smollm2-135m", "method": "full", "batch_size": 2, "seq_len": 1024}
SHIPPED = resolve(**WORDS, device="cuda")


def tiny(**overrides: Any) -> CellSpec:
    return make_spec(device="cuda", **overrides)


#: One GPU's step by hand, in bytes.
STEP = Step(
    (
        Moment("forward", "layer", {"saved_activations": 900, "temporaries": 70}),
        Moment("backward", "loss", {"saved_activations": 1000, "logits": 512}),
        Moment("optimizer_step", "optimizer", {"gradients": 2 * P}),
    ),
    remainders_bytes=0,
)
CARD = find_gpu("A100-80GB-SXM")


def moments_of(spec: CellSpec) -> list[Moment]:
    return rank_moments(spec, architecture(spec.architecture), STEP, CARD)


def at_step(sharding: Sharding, **overrides: Any) -> dict[str, int]:
    """The optimizer's step of one of 4 ranks, without what every one has."""
    found = moments_of(on_ranks(tiny(**overrides), 4, sharding))
    [step] = [one for one in found if one.phase == "optimizer_step"]
    apart = {"workspaces", "block_remainders"}
    return {name: size for name, size in step.terms.items() if size and name not in apart}


@pytest.mark.parametrize(
    ("sharding", "terms"),
    [
        ("ddp", {"weights": 2 * P, "gradients": 2 * P, "optimizer_state": 4 * P, "gradient_buckets": 2 * P}),
        ("fsdp", {"weights": P // 2, "gradients": P // 2, "optimizer_state": P}),
        ("fsdp1-shard-grad-op", {"weights": P // 2, "gradients": P // 2, "optimizer_state": P}),
    ],
)
def test_states_are_divided_by_hand(sharding: Sharding, terms: dict[str, int]) -> None:
    """All-bf16 AdamW, 2 + 2 + 4 bytes a parameter; every dimension of this model is a multiple of 4."""
    found = at_step(sharding)
    assert found.pop("weights") == terms.pop("weights") + BUFFERS
    assert found.pop("optimizer_state") == terms.pop("optimizer_state") + COUNTERS
    assert found == terms


def test_deepspeed_steps_a_flat_copy_in_fp32_by_hand() -> None:
    """A rank of 4: 16-bit weights whole or a quarter, and a quarter of an fp32 copy, of its state, of the gradients."""
    part = P // 4
    joined = part * (2 + 4)  # gradients joined, and again in fp32
    second = at_step("zero2", recipe="mixed")
    assert second == {
        "weights": 2 * P + 4 * part + BUFFERS,
        "gradients": max(2 * part, 2 * LARGEST),
        "optimizer_state": 8 * part + 4,
        "optimizer_temporaries": joined,
    }
    third = at_step("zero3", recipe="mixed")  # every tensor of this model is so small that it is whole all the same
    assert third == {
        "weights": 2 * part + 2 * P + 4 * part + BUFFERS,
        "gradients": 2 * part,
        "gradient_buckets": 2 * BUCKET,
        "optimizer_state": 8 * part + 4,
        "optimizer_temporaries": joined,
    }


@pytest.mark.parametrize("sharding", ONE_GROUP)
def test_activations_are_not_divided(sharding: Sharding) -> None:
    def highest(num_gpus: int) -> Moment:
        return next(one for one in moments_of(on_ranks(tiny(), num_gpus, sharding)) if one.label == "loss")

    few, many = highest(2), highest(64)
    for cause, size in (("saved_activations", 1000), ("logits", 512)):
        assert few.terms[cause] == many.terms[cause] == size
    assert (few.total_bytes > many.total_bytes) is (sharding != "ddp")


def num_within(module: str, several: list) -> int:
    low, _, high = _KINDS[module][1].allocated
    return sum(low - 5e-4 <= one.reference[0] / one.answered[0] <= high + 5e-4 for one in several)


@pytest.mark.usefixtures("shipped_alone")
def test_of_the_emulated_ranks_whose_step_ships_most_lie_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu_step, "_FOUND", {})
    cells = [one for one in page_of_shares.cells() if step_at_hand(one.spec, find_gpu(one.gpu)) is not None]
    found = page_of_shares.ranks(cells)
    assert len(found) >= 100
    assert sum(num_within(*one) for one in page_of_shares.by_module(found).items()) >= 0.85 * len(found)


@exhaustive
@pytest.mark.timeout(1800)  # about 140 recordings of two seconds each, where none was made before
def test_ninety_percent_of_all_emulated_ranks_lie_within_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    require_emulation()
    monkeypatch.setattr(one_gpu_step, "_FOUND", {})
    found = page_of_shares.ranks()
    assert len(found) == 323
    assert page_of_shares.PAGE.read_text() == page_of_shares.page()
    for module, several in page_of_shares.by_module(found).items():
        said = _KINDS[module][1]
        assert page_of_shares.ratios(several, 0) == said.allocated, module
        assert page_of_shares.ratios(several, 1) == said.reserved, module
        assert num_within(module, several) >= 0.9 * len(several), module


def test_a_rank_of_several_is_tight_wherever_its_interval_leaves_it_open() -> None:
    card = find_gpu("RTX-4090")
    found = near(on_ranks(SHIPPED, 2, "fsdp"), card)
    usable = verdict(found, card).usable_bytes
    assert usable == card.cuda_total_bytes - card.context_bytes - NCCL_ALLOWANCE_BYTES

    def judged(allocated: float, reserved: float) -> str:
        sizes = {
            "peak_allocated_bytes": Interval(value=usable, low=round(allocated * usable), high=usable),
            "reserved_bytes": Interval(value=usable, low=usable, high=round(reserved * usable)),
        }
        return verdict(found.model_copy(update=sizes), card).verdict

    assert [judged(0.5, 0.94), judged(0.5, 0.96), judged(0.99, 1.5), judged(1.01, 1.5)] == [
        "fits", "tight", "tight", "does not fit",
    ]  # fmt: skip
    assert verdict(found, card).reason.startswith("near, predicted reserved memory")


def test_quantized_weights_are_whole_while_they_are_loaded() -> None:
    words = {"model": "llama-3.1-70b", "method": "qlora", "device": "cuda", "gradient_checkpointing": True}
    spec = resolve(**words, batch_size=1, seq_len=1024)
    found = near(on_ranks(spec, 8, "fsdp"), find_gpu("RTX-4090"))
    linear, vocabulary = 80 * 855_638_016, 2 * 128_256 * 8192  # half a byte and scales; in fp32 by PEFT's preparation
    assert found.peak_allocated_bytes.value == pytest.approx(0.516 * linear + 4 * vocabulary, rel=0.03)
    assert "loading allocates the most" in " ".join(found.warnings)
    assert verdict(found, find_gpu("RTX-4090")).verdict == "does not fit"
    assert sum(found.terms.values()) + found.constant_bytes == found.peak_allocated_bytes.value


def test_a_rank_is_the_same_whatever_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"model": "tinyllama-1.1b", "method": "qlora", "device": "cuda", "batch_size": 1, "seq_len": 1024}
    ranks = on_ranks(resolve(**words), 2, "fsdp")
    found = []
    for before in ((), ("ddp",)):
        monkeypatch.setattr(one_gpu_step, "_FOUND", {})
        for sharding in before:
            near(ranks.model_copy(update={"sharding": sharding}), find_gpu("L4"))
        found.append(near(ranks, find_gpu("L4")))
    assert found[0] == found[1]


def test_micro_steps_after_the_second_take_no_replay_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu_step, "_FOUND", kept := {})
    rank, card = on_ranks(SHIPPED, 2, "ddp"), find_gpu("A100-80GB-SXM")
    one, two, eight = (step_at_hand(rank.model_copy(update={"grad_accum": number}), card) for number in (1, 2, 8))
    assert one != two
    assert two == eight
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("words", "said"), [({"sharding": "tp"}, "sharding tp: a rank is recorded"), ({"cp_size": 2}, "cp_size 2: a rank")]
)
def test_what_only_a_recording_knows_is_not_composed(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=said):
        near(on_ranks(tiny(), 4, **{"sharding": "fsdp"} | words))


def test_a_rank_is_recorded_and_what_would_save_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CellSpec] = []

    def recording(one: CellSpec, **_: Any) -> Any:
        seen.append(one)
        return near(one).model_copy(update={"engine": "recipe"})

    monkeypatch.setattr(recorded, "predict", recording)
    found = predict(**WORDS, num_gpus=2, sharding="fsdp", gpu="RTX-4090")
    assert (found.engine, [(one.num_gpus, one.sharding) for one in seen]) == ("recipe", [(2, "fsdp")])
    larger = WORDS | {"gpu": "RTX-4090"}
    saved = [one.options for one in changes(**larger, num_gpus=2, sharding="fsdp")]
    assert {"num_gpus": 4} in saved
    assert {"sharding": "fsdp"} in [one.options for one in changes(**larger, num_gpus=2, sharding="ddp")]
    assert len(seen) == 1
    assert not any("num_gpus" in one.options for one in changes(**larger))


def test_without_a_recipe_of_one_gpu_nothing_is_near() -> None:
    with pytest.raises(NotAtHand, match=r"no recipe of .*tiny-llama on one GPU .* is at hand; vramprobe predict rec"):
        near(on_ranks(tiny(lora_r=3, method="lora"), 2, "fsdp"))


def test_where_nothing_is_recorded_one_line_has_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(one: CellSpec, **_: Any) -> Any:
        raise NotEmulatable("no GPU can be emulated here.")

    monkeypatch.setattr(recorded, "predict", cannot)
    with pytest.raises(NotEmulatable, match=r"emulated here\. A rank allocates at least about [\d.]+ \wiB, near"):
        predict(**WORDS, num_gpus=2, sharding="fsdp")
    with pytest.raises(NotEmulatable, match=r"emulated here\.$"):
        predict(**WORDS, num_gpus=2, sharding="tp")


def test_one_process_over_several_gpus_is_refused_by_what_answers() -> None:
    shown = vramprobe(
        "predict", "--model", "pythia-70m", "--method", "full", "--batch-size", "1", "--seq-len", "64", "--sharding",
        "device-map", "--num-gpus", "2", "--gpu", "RTX-4090",
    )  # fmt: skip
    assert shown.returncode != 0
    [line] = shown.stderr.strip().splitlines()
    assert "vramprobe profile --emulate 'RTX-4090 x2' --empty-weights -- COMMAND" in line


# -- host memory --------------------------------------------------------------------------------------------------


def on_host(num_gpus: int, sharding: Sharding, offload: str, **overrides: Any) -> CellSpec:
    return on_ranks(tiny(recipe="mixed", **overrides), num_gpus, sharding, offload=offload)


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-shard-grad-op", "fsdp1", "fsdp1-shard-grad-op"])
def test_fsdp_leaves_its_states_on_the_host(sharding: Sharding) -> None:
    """A quarter of parameters, gradients and two moments, all in fp32."""
    assert of_rank_bytes(on_host(4, sharding, "params")) == 4 * P + COUNTERS
    assert at_step(sharding, recipe="mixed") != {}
    offloaded = moments_of(on_host(4, sharding, "params"))
    assert all("optimizer_state" not in one.terms for one in offloaded)


@pytest.mark.parametrize("num_gpus", [1, 4])
@pytest.mark.parametrize(
    ("sharding", "offload", "each", "beside"),
    [
        ("zero1", "optimizer", 18, 2 * LARGEST),
        ("zero2", "optimizer", 18, 2 * LARGEST),
        ("zero3", "optimizer", 18, 0),
        ("zero3", "params", 20, 0),
    ],
)
def test_deepspeed_moves_its_optimizer_and_then_its_parts(
    num_gpus: int, sharding: Sharding, offload: str, each: int, beside: int
) -> None:
    assert of_rank_bytes(on_host(num_gpus, sharding, offload)) == each * P // num_gpus + beside + 4


ALONE = {"sharding": "zero3", "offload": "params", "num_gpus": 1}


def test_one_gpu_is_a_rank_where_deepspeed_offloads() -> None:
    """Without offload, one GPU of a sharding is one by itself."""
    one = cell_on_ranks(device="cuda", **WORDS, **ALONE)
    assert (one.sharding, one.num_gpus, recorded_as(one).only_rank) == ("zero3", 1, 0)
    assert reasons_not_run(recorded_as(one)) == []
    assert cell_on_ranks(device="cuda", **WORDS, **ALONE | {"offload": "none"}) == SHIPPED


def test_a_rank_whose_host_memory_is_not_here_is_near_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 or 20 bytes a parameter step on the host of a recording, whatever the sharding."""
    words = WORDS | ALONE | {"recipe": "mixed"}
    monkeypatch.setattr("vramprobe.measure.environment.free_host_bytes", lambda: (GIB, 2 * GIB))
    monkeypatch.setattr(recorded, "find_recipe", lambda *_, **__: pytest.fail("recorded"))
    found = predict(**words, gpu="RTX-4090")
    assert (found.engine, found.num_gpus, found.sharding) == ("near", 1, "zero3")
    assert found.host_bytes == of_rank_bytes(cell_on_ranks(device="cuda", **words)) > 2 * GIB
    assert found.warnings[-1].startswith("near, not recorded: a recording takes 2.51 GiB of this machine's memory, and")
    assert any(one.startswith("on the host, by formulas: 2.51 GiB of tensors; what") for one in found.warnings)
    assert {"gradient_checkpointing": True} in [one.options for one in changes(**words, gpu="RTX-4090")]


def test_a_machine_holds_its_ranks_or_what_rank_0_loads() -> None:
    assert of_machine_bytes(on_host(4, "zero3", "params")) == 4 * of_rank_bytes(on_host(4, "zero3", "params"))
    assert of_machine_bytes(on_host(64, "zero3", "params")) == 8 * of_rank_bytes(on_host(64, "zero3", "params"))
    assert loaded_bytes(on_host(2, "fsdp", "params")) == 4 * P + BUFFERS
    assert loaded_bytes(on_host(2, "zero3", "params")) == 0
    lora = make_spec(device="cuda", method="lora")  # more than eight parts of little
    assert of_machine_bytes(on_ranks(lora, 64, "fsdp", offload="params")) == 2 * P + BUFFERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"sharding": "ddp", "num_gpus": 2, "offload": "params"}, "DistributedDataParallel keeps all on the GPU"),
        (
            {"sharding": "zero3", "num_gpus": 2, "offload": "weights"},
            "'weights' given; allowed: none, optimizer, params",
        ),
        ({"sharding": "fsdp", "num_gpus": 1, "offload": "params"}, "one GPU is DeepSpeed's; use sharding zero3, more"),
        ({"sharding": "zero2", "num_gpus": 1, "offload": "params"}, "keeps parameters on the host under zero3 alone"),
        ({"offload": "params"}, "offload params needs sharding and num_gpus: zero3 on 1, say"),
        ({"num_gpus": 0, "sharding": "zero1"}, "num_gpus: 0 given; must be from 1 to"),
        ({"num_gpus": -3, "sharding": "ddp"}, "num_gpus: -3 given; must be from 1 to"),
        ({"num_gpus": 2, "sharding": "zero4"}, "'zero4' given; allowed: ddp, zero1, zero2, zero3"),
        ({"num_gpus": 2, "sharding": "FSDPX"}, "'FSDPX' given; allowed: .* fsdp, fsdp-shard-grad-op"),
    ],
)
def test_ranks_and_offloads_that_cannot_be_are_a_clear_error(words: dict[str, Any], message: str) -> None:
    """As a cell refuses them (tests/data/cells.toml), or a question of one GPU."""
    with pytest.raises(SpecError, match=message):
        predict(**ASKED, **words)
