"""A model without arithmetic: which card, by a few recordings of each method and the launches that they counted."""

from __future__ import annotations

from typing import Any

import pytest

from vramprobe import api
from vramprobe.catalog import find_gpu
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.recipe.recorder import CannotRecord
from vramprobe.recommend import recorded
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of
from vramprobe.units import GIB

WORDS = {"model": "glm-4-9b", "seq_len": 2048, "tokens": "10M", "global_batch": 16}
NEEDED_BYTES = {"full": 150 * GIB, "lora": 30 * GIB, "qlora": 16 * GIB}


def launches(num_micro_steps: int, rows: int = 1) -> dict[str, Any]:
    """A step of so many equal micro-steps of so many rows, and one optimizer's."""

    def row(phase: str, what: str, name: str, calls: int, flops: int, num_bytes: int, shapes: str) -> dict[str, Any]:
        times_larger = 1 if phase == "optimizer" else rows
        flops, num_bytes = flops * times_larger, num_bytes * times_larger
        figures = {"calls": calls, "flops": calls * flops, "read": calls * num_bytes, "written": 0, "launches": calls}
        of = {"phase": phase, "what": what, "name": name, "shapes": shapes, "dtype": "bfloat16", "width": 0}
        return of | {"is_beside": False} | figures

    product = f"[{32 * rows}, 4096], [4096, 4096] -> [{32 * rows}, 4096]"
    times = num_micro_steps
    rows = [
        row(
            "forward",
            "other",
            "aten::embedding",
            times,
            0,
            10_000,
            f"[151552, 4096], [{rows}, 2048] -> [{rows}, 2048, 4096]",
        ),
        row("forward", "product", "aten::mm", 40 * times, 2 * 32 * 4096 * 4096, 100_000, product),
        row("backward", "product", "aten::mm", 80 * times, 2 * 32 * 4096 * 4096, 100_000, product),
        row("optimizer", "other", "aten::_fused_adamw_", 1, 0, 500_000_000, ""),
    ]
    claimed = sum(one["launches"] for one in rows)
    return {
        "step": 2, "num_launches": claimed + 7 * times, "num_claimed": claimed, "unclaimed": {}, "moved": [],
        "rows": rows,
    }  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CellSpec, str]]:
    found: list[tuple[CellSpec, str]] = []

    def predicted(one: CellSpec) -> Prediction:
        any_cell = resolve(model="pythia-70m", method="lora", device="cuda", batch_size=1, seq_len=8)
        size = NEEDED_BYTES[one.method] + one.batch_size * (GIB if one.gradient_checkpointing else 6 * GIB)
        needed = Interval(value=size, low=size, high=size)
        return predict(any_cell).model_copy(update={"engine": "recipe", "reserved_bytes": needed})

    def predict_and_count(one: CellSpec, *, gpu: Any, say: Any) -> tuple[Prediction, dict[str, Any]]:
        found.append((one, gpu.short_name))
        if one.method == "qlora":
            raise CannotRecord("no packed experts")
        return predicted(one), launches(one.grad_accum)

    def over_rows(one: CellSpec, *, gpu: Any, say: Any) -> tuple[int, Any]:
        return 8, lambda other: (predicted(other), launches(other.grad_accum, other.batch_size))

    monkeypatch.setattr(recorded, "predict_and_count", predict_and_count)
    monkeypatch.setattr(recorded, "over_rows", over_rows)
    return found


def test_each_method_is_recorded_twice_and_answers_for_every_card(asked: list[tuple[CellSpec, str]]) -> None:
    """With checkpointing and without; a method that cannot be recorded, once."""
    found = api.recommend(**WORDS)
    assert [(one.method, one.gradient_checkpointing, one.grad_accum, card) for one, card in asked] == [
        (method, checkpointing, 2, "A100-80GB-SXM")
        for method, checkpointing in [("full", True), ("full", False), ("lora", True), ("lora", False), ("qlora", True)]
    ]
    assert found.by_method["qlora"] == "not recorded: no packed experts"
    assert found.by_method["lora"] is None
    assert "RTX-4090" not in {one.gpu for one in found.options if one.fits}
    cheapest = next(answer.option for answer in found.answers if answer.question == "cheapest")
    assert cheapest.fits
    assert cheapest.usd.value == min(one.usd.value for one in found.options if one.fits and one.usd)
    assert all((one.hours is None) == (one.setting.verdict.verdict == "does not fit") for one in found.options)


@pytest.mark.parametrize(("gpu", "rows"), [("L40S", 8), ("RTX-A6000", 8), ("V100-32GB", 1)])
def test_the_fastest_micro_batch_that_fits_is_taken(asked: list[tuple[CellSpec, str]], gpu: str, rows: int) -> None:
    """30 GiB and 1 for each row, or 6: products of more rows are nearer to a card's peak."""
    (option,) = api.recommend(method="lora", gpus=(gpu,), **WORDS).options
    setting = option.setting
    assert (setting.batch_size, setting.grad_accum) == (rows, 16 // rows)
    each = GIB if setting.gradient_checkpointing else 6 * GIB
    assert setting.verdict.needed_bytes.value == NEEDED_BYTES["lora"] + rows * each


@pytest.mark.parametrize(("batch_size", "accum"), [(1, 16), (8, 2), (16, 1)])
def test_the_time_is_of_all_micro_steps(asked: list[tuple[CellSpec, str]], batch_size: int, accum: int) -> None:
    """Two are recorded, and the step has ``accum``: as if all had been counted."""
    found = api.recommend(method="lora", batch_size=batch_size, gpus=("H100-SXM",), **WORDS)
    (one, card), (option,) = asked[0], found.options
    assert (one.grad_accum, card) == (min(accum, 2), "H100-SXM")
    assert option.setting.grad_accum == accum
    whole = time_of(count_of(launches(accum)), find_gpu("H100-SXM"))
    assert option.setting.estimate.seconds == pytest.approx(whole.seconds)
    assert option.setting.estimate.tokens_per_second.value == pytest.approx(16 * 2048 / whole.seconds)
    assert option.hours.value == pytest.approx(10_000_000 / (16 * 2048) * whole.seconds / 3600)


def test_several_gpus_are_recorded_where_the_sharding_is_named(asked: list[tuple[CellSpec, str]]) -> None:
    found = api.recommend(method="lora", sharding="fsdp", gpus=("H100-SXM",), **WORDS)
    assert [(one.num_gpus, one.sharding) for one, _ in asked] == [(2, "fsdp"), (4, "fsdp"), (8, "fsdp")]
    assert {one.setting.grad_accum for one in found.options} == {8, 4, 2}


def test_what_cannot_be_recorded_at_all_is_the_error(asked: list[tuple[CellSpec, str]]) -> None:
    with pytest.raises(CannotRecord, match="no packed experts"):
        api.recommend(method="qlora", **WORDS)
