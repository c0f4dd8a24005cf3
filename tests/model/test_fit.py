"""The fit: known coefficients come back from synthetic records, physics stays where records are silent, and bad data is
refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from factories import CONSTANT_BYTES, MODELS, TRUE, make_environment, make_record, specs, synthetic

from vramprobe.errors import FitError, IncomparableRecords
from vramprobe.model.fit import fit
from vramprobe.model.memory_model import MemoryModel, load_fit, save_fit
from vramprobe.records.record import RunRecord, Timeout
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import moments
from vramprobe.terms.step.workspaces import workspaces_bytes


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return fit([synthetic(spec, TRUE, CONSTANT_BYTES) for spec in specs()])


def test_known_coefficients_come_back(model: MemoryModel) -> None:
    for cause in ("weights", "logits", "saved_activations"):
        assert model.coefficients[cause] == pytest.approx(TRUE[cause], abs=0.02), cause
    assert model.constant_bytes == pytest.approx(dict.fromkeys(("full", "lora", "qlora"), CONSTANT_BYTES), rel=0.15)
    assert model.residuals["overall"].mean_absolute < 0.003


def test_perfect_arithmetic_leaves_every_coefficient_at_one() -> None:
    model = fit([synthetic(spec, {}) for spec in specs()])
    assert all(value == pytest.approx(1, abs=1e-3) for value in model.coefficients.values())
    assert max(model.constant_bytes.values()) < 1_000_000


def test_what_the_records_do_not_decide_stays_at_one() -> None:
    """Four cells of one shape cannot tell the terms apart: the physics is kept, not thrown away."""
    one = [synthetic(specs()[0].model_copy(update={"seed": seed}), {}) for seed in range(4)]
    assert fit(one).coefficients["gradients"] == pytest.approx(1, abs=1e-3)
    assert fit(one).leave_one_model_out is None


def test_one_wild_record_does_not_move_the_fit() -> None:
    records = [synthetic(spec, {}) for spec in specs()]
    wild = synthetic(specs()[3].model_copy(update={"seed": 1}), {}, noise=0.5)
    model = fit([*records, wild])
    assert abs(model.residuals["overall"].mean_signed) < 0.02
    assert all(value == pytest.approx(1, abs=0.03) for value in model.coefficients.values())


def test_leave_one_model_out_covers_every_model_and_bounds_the_errors() -> None:
    noise = random.Random(0)
    model = fit([synthetic(spec, TRUE, CONSTANT_BYTES, noise.gauss(0, 0.01)) for spec in specs()])
    held_out = model.leave_one_model_out
    assert held_out is not None
    assert set(held_out.by_model) == set(MODELS)
    assert held_out.overall.num_records == len(specs())
    assert all(0.005 < width < 0.05 for width in model.interval.half_width.values())


def test_left_out_records_are_counted_with_the_reason() -> None:
    records = [synthetic(spec, {}) for spec in specs()]
    t5 = resolve(model="t5-small", method="full", device="cpu", batch_size=1, seq_len=8)
    timeout = make_record(specs()[0], outcome=Timeout(limit_seconds=1))
    model = fit([*records, make_record(t5), timeout])
    assert model.num_records == len(records)
    assert model.left_out["outcome timeout"] == 1
    assert any("'t5'" in reason for reason in model.left_out)


def test_ranges_and_provenance(model: MemoryModel) -> None:
    assert model.models == sorted(MODELS)
    assert (model.instrument, model.device, model.num_records) == ("cpu", "cpu", len(specs()))
    assert model.ranges.seq_len == (128, 2048)
    assert model.ranges.num_params == (70_426_624, 134_515_008)
    assert model.ranges.choices["method"] == ["full", "lora", "qlora"]
    assert {"overall", "method qlora", "phase backward"} <= set(model.residuals)
    assert (
        model.data_fingerprint == fit([synthetic(s, TRUE, CONSTANT_BYTES) for s in reversed(specs())]).data_fingerprint
    )


def test_reserved_and_device_tiers_are_learnt_where_the_records_have_them() -> None:
    def on_gpu(spec: CellSpec) -> RunRecord:
        size = max(moment.total_bytes for moment in moments(spec)) + workspaces_bytes(spec, None)
        tiers = {"reserved_bytes": round(size * 1.08), "device_bytes": round(size * 1.08) + 600_000_000}
        return synthetic(spec, {}, peak=tiers, instrument="cuda")

    model = fit([on_gpu(spec) for spec in specs("cuda")])
    assert model.reserved_over_allocated.value == pytest.approx(1.08, abs=1e-6)
    assert model.device_over_reserved_bytes.value == pytest.approx(600_000_000, abs=2)
    assert fit([synthetic(spec, {}) for spec in specs()]).reserved_over_allocated is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"instrument": "cuda"}, "instrument is 'cpu' in .* and 'cuda'"),
        (
            {"environment": make_environment(device_name="Other CPU")},
            "device_name is 'Test CPU.*' in .* and 'Other CPU'",
        ),
        ({"environment": make_environment(versions={"torch": "2.11.0"})}, "torch is '2.13' in .* and '2.11'"),
    ],
)
def test_mixed_records_are_refused(overrides: dict[str, Any], message: str) -> None:
    records = [synthetic(spec, {}) for spec in specs()[:6]]
    with pytest.raises(IncomparableRecords, match=message):
        fit([*records, synthetic(specs()[7], {}, **overrides)])


def test_differing_patch_versions_are_a_warning() -> None:
    versions = make_environment().versions | {"peft": "0.20.0"}
    records = [synthetic(spec, {}) for spec in specs()[:6]]
    model = fit([*records, synthetic(specs()[7], {}, environment=make_environment(versions=versions))])
    assert model.warnings == ["records of several versions of peft: 0.20.0, 0.21.0"]


def test_too_few_records_say_how_many_and_why() -> None:
    with pytest.raises(
        FitError, match=r"at least 4 usable records; of 2 given, 1 are; 1 left out: outcome timeout. Measure"
    ):
        fit([synthetic(specs()[0], {}), make_record(specs()[1], outcome=Timeout(limit_seconds=1))])


def test_a_saved_fit_reads_back_the_same(model: MemoryModel, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    save_fit(model, path)
    assert load_fit(path) == model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the fit"),
        ("{", "not JSON"),
        ('{"a": 1}', "no fit"),
        ('{"coefficients": {}, "format": 99}', "format 99"),
        ('{"coefficients": {}, "format": 1}', "format 1, this vramprobe reads 2; fit the records again"),
        ('{"coefficients": {}, "format": 2}', "damaged at"),
    ],
)
def test_a_bad_fit_file_is_a_clear_error(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FitError, match=message):
        load_fit(path)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("coefficients", "weights"), float("nan"), "coefficients.weights"),
        (("coefficients", "weights"), float("inf"), "coefficients.weights"),
        (("coefficients", "weights"), -1, "coefficients.weights"),
        (("coefficients", "weights"), 0, "coefficients.weights"),
        (("coefficients", "luck"), 1, "coefficients of unknown causes: luck"),
        (("constant_bytes", "full"), -1, "constant_bytes.full"),
        (("num_records",), 0, "num_records"),
        (("ranges", "num_params"), [0, 5], "ranges.num_params"),
        (("ranges", "seq_len"), [1, -5], "ranges.seq_len"),
        (("ranges", "batch_size"), [5, 1], "the smallest, 5, is above the largest, 1"),
        (("ranges", "num_tokens"), [1, 10**400], "ranges.num_tokens"),
        (("residuals",), {}, "residuals have no 'overall'"),
        (("interval", "half_width", "full"), -0.1, "interval.half_width.full"),
        (("interval", "half_width", "full"), float("inf"), "interval.half_width.full"),
        (("interval", "from_bytes"), 0, "interval.from_bytes"),
        (("interval", "power"), 1.5, "interval.power"),
        (("interval", "growth_per_doubling"), float("nan"), "interval.growth_per_doubling"),
        (("interval", "covariance"), {"luck": {}}, "covariance of unknown causes: luck"),
        (("interval",), None, "interval"),
        (("residuals", "overall", "worst_absolute"), -1, "residuals.overall.worst_absolute"),
        (("reserved_over_allocated",), {"value": 1.0, "low": 1.1, "high": 1.2}, "must be in this order"),
        (("reserved_over_allocated",), {"value": 1.0, "low": -1.1, "high": 1.2}, "must be above 0"),
    ],
)
def test_a_damaged_fit_is_refused_when_it_is_read(
    keys: tuple[str, ...], value: Any, message: str, model: MemoryModel, tmp_path: Path
) -> None:
    data = model.model_dump(mode="json")
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FitError, match=f"is damaged.*{re.escape(message)}.*fit the records again"):
        load_fit(path)


def test_an_unwritable_path_is_a_clear_error(model: MemoryModel, tmp_path: Path) -> None:
    with pytest.raises(FitError, match="cannot write the fit"):
        save_fit(model, tmp_path / "no such folder" / "fit.json")
