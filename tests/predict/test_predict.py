"""Predictions: they add up, say what they rest on, and widen outside of what was fitted."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from factories import TRUE, make_environment, make_spec, specs, synthetic

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.catalog.libraries import DECIDING, in_words, pinned_libraries
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import CardFit, Ratio
from vramprobe.predict.expected import fit_records
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import ALONE, Interval, Prediction
from vramprobe.predict.uncertainty import interval_around
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, usable_bytes, verdict
from vramprobe.spec import resolve
from vramprobe.terms.replayed import replayed
from vramprobe.units import GIB


@dataclass(frozen=True)
class Card:
    name: str
    total_bytes: int | None
    shares_host_memory: bool = False
    cuda_total_bytes: int | None = None
    context_bytes: int | None = None
    context_basis: str = ""


@pytest.fixture(scope="module")
def model() -> CardFit:
    return fit_records([synthetic(spec, TRUE) for spec in specs()])


def test_terms_and_constant_add_up_to_the_value(model: CardFit) -> None:
    for given in (None, model):
        prediction = predict(specs()[0], given)
        assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
        assert all(isinstance(size, int) for size in prediction.terms.values())


def test_arithmetic_alone_says_so_and_has_an_interval() -> None:
    prediction = predict(make_spec())
    assert prediction.fit is None
    assert prediction.warnings == ["arithmetic alone: no fit was given"]
    peak = prediction.peak_allocated_bytes
    assert peak.low < peak.value < peak.high


def test_a_held_out_model_is_predicted_from_the_others(model: CardFit) -> None:
    spec = resolve(model="smollm2-360m", method="lora", device="cpu", batch_size=2, seq_len=512)
    truth = synthetic(spec, TRUE).peak.allocated_bytes
    prediction = predict(spec, model)
    assert prediction.peak_allocated_bytes.value == pytest.approx(truth, rel=0.01)
    assert prediction.peak_allocated_bytes.low <= truth <= prediction.peak_allocated_bytes.high
    assert prediction.fit.data_fingerprint == model.data_fingerprint
    assert any("362M parameters (fitted: 70.4M to 135M)" in warning for warning in prediction.warnings)


def test_inside_of_what_was_fitted_there_is_no_warning_and_the_interval_is_the_fit_s(model: CardFit) -> None:
    spec = specs()[0].model_copy(update={"seq_len": 256})
    prediction, alone = predict(spec, model), predict(spec).peak_allocated_bytes.value
    assert prediction.warnings == []
    ratio = model.overall.allocated_of(spec.method)
    ends = (round(alone * end) for end in (ratio.low, ratio.value, ratio.high))
    peak = prediction.peak_allocated_bytes
    assert (peak.low, peak.value, peak.high) == tuple(ends)
    assert prediction.constant_bytes == peak.value - alone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 2049}, "4,098 tokens (fitted: up to 4,096)"),
        ({"optim": "adafactor"}, "optim adafactor"),
        ({"model": "llama-2-7b"}, "6.74B parameters"),
    ],
)
def test_outside_one_warning_says_so_and_the_interval_is_wider(
    options: dict[str, Any], words: str, model: CardFit
) -> None:
    spread = Ratio(value=1.0, low=0.97, high=1.002)
    spec = resolve(
        **{"model": "pythia-70m", "method": "full", "device": "cpu", "batch_size": 2, "seq_len": 64} | options
    )
    gaps = model.overall.model_copy(update={"allocated": spread, "by_method": {}})
    choices = model.choices | {"model_type": ["gpt_neox", "llama"]}
    prediction = predict(spec, model.model_copy(update={"overall": gaps, "by_card": {}, "choices": choices}))
    warning = prediction.warnings[0]
    assert "outside" not in "".join(prediction.warnings[1:])
    assert warning.startswith("outside of what was fitted: ")
    assert words in warning
    assert warning.endswith("; intervals are 2 times as wide, and 1 % to each side at least")
    peak = prediction.peak_allocated_bytes
    assert (peak.low, peak.high) == (round(0.94 * peak.value), round(1.01 * peak.value))


def test_a_fit_from_another_device_is_not_used(model: CardFit) -> None:
    spec = resolve(model="pythia-70m", method="full", device="cuda", batch_size=2, seq_len=128)
    found = predict(spec, model)
    assert found.warnings[:2] == [
        "the fit is of cpu (Test CPU @ 2.00GHz), and the cell for cuda: it is not used",
        ALONE,
    ]
    assert found.peak_allocated_bytes == predict(spec).peak_allocated_bytes


def test_unsupported_architecture_is_an_error() -> None:
    with pytest.raises(UnsupportedArchitecture, match="t5"):
        predict(resolve(model="t5-small", method="full", device="cpu", batch_size=1, seq_len=8))


@pytest.fixture(scope="module")
def on_cuda() -> CardFit:
    """A fit of an H100, measured."""
    machine = make_environment(device_name="NVIDIA H100 80GB HBM3")
    peak = {"reserved_bytes": 3 * GIB, "device_bytes": 3 * GIB + 600_000_000}
    cells = specs("cuda", ("pythia-70m",))[:4]
    found = fit_records([synthetic(one, instrument="cuda", environment=machine, peak=peak) for one in cells])
    ratio, share = Ratio(value=1.01, low=0.99, high=1.05), Ratio(value=1.1, low=1.0, high=1.2)
    update = {"allocated": ratio, "reserved": ratio, "reserved_over_allocated": share, "by_method": {}}
    return found.model_copy(update={"overall": found.overall.model_copy(update=update)})


def test_both_tiers_are_the_replays_times_the_fit(on_cuda: CardFit) -> None:
    spec, gpu = specs("cuda")[0], find_gpu("H100-SXM")
    prediction, played = predict(spec, on_cuda, gpu=gpu, replays=True), replayed(spec, gpu)
    for found, held in zip((prediction.peak_allocated_bytes, prediction.reserved_bytes), played[:2], strict=True):
        assert (found.low, found.value, found.high) == (round(0.99 * held), round(1.01 * held), round(1.05 * held))
    assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
    assert prediction.device_bytes.value == prediction.reserved_bytes.value + 600_000_000
    assert prediction.warnings == []


def test_without_a_replay_reserved_memory_is_a_share(on_cuda: CardFit) -> None:
    """Of the arithmetic, which the ratios were not learnt from: its own interval stays."""
    spec = specs("cuda")[0]
    found, alone = predict(spec, on_cuda, gpu=find_gpu("H100-SXM")), predict(spec, gpu=find_gpu("H100-SXM"))
    peak = found.peak_allocated_bytes
    assert peak == alone.peak_allocated_bytes
    assert found.reserved_bytes == Interval(value=round(peak.value * 1.1), low=peak.low, high=round(peak.high * 1.2))


def test_a_fit_is_trusted_to_half_a_percent_at_best(on_cuda: CardFit) -> None:
    exact = Ratio(value=1.0, low=1.0, high=1.0)
    gaps = on_cuda.overall.model_copy(update={"allocated": exact})
    found = predict(
        specs("cuda")[0], on_cuda.model_copy(update={"overall": gaps}), gpu=find_gpu("H100-SXM"), replays=True
    )
    peak = found.peak_allocated_bytes
    assert (peak.low, peak.high) == (round(0.995 * peak.value), round(1.005 * peak.value))


def test_another_card_than_the_measured_one_is_outside(on_cuda: CardFit) -> None:
    found = predict(specs("cuda")[0], on_cuda, gpu=find_gpu("T4"), replays=True)
    assert found.warnings[0].startswith("outside of what was fitted: card T4;")


@pytest.mark.parametrize("with_fit", [False, True])
@pytest.mark.parametrize("batch_size", [10**23, 10**155, 10**400])
def test_absurd_sizes_are_arithmetic_or_a_clear_error(with_fit: bool, batch_size: int, model: CardFit) -> None:
    spec = resolve(model="pythia-70m", method="full", device="cpu", batch_size=1, seq_len=128)
    absurd = spec.model_copy(update={"batch_size": batch_size})
    if batch_size > 10**200:
        with pytest.raises(VramprobeError, match=r"more than 10\^300 bytes"):
            predict(absurd, model if with_fit else None)
        return
    prediction = predict(absurd, model if with_fit else None)
    assert prediction.peak_allocated_bytes.value > 10**6 * batch_size


def with_peak(value: int, high: int) -> Prediction:
    return predict(make_spec()).model_copy(update={"peak_allocated_bytes": Interval(value=value, low=value, high=high)})


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


def test_a_deep_model_takes_milliseconds() -> None:
    spec = resolve(model="llama-3.1-405b", method="qlora", device="cuda", batch_size=1, seq_len=4096)
    predict(spec)
    began = time.perf_counter()
    predict(spec)
    assert time.perf_counter() - began < 0.2


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
    found = predict(make_spec(device="cuda"))
    allocated = interval_around(20 * GIB, (0.95, 1.06))
    reserved = {name: interval_around(size, (0.95, 1.08)) for name, size in tiers.items()}
    judged = verdict(found.model_copy(update={"peak_allocated_bytes": allocated, **reserved}), find_gpu("RTX-4090"))
    assert judged.verdict == answer
    assert re.search(said, judged.reason)


# -- the fit that ships ------------------------------------------------------------------------------------------------


def test_without_a_fit_the_one_that_ships_for_the_device_predicts_and_says_so() -> None:
    words = {"model": "smollm2-360m", "method": "lora", "batch_size": 1, "seq_len": 64}
    shipped = api.predict(**words, device="cpu")
    assert shipped.fit.instrument == "cpu"
    assert shipped.fit.num_records > 40
    assert api.predict(**words, device="cpu", fit="none").fit is None
    on_a_gpu = api.predict(**words)
    assert on_a_gpu.fit.instrument == "emulated"  # no GPU has been measured
    assert any("fitted to emulated runs, which reproduce published A100 runs" in note for note in on_a_gpu.warnings)
    assert api.predict(**words, fit="none").fit is None
    assert api.predict(**words, gpu="MI300X").fit is None


def test_beyond_the_fit_that_ships_it_answers_and_says_so() -> None:
    words = {"model": "llama-3.1-70b", "method": "lora", "batch_size": 1, "seq_len": 64, "device": "cpu"}
    found = api.predict(**words)
    assert found.fit is not None
    assert found.warnings[0].startswith("outside of what was fitted: ")
    assert "70.6B parameters" in found.warnings[0]


def test_a_prediction_says_which_libraries_it_holds_for() -> None:
    told = predict(specs()[0]).libraries
    assert told == dict(pinned_libraries())
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={told[name]}" for name in DECIDING} <= set(constraints)
    assert in_words({"transformers": "4.48.0", "torch": None}) == "transformers 4.48.0"
