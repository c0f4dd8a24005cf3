"""The page in headless Chromium: a person's way through the calculator, by mouse, keyboard and link, without errors.

That the calculator's numbers are predict's is tested in test_page_arithmetic.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_example import CHROMIUM, chromium, content, engine_data, engine_script, published
from test_page_arithmetic import gpu_fit

from vramprobe import api, catalog
from vramprobe.report.page import page
from vramprobe.units import format_bytes

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'vramprobe[test]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator alone."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(content(), engine_script()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of what is published."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(published(), engine_script()), encoding="utf-8")
    return path


class Opened:
    """A tab: what it asks of the network and what goes wrong in it are kept."""

    def __init__(self, browser: Any, path: Path, fragment: str = "", **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.tab = self.context.new_page()
        self.problems: list[str] = []
        self.tab.on("console", lambda message: self.problems.append(message.text))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("request", lambda request: self._note(request.url))
        self.url = path.as_uri()
        self.tab.goto(self.url + fragment)
        self.tab.wait_for_selector("html[data-ready]")

    def _note(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.problems.append(f"asked for {url}")

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector).strip()

    @property
    def fragment(self) -> str:
        return self.tab.evaluate("location.hash")

    def cells(self, table: str, column: int) -> list[str]:
        """The texts of a column's cells, of the rows that are shown."""
        return [
            text.strip()
            for text in self.tab.locator(f"#{table} tbody tr:not([hidden]) > :nth-child({column})").all_inner_texts()
        ]


@pytest.fixture
def opened(browser: Any, html: Path) -> Iterator[Any]:
    """Opens tabs, and fails where any of them logged an error or asked for anything."""
    tabs: list[Opened] = []

    def open_page(fragment: str = "", path: Path = html, **options: Any) -> Opened:
        tabs.append(Opened(browser, path, fragment, **options))
        return tabs[-1]

    yield open_page
    for one in tabs:
        one.context.close()
        assert one.problems == []


def waiting(locator: Any) -> Any:
    """Assertions that wait until they hold."""
    from playwright.sync_api import expect

    return expect(locator)


def asked(tab: Any, answer: str) -> Any:
    """What the engine says, past the page, of the ``spec`` and ``config`` that the form shows."""
    return tab.evaluate(
        "() => { const { options } = form.read(); "
        "const { config } = vramprobe.catalog.find(one => one.slug === options.model); "
        f"const {{ spec }} = vramprobe.resolve(options, config); return {answer}; }}"
    )


def test_a_click_through_the_calculator(opened: Any) -> None:
    one = opened()
    tab = one.tab
    assert one.fragment == ""
    tab.select_option("#model", "qwen2.5-7b")
    tab.click("label[for=method-full]")
    tab.fill("#batch_size", "2")
    tab.fill("#seq_len", "512")
    tab.uncheck("#gradient_checkpointing")
    tab.select_option("#optim", "adamw_bnb_8bit")
    tab.click("#cards-choice summary")
    tab.check("#card-B200")
    tab.uncheck("#card-RTX-4090")
    prediction = asked(tab, "vramprobe.predict(spec, config)")
    assert one.tab.get_attribute("#copy-command", "disabled") is None
    peak = prediction["peak_allocated_bytes"]
    assert one.text("#peak") == format_bytes(peak["value"])
    assert one.text("#interval") == f"{format_bytes(peak['low'])} to {format_bytes(peak['high'])}"
    assert one.tab.locator("#terms tbody tr").count() == len(prediction["terms"])
    assert [name.split("\n")[0] for name in tab.locator("#verdicts li").all_inner_texts()] == [
        "H100 SXM5 80GB", "A100 SXM4 80GB", "H200 SXM", "B200 SXM",
    ]  # fmt: skip
    judged = asked(
        tab,
        "vramprobe.gpus.map(gpu => "
        "[gpu.slug, gpu.memory_bytes && vramprobe.verdict(vramprobe.predict(spec, config), gpu)])",
    )
    for slug, verdict in judged:
        if slug in ("H100-SXM", "B200"):
            assert one.text(f"#verdicts [data-gpu={slug}] .verdict")[2:] == verdict["verdict"]
        if verdict:
            assert one.text(f"#gpus-rows [data-gpu={slug}] .verdict")[2:] == verdict["verdict"]
    assert {verdict["verdict"] for _, verdict in judged if verdict} == {"fits", "tight", "does not fit"}
    assert "1.00 GiB set aside for the CUDA context" in one.text("#basis")
    assert one.text("#command").startswith("vramprobe measure --model qwen2.5-7b --method full")
    assert tab.locator("[data-option=quant]").is_hidden()
    assert one.fragment == "#m=qwen2.5-7b&t=full&b=2&s=512&gc=0&o=adamw_bnb_8bit&g=A100-80GB-SXM,H100-SXM,H200,B200"


