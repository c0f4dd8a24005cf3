"""The page as a test opens it: today's results around a stand-in for the engine (tests/data/page).

In: what a test wants to differ. Out: the HTML, and a Chromium to open it in. The stand-in's memory is made up.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

from vramprobe import catalog, spec, store
from vramprobe.report import page as page_builder

ROOT = Path(__file__).parent.parent
ENGINE_SCRIPT = (Path(__file__).parent / "data" / "page" / "calculator_stub.js").read_text(encoding="utf-8")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: No network, no first-run pages, no sandbox (containers have none to give).
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
CHOICES = {"method": spec.Method, "quant": spec.Quant, "optim": spec.Optim, "dtype": spec.Dtype,
           "autocast": spec.Autocast, "attn": spec.Attention, "kbit_prep": spec.KbitPrep,
           "lora_dtype": spec.Dtype}  # fmt: skip


def engine_data(**overrides: Any) -> dict[str, Any]:
    """Catalog, GPUs with their lowest price on demand, and choices, as the engine gets them."""
    models = [
        {"slug": one.name, "name": one.hf_id, "num_params": one.n_params, "config": one.config}
        for one in catalog.list_models()
    ]
    data = {
        "catalog": models,
        "gpus": [_gpu(gpu) for gpu in catalog.list_gpus()],
        "choices": {name: list(get_args(kind)) for name, kind in CHOICES.items()}
        | {"lora_targets": ["all-linear", "q_v"]},
    }
    return data | overrides


def content(**overrides: Any) -> page_builder.Content:
    """The page of a few words, for tests of the calculator."""
    plain = page_builder.Content(
        engine=engine_data(), predictor="made up, by the tests' stand-in for the engine", tables=[], plots=[],
        provenance=["nothing"], command="vramprobe report results -o out",
    )  # fmt: skip
    return dataclasses.replace(plain, **overrides)


@cache
def published() -> page_builder.Content:
    """The page of the quickstart and the claims as they are published."""
    from vramprobe.memory_model import load_fit
    from vramprobe.report import plot, rows
    from vramprobe.report.page import gather

    folder = ROOT / "results" / "cpu" / "quickstart"
    records = store.read(folder).records
    cells = rows.cells_of(records, load_fit(folder / "fit.json"))
    plain = content()
    return gather.content_of(
        records, cells, gather.read_claims(ROOT / "results" / "claims" / "claims.csv"),
        plot.predicted_against_measured(cells), engine=plain.engine, predictor=plain.predictor, command=plain.command,
    )  # fmt: skip


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


def _gpu(gpu: catalog.Gpu) -> dict[str, Any]:
    offers = [price for price in catalog.list_prices(gpu.short_name) if price.terms == "on-demand"]
    lowest = min(offers, key=lambda price: price.usd_per_gpu_hour, default=None)
    price = lowest and {"usd_per_hour": lowest.usd_per_gpu_hour, "source": f"{lowest.provider}, {lowest.date}"}
    return {"slug": gpu.short_name, "name": gpu.name, "memory_bytes": gpu.total_bytes, "price": price}
