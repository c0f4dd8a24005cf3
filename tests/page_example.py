"""The page as a test opens it: today's results around the calculator.

In: what a test wants to differ. Out: the HTML, and a Chromium to open it in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from page_browser import CHROMIUM

from vramprobe.report import page as page_builder
from vramprobe.report.page import engine

ROOT = Path(__file__).parent.parent
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


@cache
def engine_script() -> str:
    """The calculator's own, translated once."""
    return engine.javascript()


def engine_data(**overrides: Any) -> dict[str, Any]:
    """Catalog, GPUs with their lowest price on demand, choices and fits, as the engine gets them."""
    return engine.data() | overrides


def content(**overrides: Any) -> page_builder.Content:
    """The page of a few words, for tests of the calculator."""
    plain = page_builder.Content(
        engine=engine_data(),
        predictor=engine.predictor(),
        chapters=[],
        plots=[],
        provenance=["nothing"],
        command="vramprobe report results -o out",
    )
    return dataclasses.replace(plain, **overrides)


@cache
def published() -> page_builder.Content:
    """The page of the quickstart and the claims as they are published."""
    from vramprobe.model.memory_model import load_fit
    from vramprobe.records.whole import read_whole
    from vramprobe.report import documents, drawings
    from vramprobe.report import gather as material_of
    from vramprobe.report.page import gather

    folder = ROOT / "results" / "cpu" / "quickstart"
    material = material_of(read_whole(folder), folder, "vramprobe report", load_fit(folder / "fit.json"))
    plain = content()
    return gather.content_of(
        documents(material),
        drawings(material),
        gather.read_claims(ROOT / "results" / "claims" / "claims.csv"),
        engine=plain.engine,
        predictor=plain.predictor,
        provenance=material.origin,
        command=plain.command,
    )


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