def test_a_shared_link_opens_the_same_configuration(opened: Any) -> None:
    first = opened()
    first.tab.select_option("#model", "gpt2")
    first.tab.fill("#seq_len", "512")
    first.tab.fill("#lora_targets", "c_attn,c_proj")
    first.tab.select_option("#quant", "int8")
    first.tab.click("#more summary")
    first.tab.fill("#lora_dropout", "0.05")
    second = opened(first.fragment)
    for selector in ("#peak", "#interval", "#command", "#verdicts .card >> nth=0"):
        assert second.text(selector) == first.text(selector)
    assert second.tab.input_value("#lora_targets") == "c_attn,c_proj"
    assert second.tab.input_value("#lora_dropout") == "0.05"
    assert second.tab.locator("#more").get_attribute("open") is not None
    second.tab.evaluate("location.hash = '#m=gpt2&b=7'")  # of this length, gpt2 has no positions
    waiting(second.tab.locator("#seq_len-error")).to_contain_text("1024 learned positions")
    waiting(second.tab.locator("#batch_size")).to_have_value("7")
    second.tab.click("nav a[href='#gpus']")  # a place in the page takes nothing from the state
    assert second.fragment == "#m=gpt2&b=7"
    assert second.tab.evaluate("document.activeElement.id") == "gpus"
    second.tab.click("#reset")
    assert second.fragment == ""


@pytest.mark.parametrize(("fragment", "words"), [
    ("#m=no-such-model&b=2", 'the model "no-such-model" of the link is not in this page'),
    ("#g=RTX-4090,RTX-1", "not in this page's catalog: RTX-1"),
    ("#zz=1", 'unknown part "zz=1"'),
    ("#m=config.json&c=%25%25", 'the part "c" of the link is damaged'),
    ("#m=%E0%A4%A", 'the part "m" of the link is damaged'),
    ("#t=loar", 'the part "t" of the link is damaged'),
    ("#ga=x", 'the part "ga" of the link is damaged'),
    ("#gc=yes", 'the part "gc" of the link is damaged'),
])  # fmt: skip
def test_a_bad_link_says_what_of_it_is_not_understood(opened: Any, fragment: str, words: str) -> None:
    one = opened(fragment)
    assert words in one.text("#link-problems")
    if "config.json" not in fragment:
        assert one.text("#peak").endswith("iB")


def test_an_error_stands_at_its_option_and_no_number_is_left(opened: Any) -> None:
    one = opened("#d=fp16&kp=peft")
    assert "mix two 16-bit formats" in one.text("#dtype-error")
    assert one.tab.get_attribute("#dtype", "aria-invalid") == "true"
    assert one.tab.get_attribute("#dtype", "aria-describedby") == "dtype-error"
    assert one.text("#peak") == "No prediction"
    assert one.tab.locator("#verdicts li").count() == 0
    one.tab.select_option("#autocast", "fp16")
    assert one.tab.locator("#dtype-error").is_hidden()
    assert one.tab.get_attribute("#dtype", "aria-invalid") is None
    assert one.text("#peak").endswith("GiB")
    one.tab.fill("#batch_size", "")
    assert one.text("#batch_size-error") == "batch_size: nothing given; must be a whole number of 1 or more"


@pytest.mark.parametrize(("fragment", "option", "words"), [
    ("#b=0", "batch_size", "batch_size: 0 given"),
    ("#s=1.5", "seq_len", "seq_len: 1.5 given"),
    ("#b=1e300", "batch_size", "more than 10^300 bytes"),
    ("#m=gpt2", "seq_len", "longer than the 1024 learned positions of gpt2"),
    ("#o=adam", "optim", "optim: adam given; allowed: adamw_torch, "),
    ("#q=none", "quant", "method qlora trains adapters on a quantised base"),
    ("#r=0", "lora_r", "lora_r: 0 given"),
    ("#ld=2", "lora_dropout", "lora_dropout must be in [0, 1), 2 given"),
    ("#lt=q proj", "lora_targets", "or module names such as"),
    ("#lt=c_attn", "lora_targets", "lora_targets c_attn: no such linear layer; this model has down_proj"),
    ("#kp=trl&ac=none", "autocast", "set autocast bf16"),
    ("#kp=trl&ldt=fp16", "lora_dtype", "lora_dtype fp16 was given"),
    ("#t=full&d=fp16&ac=fp16", "autocast", "GradScaler refuses"),
    ("#m=gpt-oss-20b&a=sdpa", "attn", "transformers has no sdpa attention"),
    ("#m=llama-4-scout", "model", "cannot be predicted by this version"),
])  # fmt: skip
def test_every_refusal_stands_at_the_option_that_mends_it(opened: Any, fragment: str, option: str, words: str) -> None:
    one = opened(fragment)
    shown = one.tab.locator(".error:not([hidden])")
    assert shown.count() == 1
    assert shown.get_attribute("id") == f"{option}-error"
    assert shown.is_visible()
    assert words in shown.inner_text()
    assert one.tab.locator("#form-problems").is_hidden()
    assert one.text("#peak") == "No prediction"
    assert one.text("#command") == ""


