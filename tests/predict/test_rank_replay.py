"""A rank's requests through the allocator, against the real libraries on an emulated card; what predict makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from factories import on_ranks

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.kernels.chip import Chip
from vramprobe.predict.bisection import first_of
from vramprobe.predict.fewest import MAX_GPUS
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import ALONE
from vramprobe.predict.questions import predict as ask
from vramprobe.predict.verdict import verdict
from vramprobe.predict.what_fits import max_batch_size, min_gpus
from vramprobe.rules.sharding import HYBRID, ONE_GROUP
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.replayed import num_alloc_retries, replayed
from vramprobe.terms.sharding.ddp import broadcast
from vramprobe.terms.sharding.ranks import is_logged, run_of
from vramprobe.units import GIB, MIB

H100 = find_gpu("H100-SXM")
MIXED = {"model": "qwen2.5-0.5b", "num_layers": 8, "method": "full", "recipe": "mixed"}
LORA = {"model": "qwen2.5-0.5b", "num_layers": 8, "method": "lora", "gradient_checkpointing": True}
SIXTEEN = {
    "model": "tinyllama-1.1b",
    "num_layers": 6,
    "method": "full",
    "recipe": "all-bf16",
    "gradient_checkpointing": True,
    "grad_accum": 2,
}
NF4 = {"model": "llama-3.2-1b", "num_layers": 8, "method": "qlora", "kbit_prep": "none", "gradient_checkpointing": True}
#: The peak of an emulated rank: allocated and reserved bytes (tests/oracles).
EMULATED: list[tuple[dict[str, Any], int, dict[str, tuple[int, int]]]] = [
    (
        MIXED,
        2,
        {
            "ddp": (7_109_600_768, 7_839_154_176),
            "fsdp": (4_225_465_856, 5_886_705_664),
            "fsdp-shard-grad-op": (4_472_561_152, 6_100_615_168),
            "fsdp1": (4_250_157_056, 5_718_933_504),
            "fsdp1-shard-grad-op": (4_458_932_224, 5_907_677_184),
            "zero1": (4_475_650_048, 6_396_313_600),
            "zero2": (4_475_650_048, 6_396_313_600),
        },
    ),
    (
        LORA,
        8,
        {
            "ddp": (2_515_022_336, 3_502_243_840),
            "fsdp": (2_295_669_760, 3_084_910_592),
            "fsdp1": (2_324_952_064, 2_902_458_368),
            "fsdp1-shard-grad-op": (2_539_592_704, 3_095_396_352),
            "zero1": (2_478_626_816, 3_835_691_008),
        },
    ),
    (SIXTEEN, 8, {"fsdp": (1_802_390_016, 2_392_850_432), "fsdp-shard-grad-op": (2_463_959_552, 2_971_664_384)}),
    (SIXTEEN | {"shard_size": 2}, 8, {"fsdp-hybrid": (2_705_142_784, 3_665_821_696)}),
    (NF4, 4, {"ddp": (2_556_165_632, 2_906_652_672)}),
    (MIXED | {"grad_accum": 4}, 8, {"fsdp": (3_594_568_704, 4_907_335_680)}),
]
#: Reserved bytes alone, which are not to the byte.
NEARLY: list[tuple[dict[str, Any], int, str, int]] = [
    (MIXED, 2, "zero3", 7_744_782_336),
    (LORA, 8, "zero3", 4_152_360_960),
    (NF4, 4, "fsdp1", 2_973_761_536),
    (
        {
            "model": "llama-3.1-8b",
            "num_layers": 4,
            "method": "full",
            "recipe": "mixed",
            "batch_size": 1,
            "seq_len": 1024,
        },
        4,
        "zero3",
        19_685_965_824,
    ),
]


def cell(**words: Any) -> CellSpec:
    return resolve(**{"device": "cuda", "batch_size": 2, "seq_len": 512} | words)


@pytest.mark.parametrize(("words", "num_gpus", "by_sharding"), EMULATED)
def test_a_rank_reserves_what_it_does_emulated(
    words: dict[str, Any], num_gpus: int, by_sharding: dict[str, tuple[int, int]]
) -> None:
    for sharding, (allocated, reserved) in by_sharding.items():
        found = replayed(cell(**words, num_gpus=num_gpus, sharding=sharding), H100)
        assert found.reserved_bytes == reserved, sharding
        assert found.allocated_bytes == pytest.approx(allocated, rel=0.0004), sharding


@pytest.mark.parametrize(("words", "num_gpus", "sharding", "reserved"), NEARLY)
def test_a_rank_reserves_nearly_what_it_does_emulated(
    words: dict[str, Any], num_gpus: int, sharding: str, reserved: int
) -> None:
    found = replayed(cell(**words, num_gpus=num_gpus, sharding=sharding), H100)
    assert found.reserved_bytes == pytest.approx(reserved, rel=0.015)


def test_every_counted_sharding_is_logged() -> None:
    for sharding in ONE_GROUP:
        assert is_logged(cell(**MIXED, num_gpus=4, sharding=sharding)), sharding
    for sharding in HYBRID:
        assert is_logged(cell(**MIXED, num_gpus=8, shard_size=4, sharding=sharding)), sharding


@pytest.mark.parametrize(
    "words",
    [
        {"sharding": "fsdp", "offload": "params"},
        {"sharding": "fsdp", "cp_size": 2, "seq_len": 1024},
    ],
)
def test_what_is_not_logged_is_refused_and_left_as_it_is(words: dict[str, Any]) -> None:
    spec = cell(**{**MIXED, "num_gpus": 2, **words})
    assert not is_logged(spec)
    with pytest.raises(UnsupportedArchitecture, match="not known in their order"):
        replayed(spec, H100)
    assert predict(spec, gpu=H100, replays=True) == predict(spec, gpu=H100)


class Account(CachingAllocator):
    """An allocator that knows who has what."""

    def standing(self) -> Counter[str]:
        return Counter(_kind(name) for name, _ in self.blocks())


def _kind(name: Hashable) -> str:
    return str(name[0]) if isinstance(name, tuple) else "request" if isinstance(name, int) else str(name)


@pytest.mark.parametrize("sharding", ONE_GROUP)
@pytest.mark.parametrize("words", [MIXED, LORA, SIXTEEN])
def test_each_step_gives_back_what_it_took(sharding: str, words: dict[str, Any]) -> None:
    spec = cell(**words, num_gpus=4, sharding=sharding)
    allocator = Account()
    run = run_of(spec, allocator, workspace_bytes=32 * MIB, chip=Chip())
    run.load()
    assert not allocator.standing()["request"]
    assert not {"whole", "flat gradient", "sent", "loaded"} & set(allocator.standing())
    run.step()
    run.step()
    after = allocator.ledger.now().allocated_bytes
    assert allocator.standing()["request"] == 0
    assert allocator.standing()["workspace"] == 2  # of autograd's thread, too
    run.step()
    assert allocator.ledger.now().allocated_bytes == after


def test_what_is_sent_at_once() -> None:
    asked: list[int] = []

    class Listening(CachingAllocator):
        def allocate(self, name: Hashable, size_bytes: int, stream: int = 0) -> Any:
            asked.append(size_bytes)
            return super().allocate(name, size_bytes, stream)

    # The first piece is full with the third weight, the second is one weight, the rest is one more.
    broadcast(Listening(), [100 * MIB, 100 * MIB, 100 * MIB, 300 * MIB, MIB, MIB])
    assert asked == [300 * MIB, 0, 2 * MIB]


def test_ddps_buckets_are_made_again_in_the_order_in_which_gradients_came() -> None:
    """As emulated: the first closes with the first large gradient, those behind it with 25 MiB."""
    spec = cell(**MIXED | {"num_layers": 4}, num_gpus=4, sharding="ddp")
    allocator = Account()
    run = run_of(spec, allocator, workspace_bytes=32 * MIB, chip=Chip())
    run.load()
    run.step()
    assert [block.requested for name, block in allocator.blocks() if _kind(name) == "bucket"] == [783_140_352]
    run.step()
    made = {name: block.requested for name, block in allocator.blocks() if _kind(name) == "bucket"}
    assert [made["bucket", number] for number in range(len(made))] == [
        17_436_160,
        34_865_152,
        42_216_960,
        42_216_960,
        34_865_152,
        42_216_960,
        569_323_008,
    ]


def test_a_load_that_no_card_holds_counts() -> None:
    words = {
        "model": "llama-3.1-70b",
        "method": "qlora",
        "kbit_prep": "none",
        "batch_size": 1,
        "seq_len": 1024,
        "gradient_checkpointing": True,
        "gpu": "RTX-4090",
    }
    found = ask(**words, num_gpus=64, sharding="fsdp")
    assert found.reserved_bytes is not None
    assert found.reserved_bytes.value > 35 * GIB  # of 4-bit weights, whole on each card
    assert any(one.startswith("its load needs the most, ") for one in found.warnings)
    assert verdict(found, find_gpu("RTX-4090")).verdict == "does not fit"
    assert found.peak_allocated_bytes.value < 20 * GIB


def test_predict_says_both_tiers_of_a_rank() -> None:
    found = ask(
        model="qwen2.5-0.5b",
        method="full",
        recipe="mixed",
        num_layers=8,
        batch_size=2,
        seq_len=512,
        num_gpus=2,
        sharding="fsdp",
        gpu="H100-SXM",
    )
    assert found.reserved_bytes is not None
    assert found.reserved_bytes.value == 5_886_705_664
    assert found.reserved_bytes.low < found.reserved_bytes.value < found.reserved_bytes.high
    assert sum(found.terms.values()) + found.constant_bytes == found.peak_allocated_bytes.value
    assert ALONE not in found.warnings
    assert any("replay" in one for one in found.warnings)
    assert "reserved" in verdict(found, H100).reason


@pytest.mark.parametrize("words", [{"replays": False}, {"fit": "none"}])
def test_a_rank_is_by_arithmetic_alone_where_that_is_asked_for(words: dict[str, Any]) -> None:
    found = ask(
        model="qwen2.5-0.5b",
        method="full",
        batch_size=1,
        seq_len=512,
        num_gpus=2,
        sharding="fsdp",
        gpu="H100-SXM",
        **words,
    )
    assert found.reserved_bytes is None
    assert ALONE in found.warnings


def test_no_fit_is_arithmetic_alone_of_inverse_questions_too() -> None:
    words = {
        "model": "llama-3.1-8b",
        "method": "full",
        "seq_len": 2048,
        "gradient_checkpointing": True,
        "gpu": "A100-40GB-SXM",
        "sharding": "fsdp",
        "fit": "none",
    }
    assert "allocated" in min_gpus(**words, batch_size=1).verdict.reason
    found = max_batch_size(**words, num_gpus=8)
    assert found.tight is not None
    assert "allocated" in found.tight.verdict.reason


def test_zero3s_tensors_are_the_arithmetics() -> None:
    spec = cell(**MIXED)
    counted = predict(on_ranks(spec, 4, "zero3"), gpu=H100)
    found = predict(on_ranks(spec, 4, "zero3"), gpu=H100, replays=True)
    assert found.peak_allocated_bytes.value == counted.peak_allocated_bytes.value
    assert found.reserved_bytes is not None
    assert found.reserved_bytes.value > found.peak_allocated_bytes.value


@pytest.mark.parametrize("sharding", HYBRID)
def test_a_hybrids_group_is_as_large_as_usual_where_nobody_says(sharding: str) -> None:
    words = {
        "model": "qwen2.5-0.5b",
        "method": "full",
        "num_layers": 8,
        "batch_size": 1,
        "seq_len": 512,
        "num_gpus": 16,
        "sharding": sharding,
    }
    found = ask(**words)
    assert found.reserved_bytes is not None
    assert found == ask(**words, shard_size=8) != ask(**words, shard_size=4)


def test_a_rank_that_gets_along_with_less_is_tight() -> None:
    words = {
        "model": "llama-3.1-70b",
        "method": "full",
        "batch_size": 1,
        "seq_len": 4096,
        "gradient_checkpointing": True,
    }
    found = ask(**words, num_gpus=8, sharding="fsdp", gpu="H100-SXM")
    assert found.within is not None
    said = verdict(found, H100)
    assert said.verdict == "tight"
    assert said.needed_bytes == found.peak_allocated_bytes
    assert said.needed_bytes.value <= said.usable_bytes < found.reserved_bytes.value
    assert f"gives its cached blocks back {found.within.num_alloc_retries} times" in said.reason
    spec = resolve(device="cuda", num_gpus=8, sharding="fsdp", **words)
    assert num_alloc_retries(spec, H100, found.within.limit_bytes) == found.within.num_alloc_retries
    assert num_alloc_retries(spec, H100, 60 * GIB) is None  # below what its tensors take


def test_the_fewest_cards_are_those_whose_reserved_memory_fits() -> None:
    words = {
        "model": "llama-3.1-8b",
        "method": "full",
        "batch_size": 1,
        "seq_len": 2048,
        "gradient_checkpointing": True,
    }
    found = min_gpus(gpu="A100-40GB-SXM", sharding="fsdp", **words)
    assert found.num_gpus is not None
    assert found.tight_num_gpus is not None
    assert found.tight_num_gpus < found.num_gpus
    assert "reserved" in found.verdict.reason
    card = find_gpu("A100-40GB-SXM")
    for num_gpus, so in (
        (found.num_gpus, "fits"),
        (found.num_gpus - 1, "tight"),
        (found.tight_num_gpus, "tight"),
        (found.tight_num_gpus - 1, "does not fit"),
    ):
        one = ask(**words, num_gpus=num_gpus, sharding="fsdp", gpu=card.short_name)
        assert verdict(one, card).verdict == so, num_gpus


def test_the_largest_batch_of_a_rank_is_the_one_that_predict_says_fits() -> None:
    words = {
        "model": "llama-3.1-8b",
        "method": "full",
        "seq_len": 4096,
        "gradient_checkpointing": True,
        "num_gpus": 8,
        "sharding": "fsdp",
        "gpu": "H100-SXM",
    }
    found = max_batch_size(**words)
    assert found.fits is not None
    assert found.tight is not None
    assert "reserved" in found.fits.verdict.reason
    so = [verdict(ask(**words, batch_size=size), H100).verdict for size in (found.fits.value, found.fits.value + 1)]
    assert so == ["fits", "tight"]
    assert verdict(ask(**words, batch_size=found.tight.value), H100).verdict == "tight"


@pytest.mark.parametrize("fewest", [1, 2, 3, 17, 100, 4095, 4096])
@pytest.mark.parametrize("guess", [0, 1, 2, 3, 16, 17, 18, 64, 4096])
def test_the_first_number_is_found_from_wherever_one_looks(fewest: int, guess: int) -> None:
    for least in {1, min(2, fewest), fewest}:
        assert first_of(lambda number: number >= fewest, MAX_GPUS, least=least, guess=guess) == fewest


def test_there_may_be_no_such_number() -> None:
    assert first_of(lambda number: False, MAX_GPUS, least=1, guess=7) is None


def test_a_fused_loss_hands_out_no_logits_to_be_raised() -> None:
    """Under autocast accelerate raises what a forward hands out; it ended in an error."""
    words = {
        "model": "llama-3.2-1b",
        "method": "lora",
        "batch_size": 1,
        "seq_len": 512,
        "device": "cuda",
        "recipe": "mixed",
        "sharding": "ddp",
        "num_gpus": 2,
    }
    usual, fused = (ask(fused_linear_cross_entropy=is_fused, **words) for is_fused in (False, True))
    assert fused.peak_allocated_bytes.value < usual.peak_allocated_bytes.value
    by_arithmetic = ask(fit="none", fused_linear_cross_entropy=True, **words)
    assert fused.peak_allocated_bytes.value == pytest.approx(by_arithmetic.peak_allocated_bytes.value, rel=0.01)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "fsdp1", "zero1", "zero2", "zero3"])
def test_the_causes_of_a_rank_add_up_to_its_peak(sharding: str) -> None:
    """Under DDP the remainders of the load's blocks were put in the place of all, up to 114 MB short."""
    words = {"method": "lora", "batch_size": 2, "seq_len": 512, "num_gpus": 4, "sharding": sharding}
    found = ask(model="smollm2-135m", **words)
    assert sum(found.terms.values()) + found.constant_bytes == found.peak_allocated_bytes.value
