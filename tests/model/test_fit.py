"""The fit: measured over predicted by card and method, what is left out, and bad data refused."""

from typing import Any

import pytest
from factories import MODELS, TINY_LLAMA_PARAMS, make_environment, make_oom, make_record, make_spec, on_ranks, specs

from vramprobe.errors import FitError, IncomparableRecords, VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.model.fit import Expected, conformal_quantile, fit
from vramprobe.records.outcomes import Timeout
from vramprobe.records.phase_memory import Peak
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

CARDS = {"H100-SXM": "NVIDIA H100 80GB HBM3", "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB"}
#: What is predicted of each cell.
ALLOCATED, RESERVED = 10**9, 2 * 10**9


def expect(record: RunRecord) -> Expected:
    return Expected(ALLOCATED, RESERVED)


def peaked(spec: CellSpec, ratio: float = 1.0, peak: dict[str, int] | None = None, **more: Any) -> RunRecord:
    """A record with ``ratio`` times what is predicted."""
    size = round(ratio * ALLOCATED)
    tiers = Peak(phase="backward", step=2, load_allocated_bytes=1, **({"allocated_bytes": size} | (peak or {})))
    return make_record(spec, **({"peak": tiers, "instrument": "cuda"} | more))


def seeded(count: int, **options: Any) -> list[CellSpec]:
    return [make_spec(device="cuda", **options).model_copy(update={"seed": seed}) for seed in range(count)]


def on_card(name: str, ratio: float, count: int) -> list[RunRecord]:
    machine = make_environment(device_name=CARDS[name])
    cells = [cell.model_copy(update={"seq_len": 64}) for cell in seeded(count)]
    tiers = {"reserved_bytes": round(1.1 * RESERVED), "device_bytes": round(1.1 * RESERVED) + 600_000_000}
    return [peaked(cell, ratio, tiers, environment=machine) for cell in cells]


@pytest.fixture(scope="module")
def model() -> CardFit:
    """21 records from 1.00 to 1.20 times what is predicted; every other of them lora."""
    cells = [one for pair in zip(seeded(11), seeded(11, method="lora"), strict=True) for one in pair][:21]
    return fit([peaked(cell, 1 + number / 100) for number, cell in enumerate(cells)], expect)


def test_the_median_and_what_nine_in_ten_stay_within(model: CardFit) -> None:
    """The ceil(22 · 0.9) = 20th smallest of 21 distances from the median, 0 to 0.10, is 0.10."""
    whole = model.gaps.allocated
    assert (whole.low, whole.value, whole.high) == pytest.approx((1.0, 1.1, 1.2))
    assert model.gaps.by_method["lora"].value == pytest.approx(1.10)
    assert model.gaps.allocated_of("full") == model.gaps.by_method["full"]
    assert model.gaps.allocated_of("qlora") == whole
    assert conformal_quantile(range(1, 101)) == 91  # the ceil(101 · 0.9)-th
    assert conformal_quantile([3.0, 1.0]) == 3.0


def test_a_few_records_are_trusted_half_as_far() -> None:
    found = fit([peaked(cell, ratio) for cell, ratio in zip(seeded(5), (1.0, 1.0, 1.0, 1.0, 1.1), strict=True)], expect)
    assert (found.gaps.allocated.low, found.gaps.allocated.high) == pytest.approx((0.8, 1.2))
    assert found.gaps.by_method == {}


def test_one_wild_record_does_not_move_the_fit() -> None:
    found = fit([peaked(cell, 50.0 if cell.seed == 3 else 1.0) for cell in seeded(21)], expect)
    assert found.gaps.allocated.value == found.gaps.allocated.high == 1.0


def test_reserved_memory_and_what_the_device_has_beside_it() -> None:
    found = fit(on_card("H100-SXM", 1.0, 4), expect).gaps
    assert found.reserved.value == pytest.approx(1.1)
    assert found.device_over_reserved_bytes.value == 600_000_000


