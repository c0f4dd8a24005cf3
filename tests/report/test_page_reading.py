"""The page in headless Chromium as people read it: tables, keyboard, screen reader, any width, without scripts."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from grids import grid
from page_browser import waiting, written
from page_example import MODELS, content

from vramprobe import catalog
from vramprobe.report.page import page, page_data

EVIL = '<img src=x onerror="document.title=1">'


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
    one.tab.fill("input[data-filters=gpus-rows]", "blackwell 6000")
    assert len(one.cells("gpus-rows", 1)) == 2
    assert one.text("output[data-counts=gpus-rows]") == f"2 of {len(catalog.list_gpus())} rows"
    title = one.tab.locator("h4", has_text=re.compile("^Cells$")).get_attribute("id")
    rows = one.tab.locator(f"[aria-labelledby={title}] table")
    measured = rows.get_attribute("id")
    one.tab.fill(f"input[data-filters={measured}]", "qlora smollm2")
    names = one.cells(measured, 1)
    assert set(names) == {"smollm2-135m", "smollm2-360m"}
    assert 0 < len(names) < rows.locator("tbody tr").count()
    one.tab.fill(f"input[data-filters={measured}]", "")
    one.tab.click(f"#{measured} thead th:nth-child(5) button")
    sizes = one.cells(measured, 5)
    assert sizes.index("1 × 64") < sizes.index("1 × 128") < sizes.index("2 × 64")
    one.tab.click(f"#{measured} thead th:nth-child(8) button")
    assert one.text(f"#{measured} thead th:nth-child(8)").startswith("measured")
    shown = one.tab.locator(f"#{measured} tbody tr > :nth-child(8)")
    exact = [float(shown.nth(row).get_attribute("data-sort")) for row in range(shown.count())]
    assert exact == sorted(exact)
    assert exact[0] < exact[-1]


def test_the_command_and_the_link_are_copied(opened: Any) -> None:
    one = opened(f"#m={MODELS[1]}&b=3&s=512")
    for button, expected_text in (("#copy-command", one.text("#command")), ("#copy-link", one.url + one.fragment)):
        assert expected_text.count(MODELS[1]) == 1
        one.tab.click(button)
        waiting(one.tab.locator(button)).to_have_text("Copied")
        one.tab.fill("input[data-filters=gpus-rows]", "")
        one.tab.focus("input[data-filters=gpus-rows]")
        one.tab.keyboard.press("Control+V")
        assert one.tab.input_value("input[data-filters=gpus-rows]") == expected_text


def test_by_keyboard_alone(opened: Any) -> None:
    one = opened()
    tab = one.tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.name"))
    for name in ("search", "model", "method-lora", "batch_size", "seq_len", "gradient_checkpointing", "copy-link"):
        assert name in reached
    tab.focus("#method-lora")
    tab.keyboard.press("ArrowRight")
    assert one.fragment.startswith("#t=qlora")
    tab.focus("#gpus-rows thead button >> nth=0")
    tab.keyboard.press("Enter")
    names = one.cells("gpus-rows", 1)
    assert names.index("A10") < names.index("H100 NVL") < names.index("T4")
    assert one.fragment.startswith("#t=qlora")


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


@pytest.mark.parametrize("width", grid([360, 390, 768, 1280], 360, 1280))
def test_no_width_scrolls_sideways_and_the_answer_stays_in_sight(opened: Any, with_tables: Path, width: int) -> None:
    one = opened("#b=8", path=with_tables, viewport={"width": width, "height": 800})
    assert one.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert one.tab.locator("#bar").is_visible() == (width < 960)
    if width < 960:
        assert one.text("#bar-peak") == one.text("#peak")
        assert one.text("#bar-verdict") == "fits RTX A6000"
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
    claims = tab.locator("section.chapter", has_text="Published claims, checked")
    assert claims.locator("tbody tr").count() == 135
    assert not tab.locator("#form").is_visible()
    context.close()
    path = tmp_path / "index.html"
    path.write_text(page(content(book=b"no book")))
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(path.as_uri())
    waiting(tab.locator("#link-problems")).to_contain_text("The calculator did not start (")
    context.close()


def test_html_in_a_model_or_a_note_is_text(opened: Any, tmp_path: Path) -> None:
    entry = {"slug": EVIL, "name": f"name {EVIL}", "num_params": 1, "family": EVIL}
    known = page_data.data()
    written_data = known | {"catalog": [entry, *known["catalog"]]}
    path = written(tmp_path, content(data=written_data, predictor=EVIL, command=EVIL))
    one = opened(f"#m={quote(EVIL)}", path=path)
    one.settle()
    assert one.tab.locator("img").count() == 0
    assert one.tab.title() == "vramprobe: GPU memory of fine-tuning"
    assert EVIL in one.text("#no-prediction")
    assert EVIL in one.text("#model-hint")
    assert EVIL in one.text("#command")
    assert EVIL in "".join(one.tab.locator("#model option").all_text_contents())
