"""The page's growth and allocator in Chromium, held to the byte against Python's replay of the same recipes."""

import base64
import json
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import exhaustive

from tools import page_book, page_parts
from vramprobe.allocator.config import AllocatorConfig
from vramprobe.catalog.shipped import data_file
from vramprobe.log.log import CAUSES, Log, PhaseMark
from vramprobe.log.reserved import num_retries
from vramprobe.log.shapes import RULES, Shape, ShapeRules
from vramprobe.predict.recipe_replay import replay_recipe
from vramprobe.recipe.recipe import Recipe, recipe_of
from vramprobe.recipe.shipped import BOOK
from vramprobe.report.page import page_data, part
from vramprobe.units import MIB

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "vramprobe" / "allocator" / "plain"
SHAPES: tuple[Shape, ...] = ((2, 512), (4, 2048), (7, 1000), (1, 8192))

#: In the page: what a recipe of the book says at each question's shape and settings.
ASK = """async ([bookText, allocatorText, questions]) => {
  const book = await openBook(bookText), allocator = await openAllocator(allocatorText);
  return JSON.stringify({digest: book.digest, entries: book.entries, said: questions.map(([number, shape, options]) => {
    const found = replayed(book, allocator, book.recipe(number), shape, options);
    const {retries, phases, peak, allocated, reserved, load, causes} = found;
    return {retries, phases: phases.map((one) => [one.allocated, one.reserved, one.end]), peak: [peak.name, peak.step],
            tops: [allocated, reserved, load],
            causes: Object.fromEntries(Object.entries(causes()).filter(([, size]) => size)),
            blocks: book.recipe(number).log.blocks.reduce((sum, block) => (31 * sum + block) % 1000003, 0)};
  })});
}"""


