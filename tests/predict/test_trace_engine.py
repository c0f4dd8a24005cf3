"""The trace engine: predictions by simulation, where there is no arithmetic and wherever they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA, make_spec
from grids import exhaustive
from processes import children

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.cli.display_plan import plan_in_words
from vramprobe.errors import SpecError
from vramprobe.model.fit import fit
from vramprobe.model.memory_model import Spread
from vramprobe.model.replayed import replayed
from vramprobe.predict import recorded
from vramprobe.predict import trace_engine as engine
from vramprobe.predict.grid import predict_grid
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.book import CannotRecord
from vramprobe.records import store
from vramprobe.simulate.run import simulate
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import card_named
from vramprobe.sweep.plan import make_plan
from vramprobe.sweep.resume import ResumedCell

RESULTS = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"
#: A family that the formula engine has no arithmetic for.
UNKNOWN = TINY_LLAMA | {"model_type": "stablelm"}


def spec_of(architecture: dict[str, Any], **options: Any) -> CellSpec:
    return CellSpec(**(make_spec(device="cuda", **options).model_dump() | {"architecture": architecture}))


def resumed_cells(*specs: CellSpec, action: str = "run") -> list[ResumedCell]:
    return [ResumedCell(spec=spec, action=action, reason="new", record=None, num_ok=0) for spec in specs]


def test_a_prediction_is_the_simulated_record_with_an_interval() -> None:
    spec = spec_of(UNKNOWN)
    record, found = simulate(spec).record, engine.predict(spec)
    assert found.engine == "trace"
    assert found.peak_allocated_bytes.value == record.peak.allocated_bytes
    assert found.peak_allocated_bytes.low < found.peak_allocated_bytes.value < found.peak_allocated_bytes.high
    assert (found.peak_phase, found.cell_id) == (record.peak.phase, spec.cell_id)
    assert sum(found.terms.values()) + found.constant_bytes == found.peak_allocated_bytes.value
    assert {"weights", "saved_activations", "temporaries"} <= set(found.terms)
    assert verdict(found, card_named("RTX-4090")).verdict == "fits"


def test_both_engines_agree_where_both_can() -> None:
    """Within 1 % of what is asked for: the arithmetic knows few kernels' scratch."""
    spec = spec_of(TINY_LLAMA | {"hidden_size": 512, "intermediate_size": 1536}, batch_size=4, seq_len=512)
    traced = engine.predict(spec)
    asked_bytes = sum(traced.terms.values())
    assert asked_bytes == pytest.approx(predict(spec).peak_allocated_bytes.value, rel=0.01)
    assert predict(spec).terms["workspaces"] == 2 * 8_519_680
    assert 0 <= traced.constant_bytes < 0.05 * asked_bytes  # what the allocator did not split off


def test_what_the_card_and_the_weights_are_does_not_matter() -> None:
    plain = engine.predict(spec_of(UNKNOWN))
    limited = engine.predict(spec_of(UNKNOWN, limit_vram="24GiB"))
    assert limited.peak_allocated_bytes == plain.peak_allocated_bytes


@exhaustive
def test_many_come_in_order_with_reasons_and_stop_when_told() -> None:
    nonsense = spec_of(TINY_LLAMA | {"model_type": "no-such-model"})
    specs = [spec_of(UNKNOWN), nonsense, spec_of(UNKNOWN, seq_len=32), spec_of(UNKNOWN, seq_len=64)]
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    first, second, third, last = engine.predict_many(specs, stop)
    assert isinstance(first, Prediction)
    assert isinstance(second, str)
    assert "no-such-model" in second
    assert isinstance(third, Prediction)
    assert third.cell_id == specs[2].cell_id
    assert last == "not simulated: stopped before its turn"
    assert engine.predict_many([]) == []
    assert children("spawn_main") == []


def test_a_plan_asks_for_what_has_no_arithmetic_only() -> None:
    llama, stablelm, refused = spec_of(TINY_LLAMA), spec_of(UNKNOWN), spec_of(UNKNOWN, seq_len=64)
    asked: list[CellSpec] = []

    def trace(specs: Sequence[CellSpec], stop: Callable[[], bool]) -> list[Prediction | str]:
        asked.extend(specs)
        return [predict(llama).model_copy(update={"engine": "trace"}), "it exploded"]

    plan = make_plan(resumed_cells(llama, stablelm, refused), card=card_named("RTX-4090"), trace=trace)
    rows = {row.spec.fingerprint: row for row in plan.rows}
    assert asked == [stablelm, refused]
    assert rows[llama.fingerprint].prediction.engine == "formula"
    assert rows[stablelm.fingerprint].verdict == "fits"
    assert (rows[refused.fingerprint].verdict, rows[refused.fingerprint].note) == ("unknown", "it exploded")
    assert "(1 cell by simulation)" in plan_in_words(plan)