def test_what_the_engine_refuses_is_told_in_its_words(opened: Any) -> None:
    one = opened("#m=llama-4-scout")
    assert one.text("#no-prediction").startswith("model type 'llama4_text' cannot be predicted by this version")
    assert set(one.cells("gpus-rows", 2)) == {"–", "memory not known"}


def test_a_pasted_config_is_predicted_and_travels_in_the_link_while_it_is_small(opened: Any) -> None:
    one = opened()
    tab = one.tab
    tab.select_option("#model", "config.json")
    assert "Paste the model's config.json" in one.text("#config-error")
    tab.fill("#config", '{"model_type": "llama", ')
    assert "not valid JSON" in one.text("#config-error")
    tab.fill("#config", "[1]")
    assert "no config.json" in one.text("#config-error")
    tab.fill("#config", '{"hidden_size": 4096}')
    assert "must name its model_type" in one.text("#config-error")
    config = catalog.find_model("llama-3.1-8b").config | {"name": "π 𝜋"}
    tab.fill("#config", json.dumps({key: value for key, value in config.items() if key != "intermediate_size"}))
    assert "intermediate_size" in one.text("#config-error")
    assert one.text("#peak") == "No prediction"
    tab.fill("#config", json.dumps(config, indent=2, ensure_ascii=False))
    assert one.tab.locator("#config-error").is_hidden()
    assert one.text("#peak") == opened().text("#peak")
    assert one.text("#command").startswith("vramprobe measure --model config.json --method qlora")
    assert one.text("#command-hint") == "Save the pasted config as config.json first."
    other = opened(one.fragment)
    assert json.loads(other.tab.input_value("#config")) == config
    assert other.text("#peak") == one.text("#peak")
    tab.fill("#config", json.dumps(config | {"more": "x" * 5000}))
    assert "too large for a link" in one.text("#link-hint")
    assert "c=" not in one.fragment
    assert one.text("#peak") == other.text("#peak")


def test_what_a_fit_knows_beside_tensors_is_part_of_the_bar_and_of_the_verdict(opened: Any, tmp_path: Path) -> None:
    model = gpu_fit().model_copy(update={"constant_bytes": {"qlora": 1024**3}})
    fits = [{"gpu": "RTX-4090", "model": model.model_dump(mode="json")}]
    path = tmp_path / "index.html"
    path.write_text(page(content(engine=engine_data(fits=fits)), engine_script()))
    one = opened("#g=H100-SXM,RTX-4090", path=path)
    predicted = api.predict(
        model="llama-3.1-8b", method="qlora", batch_size=1, seq_len=2048, gradient_checkpointing=True,
        engine="formula", fit=model, gpu="RTX-4090",
    )  # fmt: skip
    allocated, reserved, device = (
        predicted.peak_allocated_bytes.value, predicted.reserved_bytes.value, predicted.device_bytes.value
    )  # fmt: skip
    assert one.text("#peak") == format_bytes(allocated)
    rows = one.tab.locator("#terms tbody tr").all_inner_texts()
    assert [row.split("\n")[0] for row in rows][-3:] == ["constant", "allocator", "context"]
    assert [row.replace("\n", "\t").split("\t")[-2] for row in rows][-3:] == [
        "1.00 GiB", format_bytes(reserved - allocated), format_bytes(device - reserved),
    ]  # fmt: skip
    assert one.text("#basis") == "predicted device memory"
    assert f"{format_bytes(reserved)} reserved (" in one.text("#where")
    assert f"{format_bytes(device)} device (" in one.text("#where")
    judged = one.text("#verdicts [data-gpu=RTX-4090] .reason")
    assert judged.startswith(f"{format_bytes(device)} (up to {format_bytes(predicted.device_bytes.high)}) of")
    alone = api.predict(
        model="llama-3.1-8b", method="qlora", batch_size=1, seq_len=2048, gradient_checkpointing=True, engine="formula"
    ).peak_allocated_bytes  # the other card was not measured
    other = one.text("#verdicts [data-gpu=H100-SXM] .reason")
    assert other.startswith(f"{format_bytes(alone.value)} (up to {format_bytes(alone.high)}) of")