@pytest.fixture(scope="module")
def ask(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Asks a packed book questions, each of (number of the entry, shape, settings)."""
    path = tmp_path_factory.mktemp("growth") / "growth.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><script>{part("growth.js")}</script>')
    tab = browser.new_page()
    tab.goto(path.as_uri())
    allocator = base64.b64encode(page_data.ALLOCATOR.read_bytes()).decode()

    def asked(packed: bytes, questions: list[tuple[int, Shape, dict[str, Any]]]) -> Any:
        return json.loads(tab.evaluate(ASK, [base64.b64encode(packed).decode(), allocator, questions]))

    yield asked
    tab.close()


def expected(recipe: Recipe, shape: Shape, config: AllocatorConfig | None = None) -> dict[str, Any]:
    """Python's own answer."""
    replay = replay_recipe(recipe, config or AllocatorConfig(), shape, stack={})
    peak, log = replay.peak, replay.log
    # The page numbers where the cache is emptied, too.
    blocks = np.where(log.size_bytes == 0, np.cumsum(log.size_bytes >= 0), log.blocks).tolist()
    return {
        "retries": 0,
        "phases": [
            [one.allocated_peak_bytes, one.reserved_peak_bytes, one.allocated_end_bytes] for one in replay.phases
        ],
        "peak": [peak.phase, peak.step],
        "tops": [peak.allocated_bytes, peak.reserved_bytes, peak.load_allocated_bytes],
        "causes": replay.at_peak,
        "blocks": reduce(lambda total, block: (31 * total + block) % 1_000_003, blocks, 0),
    }


def test_what_ships_is_of_todays_sources() -> None:
    sources = page_book.digest_of(*(PLAIN / name for name in ("blocks.c", "blocks.h", "replay.c")))
    assert sources.encode() in page_data.ALLOCATOR.read_bytes(), "rebuild it: python tools/page_parts.py"
    index = page_data.index_of(page_data.BOOK.read_bytes())
    assert index["digest"] == page_book.digest_of(data_file(BOOK)), "pack it: python tools/page_parts.py"


def in_order(entries: list[page_book.PageRecipe]) -> list[page_book.PageRecipe]:
    return sorted(entries, key=page_book.order)


def test_recipes_of_the_book(ask: Any) -> None:
    entries = in_order(list(page_parts.entries()))
    packed = page_data.BOOK.read_bytes()
    index = page_data.index_of(packed)
    assert len(entries) == len(index["entries"])
    firsts = {structure: number for number, (*_, structure) in enumerate(index["entries"])}
    sample = sorted(firsts.values())[:: max(len(firsts) // 8, 1)]
    holds(ask, packed, entries, sample)


@exhaustive
@pytest.mark.timeout(1800)
def test_every_second_recipe_of_the_book(ask: Any) -> None:
    """Half of them, in the order of models: all 800 and more take longer than a test may."""
    entries = in_order(list(page_parts.entries()))
    holds(ask, page_data.BOOK.read_bytes(), entries, range(0, len(entries), 2))


def shapes_for(entry: page_book.PageRecipe) -> Sequence[Shape]:
    """Those of any length; of a recipe of one length, which says nothing of others, its own."""
    return SHAPES if len({length for _, length in entry.shapes}) > 1 else entry.shapes


def holds(ask: Any, packed: bytes, entries: list[page_book.PageRecipe], numbers: Any) -> None:
    questions = [(number, shape, {}) for number in numbers for shape in shapes_for(entries[number])]
    for (number, shape, _), said in zip(questions, ask(packed, questions)["said"], strict=True):
        assert said == expected(entries[number].recipe, shape), (entries[number].model, shape)


def made_up(seed: int) -> Recipe:
    """A recipe of random events on two streams; blocks of one size at one shape follow several rules."""
    chosen = np.random.default_rng(seed)
    sizes, blocks, marks, alive, made = [], [], [], [], 0
    names = [("load", None), *((name, step) for step in (1, 2) for name in ("forward", "backward", "zero_grad"))]
    choices = [512, 100_000, 700_000, 3 * MIB, 3 * MIB + 5, 30 * MIB]
    size_of, stream_of, cause_of = {}, {}, {}
    for name, step in names:
        start = len(sizes)
        for _ in range(80):
            if alive and chosen.random() < 0.48:
                block = alive.pop(chosen.integers(len(alive)))
                sizes.append(-size_of[block])
            else:
                made += 1
                block = made
                size_of[block], stream_of[block] = int(chosen.choice(choices)), int(chosen.random() < 0.2)
                cause_of[block] = int(chosen.integers(len(CAUSES)))
                alive.append(block)
                sizes.append(size_of[block])
            blocks.append(block)
        marks.append(PhaseMark(name, step, None, range(start, len(sizes))))
    each = np.array(blocks)
    log = Log(
        size_bytes=np.array(sizes),
        blocks=each,
        causes=np.array([cause_of[block] for block in blocks], dtype=np.int8),
        marks=tuple(marks),
        streams=np.array([stream_of[block] for block in blocks], dtype=np.int8),
    )
    parts = recipe_of([log], None, [2], [{}], [{}])
    (growths,) = (parts["growths"],)
    sorted_blocks = _blocks_of(log, growths)
    rules = tuple({name: _factor(chosen, name) for name in RULES[number]} for number in range(len(RULES)))
    rule_of_block = chosen.integers(-1, len(rules), made + 1)
    fallback_of_block = chosen.integers(1, 40, made + 1) * 100_001
    return Recipe(
        marks=tuple(marks),
        rules=ShapeRules(
            rule_of_block[sorted_blocks].astype(np.int32), rules, fallback_of_block[sorted_blocks].astype(np.int64)
        ),
        depths=(2,),
        stack={},
        **parts,
    )


def _factor(chosen: np.random.Generator, name: str) -> Fraction:
    return Fraction(int(chosen.integers(1, 4000)), 3 if name in ("tokens", "scores") else 1)


def _blocks_of(log: Log, growths: Any) -> np.ndarray:
    """The block of each event in a recipe's order, in which consecutive frees stand by age."""
    found: list[int] = []
    for mark in log.marks:
        own = [(int(log.size_bytes[at]) < 0, int(log.blocks[at])) for at in mark.events]
        run: list[int] = []
        for is_free, block in own:
            if is_free:
                run.append(block)
                continue
            found += [*sorted(run), block]
            run = []
        found += sorted(run)
    assert len(found) == sum(len(growth.codes) for growth in growths)
    return np.array(found)


@pytest.mark.parametrize("seed", range(4))
def test_random_events_on_two_streams(ask: Any, seed: int) -> None:
    recipe = made_up(seed)
    packed = page_book.packed_book([entry_of(recipe)], {})
    shapes = [(2, 100), (3, 777), (1, 64)]
    said = ask(packed, [(0, shape, {}) for shape in shapes])["said"]
    assert said == [expected(recipe, shape) for shape in shapes]
    larger = AllocatorConfig(large_segment_bytes=64 * MIB, max_non_split_rounding_bytes=64 * MIB)
    (said,) = ask(packed, [(0, (2, 100), {"largeSegmentBytes": 64 * MIB})])["said"]
    assert said == expected(recipe, (2, 100), larger)


def test_a_full_card_takes_the_cache_back(ask: Any) -> None:
    recipe = made_up(18)
    packed, shape = page_book.packed_book([entry_of(recipe)], {}), (2, 100)
    log, most = recipe.deep(shape).log, max(reserved for _, reserved, _ in expected(recipe, shape)["phases"])
    limits = [most * thousandth // 1000 for thousandth in range(700, 1010, 10)]
    said = ask(packed, [(0, shape, {"limitBytes": limit, "empties": False}) for limit in limits])["said"]
    counts = [num_retries(log, AllocatorConfig(), limit) for limit in limits]
    assert [one["retries"] if one["retries"] >= 0 else None for one in said] == counts
    assert None in counts
    assert 0 in counts
    assert any(counts)


def test_recipes_of_one_structure_share_it() -> None:
    recipe = made_up(1)
    assert recipe.rules is not None
    doubled = tuple({name: 2 * factor for name, factor in rule.items()} for rule in recipe.rules.coefficients)
    other = Recipe(
        **{name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
        | {"rules": ShapeRules(recipe.rules.rule_of, doubled, recipe.rules.fallback)}
    )
    packed = page_book.packed_book([entry_of(recipe), entry_of(other, "other")], {})
    assert page_data.index_of(packed)["counts"][1] == 1
    assert len(packed) < 1.2 * len(page_book.packed_book([entry_of(recipe)], {}))


def entry_of(recipe: Recipe, model: str = "one") -> page_book.PageRecipe:
    return page_book.PageRecipe(model=model, options={}, shapes=((2, 100),), notes=(), recipe=recipe)
