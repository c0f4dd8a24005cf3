"""Predictions by a fit: what it adds to a recording, and that intervals widen outside of what was fitted."""

from typing import Any

import pytest
from factories import TRUE, make_environment, specs, synthetic

from vramprobe.catalog import find_gpu
from vramprobe.model.card_fit import CardFit, Ratio
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.expected import fit_records, predict_at_hand
from vramprobe.resolve import resolve
from vramprobe.units import GIB

H100 = find_gpu("H100-SXM")


@pytest.fixture(scope="module")
def model() -> CardFit:
    """Fit records that seem measured on an H100."""
    return fit_records([synthetic(spec, TRUE) for spec in specs()])


def test_a_held_out_model_is_predicted_from_the_others(model: CardFit) -> None:
    spec = resolve(model="llama-3.2-1b", method="lora", device="cuda", batch_size=2, seq_len=2048)
    truth = synthetic(spec, TRUE).peak.allocated_bytes
    prediction = predict_at_hand(spec, H100, model)
    assert prediction.peak_allocated_bytes.value == pytest.approx(truth, rel=1e-6)
    assert prediction.peak_allocated_bytes.low <= truth <= prediction.peak_allocated_bytes.high
    assert prediction.fit.data_fingerprint == model.data_fingerprint
    assert any("1.24B parameters (fitted: 135M to 494M)" in warning for warning in prediction.warnings)


def test_inside_of_what_was_fitted_there_is_no_warning_and_the_interval_is_the_fit_s(model: CardFit) -> None:
    spec, spread = specs()[0].model_copy(update={"seq_len": 3000}), Ratio(value=1.06, low=1.0, high=1.09)
    gaps = model.gaps.model_copy(update={"allocated": spread, "by_method": {}})
    prediction = predict_at_hand(spec, H100, model.model_copy(update={"gaps": gaps}))
    assert not [note for note in prediction.warnings if "fitted" in note]
    bare = predict_at_hand(spec, H100)
    alone, peak = bare.peak_allocated_bytes.value, prediction.peak_allocated_bytes
    assert (peak.low, peak.value, peak.high) == (alone, round(1.06 * alone), round(1.09 * alone))
    assert prediction.constant_bytes == bare.constant_bytes + peak.value - alone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 4097}, "8,194 tokens (fitted: up to 8,192)"),
        ({"method": "qlora"}, "method qlora"),
        ({"model": "llama-2-7b"}, "6.74B parameters"),
    ],
)
def test_outside_one_warning_says_so_and_the_interval_is_wider(
    options: dict[str, Any], words: str, model: CardFit
) -> None:
    spread = Ratio(value=1.0, low=0.97, high=1.002)
    cell = {"model": "smollm2-135m", "method": "full", "device": "cuda", "batch_size": 2, "seq_len": 2048}
    spec = resolve(**cell | options)
    gaps = model.gaps.model_copy(update={"allocated": spread, "by_method": {}})
    choices = model.choices | {"method": ["full", "lora"], "quant": ["none", "nf4"]}
    fit = model.model_copy(update={"gaps": gaps, "choices": choices})
    prediction = predict_at_hand(spec, H100, fit)
    warning = prediction.warnings[0]
    assert "outside" not in "".join(prediction.warnings[1:])
    assert warning.startswith("outside of what was fitted: ")
    assert words in warning
    assert warning.endswith("; intervals are 2 times as wide, and 1 % to each side at least")
    peak = prediction.peak_allocated_bytes
    assert (peak.low, peak.high) == (round(0.94 * peak.value), round(1.01 * peak.value))


@pytest.fixture(scope="module")
def on_cuda() -> CardFit:
    """A fit of an H100, measured."""
    machine = make_environment(device_name="NVIDIA H100 80GB HBM3")
    peak = {"reserved_bytes": 3 * GIB, "device_bytes": 3 * GIB + 600_000_000}
    found = fit_records([synthetic(one, environment=machine, peak=peak) for one in specs()[:4]])
    ratio = Ratio(value=1.01, low=0.99, high=1.05)
    update = {"allocated": ratio, "reserved": ratio, "by_method": {}}
    return found.model_copy(update={"gaps": found.gaps.model_copy(update=update)})


def test_both_tiers_are_the_replays_times_the_fit(on_cuda: CardFit) -> None:
    spec = specs()[0]
    prediction, peak = predict_at_hand(spec, H100, on_cuda), replay_at_hand(spec, gpu=H100).peak
    pairs = (prediction.peak_allocated_bytes, peak.allocated_bytes), (prediction.reserved_bytes, peak.reserved_bytes)
    for found, held in pairs:
        assert (found.low, found.value, found.high) == (round(0.99 * held), round(1.01 * held), round(1.05 * held))
    assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
    assert prediction.device_bytes.value == prediction.reserved_bytes.value + 600_000_000


def test_a_fit_is_trusted_to_half_a_percent_at_best(on_cuda: CardFit) -> None:
    exact = Ratio(value=1.0, low=1.0, high=1.0)
    gaps = on_cuda.gaps.model_copy(update={"allocated": exact})
    found = predict_at_hand(specs()[0], H100, on_cuda.model_copy(update={"gaps": gaps}))
    peak = found.peak_allocated_bytes
    assert (peak.low, peak.high) == (round(0.995 * peak.value), round(1.005 * peak.value))


def test_another_card_than_the_measured_one_is_outside(on_cuda: CardFit) -> None:
    found = predict_at_hand(specs()[0], find_gpu("L4"), on_cuda)
    assert found.warnings[0].startswith("outside of what was fitted: card L4;")
