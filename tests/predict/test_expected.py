"""Predictions by recipes beside which a fit learns, recorded where they are missing and the caller says so."""

import pytest
from factories import make_environment, make_record, make_spec

from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.expected import expected, once, recording
from vramprobe.predict.prediction import Prediction
from vramprobe.records.record import RunRecord
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec


def smollm(**sizes: int) -> CellSpec:
    """A cell whose recipes ship for one row and for 2 to 8, of up to 8,192 tokens."""
    return resolve(model="smollm2-135m", method="lora", device="cuda", gradient_checkpointing=True, **sizes)


def on_a_gpu(spec: CellSpec) -> RunRecord:
    return make_record(spec, instrument="cuda", environment=make_environment(device_name="NVIDIA H100 80GB HBM3"))


SHIPPED, OUTSIDE = smollm(batch_size=3, seq_len=2048), smollm(batch_size=3, seq_len=32768)


pytestmark = pytest.mark.usefixtures("shipped_alone")


def test_a_recipe_at_hand_answers_for_the_record_s_own_card() -> None:
    card = at_hand.catalog.find_gpu("H100-SXM")
    replay, elsewhere = replay_at_hand(SHIPPED, gpu=card), replay_at_hand(SHIPPED)
    found = expected(on_a_gpu(SHIPPED))
    assert (found.engine, found.fit) == ("recipe", None)
    assert found.peak_allocated_bytes.value == replay.peak.allocated_bytes != elsewhere.peak.allocated_bytes
    assert found.reserved_bytes.value == replay.peak.reserved_bytes


def test_without_one_it_says_so_and_records_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    told, asked = [], []

    def record(spec: CellSpec, *, gpu: Gpu, say: object) -> Prediction:
        asked.append((spec, gpu.short_name))
        return expected(on_a_gpu(SHIPPED))

    monkeypatch.setattr(recorded, "predict", record)
    with pytest.raises(VramprobeError, match="no recipe of the cell is at hand: vramprobe predict"):
        expected(on_a_gpu(OUTSIDE))
    expect = recording(told.append)
    assert expect(on_a_gpu(SHIPPED)) == expect(on_a_gpu(OUTSIDE))
    assert (asked, told) == ([(OUTSIDE, "H100-SXM")], [f"recording {OUTSIDE.cell_id}"])


def test_the_cpu_is_measured_and_not_predicted() -> None:
    for expect in (expected, recording()):
        with pytest.raises(VramprobeError, match=r"device cpu was given; .*vramprobe measure --device cpu"):
            expect(make_record(make_spec()))


def test_an_attempt_is_asked_once() -> None:
    asked = []

    def counted(record: RunRecord) -> Prediction:
        asked.append(record.cell_id)
        return expected(record)

    records = [on_a_gpu(SHIPPED), on_a_gpu(OUTSIDE)]
    expect = once(counted)
    for _ in range(2):
        assert expect(records[0]) == expected(records[0])
        with pytest.raises(VramprobeError, match="no recipe"):
            expect(records[1])
    assert asked == [record.cell_id for record in records]
