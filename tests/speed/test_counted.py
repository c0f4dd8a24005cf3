"""Seconds of counted work: a roofline's known answers, an interval that widens, tokens by the embedding."""

from __future__ import annotations

import math

import pytest

from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError, StoreError
from vramprobe.profile.step_time import count_of
from vramprobe.speed.counted import WIDER, Count, Row, class_of, time_of
from vramprobe.speed.rates import shipped_speed

A100 = find_gpu("A100-80GB-SXM")
FIT = shipped_speed()


def counted(*rows: Row, num_launches: int = 0, num_claimed: int = 0, **more) -> Count:
    return Count(step=2, num_launches=num_launches, num_claimed=num_claimed, rows=rows, **more)


def test_memory_bound_bytes_take_the_bandwidth_that_steps_reach() -> None:
    row = Row(phase="forward", what="other", name="aten::add", read=2 * 10**12, written=10**12)
    found = time_of(counted(row), A100)
    stream = 3e12 / (A100.bandwidth_gb_s * 1e9 * FIT.rates.stream)
    assert found.by_class["memory-bound"] == pytest.approx(stream)
    assert found.seconds == pytest.approx(stream + FIT.rates.step_seconds)


def test_a_product_takes_its_operations_and_its_bytes() -> None:
    row = Row(phase="backward", what="product", name="aten::mm", flops=10**15, read=10**11, dtype="bfloat16")
    rates = FIT.rates
    flops = 1e15 / (A100.half_dense_tflops * 1e12 * rates.product * rates.generations["Ampere"])
    moved = 1e11 / (A100.bandwidth_gb_s * 1e9 * rates.stream)
    assert time_of(counted(row), A100).by_class["products"] == pytest.approx(math.hypot(flops, moved))


def test_recomputation_is_in_hfu_and_not_in_mfu() -> None:
    rows = [
        Row(phase=phase, what="product", name="aten::mm", flops=10**15, dtype="bfloat16")
        for phase in ("forward", "recompute")
    ]
    found = time_of(counted(*rows), A100)
    assert found.hfu == pytest.approx(2 * found.mfu)
    assert found.hfu == pytest.approx(2e15 / found.seconds / (A100.half_dense_tflops * 1e12))


def test_the_interval_is_the_speed_models_wider_and_open_above_by_what_nobody_claimed() -> None:
    row = Row(phase="forward", what="product", name="aten::mm", flops=10**15, dtype="bfloat16", launches=1)
    tokens = Row(phase="forward", what="other", name="aten::embedding", shapes="bfloat16[9, 2] int64[4, 2048] -> x")
    for num_claimed, more in ((100, 1.0), (75, 1 / 0.75)):
        found = time_of(counted(row, tokens, num_launches=100, num_claimed=num_claimed), A100)
        assert found.condition == "usual"
        factor = math.exp(FIT.half_widths["usual"] + WIDER)
        assert found.low_seconds == pytest.approx(found.seconds / factor)
        assert found.high_seconds == pytest.approx(found.seconds * factor * more)
    assert time_of(counted(row), find_gpu("B200")).condition == "card never seen"
    launched = Row(phase="forward", what="other", name="aten::add", launches=10_000)
    assert time_of(counted(launched), A100).condition == "short steps"


def test_tokens_are_those_that_the_largest_embedding_looks_up_in_forward() -> None:
    shapes = {"words": "bfloat16[50257, 768] int64[8, 512] -> bfloat16[8, 512, 768]",
              "positions": "bfloat16[1024, 768] int64[1, 512] -> bfloat16[1, 512, 768]"}  # fmt: skip
    rows = [
        Row(phase=phase, what="other", name="aten::embedding", shapes=text, calls=3)
        for text in shapes.values()
        for phase in ("forward", "recompute")
    ]
    found = time_of(counted(*rows), A100)
    assert (found.tokens, found.samples) == (3 * 8 * 512, 24)
    assert time_of(counted(), A100).tokens is None


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(phase="optimizer", what="other", name="aten::_foreach_add_"), "optimizer"),
        (Row(phase="backward", what="other", name="bitsandbytes::dequantize_4bit"), "dequantize"),
        (Row(phase="backward", what="other", name="c10d::allreduce_"), "collectives"),
        (Row(phase="forward", what="host_to_device", name="aten::copy_"), "copies"),
        (Row(phase="optimizer", what="product", name="aten::mm"), "products"),
    ],
)
def test_each_operator_has_its_class(row: Row, expected: str) -> None:
    assert class_of(row) == expected


def test_what_cannot_be_predicted_is_said() -> None:
    with pytest.raises(SpecError, match="16 ranks share a collective"):
        time_of(counted(link_bytes=(("all_reduce", 1, 16),)), A100)
    with pytest.raises(StoreError, match="a count of a step is not whole"):
        count_of({"step": 2})
