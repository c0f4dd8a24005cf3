"""What a step launches, extended: linear in depth, checked on another depth, the same as the whole model's."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import require_emulation
from grids import exhaustive

from vramprobe import api, catalog
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.launches import launches_of
from vramprobe.recipe.recipe import unpack
from vramprobe.recipe.recorder import record_packed
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of

WIDTH, TOKENS, VOCABULARY = 64, 128, 1000


def row(name: str, what: str, calls: int, flops: int, shapes: str, phase: str = "forward") -> dict[str, Any]:
    own = {"calls": calls, "flops": calls * flops, "read": calls * 10, "written": calls * 5, "launches": calls}
    return {"phase": phase, "what": what, "name": name, "shapes": shapes, "dtype": "bfloat16", "line": None} | own


def count_at(depth: int, *, bent: int = 0) -> dict[str, Any]:
    """Two products of each layer, from two lines, the head's, and an optimizer that sees all weights at once."""
    product = f"[{TOKENS}, {WIDTH}], [{WIDTH}, {WIDTH}] -> [{TOKENS}, {WIDTH}]"
    rows = [
        row("aten::embedding", "other", 1, 0, f"[{VOCABULARY}, {WIDTH}], [1, {TOKENS}] -> [1, {TOKENS}, {WIDTH}]"),
        row("aten::mm", "product", depth, 2 * TOKENS * WIDTH * WIDTH, product),
        row("aten::mm", "product", depth + bent, 2 * TOKENS * WIDTH * WIDTH, product) | {"line": ["a.py", 2, "f"]},
        row("aten::_fused_adamw_", "other", 1, 0, "x".join("w" * depth), "optimizer"),
    ]
    launched = sum(one["launches"] for one in rows)
    return {
        "step": 2, "num_launches": launched + depth, "num_claimed": launched, "unclaimed": {"before x": depth},
        "moved": [[1, 8, depth, 100 * depth]], "rows": rows, "order": [],
    }  # fmt: skip


def test_the_whole_models_count_follows_from_three_depths() -> None:
    made = launches_of([count_at(depth) for depth in (2, 3, 4, 5)], 30)
    assert made == launches_of([count_at(32)], 0)
    rows = {one["name"]: one for one in made["rows"]}
    assert rows["aten::mm"]["calls"] == 64
    assert rows["aten::mm"]["flops"] == 64 * 2 * TOKENS * WIDTH * WIDTH
    assert made["moved"] == [[1, 8, 32, 3200]]
    assert made["num_launches"] - made["num_claimed"] == 32
    time = time_of(count_of(made), catalog.find_gpu("A100-80GB-SXM"))
    assert time.tokens == TOKENS


@pytest.mark.parametrize("bent", [2, 3])
def test_depths_that_are_not_on_a_line_have_no_count(bent: int) -> None:
    """The third depth or the one that is held against them has a call more."""
    counts = [count_at(depth, bent=1 if number == bent else 0) for number, depth in enumerate((2, 3, 4, 5))]
    assert launches_of(counts, 30) is None


@exhaustive
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_recorded_count_is_the_whole_runs(method: str) -> None:
    """All but the launches of the fused optimizer, which takes so many tensors at a time."""
    require_emulation()
    spec = recorded_as(
        api.cell(
            model="smollm2-135m", method=method, device="cuda", batch_size=2, seq_len=512, gradient_checkpointing=True
        )
    )
    gpu = catalog.find_gpu("A100-80GB-SXM")
    made, seen = (unpack(record_packed(spec, gpu, lambda words: None, whole=whole), "x") for whole in (False, True))
    assert made.checked is not None
    assert seen.checked is None
    for one in (made.launches, seen.launches):
        for each in one["rows"]:
            if each["phase"] == "optimizer":
                del each["launches"]
        one["rows"].sort(key=str)
    assert made.launches["rows"] == seen.launches["rows"]
    assert seen.launches["num_launches"] - made.launches["num_launches"] in range(8)