def test_what_is_kept_is_not_simulated() -> None:
    make_plan(resumed_cells(spec_of(UNKNOWN), action="kept"), card=None, trace=lambda specs, stop: pytest.fail("asked"))


WORDS = {"method": "lora", "batch_size": 1, "seq_len": 16, "num_layers": 2}


def test_the_engine_is_chosen_by_the_user_or_by_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without arithmetic is recorded, and simulated where nothing can be recorded."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(UNKNOWN))
    words = WORDS | {"model": str(config)}
    known = predict(spec_of(TINY_LLAMA)).model_copy(update={"engine": "recipe"})
    monkeypatch.setattr(recorded, "predict", lambda one, **words: known)
    assert api.predict(**words).engine == "recipe"
    monkeypatch.setattr(recorded, "predict", cannot_record)
    found = api.predict(**words)
    assert found.engine == "trace"
    assert "simulated, as no recipe could be recorded here: no layer of that name" in found.warnings
    with pytest.raises(CannotRecord, match="no layer of that name"):
        api.predict(**words, engine="recipe")
    assert api.predict(**words, device="cpu").engine == "trace"
    with pytest.raises(UnsupportedArchitecture, match="stablelm"):
        api.predict(**words, engine="formula")
    config.write_text(json.dumps(TINY_LLAMA))
    assert api.predict(**words).engine == "formula"
    assert api.predict(**words, engine="trace").engine == "trace"
    with pytest.raises(SpecError, match="engine: 'crystal ball' given; allowed: auto, formula, recipe, trace"):
        api.predict(**words, engine="crystal ball")


def cannot_record(one: CellSpec, **words: Any) -> Prediction:
    raise CannotRecord("no layer of that name")


def test_the_kernels_are_those_of_the_gpu() -> None:
    words = WORDS | {"model": "smollm2-135m", "engine": "trace", "seq_len": 64}
    a100, h100 = (api.predict(**words, gpu=gpu).peak_allocated_bytes.value for gpu in ("A100-80GB", "H100-SXM"))
    assert h100 - a100 > 2 * 23 * 2**20  # cuBLAS workspaces of 32 MiB, not 8.125


def test_a_fit_adds_what_it_knows_beyond_the_allocator() -> None:
    gap = {"device": "cuda", "device_over_reserved_bytes": Spread(value=500, low=400, high=600)}
    model = fit(store.read(RESULTS).records).model_copy(update=gap)
    spec = spec_of(UNKNOWN)
    record = simulate(spec).record
    record = record.model_copy(update={"peak": record.peak.model_copy(update={"reserved_bytes": 1_000_000})})
    found = engine.prediction_of(record, spec, model)
    assert found.reserved_bytes.value == 1_000_000
    assert found.device_bytes.value == 1_000_500
    assert engine.prediction_of(record, spec).device_bytes is None


