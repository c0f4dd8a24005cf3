"""Seconds of counted work: a roofline's known answers, an interval that widens, tokens by the embedding."""

import dataclasses
import math

import pytest

from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError, StoreError
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.rates import shipped_counted
from vramprobe.speed.raw_count import count_of
from vramprobe.speed.shapes import product_share

A100 = find_gpu("A100-80GB-SXM")
FIT = shipped_counted()


def counted(*rows: CountRow, num_launches: int = 0, num_claimed: int = 0, **more) -> Count:
    return Count(step=2, num_launches=num_launches, num_claimed=num_claimed, rows=rows, **more)


def test_memory_bound_bytes_take_the_bandwidth_that_steps_reach() -> None:
    row = CountRow(phase="forward", what="other", name="aten::add", read=2 * 10**12, written=10**12)
    found = time_of(counted(row), A100)
    stream = 3e12 / (A100.bandwidth_gb_s * 1e9 * FIT.rates.stream)
    assert found.by_class["memory-bound"] == pytest.approx(stream)
    assert found.seconds == pytest.approx(stream + FIT.rates.step_seconds)


def test_a_product_takes_its_share_of_the_peak_by_its_shape_or_its_bytes() -> None:
    shapes = "bfloat16[8192, 4096] bfloat16[4096, 2048] -> bfloat16[8192, 2048]"
    flops, peak = 2 * 8192 * 4096 * 2048, A100.half_dense_tflops * 1e12 * FIT.rates.product
    row = CountRow(phase="backward", what="product", name="aten::mm", shapes=shapes, flops=flops, dtype="bfloat16")
    expected = flops / (peak * product_share(A100, 8192, 2048, 4096))
    assert time_of(counted(row), A100).by_class["products"] == pytest.approx(expected)
    slow = dataclasses.replace(row, read=10**11)
    moved = 1e11 / (A100.bandwidth_gb_s * 1e9 * FIT.rates.stream)
    assert time_of(counted(slow), A100).by_class["products"] == pytest.approx(moved)


def test_tf32_has_half_the_16_bit_rate_and_fp32_that_of_its_own_lanes() -> None:
    row = CountRow(phase="forward", what="product", name="aten::convolution", flops=10**15, dtype="bfloat16")
    rows = (dataclasses.replace(row, dtype=dtype) for dtype in ("bfloat16", "tf32", "float32"))
    half, tf32, fp32 = (time_of(counted(row), A100).by_class["products"] for row in rows)
    assert tf32 == pytest.approx(2 * half)  # 156 of 312 TFLOPS
    assert fp32 == pytest.approx(16 * half, rel=0.01)  # 19.5


def test_a_copy_on_a_stream_of_its_own_runs_while_the_card_computes() -> None:
    computed = CountRow(phase="forward", what="other", name="aten::add", read=3 * 10**12)
    copied = CountRow(phase="forward", what="device_to_host", name="aten::copy_", read=4 * 10**9, written=4 * 10**9)
    beside = dataclasses.replace(copied, is_beside=True)
    several = ((computed,), (computed, copied), (computed, beside))
    alone, waits, overlaps = (time_of(counted(*rows), A100) for rows in several)
    link = A100.pcie_gb_s / 2 * 1e9
    assert waits.seconds - alone.seconds == pytest.approx(4e9 / (0.4 * link))
    assert overlaps.by_class["copies"] == pytest.approx(4e9 / (0.8 * link))
    rest = FIT.rates.step_seconds
    assert overlaps.seconds == pytest.approx(math.hypot(alone.seconds - rest, 4e9 / (0.8 * link)) + rest)


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "expected"),
    [
        ("aten::mm", "bfloat16[64, 32] bfloat16[32, 16] -> bfloat16[64, 16]", 2 * 64 * 32 * 16, (64, 16, 32)),
        ("aten::linear", "a[2, 64, 32] a[16, 32] -> a[2, 64, 16]", 2 * 128 * 32 * 16, (128, 16, 32)),
        ("aten::bmm", "a[4, 64, 32] a[4, 32, 16] -> a[4, 64, 16]", 2 * 4 * 64 * 32 * 16, (256, 16, 32)),
        ("aten::mm", "", 2 * 128**3, (128, 128, 128)),
    ],
)
def test_rows_columns_and_depth_of_a_product(name: str, shapes: str, flops: int, expected: tuple) -> None:
    assert CountRow(phase="forward", what="product", name=name, shapes=shapes, flops=flops).product_shape == expected


