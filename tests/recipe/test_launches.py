"""Launches of a step, extended: linear in depth, checked on another depth, the same as the whole model's."""

from typing import Any

import pytest
from emulated import recorded_recipe
from grids import exhaustive

from vramprobe import api, catalog
from vramprobe.log.shapes import Shape
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.launches import launch_rules, launches_at, launches_of
from vramprobe.recipe.recipe import at_shape
from vramprobe.recipe.recording import adds_apart
from vramprobe.speed.counted import time_of
from vramprobe.speed.raw_count import count_of

WIDTH, TOKENS, VOCABULARY = 64, 128, 1000
CELL = {"model": "smollm2-135m", "device": "cuda", "gradient_checkpointing": True}
A100 = catalog.find_gpu("A100-80GB-SXM")


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
    time = time_of(count_of(made), A100)
    assert time.tokens == TOKENS


@pytest.mark.parametrize("bent", [2, 3])
def test_depths_that_are_not_on_a_line_have_no_count(bent: int) -> None:
    """The third depth or the one that is held against them has a call more."""
    counts = [count_at(depth, bent=1 if number == bent else 0) for number, depth in enumerate((2, 3, 4, 5))]
    assert launches_of(counts, 30) is None


def test_an_optimizers_launches_lie_between_those_that_were_counted() -> None:
    """It takes so many weights at a time: 11, 13, 14 and 16 of depths 2 to 5 make 56 of depth 32."""
    counts = [count_at(depth) for depth in (2, 3, 4, 5)]
    for count, number in zip(counts, (11, 13, 14, 16), strict=True):
        count["rows"][-1]["launches"] = number
        for name in ("num_launches", "num_claimed"):
            count[name] += number - 1
    made = launches_of(counts, 30)
    assert made["rows"][-1]["launches"] == 11 + 3 * 30 // 2
    assert made["num_claimed"] == sum(one["launches"] for one in made["rows"])
    assert made["num_launches"] - made["num_claimed"] == 32


#: The last has as many tokens as the second product has rows, so that both are one row.
SHAPES = ((5, 2048), (2, 512), (3, 1024), (8, 8192), (1, TOKENS))


def count_of_shape(depth: int, rows: int, length: int) -> dict[str, Any]:
    """Count in each layer a product of the batch, one of fixed rows, and attention; an addition of tokens and one of
    positions, an optimizer over all weights. Calls of the same shapes are one row.
    """
    tokens = rows * length
    product, other = (f"[{size}, {WIDTH}], [{WIDTH}, {WIDTH}] -> [{size}, {WIDTH}]" for size in (tokens, TOKENS))
    attention = f"[{rows}, 4, {length}, 16], [{rows}, 4, {length}, 16] -> [{rows}, 4, {length}, 16]"
    given = [
        row("aten::embedding", "other", 1, 0, f"[{VOCABULARY}, 64], [{rows}, {length}] -> [{rows}, {length}, 64]"),
        row("aten::mm", "product", depth, 2 * tokens * WIDTH * WIDTH, product) | {"width": WIDTH},
        row("aten::mm", "product", depth, 2 * TOKENS * WIDTH * WIDTH, other) | {"width": WIDTH},
        row("aten::_flash_attention", "attention", depth, 4 * rows * length * length * WIDTH, attention),
        row("aten::add", "other", 2 * depth, 0, f"[{tokens}]") | {"read": 2 * depth * tokens},
        row("aten::add", "other", depth, 0, f"[{length}]") | {"read": depth * length, "line": ["a.py", 3, "f"]},
        row("aten::_fused_adamw_", "other", 1, 0, "x".join("w" * depth), "optimizer"),
    ]  # fmt: skip
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    order = []
    for one in given:
        known = merged.setdefault(key := (one["name"], one["shapes"]), one)
        if known is not one:
            known |= {name: known[name] + one[name] for name in ("calls", "flops", "read", "written", "launches")}
        order += [[list(merged).index(key), 0, 0]] * one["calls"]
    return count_at(depth) | {"rows": list(merged.values()), "order": order}