def test_no_gpu_is_a_choice_too(opened: Any) -> None:
    one = opened("#g=")
    assert one.text("#verdicts") == "No GPU is chosen."
    assert one.text("#cards-count") == "none chosen"
    one.tab.fill("#batch_size", "2")
    assert one.fragment == "#b=2&g="


def test_the_largest_counts_are_taken_over_by_a_click(opened: Any) -> None:
    one = opened()
    button = one.tab.locator("[data-gpu=RTX-4090] .largest button").first
    button.wait_for()
    largest = button.inner_text()
    button.click()
    assert one.tab.input_value("#batch_size") == largest.replace(",", "")
    assert "fits" in one.text("#verdicts [data-gpu=RTX-4090] .verdict")


def test_the_command_and_the_link_are_copied(opened: Any) -> None:
    one = opened("#m=gpt2&b=3&s=512")
    for button, expected_text in (("#copy-command", one.text("#command")), ("#copy-link", one.url + one.fragment)):
        assert expected_text.count("gpt2") == 1
        one.tab.click(button)
        waiting(one.tab.locator(button)).to_have_text("Copied")
        one.tab.fill("input[data-filters=gpus-rows]", "")
        one.tab.focus("input[data-filters=gpus-rows]")
        one.tab.keyboard.press("Control+V")
        assert one.tab.input_value("input[data-filters=gpus-rows]") == expected_text


def test_every_card_gets_the_largest_counts_that_the_engine_finds_for_it(opened: Any) -> None:
    one = opened("#m=qwen2.5-7b&t=lora")
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    found = asked(one.tab, "vramprobe.gpus.map(gpu => gpu.memory_bytes && vramprobe.largest(spec, config, gpu))")
    for column, name in ((4, "batch_size"), (5, "seq_len")):
        told = [f"{one_card[name]:,}" if one_card and one_card[name] else "–" for one_card in found]
        assert one.cells("gpus-rows", column) == told


def test_tables_sort_by_value_and_filter_by_words(opened: Any, with_tables: Path) -> None:
    one = opened(path=with_tables)
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    heading = "#gpus-rows thead th:nth-child(6)"
    one.tab.click(f"{heading} button")
    sizes = one.cells("gpus-rows", 6)
    known = [float(size) for size in sizes if size != "–"]
    assert known == sorted(known)
    assert sizes[-1] == "–"  # unknown is last, both ways
    assert one.tab.get_attribute(heading, "aria-sort") == "ascending"
    one.tab.click(f"{heading} button")
    again = one.cells("gpus-rows", 6)
    assert [float(size) for size in again if size != "–"] == sorted(known, reverse=True)
    assert again[-1] == "–"
    one.tab.click("#gpus-rows thead th:nth-child(7) button")
    prices = [float(price) for price in one.cells("gpus-rows", 7) if price != "–"]
    assert prices == sorted(prices)
    assert prices
    one.tab.fill("input[data-filters=gpus-rows]", "blackwell RTX")
    assert len(one.cells("gpus-rows", 1)) == 2
    assert one.text("output[data-counts=gpus-rows]") == "2 of 33 rows"
    rows = one.tab.locator("section.sheet", has_text="Measured peak memory: in the fit").locator("table")
    measured = rows.get_attribute("id")
    one.tab.fill(f"input[data-filters={measured}]", "qlora smollm2")
    names = one.cells(measured, 1)
    assert set(names) == {"smollm2-135m"}
    assert 0 < len(names) < rows.locator("tbody tr").count()
    one.tab.fill(f"input[data-filters={measured}]", "")
    one.tab.click(f"#{measured} thead th:nth-child(5) button")
    sizes = one.cells(measured, 5)
    one.tab.click(f"#{measured} thead th:nth-child(12) button")
    assert one.text(f"#{measured} thead th:nth-child(12)").startswith("error, %")
    errors = one.tab.locator(f"#{measured} tbody tr > :nth-child(12)")
    exact = [float(errors.nth(row).get_attribute("data-sort")) for row in range(errors.count())]
    assert exact == sorted(exact)
    assert min(exact) < 0 < max(exact)
    assert sizes.index("1 × 64") < sizes.index("1 × 128") < sizes.index("2 × 64")


