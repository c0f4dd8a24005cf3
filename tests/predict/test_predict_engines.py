"""Choice of a recording: one at hand, or one that is made now; and what is said where none can be made."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA, make_spec
from predictions import some_prediction

from vramprobe import api, catalog
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import SpecError
from vramprobe.log.shapes import Shape
from vramprobe.predict import recorded
from vramprobe.predict.prediction import Prediction
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.recipe import CannotRecord, NotOneBranch, Recipe, TooLarge
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec


def test_many_are_recorded_in_order_with_reasons_until_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [make_spec(device="cuda", seq_len=length) for length in (16, 32, 64)]
    known = some_prediction()

    def one(spec: CellSpec, **words: Any) -> Prediction:
        return known if spec == specs[0] else cannot_record(spec)

    monkeypatch.setattr(recorded, "predict", one)
    stops = iter((False, False, True))
    assert recorded.predict_many(specs, lambda: next(stops)) == [
        known, "no layer of that name", "not recorded: stopped before its turn",
    ]  # fmt: skip
    assert recorded.predict_many([]) == []


def cannot_emulate(one: CellSpec, **words: Any) -> Prediction:
    raise NotEmulatable("this is macOS on arm64")


def cannot_record(one: CellSpec, **words: Any) -> Prediction:
    raise CannotRecord("no layer of that name")


def test_what_is_not_at_hand_is_recorded_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA | {"model_type": "stablelm"}))
    words = {"method": "lora", "batch_size": 1, "seq_len": 16, "num_layers": 2, "model": str(config)}
    asked: list[CellSpec] = []
    monkeypatch.setattr(recorded, "predict", lambda one, **words: [some_prediction(), asked.append(one)][0])
    assert api.predict(**words) is not None
    assert [one.model_type for one in asked] == ["stablelm"]
    monkeypatch.setattr(recorded, "predict", cannot_record)
    with pytest.raises(CannotRecord, match="no layer of that name"):
        api.predict(**words)
    monkeypatch.setattr(recorded, "predict", cannot_emulate)
    for engine in ("auto", "recipe"):
        with pytest.raises(NotEmulatable, match=r"^this is macOS on arm64$"):
            api.predict(**words, engine=engine)
    with pytest.raises(SpecError, match="engine: 'crystal ball' given; allowed: auto, recipe, measured"):
        api.predict(**words, engine="crystal ball")


@pytest.mark.parametrize(("rows", "by"), [(4096, "batch_size"), (1, "seq_len")])
def test_what_no_recording_holds_is_extended_from_smaller_shapes(
    monkeypatch: pytest.MonkeyPatch, rows: int, by: str
) -> None:
    asked: list[int] = []
    branches: list[int] = []  # values of ``by`` whose events are others than those at larger ones

    def record(spec: CellSpec, gpu: catalog.Gpu, say: Any, *, shapes: Sequence[Shape] = (), **_: Any) -> Recipe:
        asked.append(spec.batch_size * spec.seq_len)
        if spec.batch_size * spec.seq_len > 2**17:
            raise TooLarge("in forward of step 1: 224 GiB requested")
        if getattr(spec, by) in branches:
            raise NotOneBranch("the events are not those at 8 x 2048")
        shipped = shipped_recipe(recorded_as(spec), gpu)
        return shipped.recipe

    monkeypatch.setattr(recorded, "find_recipe", record)
    length = 4096 if rows > 1 else 2**20
    cell = resolve(model="smollm2-135m", method="lora", batch_size=rows, seq_len=length, device="cuda")
    found = recorded.predict(cell, gpu=catalog.find_gpu("A100-80GB-SXM"))
    assert asked == ([rows * length, 8 * length] if by == "batch_size" else [length, 1024])
    assert found.peak_allocated_bytes.value > 2**40
    assert [note for note in found.warnings if note.startswith(f"more than a recording's GPU holds: recorded at {by} ")]
    branches.append(8 if by == "batch_size" else 1024)
    notes = recorded.predict(cell, gpu=catalog.find_gpu("A100-80GB-SXM")).warnings
    fewest = "batch_size 8, 12" if by == "batch_size" else "seq_len 4,096, 6,144"
    assert [note for note in notes if note.startswith(f"more than a recording's GPU holds: recorded at {fewest}, ")]
    small = cell.model_copy(update={"batch_size": 2, "seq_len": 2**17})
    monkeypatch.setattr(recorded, "_COUNTS", {"batch_size": (2,), "seq_len": (2**17,)})
    with pytest.raises(TooLarge, match="224 GiB requested"):
        recorded.predict(small, gpu=catalog.find_gpu("A100-80GB-SXM"))