@pytest.mark.parametrize(
    ("options", "holds_scores"),
    [
        ({"model": "llama-3.2-1b", "method": "qlora", "fused_linear_cross_entropy": True}, True),  # heads share keys
        (
            {
                "model": "llama-3.2-1b",
                "method": "qlora",
                "fused_linear_cross_entropy": True,
                "seq_len": 2048,
                "gradient_checkpointing": True,
                "dtype": "fp16",
                "autocast": "fp16",
            },
            True,
        ),
        ({"model": "pythia-160m", "method": "full", "dtype": "fp32", "autocast": "fp16"}, False),
        ({"model": "pythia-160m", "method": "full"}, True),  # in bf16
    ],
)
def test_arithmetic_knows_a_card_without_flash_attention_as_the_simulation_does(
    options: dict[str, Any], holds_scores: bool
) -> None:
    words = {"batch_size": 1, "seq_len": 1024, "num_layers": 4, "gpu": "T4"} | options
    counted, simulated, elsewhere = (
        api.predict(**words | more).peak_allocated_bytes.value
        for more in ({"engine": "formula"}, {"engine": "trace"}, {"engine": "formula", "gpu": "A10"})
    )
    assert (counted > 1.1 * elsewhere) == holds_scores
    assert counted == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize(
    ("heads", "head_size", "gpu", "holds_scores"),
    [
        (2, 200, "L40S", True),  # 8.9: flash has no backward, and grouped heads leave math alone
        (2, 224, "RTX-5090", True),  # 12.0
        (2, 200, "A100-80GB", False),
        (2, 192, "L40S", False),
        (2, 256, "L40S", False),
        (8, 200, "L40S", False),  # the memory-efficient kernel takes heads that are not grouped
    ],
)
def test_arithmetic_knows_the_heads_that_flash_attention_does_not_train_as_the_simulation_does(
    heads: int, head_size: int, gpu: str, holds_scores: bool
) -> None:
    own = {"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": head_size}
    spec = spec_of(TINY_LLAMA | own, batch_size=2, seq_len=2048, method="lora")
    card = card_named(gpu).gpu
    counted, elsewhere = predict(spec, gpu=card), predict(spec, gpu=card_named("A100-80GB").gpu)
    simulated = simulate(spec, gpu=card).record
    assert replayed(spec, card).allocated_bytes == pytest.approx(simulated.peak.allocated_bytes, rel=0.01)
    if holds_scores:
        assert counted.peak_allocated_bytes.value == pytest.approx(simulated.peak.allocated_bytes, rel=0.01)
    assert (counted.peak_allocated_bytes.value > 1.3 * elsewhere.peak_allocated_bytes.value) == holds_scores
    said = " ".join(counted.warnings)
    assert (f"no backward of flash attention for heads of {head_size}" in said) == (
        gpu != "A100-80GB" and head_size in (200, 224)
    )


def test_every_question_and_the_plan_know_a_card_without_flash_attention() -> None:
    words = {
        "model": "llama-3.2-1b",
        "method": "qlora",
        "device": "cuda",
        "gradient_checkpointing": True,
        "fused_linear_cross_entropy": True,
    }
    long, card = words | {"batch_size": 1, "seq_len": 8192}, card_named("T4")
    on_t4 = api.predict(gpu="T4", fit="none", **long)
    assert verdict(on_t4, card).verdict == "does not fit"
    assert verdict(api.predict(**long), card).verdict == "fits"  # what it was taken for
    batch = api.max_batch_size(gpu="T4", seq_len=1024, **words).fits
    assert batch.prediction == api.predict(gpu="T4", batch_size=batch.value, seq_len=1024, **words)
    assert api.max_seq_len(gpu="T4", batch_size=1, **words).fits.value < 8192
    asked = {name: value for name, value in long.items() if name != "model"} | {"attn": "sdpa"}
    assert api.largest_model(gpu="V100-32GB", **asked).fits.value != api.largest_model(gpu="A10", **asked).fits.value
    for sharding in ("zero3", "fsdp"):
        ranks = {name: value for name, value in long.items() if name != "fused_linear_cross_entropy"}
        needed = api.min_gpus(gpu="T4", sharding=sharding, **ranks).verdict.needed_bytes
        assert needed.value > api.min_gpus(gpu="A10", sharding=sharding, **ranks).verdict.needed_bytes.value
    grid = predict_grid(api.cell(**long), [1], [8192], gpu=card.gpu)
    assert grid.peak_allocated_bytes.value.item() == on_t4.peak_allocated_bytes.value
    [row] = make_plan([ResumedCell(api.cell(**long), "run", "new")], card=card).rows
    assert (row.verdict, row.prediction.peak_allocated_bytes) == ("certain oom", on_t4.peak_allocated_bytes)
    with pytest.raises(SpecError, match="Ampere"):
        api.predict(gpu="T4", **(long | {"attn": "flash_attention_2"}))


def test_a_card_without_flash_attention_is_noted_where_arithmetic_answers() -> None:
    words = {"model": "llama-3.2-1b", "method": "qlora", "batch_size": 1, "seq_len": 8192, "device": "cuda"}
    said = {gpu: " ".join(api.predict(engine="formula", gpu=gpu, **words).warnings) for gpu in ("T4", "A10", "MI300X")}
    assert "T4 has no flash attention" in said["T4"]
    assert "flash" not in said["A10"] + said["MI300X"]
    eager = api.predict(engine="formula", gpu="T4", attn="eager", **words)
    assert not any("flash" in warning for warning in eager.warnings)
