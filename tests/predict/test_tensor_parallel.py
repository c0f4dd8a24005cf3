"""Layers that are divided among ranks: recorded, never counted by arithmetic; what the libraries do not divide."""

from pathlib import Path
from typing import Any

import pytest
from predictions import some_prediction

from vramprobe.api import plan
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.predict import recorded
from vramprobe.predict.prediction import Interval
from vramprobe.predict.questions import predict
from vramprobe.predict.what_fits import largest_model, min_gpus
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

WHOLE_LLAMA = {"model": "llama-3.1-8b", "batch_size": 1, "seq_len": 512, "sharding": "tp"}
Q_V = {"method": "lora", "lora_targets": "q_v"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CellSpec]:
    """The cells that are recorded, in place of recording them: each has the memory of the whole model."""
    found: list[CellSpec] = []

    def predicted(one: CellSpec, **_: Any) -> Any:
        found.append(one)
        size = 30 * GIB
        reserved = Interval(value=size, low=size, high=round(1.01 * size))
        return some_prediction(num_gpus=one.num_gpus, reserved_bytes=reserved)

    monkeypatch.setattr(recorded, "predict", predicted)
    return found


def test_a_rank_is_recorded(asked: list[CellSpec]) -> None:
    found = predict(**WHOLE_LLAMA, method="full", num_gpus=8, gpu="H100-SXM")
    assert (found.engine, found.num_gpus, [one.sharding for one in asked]) == ("recipe", 8, ["tp"])


def test_the_fewest_are_numbers_that_divide_the_heads(asked: list[CellSpec]) -> None:
    found = min_gpus(gpu="RTX-4090", **WHOLE_LLAMA, method="full")
    assert found.num_gpus is None
    assert max(one.num_gpus for one in asked) == found.verdict_num_gpus == 8  # as many as it has key heads


def test_the_largest_model_is_recorded_where_that_is_asked_for() -> None:
    words = {"batch_size": 1, "seq_len": 512, "sharding": "tp", "num_gpus": 8, "gradient_checkpointing": True}
    with pytest.raises(VramprobeError, match="could be judged; --engine recipe records those that may be the answer"):
        largest_model(gpu="L4", **words, **Q_V)
    with pytest.raises(SpecError, match="quant nf4 under tp"):
        largest_model(gpu="L4", **words, method="qlora")


def test_a_plan_records_divided_layers(tmp_path: Path, asked: list[CellSpec]) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "name: parts\ncells:\n  - {model: qwen3-0.6b, method: full, batch_size: 1, seq_len: 512, sharding: tp,"
        " num_gpus: [4, 8], device: cuda}\n"
    )
    rows = plan(sweep, gpu="H100-SXM", out=tmp_path / "out", records=True).rows
    assert {(row.spec.num_gpus, row.verdict) for row in rows} == {(8, "fits"), (4, "fits")}
    assert sorted(one.num_gpus for one in asked) == [4, 8]


def test_what_a_cell_refuses_is_not_predicted() -> None:
    with pytest.raises(SpecError, match="num_gpus 3 under tp: num_attention_heads 32 and num_key_value_heads 8"):
        predict(**WHOLE_LLAMA, method="full", num_gpus=3)
