"""What a fit learns beside: predictions without a fit, by arithmetic or from a recipe at hand, never by recording."""

from __future__ import annotations

import pytest
from factories import make_environment, make_record, specs

from vramprobe.catalog import find_gpu
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import Gaps, Ratio
from vramprobe.model.fit import Expected, fit
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.expected import expected
from vramprobe.predict.predict import predict
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms.replayed import replayed

A100 = make_environment(device_name="NVIDIA A100-SXM4-80GB")


def internlm(**sizes: int) -> CellSpec:
    """A cell whose family has no arithmetic; its recipes ship for one row and for 2 to 8, of up to 8,192 tokens."""
    return resolve(model="internlm3-8b", method="lora", device="cuda", gradient_checkpointing=True, **sizes)


def on_a100(spec: CellSpec) -> RunRecord:
    return make_record(spec, instrument="cuda", environment=A100)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recipe that this machine recorded, and none that it could record."""
    monkeypatch.setattr(at_hand, "kept_recipe", lambda *given: None)
    monkeypatch.setattr(recorded, "find_recipe", lambda *given, **more: pytest.fail("recorded"))


def test_arithmetic_goes_first() -> None:
    on_cpu, on_cuda = specs()[0], specs("cuda")[0]
    assert expected(make_record(on_cpu))[:2] == (predict(on_cpu).peak_allocated_bytes.value, None)
    assert expected(on_a100(on_cuda))[:2] == replayed(on_cuda, find_gpu("A100-80GB-SXM"))[:2]


def test_else_a_recipe_at_hand_that_was_recorded_at_such_a_shape() -> None:
    spec = internlm(batch_size=3, seq_len=2048)
    replay = replay_at_hand(spec)
    assert replay is not None
    assert expected(on_a100(spec))[:2] == (replay.peak.allocated_bytes, replay.peak.reserved_bytes)


@pytest.mark.parametrize("sizes", [{"batch_size": 3, "seq_len": 32768}, {"batch_size": 1, "seq_len": 32768}])
def test_without_one_the_record_is_left_out_and_nothing_is_recorded(sizes: dict[str, int]) -> None:
    with pytest.raises(VramprobeError, match=r"internlm3.*and no recipe is at hand: vramprobe predict --engine recipe"):
        expected(on_a100(internlm(**sizes)))
    with pytest.raises(VramprobeError, match="internlm3"):
        expected(make_record(internlm(**sizes).model_copy(update={"device": "cpu"})))


def test_a_fit_of_measured_records_corrects_a_recording_and_one_of_emulated_records_does_not() -> None:
    spec, gpu = internlm(batch_size=3, seq_len=2048), find_gpu("A100-80GB-SXM")
    replay = replay_at_hand(spec, gpu=gpu)
    assert replay is not None
    cells = [spec.model_copy(update={"seed": seed}) for seed in range(4)]
    model = fit(map(on_a100, cells), lambda record: Expected(10**6, 10**6, replay.num_params or 1))
    twice = Ratio(value=2.0, low=1.9, high=2.2)
    gaps = Gaps(num_records=4, allocated=twice, reserved=Ratio(value=3.0, low=2.9, high=3.1))
    measured = recorded._predicted(replay, spec, model.model_copy(update={"overall": gaps}), gpu)
    peak = replay.peak
    assert (measured.peak_allocated_bytes.value, measured.peak_allocated_bytes.high) == (
        2 * peak.allocated_bytes,
        round(2.2 * peak.allocated_bytes),
    )
    assert peak.reserved_bytes is not None
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes.value == 3 * peak.reserved_bytes
    emulated = model.model_copy(update={"overall": gaps, "instrument": "emulated"})
    assert recorded._predicted(replay, spec, emulated, gpu) == recorded._predicted(replay, spec, None, gpu)