def test_by_keyboard_alone(opened: Any) -> None:
    one = opened()
    tab = one.tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.name"))
    for name in ("model", "method-qlora", "batch_size", "seq_len", "gradient_checkpointing", "optim", "copy-link"):
        assert name in reached
    tab.focus("#method-qlora")
    tab.keyboard.press("ArrowLeft")
    assert one.fragment.startswith("#t=lora")
    tab.focus("#gpus-rows thead button >> nth=0")
    tab.keyboard.press("Enter")
    names = one.cells("gpus-rows", 1)
    assert names.index("A10") < names.index("H100 NVL") < names.index("T4")
    assert one.fragment.startswith("#t=lora")


def test_a_screen_reader_is_told_the_answer_and_every_control_has_a_name(opened: Any) -> None:
    one = opened()
    one.tab.fill("#batch_size", "3")
    waiting(one.tab.locator("#spoken")).to_contain_text("GeForce RTX 4090: ")
    assert one.tab.text_content("#spoken").startswith("Predicted peak ")
    assert one.tab.get_attribute("#chart svg", "aria-label").startswith("Stacked bar: weights")
    nameless = one.tab.eval_on_selector_all(
        "input, select, textarea, button",
        "all => all.filter(one => one.tagName === 'BUTTON' ? !one.textContent.trim() : !one.labels.length)"
        ".map(one => one.id)",
    )
    assert nameless == []


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_no_width_scrolls_sideways_and_the_answer_stays_in_sight(opened: Any, with_tables: Path, width: int) -> None:
    one = opened("#t=full&b=8", path=with_tables, viewport={"width": width, "height": 800})
    assert one.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert one.tab.locator("#bar").is_visible() == (width < 960)
    if width < 960:
        assert one.text("#bar-peak") == one.text("#peak")
        assert one.text("#bar-verdict") == "fits H200 SXM"
        one.tab.fill("#batch_size", "999")
        assert one.text("#bar-verdict") == "does not fit the 4 chosen"


def test_nothing_moves_while_the_page_opens(browser: Any, with_tables: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(
        "window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(one => { moved += one.value; }))"
        ".observe({ type: 'layout-shift', buffered: true });"
    )
    tab = context.new_page()
    tab.goto(with_tables.as_uri())
    tab.wait_for_selector("#gpus-rows[data-done]")
    tab.wait_for_timeout(300)  # shifts are reported after the frame
    assert tab.evaluate("moved") < 0.02
    context.close()


def test_without_scripts_the_tables_are_there_and_a_broken_engine_says_so(
    browser: Any, with_tables: Path, tmp_path: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(with_tables.as_uri())
    assert tab.locator("noscript p").is_visible()
    claims = tab.locator("section.sheet", has_text="Published claims, checked")
    assert claims.locator("tbody tr").count() == 135
    assert not tab.locator("#form").is_visible()
    context.close()
    path = tmp_path / "index.html"
    path.write_text(page(content(), "throw new Error('no engine');"))
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert "The calculator did not start (vramprobe is not defined)" in tab.inner_text("#link-problems")
    context.close()


def test_html_in_a_model_or_a_note_is_text(opened: Any, tmp_path: Path) -> None:
    llama = catalog.find_model("llama-3.1-8b").config
    entry = {"slug": EVIL, "name": f"name {EVIL}", "num_params": 1, "config": llama}
    model = gpu_fit().model_copy(update={"device": "cpu", "device_name": EVIL})
    fits = [{"gpu": "RTX-4090", "model": model.model_copy(update={"device": "cuda"}).model_dump(mode="json")}]
    fits[0]["model"]["ranges"]["choices"]["optim"] = [EVIL]
    path = tmp_path / "index.html"
    data = engine_data(catalog=[entry], fits=fits)
    path.write_text(page(content(engine=data, predictor=EVIL, command=EVIL), engine_script()))
    one = opened(path=path)
    one.tab.wait_for_selector("#gpus-rows[data-done]")
    assert one.tab.locator("img").count() == 0
    assert one.tab.title() == "vramprobe: GPU memory of fine-tuning"
    assert EVIL in one.text("#notes")
    assert EVIL in one.text("#model-hint")
    assert EVIL in one.tab.text_content("#model option >> nth=0")


def test_amounts_are_written_as_python_writes_them(opened: Any) -> None:
    sizes = [0, 1, 1023, 1024, 1024**2 - 1, 1024**3, 24 * 1024**3, 13619882884]
    sizes += [eighths * 1024**3 // 8 for eighths in range(8, 200)] + [7 * 1024**2 * n // 64 for n in range(1, 300)]
    assert opened().tab.evaluate("sizes => sizes.map(words.bytes)", sizes) == [format_bytes(size) for size in sizes]
