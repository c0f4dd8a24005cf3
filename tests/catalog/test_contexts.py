"""CUDA contexts by card: the table, the line through it, and the interval of a card without a row."""

import pytest

from vramprobe.catalog import contexts, find_gpu, list_gpus
from vramprobe.catalog.contexts import card_points, context_of, context_rows, left_out_errors, line_of
from vramprobe.emulate.cards import card_properties, context_bytes
from vramprobe.units import MIB

CARDS = [card_properties(gpu.short_name) for gpu in list_gpus() if gpu.vendor == "NVIDIA"]


def test_every_row_names_a_card_of_the_catalog_and_its_source() -> None:
    names = {gpu.name for gpu in list_gpus()}
    for row in context_rows():
        assert row.gpu in names
        assert row.loaded in ("start", "step")
        assert row.grade in ("measured", "published")
        assert row.mib > 0
        assert row.source
        assert row.what
        assert row.libraries


def test_a_t4_s_context_is_the_published_one() -> None:
    found = context_of("T4")
    assert found.basis == "published"
    assert found.value_bytes == round(140.875 * MIB)
    assert found.low_bytes < found.value_bytes < found.high_bytes < 150 * MIB


def test_an_a100_s_range_holds_all_its_rows() -> None:
    found = context_of("A100 SXM4 80GB")
    assert found.value_bytes == 519 * MIB
    assert found.low_bytes <= 511 * MIB < 531 * MIB < found.high_bytes


def test_a_line_is_exact_where_the_points_lie_on_one() -> None:
    points = {"a": (1000, 30.0), "b": (2000, 50.0), "c": (5000, 110.0)}
    assert line_of(list(points.values())) == pytest.approx((10.0, 0.02))
    assert left_out_errors(points) == pytest.approx(dict.fromkeys(points, 0.0))
    assert left_out_errors(points | {"d": (10_000, 420.0)})["d"] == pytest.approx(-0.5)


def test_a_card_without_a_row_has_an_interval_by_its_multiprocessors() -> None:
    card = next(card for card in CARDS if card.gpu.name not in card_points("step"))
    found = context_of(card.gpu.name)
    assert found.basis == "by its multiprocessors"
    base, slope = line_of(list(card_points("step").values()))
    assert found.value_bytes == pytest.approx((base + slope * card.sm_count * card.threads_per_sm) * MIB)
    worst = max(abs(error) for kind in ("start", "step") for error in left_out_errors(card_points(kind)).values())
    assert found.high_bytes / found.value_bytes - 1 == pytest.approx(worst)


def test_a_measured_row_takes_the_place_of_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    more = context_rows()[1]._replace(mib=160.0, grade="measured")
    rows = (*context_rows(), more)
    monkeypatch.setattr(contexts, "context_rows", lambda: rows)
    card_points.cache_clear()
    try:
        found = context_of("T4")
        assert (found.basis, found.value_bytes) == ("measured", 160 * MIB)
    finally:
        card_points.cache_clear()


def test_every_nvidia_card_has_a_context_and_amd_s_none() -> None:
    for card in CARDS:
        assert 0 < context_bytes(card) < context_bytes(card, most=True) < 1024 * MIB
    assert find_gpu("MI300X").context_bytes is None
    assert context_of("MI300X") is None


def test_an_amount_of_memory_has_no_context_of_its_own_and_is_emulated_with_an_a100_s() -> None:
    assert context_bytes(card_properties("12GiB")) == context_bytes(card_properties("A100-80GB-SXM"))
