"""One fit of several emulated cards: workspaces tell them apart, and it is what ships for every card of NVIDIA's."""

from __future__ import annotations

from typing import Any

import pytest
from factories import TRUE, make_environment, specs, synthetic

from vramprobe.catalog import find_gpu
from vramprobe.errors import IncomparableRecords
from vramprobe.model import memory_model
from vramprobe.model.fit import fit
from vramprobe.model.memory_model import Spread, shipped_fit
from vramprobe.predict.predict import predict
from vramprobe.records.record import RunRecord
from vramprobe.terms.replayed import replayed

CARDS = {"H100-SXM": "NVIDIA H100 80GB HBM3", "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB"}
MODELS = ("pythia-70m", "smollm2-135m", "qwen2.5-0.5b")


def of_card(name: str, instrument: str = "emulated", **more: Any) -> list[RunRecord]:
    machine = make_environment(device_name=CARDS[name], emulator="abc" if instrument == "emulated" else None)
    return [synthetic(spec, TRUE, instrument=instrument, environment=machine, **more) for spec in specs("cuda", MODELS)]


@pytest.fixture(scope="module")
def both() -> memory_model.MemoryModel:
    return fit([*of_card("H100-SXM"), *of_card("A100-80GB-SXM")])


def test_the_cards_differ_by_their_workspaces_alone(both: memory_model.MemoryModel) -> None:
    assert both.cards == ["A100-80GB-SXM", "H100-SXM"]
    assert both.device_name == "2 cards"
    assert both.device_over_reserved_bytes is None
    for name in CARDS:
        for record in of_card(name)[:8]:
            found = predict(record.spec, both, gpu=find_gpu(name))
            assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=1e-3)


def test_what_was_measured_on_two_cards_is_not_fitted_together() -> None:
    with pytest.raises(IncomparableRecords, match="device_name"):
        fit([*of_card("H100-SXM", "cuda"), *of_card("A100-80GB-SXM", "cuda")])


def test_it_ships_for_cards_that_have_none_of_their_own(
    both: memory_model.MemoryModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fit(of_card("H100-SXM"))
    monkeypatch.setattr(memory_model, "shipped_fits", lambda: iter([own, both]))
    assert shipped_fit("cuda", find_gpu("H100-SXM")) is own
    assert shipped_fit("cuda", find_gpu("T4")) is both
    assert shipped_fit("cuda") is both
    assert shipped_fit("cuda", find_gpu("T4"), of_one_card=True) is None
    assert shipped_fit("cuda", find_gpu("MI300X")) is None


def test_both_tiers_are_replayed_where_it_is_asked_for(both: memory_model.MemoryModel) -> None:
    ratio = Spread(value=1.01, low=0.99, high=1.05)
    names = ("allocated_over_replayed", "reserved_over_replayed", "reserved_over_allocated")
    within = both.interval.model_copy(update={"growth_per_doubling": 0.0})
    model = both.model_copy(update=dict.fromkeys(names, ratio) | {"interval": within})
    spec, gpu = specs("cuda", MODELS)[0], find_gpu("H100-SXM")
    prediction, played = predict(spec, model, gpu=gpu, replays=True), replayed(spec, gpu)
    for found, held in zip((prediction.peak_allocated_bytes, prediction.reserved_bytes), played[:2], strict=True):
        assert (found.low, found.value, found.high) == (round(0.99 * held), round(1.01 * held), round(1.05 * held))
    assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
    plain = predict(spec, model, gpu=gpu)
    assert plain.reserved_bytes is not None
    assert plain.reserved_bytes.value == round(1.01 * plain.peak_allocated_bytes.value)
