"""Which engine answers: arithmetic, or a recording; and what arithmetic knows of cards without flash attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation
from factories import TINY_LLAMA, make_spec, on_ranks
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.cli.display_plan import plan_in_words
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import SpecError
from vramprobe.predict import questions, recorded
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.shares import near
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.recorder import CannotRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import card_named
from vramprobe.sweep.plan import make_plan
from vramprobe.sweep.resume import ResumedCell
from vramprobe.terms.replayed import replayed

#: A family that the formula engine has no arithmetic for.
UNKNOWN = TINY_LLAMA | {"model_type": "stablelm"}


def spec_of(architecture: dict[str, Any], **options: Any) -> CellSpec:
    return CellSpec(**(make_spec(device="cuda", **options).model_dump() | {"architecture": architecture}))


def resumed_cells(*specs: CellSpec, action: str = "run") -> list[ResumedCell]:
    return [ResumedCell(spec=spec, action=action, reason="new", record=None, num_ok=0) for spec in specs]


def test_many_are_recorded_in_order_with_reasons_until_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec_of(UNKNOWN, seq_len=length) for length in (16, 32, 64)]
    known = predict(spec_of(TINY_LLAMA))

    def one(spec: CellSpec, **words: Any) -> Prediction:
        return known if spec == specs[0] else cannot_record(spec)

    monkeypatch.setattr(recorded, "predict", one)
    stops = iter((False, False, True))
    assert recorded.predict_many(specs, lambda: next(stops)) == [
        known, "no layer of that name", "not recorded: stopped before its turn",
    ]  # fmt: skip
    assert recorded.predict_many([]) == []


def test_a_plan_asks_for_what_has_no_arithmetic_only() -> None:
    llama, stablelm, refused = spec_of(TINY_LLAMA), spec_of(UNKNOWN), spec_of(UNKNOWN, seq_len=64)
    asked: list[CellSpec] = []

    def record(specs: Sequence[CellSpec], stop: Callable[[], bool]) -> list[Prediction | str]:
        asked.extend(specs)
        return [predict(llama).model_copy(update={"engine": "recipe"}), "it exploded"]

    plan = make_plan(resumed_cells(llama, stablelm, refused), card=card_named("RTX-4090"), recording=record)
    rows = {row.spec.fingerprint: row for row in plan.rows}
    assert asked == [stablelm, refused]
    assert rows[llama.fingerprint].prediction.engine == "formula"
    assert rows[stablelm.fingerprint].verdict == "fits"
    assert (rows[refused.fingerprint].verdict, rows[refused.fingerprint].note) == ("unknown", "it exploded")
    assert "(1 cell from recordings)" in plan_in_words(plan)


def test_what_is_kept_is_not_recorded() -> None:
    kept = resumed_cells(spec_of(UNKNOWN), action="kept")
    make_plan(kept, card=None, recording=lambda specs, stop: pytest.fail("asked"))


WORDS = {"method": "lora", "batch_size": 1, "seq_len": 16, "num_layers": 2}


def test_the_engine_is_chosen_by_the_user_or_by_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without arithmetic is recorded; where nothing can be recorded, one line says both reasons."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(UNKNOWN))
    words = WORDS | {"model": str(config)}
    known = predict(spec_of(TINY_LLAMA)).model_copy(update={"engine": "recipe"})
    with monkeypatch.context() as patched:
        patched.setattr(recorded, "predict", lambda one, **words: known)
        assert api.predict(**words).engine == "recipe"
        patched.setattr(recorded, "predict", cannot_record)
        with pytest.raises(CannotRecord, match="no layer of that name"):
            api.predict(**words)
        patched.setattr(recorded, "predict", cannot_emulate)
        with pytest.raises(NotEmulatable, match="this is macOS"):
            api.predict(**words, engine="recipe")
        with pytest.raises(UnsupportedArchitecture, match=r"^no recipe: this is macOS.*no arithmetic: .*'stablelm'"):
            api.predict(**words)
    for more, said in (({"device": "cpu"}, "device cpu was given"), ({"gpu": "MI300X"}, "is made by AMD")):
        with pytest.raises(UnsupportedArchitecture, match=rf"^no recipe: .*{said}"):
            api.predict(**words, **more)
    with pytest.raises(UnsupportedArchitecture, match=r"^model type 'stablelm'"):
        api.predict(**words, engine="formula")
    config.write_text(json.dumps(TINY_LLAMA))
    assert api.predict(**words).engine == "formula"
    with pytest.raises(SpecError, match="engine: 'crystal ball' given; allowed: auto, formula, recipe"):
        api.predict(**words, engine="crystal ball")


def cannot_emulate(one: CellSpec, **words: Any) -> Prediction:
    raise NotEmulatable("this is macOS on arm64")


def cannot_record(one: CellSpec, **words: Any) -> Prediction:
    raise CannotRecord("no layer of that name")


#: (a cell, whether it holds the scores whole on a card without flash attention)
WITHOUT_FLASH: list[tuple[dict[str, Any], bool]] = [
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
]


@pytest.mark.parametrize(("options", "holds_scores"), WITHOUT_FLASH)
def test_arithmetic_knows_a_card_without_flash_attention(options: dict[str, Any], holds_scores: bool) -> None:
    words = {"batch_size": 1, "seq_len": 1024, "num_layers": 4, "gpu": "T4", "engine": "formula"} | options
    counted, elsewhere = (api.predict(**words | more).peak_allocated_bytes.value for more in ({}, {"gpu": "A10"}))
    assert (counted > 1.1 * elsewhere) == holds_scores


@exhaustive
@pytest.mark.parametrize("options", [options for options, _ in WITHOUT_FLASH])
def test_a_card_without_flash_attention_is_counted_as_recorded(options: dict[str, Any]) -> None:
    require_emulation()
    words = {"batch_size": 1, "seq_len": 1024, "num_layers": 4, "gpu": "T4"} | options
    counted, found = (
        api.predict(engine=engine, **words).peak_allocated_bytes.value for engine in ("formula", "recipe")
    )
    assert counted == pytest.approx(found, rel=0.03)


HEADS = [
    (2, 200, "L40S", True),  # 8.9: flash has no backward, and grouped heads leave math alone
    (2, 224, "RTX-5090", True),  # 12.0
    (2, 200, "A100-80GB", False),
    (2, 192, "L40S", False),
    (2, 256, "L40S", False),
    (8, 200, "L40S", False),  # the memory-efficient kernel takes heads that are not grouped
]


@pytest.mark.parametrize(("heads", "head_size", "gpu", "holds_scores"), HEADS)
def test_arithmetic_knows_the_heads_that_flash_attention_does_not_train(
    heads: int, head_size: int, gpu: str, holds_scores: bool
) -> None:
    spec = of_heads(heads, head_size)
    counted, elsewhere = (predict(spec, gpu=card_named(name).gpu) for name in (gpu, "A100-80GB"))
    assert (counted.peak_allocated_bytes.value > 1.3 * elsewhere.peak_allocated_bytes.value) == holds_scores
    said = " ".join(counted.warnings)
    assert (f"no backward of flash attention for heads of {head_size}" in said) == (
        gpu != "A100-80GB" and head_size in (200, 224)
    )


@exhaustive
@pytest.mark.parametrize(("heads", "head_size", "gpu", "holds_scores"), HEADS)
def test_heads_that_flash_attention_does_not_train_are_counted_as_recorded(
    heads: int, head_size: int, gpu: str, holds_scores: bool
) -> None:
    require_emulation()
    spec, card = of_heads(heads, head_size), card_named(gpu).gpu
    found = recorded.predict(spec, gpu=card).peak_allocated_bytes.value
    assert replayed(spec, card).allocated_bytes == pytest.approx(found, rel=0.01)
    if holds_scores:
        assert predict(spec, gpu=card).peak_allocated_bytes.value == pytest.approx(found, rel=0.01)


def of_heads(heads: int, head_size: int) -> CellSpec:
    own = {"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": head_size}
    return spec_of(TINY_LLAMA | own, batch_size=2, seq_len=2048, method="lora")


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
    assert batch.prediction == questions.predict(gpu="T4", batch_size=batch.value, seq_len=1024, **words)
    assert api.max_seq_len(gpu="T4", batch_size=1, **words).fits.value < 8192
    asked = {name: value for name, value in long.items() if name != "model"} | {"attn": "sdpa"}
    assert api.largest_model(gpu="V100-32GB", **asked).fits.value != api.largest_model(gpu="A10", **asked).fits.value
    for sharding in ("zero3", "fsdp"):
        ranks = {name: value for name, value in long.items() if name != "fused_linear_cross_entropy"}
        rank = on_ranks(api.cell(**ranks), 8, sharding)
        old, new = (near(rank, find_gpu(name)).peak_allocated_bytes.value for name in ("T4", "A10"))
        assert old > new
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
