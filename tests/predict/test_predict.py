"""Predictions: they add up, say what they rest on and which libraries they hold for; verdicts say what they compare."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from predictions import some_prediction

from vramprobe import api
from vramprobe.catalog import find_gpu
from vramprobe.catalog.libraries import DECIDING, in_words, pinned_libraries
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict import at_hand
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.uncertainty import interval_around
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, usable_bytes, verdict
from vramprobe.units import GIB

#: A cell whose recipe ships.
CELL = {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 1024}


@dataclass(frozen=True)
class Card:
    name: str
    total_bytes: int | None
    shares_host_memory: bool = False
    cuda_total_bytes: int | None = None
    context_bytes: int | None = None
    context_basis: str = ""


def test_terms_and_constant_add_up_to_the_value() -> None:
    prediction = api.predict(**CELL)
    assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
    assert all(isinstance(size, int) for size in prediction.terms.values())


@pytest.mark.usefixtures("shipped_alone")
def test_without_recording_the_nearest_that_ships_answers_and_says_so() -> None:
    exact, near = (api.predict(**CELL | {"seq_len": length}, records=False) for length in (1024, 64))
    assert not any("near, not exact" in note for note in exact.warnings)
    assert "2 x 64 tokens lie outside: near, not exact" in near.warnings
    with pytest.raises(at_hand.NotAtHand, match=r"no recipe of .* is at hand: vramprobe predict records one"):
        api.predict(**CELL, padding=True, records=False)


def test_another_makers_card_is_answered_as_an_nvidia_one_and_said() -> None:
    amd, nvidia = (api.predict(**CELL, gpu=gpu) for gpu in ("MI300X", "A100-80GB-SXM"))
    assert amd.peak_allocated_bytes == nvidia.peak_allocated_bytes
    assert [one for one in amd.warnings if one not in nvidia.warnings] == [
        "recorded as on A100-80GB-SXM: what the kernels of AMD ask for beside it was not checked"
    ]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_is_measured_and_not_predicted(device: str) -> None:
    with pytest.raises(SpecError, match=f"device: '{device}' given; .* vramprobe measure --device cpu"):
        api.predict(**CELL, device=device)
    with pytest.raises(SpecError, match="vramprobe measure --device cpu"):
        api.max_batch_size(gpu="L4", model="llama-3.2-1b", method="lora", seq_len=1024, device=device)


def with_peak(value: int, high: int) -> Prediction:
    return some_prediction(peak_allocated_bytes=Interval(value=value, low=value, high=high), reserved_bytes=None)


@pytest.mark.parametrize(
    ("value_gib", "high_gib", "answer"),
    [(10, 11, "fits"), (21, 22, "tight"), (22, 24, "tight"), (23.5, 24, "does not fit"), (30, 31, "does not fit")],
)
def test_verdicts_on_a_24_gib_card(value_gib: float, high_gib: float, answer: str) -> None:
    found = verdict(with_peak(int(value_gib * GIB), int(high_gib * GIB)), Card("card", 24 * GIB))
    assert found.verdict == answer
    assert found.usable_bytes == 24 * GIB - CONTEXT_ALLOWANCE_BYTES
    assert "set aside for the CUDA context" in found.reason


def test_the_driver_s_part_and_the_most_of_a_context_are_set_aside() -> None:
    card = Card("card", 24 * GIB, False, 23 * GIB, 400 * 2**20, "published")
    found = verdict(with_peak(10 * GIB, 11 * GIB), card)
    assert found.usable_bytes == 23 * GIB - 400 * 2**20
    assert "1.39 GiB set aside for the driver and the CUDA context (published): 10.00 GiB" in found.reason
    limited = replace(card, total_bytes=8 * GIB)  # as --limit-vram
    assert usable_bytes(limited, device_is_known=False) == 8 * GIB - 400 * 2**20


def test_a_known_device_tier_is_compared_with_the_whole_card() -> None:
    device = Interval(value=20 * GIB, low=19 * GIB, high=21 * GIB)
    found = verdict(with_peak(1, 1).model_copy(update={"device_bytes": device}), Card("card", 24 * GIB))
    assert (found.verdict, found.usable_bytes, found.needed_bytes) == ("fits", 24 * GIB, device)


def test_a_card_of_unknown_size_is_an_error() -> None:
    with pytest.raises(VramprobeError, match="memory of card is not known"):
        verdict(with_peak(1, 1), Card("card", None))


@pytest.mark.parametrize(
    ("tiers", "answer", "said"),
    [
        ({}, "fits", r"predicted allocated memory, .*: 20.00 GiB \(up to 21.20 GiB\) of 22.90 GiB"),
        ({"reserved_bytes": 20 * GIB}, "fits", r"predicted reserved memory, .*: 20.00 GiB \(up to 21.60 GiB\) of"),
        ({"reserved_bytes": 22 * GIB}, "tight", "predicted reserved memory, .*: 22.00 GiB"),
        ({"reserved_bytes": 23 * GIB}, "does not fit", "predicted reserved memory, .*: 23.00 GiB"),
    ],
)
def test_reserved_memory_is_judged_where_it_is_known(tiers: dict[str, int], answer: str, said: str) -> None:
    found = some_prediction(reserved_bytes=None)
    allocated = interval_around(20 * GIB, (0.95, 1.06))
    reserved = {name: interval_around(size, (0.95, 1.08)) for name, size in tiers.items()}
    judged = verdict(found.model_copy(update={"peak_allocated_bytes": allocated, **reserved}), find_gpu("RTX-4090"))
    assert judged.verdict == answer
    assert re.search(said, judged.reason)


def test_a_prediction_says_which_libraries_it_holds_for() -> None:
    told = api.predict(**CELL).libraries
    assert told == {name: release for name, release in pinned_libraries().items() if name in told}
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={told[name]}" for name in DECIDING} <= set(constraints)
    assert in_words({"transformers": "4.48.0", "torch": None}) == "transformers 4.48.0"
