"""Calibrate: known constants come back exactly, every formula is scored beside ours, and like goes with like only."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe
from factories import make_environment, make_oom, make_record, make_spec

from vramprobe import api
from vramprobe.errors import FitError, IncomparableRecords, StoreError
from vramprobe.literature.calibrate import OURS, OURS_FITTED, OURS_FITTED_UNSEEN, Calibration, Constant, calibrate
from vramprobe.literature.formulas import FORMULAS, facts_of
from vramprobe.predict import recorded
from vramprobe.predict.expected import fit_records
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Invalid, Timeout
from vramprobe.records.phase_memory import MemoryLedger, Peak
from vramprobe.records.record import ModelFacts, RunRecord
from vramprobe.report.calibration import calibration_document, said
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

QUICKSTART = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"
MODELS = ("pythia-70m", "smollm2-135m", "gpt2", "opt-125m", "pythia-160m", "smollm2-360m")
TRUE = {
    "weights": 2.5,
    "adapter_weights": 3.5,
    "quantised_weights": 0.5125,
    "gradients": 1.75,
    "optimizer_state": 7.25,
    "layer_activations": 29.0,
    "checkpoint_store": 2.25,
    "attention_scores": 6.0,
    "logits": 3.0,
}


def cells(**words: Any) -> list[CellSpec]:
    return [
        resolve(model=model, device="cpu", batch_size=2, seq_len=length, **({"method": "full"} | words))
        for model in MODELS
        for length in (64, 192)
    ]


def synthetic(spec: CellSpec, true: dict[str, float] = TRUE, *, fused: bool = True, **overrides: Any) -> RunRecord:
    """A record whose ledger is what these constants make of the counts; its peak is 100 MB above its states."""
    facts = facts_of(spec)
    adapters = 0 if spec.method == "full" else facts["num_trained"]
    quantised = round(true["quantised_weights"] * facts["num_quantised"])
    plain = facts["num_params"] - facts["num_quantised"]
    weights = true["weights"] * plain + true["adapter_weights"] * adapters + quantised
    saved = true["logits"] * facts["num_tokens"] * facts["vocab"]
    if spec.gradient_checkpointing:
        saved += true["checkpoint_store"] * facts["token_layer_widths"] + 2 * facts["num_cast_head_params"]
    else:
        saved += true["layer_activations"] * facts["token_layer_widths"] + 2 * facts["num_cast_params"]
        saved += 0 if fused else true["attention_scores"] * facts["num_scores"]
    parts = {
        "weights_bytes": weights,
        "gradients_bytes": true["gradients"] * facts["num_trained"],
        "optimizer_state_bytes": true["optimizer_state"] * facts["num_trained"],
    }
    states = {name: round(size) for name, size in parts.items()}
    ledger = MemoryLedger(**states, batch_bytes=0, saved_activations_bytes=round(saved), unaccounted_bytes=0)
    seen = ModelFacts(
        num_params=facts["num_params"],
        num_trainable_params=facts["num_trained"],
        num_quantised_params=facts["num_quantised"],
        quantised_weights_bytes=quantised,
        attention_kernels=["Flash"] if fused else [],
    )
    peak = Peak(phase="backward", step=2, allocated_bytes=sum(states.values()) + 10**8, load_allocated_bytes=1)
    return make_record(spec, **({"ledger": ledger, "facts": seen, "peak": peak} | overrides))


STEP = ("layer_activations", "logits")


def measured(found: Calibration) -> dict[str, list[Constant]]:
    names = {one.name for one in found.constants}
    return {name: [one for one in found.constants if one.name == name] for name in names}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({"method": "full"}, ("weights", "gradients", "optimizer_state", *STEP)),
        ({"method": "lora"}, ("weights", "adapter_weights", "gradients", "optimizer_state", *STEP)),
        ({"method": "lora", "gradient_checkpointing": True}, ("checkpoint_store", "logits")),
        ({"method": "qlora"}, ("quantised_weights", "weights", "adapter_weights", *STEP)),
        ({"method": "qlora", "gradient_checkpointing": True}, ("checkpoint_store", "logits")),
        ({"method": "full", "recipe": "mixed"}, ("weights", *STEP, "cast_copies")),
    ],
    ids=str,
)
def test_known_constants_come_back_exactly(words: dict[str, Any], names: tuple[str, ...]) -> None:
    found = measured(calibrate([synthetic(spec) for spec in cells(**words)]))
    for name in names:
        (constant,) = found[name]
        assert constant.measured == pytest.approx((TRUE | {"cast_copies": 2.0})[name], rel=1e-4), name
        assert constant.standard_error < 1e-3 * constant.measured, name
        assert constant.problem is None


def test_scores_of_attention_are_a_constant_where_no_fused_kernel_ran() -> None:
    records = [synthetic(spec, fused=False) for spec in cells(attn="eager")]
    found = measured(calibrate(records))
    assert found["attention_scores"][0].measured == pytest.approx(6, rel=1e-3)
    assert "attention_scores" not in measured(calibrate([synthetic(spec) for spec in cells()]))


def test_a_standard_error_by_hand() -> None:
    """Three models with 1.9, 2 and 2.1 B of gradient per parameter: count/bytes x = 1/1.9, 1/2, 1/2.1; c = Σx/Σx²."""
    specs = cells()[::2][:3]
    records = [synthetic(spec, TRUE | {"gradients": size}) for spec, size in zip(specs, (1.9, 2.0, 2.1), strict=True)]
    (constant,) = measured(calibrate(records))["gradients"]
    x = [1 / 1.9, 1 / 2, 1 / 2.1]
    expected = sum(x) / sum(one**2 for one in x)
    residual = sum((1 - expected * one) ** 2 for one in x) / 2
    assert constant.measured == pytest.approx(expected, rel=1e-6)
    assert constant.standard_error == pytest.approx((residual / sum(one**2 for one in x)) ** 0.5, rel=1e-6)
    assert constant.num_rows == 3


def test_a_second_length_of_a_model_measures_its_weights_no_second_time() -> None:
    found = measured(calibrate([synthetic(spec) for spec in cells()]))
    assert found["weights"][0].num_rows == len(MODELS)
    assert found["layer_activations"][0].num_rows == 2 * len(MODELS)


def test_too_few_rows_say_so() -> None:
    (constant,) = measured(calibrate([synthetic(spec) for spec in cells()[:4]]))["weights"]
    assert (constant.num_rows, constant.measured, constant.standard_error) == (2, None, None)
    assert constant.problem == "too few rows: 2 distinct, and a constant with a standard error needs 3"


def test_rows_of_one_model_cannot_tell_constants_apart() -> None:
    specs = [make_spec(seq_len=length) for length in (16, 32, 48, 64, 80)]
    found = measured(calibrate([synthetic(spec) for spec in specs]))
    assert found["logits"][0].problem.startswith("these rows cannot tell layer_activations, logits apart")
    assert found["logits"][0].measured is None


def test_a_constant_within_its_error_is_not_called_determined() -> None:
    specs = cells()[::2][:4]
    noisy = [
        synthetic(spec, TRUE | {"layer_activations": 5.0 * (1 + number % 2 * 8), "logits": 1e-3})
        for number, spec in enumerate(specs)
    ]
    (constant,) = measured(calibrate(noisy))["logits"]
    assert constant.standard_error > abs(constant.measured)
    assert constant.problem.startswith("not determined")


def test_what_formulas_say_is_taken_from_the_formulas() -> None:
    found = measured(calibrate([synthetic(spec) for spec in cells(method="qlora")]))
    says = found["quantised_weights"][0].says
    assert says["guide-spheron"] == (0.5, 0.5)
    assert says["qlora-paper"] == pytest.approx((4.126953125 / 8, 4.126953125 / 8))
    assert set(says) == {"guide-lyceum", "guide-spheron", "qlora-paper", "gpu_poor"}


# -- scores ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart() -> Calibration:
    return api.calibrate(QUICKSTART)


def score(found: Calibration, formula: str, group: str, quantity: str = "peak") -> Any:
    (one,) = [s for s in found.scores if (s.formula, s.group, s.quantity) == (formula, group, quantity)]
    return one


def test_errors_by_hand() -> None:
    """Peaks of 10 B/param and of 6.4: 8 B/param are 20 % below one and 25 % above the other."""
    specs = cells()[:3:2]
    sizes = [round(size * facts_of(spec)["num_params"]) for spec, size in zip(specs, (10, 6.4), strict=True)]
    peaks = [Peak(phase="backward", step=2, allocated_bytes=size, load_allocated_bytes=1) for size in sizes]
    found = calibrate([synthetic(spec, peak=peak) for spec, peak in zip(specs, peaks, strict=True)])
    one = score(found, "8-bytes", "method full")
    assert one.num_rows == 2
    errors = (one.mean_signed, one.mean_absolute, one.worst_signed)
    assert errors == pytest.approx((0.025, 0.225, 0.25), abs=1e-6)


def test_every_formula_is_there_with_its_words(quickstart: Calibration) -> None:
    assert [one.name for one in quickstart.formulas] == [formula.name for formula in FORMULAS]
    assert all(one.source and one.says and one.recipe for one in quickstart.formulas)
    for info in quickstart.formulas:
        spoken = [one for one in quickstart.scores if (one.formula, one.group) == (info.name, "all")]
        rows = max((one.num_rows for one in spoken), default=0)
        assert rows + sum(info.not_for.values()) == quickstart.num_rows, info.name


def test_the_cpu_is_scored_without_ours(quickstart: Calibration) -> None:
    assert quickstart.num_rows == len(store.latest_by_fingerprint(store.read(QUICKSTART).records))
    assert {one.formula for one in quickstart.scores} <= {formula.name for formula in FORMULAS}
    assert {one.ours_mean_absolute for one in quickstart.scores} == {None}


def test_the_recipe_a_rule_stands_for_is_where_it_is_near(quickstart: Calibration) -> None:
    mixed = "recipe full fp32+bf16, adamw_torch_fused"
    assert abs(score(quickstart, "16-bytes-fp32", mixed).mean_signed) < 0.001
    assert score(quickstart, "8-bytes", mixed).mean_signed == pytest.approx(-0.5, abs=0.001)
    assert score(quickstart, "8-bytes", "method full").worst_signed == pytest.approx(-0.5, abs=0.001)


def test_activation_formulas_are_held_against_what_is_kept_for_backward(quickstart: Calibration) -> None:
    assert {one.quantity for one in quickstart.scores if one.formula == "korthikanti"} == {"saved"}
    assert {one.quantity for one in quickstart.scores if one.formula == "8-bytes"} == {"peak"}
    assert {one.quantity for one in quickstart.scores if one.formula == "megatron"} == {"peak", "saved"}


def test_the_published_constants_of_quickstart(quickstart: Calibration) -> None:
    found = measured(quickstart)
    (quantised,) = found["quantised_weights"]
    assert quantised.measured == pytest.approx(0.517, abs=0.001)
    stores = {one.group.split()[0]: one.measured for one in found["checkpoint_store"]}
    kept = {"lora,": 2.13, "qlora": 4.13}  # an fp32 residual under peft's preparation
    assert stores == pytest.approx(kept, abs=0.01)


# -- what is not compared -------------------------------------------------------------------------------------------


def test_what_is_left_out_is_counted() -> None:
    spec = cells()[0]
    t5 = resolve(model="t5-small", method="full", device="cpu", batch_size=1, seq_len=8)
    others = [
        make_record(make_spec(seed=1), outcome=Timeout(limit_seconds=1)),
        make_record(make_spec(seed=2), outcome=Invalid(reasons=["the ledger did not close"])),
        make_oom(make_spec(seed=3, device="cuda")),
        make_record(t5),
    ]
    found = calibrate([synthetic(spec), *others])
    assert found.num_rows == 1
    t5_reason = next(reason for reason in found.left_out if "'t5'" in reason)
    assert found.left_out == {"outcome timeout": 1, "outcome invalid": 1, "outcome oom": 1, t5_reason: 1}


def test_nothing_is_recorded_for_a_score_and_a_cell_without_a_recipe_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "predict", lambda *given, **words: pytest.fail("recorded"))
    rare = resolve(model="gpt2", method="full", device="cuda", batch_size=1, seq_len=8)
    found = calibrate([on_gpu(of_gpu()[0]), on_gpu(rare)])
    assert (found.num_rows, score(found, OURS, "all").num_rows) == (2, 1)
    assert score(found, "8-bytes", "all").ours_mean_absolute is None


def test_mixed_records_are_refused() -> None:
    first, _, second, *_ = cells()
    with pytest.raises(IncomparableRecords, match=r"device_name is 'Test CPU.*' in .* and 'Other'"):
        calibrate([synthetic(first), synthetic(second, environment=make_environment(device_name="Other"))])


def test_only_failed_records_say_what_is_there() -> None:
    records = [make_record(make_spec(seed=seed), outcome=Timeout(limit_seconds=1)) for seed in range(2)]
    with pytest.raises(FitError, match="nothing to calibrate on, of 2 records: 2 left out: outcome timeout"):
        calibrate(records)
    with pytest.raises(FitError, match="of 0 records: it holds none"):
        calibrate([])


def test_the_latest_attempt_of_a_cell_counts() -> None:
    spec = cells()[0]
    old = synthetic(spec, TRUE | {"gradients": 9.0}, attempt_id="old", started_at="2025-01-01T00:00:00Z")
    assert calibrate([old, synthetic(spec)]).num_rows == 1


def test_an_empty_folder_and_a_damaged_record_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=str(tmp_path)):
        api.calibrate(tmp_path)
    line = json.loads(synthetic(cells()[0]).to_json_line())
    for value in (float("nan"), -1):
        line["peak"]["allocated_bytes"] = value
        (tmp_path / "records.jsonl").write_text(json.dumps(line) + "\n")
        with pytest.raises(StoreError, match="allocated_bytes"):
            api.calibrate(tmp_path)


def test_a_peak_or_ledger_without_bytes_is_left_out() -> None:
    spec = cells()[2]
    nothing = Peak(phase="backward", step=2, allocated_bytes=0, load_allocated_bytes=0)
    found = calibrate([synthetic(cells()[0]), synthetic(spec, peak=nothing)])
    assert found.left_out == {"no peak or no ledger": 1}


def of_gpu() -> list[CellSpec]:
    """Cells whose recipes ship."""
    return [
        resolve(model=model, device="cuda", batch_size=2, seq_len=length, method="full")
        for model in ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b")
        for length in (2048, 4096)
    ]


def on_gpu(spec: CellSpec, num_overhead_bytes: int = 10**9) -> RunRecord:
    peak = synthetic(spec).peak
    seen = peak.allocated_bytes + num_overhead_bytes
    tiers = {"reserved_bytes": peak.allocated_bytes, "device_bytes": seen}
    return synthetic(spec, peak=peak.model_copy(update=tiers), instrument="cuda")


def test_a_formulas_overhead_counts_against_the_device_only() -> None:
    records = [on_gpu(spec) for spec in cells()]
    found = calibrate(records)
    answer = next(formula for formula in FORMULAS if formula.name == "gpu_poor").apply(facts_of(cells()[0]))
    one = score(calibrate(records[:1]), "gpu_poor", "all", "device")
    assert one.mean_signed == pytest.approx(answer.total_bytes / records[0].peak.device_bytes - 1)
    assert score(found, "gpu_poor", "all", "device").ours_mean_absolute is None  # without a fit no context is known
    assert any(one.title.startswith("Peak of the device") for one in calibration_document(found).tables)
    assert {one.quantity for one in calibrate([synthetic(cells()[0])]).scores} == {"peak", "saved"}


def test_a_fit_that_knows_the_device_is_scored_on_it() -> None:
    records = [on_gpu(spec) for spec in of_gpu()]
    found = calibrate(records, fit_records(records))
    ours = score(found, OURS_FITTED, "all", "device")
    assert ours.num_rows == 6
    assert score(found, "8-bytes", "all", "device").ours_mean_absolute == ours.mean_absolute


# -- on the terminal ------------------------------------------------------------------------------------------------


def test_the_verb_prints_tables_and_json(tmp_path: Path) -> None:
    writing.append(tmp_path / "records.jsonl", synthetic(cells()[0]))
    text = vramprobe("calibrate", str(tmp_path)).stdout
    assert all(f"\n{formula.name} " in text for formula in FORMULAS)
    assert "too few rows" in text
    found = json.loads(vramprobe("calibrate", str(tmp_path), "--json").stdout)
    assert Calibration.model_validate(found).num_rows == 1


def test_the_page_has_every_formula_score_and_constant(quickstart: Calibration) -> None:
    document = calibration_document(quickstart)
    peaks, *others = document.tables
    assert {row[0] for row in peaks.texts()} >= {formula.name for formula in FORMULAS if formula.predicts == "peak"}
    silent = next(row for row in peaks.texts() if row[0] == "unsloth-table")
    assert silent[1:] == ["0", *["–"] * (len(silent) - 2)]
    measured = [table for table in others if table.title.startswith("Measured ")]
    assert sum(len(table.rows) for table in measured) == len(quickstart.constants)
    assert list(document.data.rows) == [score.model_dump() for score in quickstart.scores]


def test_what_formulas_say_is_grouped_by_value() -> None:
    assert said({"a": (2, 2), "b": (4, 4), "c": (2, 2), "d": (2, 4)}) == "2: a, c; 2 to 4: d; 4: b"


def test_a_fit_is_scored_beside_recipes_alone() -> None:
    records = [on_gpu(spec) for spec in of_gpu()]
    model = fit_records(records[:4])
    found = calibrate(records, model)
    assert found.fit == model.data_fingerprint
    assert [score(found, name, "all").num_rows for name in (OURS, OURS_FITTED, OURS_FITTED_UNSEEN)] == [6, 6, 2]
    assert score(found, OURS, "all").mean_absolute == score(found, "8-bytes", "all").ours_mean_absolute
