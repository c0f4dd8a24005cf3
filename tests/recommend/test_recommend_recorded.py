"""A model without a recipe: which card, by a few recordings of each method and the launches that they counted."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from vramprobe import api
from vramprobe.catalog import find_gpu
from vramprobe.predict import recorded as recordings
from vramprobe.recipe import book
from vramprobe.recipe.recipe import CannotRecord, Recipe
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.recommend import recorded
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of

WORDS = {"model": "llama-3.2-1b", "seq_len": 2048, "tokens": "10M", "global_batch": 16}


def launches(num_micro_steps: int, rows: int = 1) -> dict[str, Any]:
    """A step of so many equal micro-steps of so many rows, and one optimizer's."""

    def row(phase: str, what: str, name: str, calls: int, flops: int, num_bytes: int, shapes: str) -> dict[str, Any]:
        times_larger = 1 if phase == "optimizer" else rows
        flops, num_bytes = flops * times_larger, num_bytes * times_larger
        figures = {"calls": calls, "flops": calls * flops, "read": calls * num_bytes, "written": 0, "launches": calls}
        of = {"phase": phase, "what": what, "name": name, "shapes": shapes, "dtype": "bfloat16", "width": 0}
        return of | {"is_beside": False} | figures

    product = f"[{32 * rows}, 4096], [4096, 4096] -> [{32 * rows}, 4096]"
    embedded = f"[151552, 4096], [{rows}, 2048] -> [{rows}, 2048, 4096]"
    times = num_micro_steps
    rows = [
        row("forward", "other", "aten::embedding", times, 0, 10_000, embedded),
        row("forward", "product", "aten::mm", 40 * times, 2 * 32 * 4096 * 4096, 100_000, product),
        row("backward", "product", "aten::mm", 80 * times, 2 * 32 * 4096 * 4096, 100_000, product),
        row("optimizer", "other", "aten::_fused_adamw_", 1, 0, 500_000_000, ""),
    ]
    claimed = sum(one["launches"] for one in rows)
    return {
        "step": 2, "num_launches": claimed + 7 * times, "num_claimed": claimed, "unclaimed": {}, "moved": [],
        "rows": rows,
    }  # fmt: skip


def shipped_as(spec: CellSpec) -> Recipe:
    """The recipe that ships, in place of one that is recorded of this shape."""
    one = resolve(model="llama-3.2-1b", method="lora", device="cuda", batch_size=spec.batch_size, seq_len=2048)
    found = shipped_recipe(book.recorded_as(one), find_gpu("A100-80GB-SXM"))
    return replace(found.recipe, launches=launches(1, spec.batch_size), launch_rules=None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[CellSpec, str, bool]]]:
    """Cells that are recorded, on which card, and if of several shapes; QLoRA cannot be."""
    found: list[tuple[CellSpec, str, bool]] = []

    def find_recipe(spec: CellSpec, gpu: Any, say: Any, *, shapes: Any = ()) -> Recipe:
        found.append((spec, gpu.short_name, bool(shapes)))
        say(f"recording {spec.cell_id}")
        if spec.method == "qlora":
            raise CannotRecord("no packed experts")
        return shipped_as(spec)

    monkeypatch.setattr(recorded, "shipped_recipe", lambda *words: None)
    monkeypatch.setattr(recorded.at_hand, "kept_for", lambda *words: None)
    monkeypatch.setattr(book, "find_recipe", find_recipe)
    monkeypatch.setattr(recordings, "find_recipe", find_recipe)
    return found


def test_each_method_is_recorded_a_few_times_and_answers_for_every_card(
    asked: list[tuple[CellSpec, str, bool]],
) -> None:
    """With checkpointing and without, one row and several; a method that cannot be recorded is named."""
    said: list[str] = []
    found = api.recommend(say=said.append, gpus=("A100-80GB-SXM", "RTX-4090", "B200"), max_gpus=1, **WORDS)
    assert {card for _, card, _ in asked} == {"A100-80GB-SXM"}
    recordings = {(one.method, one.gradient_checkpointing, several) for one, _, several in asked}
    assert len(recordings) == 12
    assert len(said) == len(asked)
    assert found.by_method["qlora"] == "not recorded: no packed experts"
    assert found.by_method["lora"] is None
    assert {one.gpu for one in found.options} == {"A100-80GB-SXM", "RTX-4090", "B200"}


def times_as_many(row: dict[str, Any], times: float) -> dict[str, Any]:
    names = ("calls", "flops", "read", "written", "launches")
    return row | {name: round(row[name] * times) for name in names}


@pytest.mark.parametrize(("batch_size", "accum"), [(1, 16), (8, 2), (16, 1)])
def test_the_time_is_of_all_micro_steps(asked: list[tuple[CellSpec, str, bool]], batch_size: int, accum: int) -> None:
    """One is recorded, a second composed, which adds gradients; the others are like the second's half."""
    own = {"batch_size": batch_size, "gradient_checkpointing": True, "gpus": ("B200",), "max_gpus": 1}
    (option,) = api.recommend(method="lora", **own, **WORDS).options
    ((one, card, _),) = asked
    assert (one.batch_size, one.grad_accum, card, option.setting.grad_accum) == (batch_size, 1, "A100-80GB-SXM", accum)
    counted = shipped_as(one).launches_at(accumulates=accum > 1)
    assert counted is not None
    times = accum / min(accum, 2)
    rows = [row if row["phase"] == "optimizer" else times_as_many(row, times) for row in counted["rows"]]
    whole = count_of(counted | {"rows": rows, "num_claimed": 0, "num_launches": 0})
    unclaimed = (counted["num_launches"] - counted["num_claimed"]) * times
    seconds = time_of(replace(whole, num_launches=round(unclaimed)), find_gpu("B200")).seconds
    assert option.setting.estimate.seconds == pytest.approx(seconds)
    assert option.setting.estimate.tokens_per_second.value == pytest.approx(16 * 2048 / option.setting.estimate.seconds)
    assert option.hours.value == pytest.approx(10_000_000 / (16 * 2048) * option.setting.estimate.seconds / 3600)


def test_a_card_before_ampere_is_recorded_by_itself_in_fp16(asked: list[tuple[CellSpec, str, bool]]) -> None:
    found = api.recommend(method="lora", batch_size=1, gradient_checkpointing=True, gpus=("T4",), max_gpus=1, **WORDS)
    ((one, card, _),) = asked
    assert (card, one.dtype, one.autocast) == ("T4", "fp16", "fp16")
    assert found.options[0].gpu == "T4"


def test_what_cannot_be_recorded_at_all_is_the_error(asked: list[tuple[CellSpec, str, bool]]) -> None:
    with pytest.raises(CannotRecord, match="no packed experts"):
        api.recommend(method="qlora", gpus=("B200",), **WORDS)
