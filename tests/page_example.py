"""The page as a test opens it: today's results around the calculator.

In: what a test wants to differ. Out: the HTML, and a Chromium to open it in.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from page_browser import CHROMIUM

from tools import page_book
from vramprobe.catalog.shipped import data_file
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.recipe import Recipe
from vramprobe.recipe.shipped import BOOK, read_book
from vramprobe.report import page as page_builder

ROOT = Path(__file__).parent.parent
MODELS = ("ernie-4.5-0.3b", "granite-4.0-micro", "glm-4-9b")
#: No network, no first-run pages, no sandbox (containers have none to give).
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _at_rank_16(recipe: Recipe) -> Recipe:
    """As tools/page_parts.py packs one that was recorded at several ranks."""
    return recipe if recipe.rules is None else dataclasses.replace(recipe, rules=recipe.rules.at_rank(16))


@cache
def example_book() -> bytes:
    """Recipes of three models that ship, the first's as those of other methods, too, and of one length alone."""
    packed = read_book(data_file(BOOK))
    names = {
        model: next(
            name
            for name in packed
            if f" {model}_lora" in name and "_grpo" not in name and not name.split()[1].startswith("1x")
        )
        for model in MODELS
    }
    recipes = {model: _at_rank_16(unpack(packed[name], name)) for model, name in names.items()}
    several, options = ((2, 512), (3, 1024), (5, 2048), (8, 8192)), {"gradient_checkpointing": True, "method": "lora"}
    rows = [(model, options, several, model) for model in MODELS]
    rows += [(MODELS[0], options, ((1, 1024), (1, 8192)), MODELS[0])]
    rows += [(MODELS[0], options | {"method": "qlora"}, several, MODELS[1])]
    rows += [(MODELS[0], {"gradient_checkpointing": False, "method": "full"}, ((2, 1024), (3, 1024)), MODELS[2])]
    made = [
        page_book.PageRecipe(model=model, options=chosen, shapes=shapes, notes=["as recorded"], recipe=recipes[source])
        for model, chosen, shapes, source in rows
    ]
    return page_book.packed_book(made, {"gradient_checkpointing": [True, False], "method": ["lora", "qlora", "full"]})


def content(**overrides: Any) -> page_builder.Content:
    """The page of a few words, for tests of the calculator."""
    plain = page_builder.Content(
        book=example_book(), chapters=[], plots=[], provenance=["nothing"], command="vramprobe report results -o out"
    )
    return dataclasses.replace(plain, **overrides)


@cache
def published() -> page_builder.Content:
    """The page of the quickstart and the claims as they are published."""
    from vramprobe.records.whole import read_whole
    from vramprobe.report.page import gather
    from vramprobe.report.publish import documents, drawings
    from vramprobe.report.publish import gather as material_of

    folder = ROOT / "results" / "cpu" / "quickstart"
    material = material_of(read_whole(folder), folder, "vramprobe report", None)
    claims = gather.read_claims(ROOT / "results" / "claims" / "claims.csv")
    shown = documents(material), drawings(material), claims
    found = gather.content_of(*shown, material.origin, "vramprobe report results -o out")
    return dataclasses.replace(found, book=example_book())


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