@pytest.mark.parametrize(
    ("instrument", "words"),
    [
        ("emulated", "4 left out: emulated: vramprobe predict answers by such runs already, without a fit; measure on"),
        ("cpu", "4 left out: of the CPU, which is measured and not predicted; measure on a GPU"),
    ],
)
def test_records_that_say_nothing_of_a_gpu_are_refused(instrument: str, words: str) -> None:
    others = [peaked(cell, instrument=instrument) for cell in seeded(4)]
    with pytest.raises(FitError, match=words):
        fit(others, expect)
    found = fit([*others, *map(peaked, seeded(4, method="lora"))], expect)
    assert (found.num_records, found.left_out[next(iter(found.left_out))]) == (4, 4)


def test_left_out_records_are_counted_with_the_reason() -> None:
    def refuses(record: RunRecord) -> Expected:
        if record.spec.seq_len == 77:
            raise VramprobeError("no recipe is at hand")
        return expect(record)

    cells = seeded(11)
    others = {
        "cached blocks": peaked(cells[4], num_alloc_retries=2),
        "held out": peaked(cells[5], held_out=True),
        "no recipe": peaked(cells[6].model_copy(update={"seq_len": 77})),
        "several GPUs": peaked(on_ranks(cells[7], 8, "fsdp")),
        "ran out of memory": make_oom(cells[8], instrument="cuda"),
        "outcome timeout": make_record(cells[9], instrument="cuda", outcome=Timeout(limit_seconds=1)),
        "0 bytes": peaked(cells[10], 0.0),
    }
    found = fit([*map(peaked, cells[:4]), *others.values()], refuses)
    assert found.num_records == 4
    assert sorted(found.left_out.values()) == [1] * 7
    assert all(any(word in reason for reason in found.left_out) for word in others)


def test_what_it_was_fitted_on() -> None:
    cells = specs()
    found = fit([peaked(cell) for cell in cells], expect)
    assert (found.models, found.num_records) == (sorted(MODELS), len(cells))
    assert (found.num_tokens.low, found.num_tokens.high) == (4096, 8192)
    assert (found.num_params.low, found.num_params.high) == (TINY_LLAMA_PARAMS, TINY_LLAMA_PARAMS)
    assert found.choices["method"] == ["full", "lora", "qlora"]
    assert found.fingerprints == sorted(cell.fingerprint for cell in cells)
    again = fit([peaked(cell) for cell in reversed(cells)], expect)
    assert found.data_fingerprint == again.data_fingerprint
    assert found.data_fingerprint != fit([peaked(cell, 1.1) for cell in cells], expect).data_fingerprint


def test_what_was_measured_on_two_cards_is_not_fitted_together() -> None:
    with pytest.raises(IncomparableRecords, match="device_name"):
        fit([*on_card("H100-SXM", 1.0, 4), *on_card("A100-80GB-SXM", 1.0, 4)], expect)


def test_differing_patch_versions_are_a_warning() -> None:
    versions = make_environment().versions | {"peft": "0.20.0"}
    *cells, other = seeded(6)
    found = fit([*map(peaked, cells), peaked(other, environment=make_environment(versions=versions))], expect)
    assert found.warnings == ["records of several versions of peft: 0.20.0, 0.21.0"]


def test_records_of_other_cells_than_they_say_are_refused() -> None:
    with pytest.raises(FitError, match="have 101 times the memory that is predicted"):
        fit([peaked(cell, 101) for cell in seeded(4)], expect)


def test_too_few_records_say_how_many_and_why() -> None:
    one, other = seeded(2)
    said = r"at least 4 usable records; of 2 given, 1 are; 1 left out: outcome timeout. Measure"
    with pytest.raises(FitError, match=said):
        fit([peaked(one), make_record(other, instrument="cuda", outcome=Timeout(limit_seconds=1))], expect)
