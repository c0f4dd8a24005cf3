"""Kernels by shape: known points of the tables, between them, beyond them, and cards that stand in for others."""

import pytest

from vramprobe.catalog import find_gpu, fp32_tflops, list_gpus
from vramprobe.speed.rates import kernel_tables
from vramprobe.speed.shapes import attention_share, product_share, sent_bytes_per_second, stand_in, times_faster

A100, L40S, RTX_4090 = (find_gpu(name) for name in ("A100-80GB-SXM", "L40S", "RTX-4090"))
TABLES = kernel_tables()


def at(card: str, m: int, n: int, k: int) -> float:
    place = (TABLES.m.index(m) * len(TABLES.n) + TABLES.n.index(n)) * len(TABLES.k) + TABLES.k.index(k)
    return TABLES.products[card][place] / 1000


def test_every_table_is_whole() -> None:
    for shares in TABLES.products.values():
        assert len(shares) == len(TABLES.m) * len(TABLES.n) * len(TABLES.k)
        assert all(0 < share < 1000 for share in shares)
    assert all(len(one) == len(TABLES.lengths) for by in TABLES.attention.values() for one in by.values())


def test_a_measured_shape_has_its_share_and_one_between_lies_between() -> None:
    low, high = at("A100-80GB-SXM", 4096, 4096, 4096), at("A100-80GB-SXM", 8192, 4096, 4096)
    assert product_share(A100, 4096, 4096, 4096) == pytest.approx(low)
    between = product_share(A100, round(4096 * 2**0.5), 4096, 4096)
    assert between == pytest.approx((low * high) ** 0.5, rel=1e-3)
    assert product_share(A100, 10**6, 4096, 4096) == pytest.approx(at("A100-80GB-SXM", 32768, 4096, 4096))


def test_a_small_product_reaches_less_than_a_large_one() -> None:
    for name in TABLES.products:
        assert product_share(find_gpu(name), 256, 4096, 4096) < 0.85 * product_share(find_gpu(name), 8192, 4096, 4096)


def test_a_card_without_a_table_has_its_likes_by_how_much_of_its_peak_it_reaches() -> None:
    """RTX 4090: 179 of 165.2 TFLOP/s in its best product, L40S 252 of 362."""
    assert stand_in(RTX_4090) == "L40S"
    expected = product_share(L40S, 8192, 4096, 4096) * (179 / 165.2) / (252 / 362)
    assert product_share(RTX_4090, 8192, 4096, 4096) == pytest.approx(expected)


def test_every_card_with_a_peak_has_shares_below_what_is_possible() -> None:
    for gpu in list_gpus():
        if gpu.half_dense_tflops:
            assert 0.3 < product_share(gpu, 8192, 8192, 8192) < 1.1, gpu.name
            backward, forward = (attention_share(gpu, 4096, 128, backward=which) for which in (True, False))
            assert 0.1 < backward < forward


def test_a_product_in_fp8_is_faster_where_the_tensor_cores_have_it() -> None:
    h100 = find_gpu("H100-SXM")
    assert 1.3 < times_faster(h100, "float8_e4m3fn", 16384) < 1.7
    b200 = find_gpu("B200")
    assert times_faster(b200, "float4_e2m1fn_x2", 16384) > times_faster(b200, "float8_e4m3fn", 16384)
    assert times_faster(A100, "float8_e4m3fn", 16384) == times_faster(h100, "bfloat16", 16384) == 1.0


def test_narrow_heads_and_short_sequences_reach_less() -> None:
    assert attention_share(A100, 4096, 64, backward=False) < attention_share(A100, 4096, 128, backward=False)
    assert attention_share(A100, 512, 128, backward=False) < attention_share(A100, 4096, 128, backward=False)


def test_what_a_gpu_sends_in_a_collective() -> None:
    """A GPU sends (n - 1)/n of the message in an all-gather, twice that in an all-reduce, and far less by PCIe."""
    speeds = TABLES.collectives["A100-80GB-SXM"]["all_gather"]["8"]
    assert sent_bytes_per_second(A100, "all_gather", 8, 1 << 29) == pytest.approx(speeds[-1] * 1e9 * 7 / 8)
    speeds = TABLES.collectives["A100-80GB-SXM"]["all_reduce"]["8"]
    assert sent_bytes_per_second(A100, "all_reduce", 8, 1 << 29) == pytest.approx(speeds[-1] * 1e9 * 14 / 8)
    assert sent_bytes_per_second(L40S, "all_gather", 8) < 0.1 * sent_bytes_per_second(L40S, "all_gather", 2)
    assert sent_bytes_per_second(A100, "all_gather", 8, 4096) < 0.1 * sent_bytes_per_second(A100, "all_gather", 8)


def test_large_messages_of_one_size_are_as_fast_whatever_their_dtype() -> None:
    """Half messages are listed by their elements: read as bytes, 64 MiB were a third slower than 512 MiB over PCIe."""
    large = [TABLES.sizes.index(1 << power) for power in (26, 29)]
    for number, speeds in TABLES.collectives["L40S"]["all_gather"].items():
        assert speeds[large[0]] == pytest.approx(speeds[large[1]], rel=0.05), number


def test_the_peak_of_fp32_by_clock_and_lanes_is_the_data_sheets() -> None:
    sheets = {"A100-80GB-SXM": 19.5, "H100-SXM": 66.9, "L40S": 91.6, "RTX-4090": 82.6, "V100-32GB-SXM": 15.7, "T4": 8.1}
    assert {name: fp32_tflops(find_gpu(name)) for name in sheets} == pytest.approx(sheets, rel=0.01)