def test_the_keys_of_an_attention_and_the_width_of_its_heads() -> None:
    tensors = "a[2, 512, 8, 64] a[2, 1024, 2, 64] a[2, 1024, 2, 64]"
    name = "aten::_flash_attention_forward"
    flash = CountRow(phase="forward", what="attention", name=name, shapes=f"{tensors} -> a[2]")
    assert flash.attention_shape == (1024, 64)
    backward = "a[2, 8, 512, 64] a[2, 8, 512, 64] a[2, 2, 1024, 64] a[2, 2, 1024, 64] -> a[2]"
    name = "aten::_scaled_dot_product_flash_attention_backward"
    assert CountRow(phase="backward", what="attention", name=name, shapes=backward).attention_shape == (1024, 64)


def test_a_phase_ends_when_the_host_has_issued_it_and_the_card_has_computed_it() -> None:
    """Forward decided by the host, backward by the card, which begins no earlier than it was issued."""
    launch, stream = FIT.rates.kernel_seconds, A100.bandwidth_gb_s * 1e9 * FIT.rates.stream
    forward = CountRow(phase="forward", what="other", name="aten::add", launches=10_000)
    backward = CountRow(phase="backward", what="other", name="aten::mul", launches=1, read=int(stream))
    ahead = [dataclasses.replace(forward, phase="optimizer"), dataclasses.replace(backward, phase="forward")]
    for rows, seconds in (((forward, backward), 10_000 * launch + 1), (ahead, max(1, 10_001 * launch))):
        found = time_of(counted(*rows), A100).seconds
        assert found == pytest.approx(seconds + FIT.rates.step_seconds, rel=1e-6)


def test_recomputation_is_in_hfu_and_not_in_mfu() -> None:
    product = {"what": "product", "name": "aten::mm", "flops": 10**15, "dtype": "bfloat16"}
    found = time_of(counted(*(CountRow(phase=phase, **product) for phase in ("forward", "recompute"))), A100)
    assert found.hfu == pytest.approx(2 * found.mfu)
    assert found.hfu == pytest.approx(2e15 / found.seconds / (A100.half_dense_tflops * 1e12))


def test_the_interval_is_the_fits_and_open_above_by_what_nobody_claimed() -> None:
    row = CountRow(phase="forward", what="product", name="aten::mm", flops=10**15, dtype="bfloat16", launches=1)
    shapes = "bfloat16[9, 2] int64[4, 2048] -> x"
    tokens = CountRow(phase="forward", what="other", name="aten::embedding", shapes=shapes)
    for num_claimed, more in ((100, 1.0), (75, 1 / 0.75)):
        found = time_of(counted(row, tokens, num_launches=100, num_claimed=num_claimed), A100)
        assert found.condition == "usual"
        factor = math.exp(FIT.half_widths["usual"])
        assert found.low_seconds == pytest.approx(found.seconds / factor)
        assert found.high_seconds == pytest.approx(found.seconds * factor * more)
    assert time_of(counted(row), find_gpu("B200")).condition == "card never seen"
    launched = CountRow(phase="forward", what="other", name="aten::add", launches=10_000)
    assert time_of(counted(launched), A100).condition == "short steps"


def test_tokens_are_those_that_the_largest_embedding_looks_up_in_forward() -> None:
    shapes = {"words": "bfloat16[50257, 768] int64[8, 512] -> bfloat16[8, 512, 768]",
              "positions": "bfloat16[1024, 768] int64[1, 512] -> bfloat16[1, 512, 768]"}  # fmt: skip
    rows = [
        CountRow(phase=phase, what="other", name="aten::embedding", shapes=text, calls=3)
        for text in shapes.values()
        for phase in ("forward", "recompute")
    ]
    found = time_of(counted(*rows), A100)
    assert (found.tokens, found.samples) == (3 * 8 * 512, 24)
    assert time_of(counted(), A100).tokens is None


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (CountRow(phase="optimizer", what="other", name="aten::_foreach_add_"), "optimizer"),
        (CountRow(phase="backward", what="other", name="bitsandbytes::dequantize_4bit"), "dequantize"),
        (CountRow(phase="backward", what="other", name="c10d::allreduce_"), "collectives"),
        (CountRow(phase="forward", what="host_to_device", name="aten::copy_"), "copies"),
        (CountRow(phase="optimizer", what="product", name="aten::mm"), "products"),
    ],
)
def test_each_operator_has_its_class(row: CountRow, expected: str) -> None:
    assert row.kind == expected


def test_what_cannot_be_predicted_is_said() -> None:
    with pytest.raises(SpecError, match="16 ranks share a collective"):
        time_of(counted(link_bytes=(("all_reduce", 1, 16),)), A100)
    with pytest.raises(StoreError, match="a count of a step is not whole"):
        count_of({"step": 2})