def rules_of(own: Shape, changed: dict[Shape, dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    """(what a step launches at ``own``, its rules); ``changed``: counts in place of those of some shapes."""
    counts = [count_of_shape(depth, *own) for depth in (2, 3, 4, 5)]
    shapes = [own, *(shape for shape in SHAPES if shape != own)]
    made = launches_of(counts, 30)
    return made, launch_rules(made, counts, {one: count_of_shape(3, *one) for one in shapes} | changed, 30)


def test_launches_of_another_shape_are_those_that_were_counted_there() -> None:
    made, rules = rules_of(SHAPES[0], {})
    for shape in [*SHAPES[:4], (4, 640), (7, 3000)]:
        assert launches_at(made, rules, shape) == launches_of([count_of_shape(32, *shape)], 0), shape


@pytest.mark.parametrize("other", ["rows", "calls", "moved", "merged"])
def test_launches_that_do_not_follow_from_the_shape_have_no_rule(other: str) -> None:
    """A row more at one shape or calls in another order, other bytes between ranks, or two products that are one row at
    the cell's own shape."""
    count = count_of_shape(3, *SHAPES[2])
    if other == "rows":
        count["rows"].append(row("aten::mul", "other", 1, 0, ""))
        count["order"].append([len(count["rows"]) - 1, 0, 0])
    if other == "calls":
        count["order"].reverse()
    if other == "moved":
        count["moved"] = [[1, 8, 3, 301]]
    _, rules = rules_of(SHAPES[-1 if other == "merged" else 0], {SHAPES[2]: count})
    assert rules is None


def test_a_step_that_adds_all_its_gradients_out_of_place_is_not_kept() -> None:
    """One of 22 recordings that were kept so, of a process whose modes torch saw."""
    rows = [row("aten::add", "other", 35, 0, "", "backward"), row("aten::add_", "other", 2, 0, "", "optimizer")]
    assert adds_apart({"rows": rows})
    assert not adds_apart({"rows": [*rows, row("aten::add_", "other", 29, 0, "", "backward")]})
    assert not adds_apart({"rows": rows[1:]})


RANKED = (*((*shape, 16) for shape in SHAPES[:4]), (*SHAPES[0], 64), (*SHAPES[0], 32))


@exhaustive
@pytest.mark.parametrize(
    ("shapes", "asked"),
    [
        (SHAPES[:4], (4, 1280)),
        (((1, 4672), (1, 4096), (1, 6144), (1, 8192)), (1, 5120)),
        (RANKED, (4, 1280, 8)),
        (RANKED, (3, 2100, 128)),
    ],
)
def test_a_recorded_count_at_another_shape_is_the_one_recorded_there(shapes: tuple[Shape, ...], asked: Shape) -> None:
    """Peaks, too."""
    spec = at_shape(recorded_as(api.cell(**CELL, method="lora", batch_size=1, seq_len=8)), shapes[0])
    made = recorded_recipe(spec, A100, shapes=shapes[1:])
    seen = recorded_recipe(at_shape(spec, asked), A100)
    assert made.deep(asked).phases == seen.deep().phases
    found, expected = made.launches_at(asked), seen.launches
    assert sorted(map(str, found.pop("rows"))) == sorted(map(str, expected.pop("rows")))
    assert found == expected


@exhaustive
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_recorded_count_is_the_whole_runs(method: str) -> None:
    """All but the launches of the fused optimizer, which takes so many tensors at a time."""
    spec = recorded_as(api.cell(**CELL, method=method, batch_size=2, seq_len=512))
    made, seen = (recorded_recipe(spec, A100, whole=whole) for whole in (False, True))
    assert made.checked is not None
    assert seen.checked is None
    for one in (made.launches, seen.launches):
        for each in one["rows"]:
            if each["phase"] == "optimizer":
                del each["launches"]
        one["rows"].sort(key=str)
    assert made.launches["rows"] == seen.launches["rows"]
    assert seen.launches["num_launches"] - made.launches["num_launches"] in range(8)
