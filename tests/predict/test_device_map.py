"""One process over several cards, by arithmetic: where transformers puts what, and each card's bytes as emulated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError
from vramprobe.predict.predict import predict
from vramprobe.predict.questions import predict as ask
from vramprobe.predict.verdict import verdict
from vramprobe.predict.what_fits import min_gpus
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.cell import parameters
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.sharding.device_map import CardTape, cards_of
from vramprobe.terms.sharding.placement import CardMap, card_map
from vramprobe.terms.step.walk import walk_layers
from vramprobe.terms.step.workspaces import workspaces_bytes

QWEN = "deepseek-r1-distill-qwen-1.5b"  # whose head is not tied
PHASES = ("forward", "backward", "optimizer_step")
#: What tensors asked for on each of two emulated H100s at the peak of forward, backward and the optimizer's step.
EMULATED: list[tuple[dict[str, Any], list[tuple[int, int, int]]]] = [
    ({"model": "mistral-7b-v0.3", "num_layers": 6, "method": "lora"},
     [(2_552_221_916, 2_418_561_248, 1_707_147_432), (2_728_260_320, 2_786_972_376, 1_707_139_752)]),
    ({"model": QWEN, "num_layers": 8, "method": "qlora", "gradient_checkpointing": True},
     [(2_089_688_788, 1_413_955_304, 1_139_478_224), (3_195_065_560, 3_494_655_184, 1_139_467_472)]),
    ({"model": QWEN, "num_layers": 8, "method": "full", "gradient_checkpointing": True},
     [(3_199_510_776, 3_809_173_756, 3_806_028_020), (3_887_853_216, 4_199_009_944, 3_057_259_160)]),
    ({"model": "mistral-7b-v0.3", "num_layers": 4, "method": "full", "optim": "adamw_torch", "seq_len": 2048},
     [(5_405_638_692, 5_523_079_208, 5_771_591_680), (6_612_558_376, 6_880_961_056, 5_771_567_616)]),
    ({"model": QWEN, "num_layers": 6, "method": "lora", "autocast": "bf16", "grad_accum": 2},
     [(2_333_774_116, 1_440_043_304, 950_460_640), (2_535_296_664, 2_843_307_664, 742_153_840)]),
    ({"model": "smollm2-1.7b", "num_layers": 8, "method": "full", "dtype": "fp32", "autocast": "bf16",
      "gradient_checkpointing": True},
     [(5_776_838_828, 6_384_009_372, 5_972_967_572), (3_897_008_532, 4_446_646_692, 4_362_371_476)]),
]  # fmt: skip
#: Layers by card, as transformers placed them (benchmarks/ranks/device_map.csv).
PLACED = [
    ({"model": "llama-3.1-8b", "method": "lora"}, [16, 16]),
    ({"model": "llama-3.1-8b", "method": "qlora"}, [14, 18]),
    ({"model": "qwen2.5-32b", "method": "qlora"}, [28, 36]),
    ({"model": "llama-3.1-70b", "method": "qlora"}, [36, 44]),
    ({"model": "llama-3.1-70b", "method": "qlora"}, [22, 32, 26]),
    ({"model": "llama-3.1-70b", "method": "qlora"}, [15, 25, 25, 15]),
]


def cell(**words: Any) -> CellSpec:
    return resolve(**{"device": "cuda", "batch_size": 2, "seq_len": 512} | words)


def placed(num_cards: int, **words: Any) -> CardMap:
    spec = cell(**words)
    return card_map(spec, architecture(spec.architecture), num_cards)


@pytest.mark.parametrize(("words", "layers"), PLACED)
def test_layers_lie_where_transformers_puts_them(words: dict[str, Any], layers: list[int]) -> None:
    found = placed(len(layers), **words)
    assert [Counter(found.layers)[card] for card in range(len(layers))] == layers
    assert (found.embedding, found.norm, found.head) == (0, len(layers) - 1, len(layers) - 1)


def test_a_tied_head_lies_with_the_embedding() -> None:
    found = placed(2, model="smollm2-1.7b", method="full")
    assert (found.embedding, found.norm, found.head) == (0, 1, 0)


@pytest.mark.parametrize(("words", "seen"), EMULATED, ids=lambda one: one.get("model") if isinstance(one, dict) else "")
def test_each_card_as_emulated(words: dict[str, Any], seen: list[tuple[int, int, int]]) -> None:
    spec = cell(**words)
    for card, on_card in zip(cards_of(spec, 2).cards, seen, strict=True):
        for phase, requested in zip(PHASES, on_card, strict=True):
            asked = max(
                one.total_bytes - one.terms.get("block_remainders", 0)
                for one in card.moments(spec)
                if one.phase == phase
            ) + workspaces_bytes(spec, find_gpu("H100-SXM"))
            assert asked == pytest.approx(requested, abs=12_288)


def test_what_stands_on_all_cards_is_what_stands_on_one() -> None:
    spec = cell(model="llama-3.1-8b", method="qlora")
    cards = [max(card.moments(spec), key=lambda one: one.phase == "optimizer_step") for card in cards_of(spec, 2).cards]
    alone = predict(spec.model_copy(update={"seq_len": 1, "batch_size": 1}))
    for cause in ("weights", "optimizer_state"):
        assert sum(one.terms[cause] for one in cards) == alone.terms[cause]


@pytest.mark.parametrize(("method", "num_cards"), [("full", 3), ("qlora", 4)])
def test_a_card_holds_the_same_where_all_layers_of_the_others_are_walked(method: str, num_cards: int) -> None:
    spec = cell(model="llama-3.1-8b", method=method, gradient_checkpointing=method == "qlora")
    arch, found = architecture(spec.architecture), cards_of(spec, num_cards)
    setup = setup_of(spec, arch, parameters.tensors(spec, arch))
    for number, card in enumerate(found.cards):
        whole = walk_layers(setup, range(arch.num_layers), CardTape(setup.sizes.covers, found.map, number))
        tops = [
            [
                max((sum(terms.values()) for (its_phase, _), terms in places.items() if its_phase == phase), default=0)
                for phase in ("forward", "backward")
            ]
            for places in (walk.highest(2, 512) for walk in (whole, card.walk))
        ]
        assert tops[0] == tops[1]


def test_the_fullest_card_is_the_predictions() -> None:
    found = ask(
        model="llama-3.1-8b",
        method="qlora",
        batch_size=1,
        seq_len=2048,
        gradient_checkpointing=True,
        num_gpus=2,
        sharding="device-map",
        gpu="RTX-4090",
    )
    assert found.cards is not None
    assert found.peak_allocated_bytes.value == max(one.peak_allocated_bytes for one in found.cards)
    assert [one.parts for one in found.cards] == ["embedding, layers 0 to 13", "layers 14 to 31, last norm, head"]
    assert [one.num_layers for one in found.cards] == [14, 18]
    judged = verdict(found, find_gpu("RTX-4090"))
    assert judged.verdict == "fits"
    assert "NCCL" not in judged.reason


def test_the_fewest_cards() -> None:
    words = {
        "model": "llama-3.1-70b",
        "method": "qlora",
        "kbit_prep": "none",
        "batch_size": 1,
        "seq_len": 512,
        "gradient_checkpointing": True,
        "sharding": "device-map",
    }
    found = min_gpus(gpu="RTX-4090", **words)
    assert (found.num_gpus, found.tight_num_gpus, found.verdict.verdict) == (3, 2, "fits")
    assert min_gpus(gpu="H200", **words).num_gpus == 1
    large = {"model": "mistral-7b-v0.3", "num_layers": 3, "batch_size": 64, "seq_len": 32767}
    none = min_gpus(gpu="RTX-4090", **words | large)
    assert (none.num_gpus, none.verdict.verdict) == (None, "does not fit")


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch", "sgd"])
def test_a_card_on_which_nothing_is_trained(optim: str) -> None:
    """The last of three has the head alone, and adapters are in layers."""
    found = ask(
        model="llama-3.1-8b",
        method="qlora",
        lora_targets="q_v",
        dtype="fp32",
        batch_size=1,
        seq_len=64,
        num_gpus=3,
        sharding="device-map",
        optim=optim,
    )
    assert found.cards is not None
    assert [one.parts for one in found.cards][2] == "head"


def test_where_no_machine_is_enough_the_verdict_is_of_the_most_cards() -> None:
    words = {"model": "llama-3.1-70b", "method": "full", "batch_size": 1, "seq_len": 512}
    none = min_gpus(gpu="RTX-4090", sharding="device-map", **words)
    most = ask(**words, sharding="device-map", num_gpus=16, gpu="RTX-4090")
    assert (none.num_gpus, none.verdict.needed_bytes) == (None, most.peak_allocated_bytes)


def test_what_cannot_be_asked() -> None:
    words = {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 512, "sharding": "device-map"}
    with pytest.raises(SpecError, match="num_gpus 64 under device-map: the model has 32 layers"):
        ask(**words, num_gpus=64)
    with pytest.raises(SpecError, match="offload params under device-map"):
        ask(**words, num_gpus=2, offload="params")
    with pytest.raises(SpecError, match="cp_size 2 under device-map: accelerate splits sequences beside FSDP2 alone"):
        ask(**words, num_gpus=2, cp_size=2)
    with pytest.raises(UnsupportedArchitecture, match="no arithmetic for sharding device-map of a gpt_neox, but of"):
        ask(**words | {"model": "pythia-1b"}, num_gpus=2)
    with pytest.raises(UnsupportedArchitecture, match="no arithmetic for sharding device-map with attn eager"):
        ask(**words, num_gpus=2, attn="eager")
    with pytest.raises(SpecError, match="puts the whole of this model on one card"):  # as transformers does, emulated
        placed(2, model="qwen3-0.6b", num_layers=24, method="qlora")
