"""The form in headless Chromium: links, what is wrong with them, the list of models and its search."""

from typing import Any

from page_browser import waiting
from page_example import MODELS

from vramprobe import catalog


def test_a_shared_link_opens_the_same_configuration(opened: Any) -> None:
    first = opened()
    first.tab.fill("#search", "glm-4-9b")
    first.tab.fill("#seq_len", "512")
    second = opened(first.fragment)
    for selector in ("#peak", "#interval", "#command", "#verdicts .card >> nth=0"):
        assert second.text(selector) == first.text(selector)
    assert second.tab.input_value("#model") == first.tab.input_value("#model") == "glm-4-9b"
    second.tab.evaluate(f"location.hash = '#m={MODELS[1]}&b=7'")
    waiting(second.tab.locator("#batch_size")).to_have_value("7")
    assert second.tab.input_value("#model") == MODELS[1]
    second.tab.click("nav a[href='#gpus']")  # a place in the page takes nothing from the state
    second.tab.wait_for_function(f"location.hash === '#m={MODELS[1]}&b=7'")
    assert second.tab.evaluate("scrollY") > 0
    second.tab.click("#reset")
    assert second.fragment == ""


BAD_LINKS = [
    ("#m=no-such-model&b=3", 'the part "m" of the link is damaged'),
    ("#g=RTX-4090,RTX-1", "not in this page's catalog: RTX-1"),
    ("#zz=1", 'unknown part "zz=1"; known: m, '),
    ("#m=%E0%A4%A", 'the part "m" of the link is damaged'),
    ("#t=loar", 'the part "t" of the link is damaged'),
    ("#b=x", 'the part "b" of the link is damaged'),
    ("#s=0", 'the part "s" of the link is damaged'),
    ("#gc=yes", 'the part "gc" of the link is damaged'),
]


def test_a_bad_link_says_what_of_it_is_not_understood(opened: Any) -> None:
    """The first as the page opens, the others as they are pasted into its tab."""
    one = opened(BAD_LINKS[0][0])
    for fragment, words in BAD_LINKS:
        one.tab.evaluate("fragment => { location.hash = fragment; }", fragment)
        waiting(one.tab.locator("#link-problems")).to_contain_text(words)
        assert one.tab.inner_text("#peak").endswith("iB"), fragment


def test_a_count_that_is_none_is_marked_and_no_number_is_left(opened: Any) -> None:
    one = opened()
    for text, said in (("", "nothing"), ("0", "0"), ("1.5", "1.5")):
        one.tab.fill("#batch_size", text)
        assert one.text("#form-problems") == f"Batch: {said} given; must be a whole number of 1 or more"
        assert one.tab.get_attribute("#batch_size", "aria-invalid") == ""
        assert one.text("#peak") == "No prediction"
        assert one.text("#command") == ""
        assert one.tab.locator("#copy-command").is_disabled()
        assert set(one.cells("gpus-rows", 2)) == {"–", "memory not known"}
    one.tab.fill("#batch_size", "2")
    assert one.tab.locator("#form-problems").is_hidden()
    assert one.text("#peak").endswith("GiB")


def test_every_model_is_in_the_list_and_found_by_its_names(opened: Any) -> None:
    one = opened()
    listed = one.tab.eval_on_selector_all("#model option", "all => all.map((option) => option.value)")
    assert sorted(listed) == sorted(entry.name for entry in catalog.list_models())
    assert sorted(listed[: len(MODELS)]) == sorted(MODELS)  # what is recorded is first
    entry = catalog.find_model("llama-3.1-8b")
    one.tab.fill("#search", entry.hf_id.upper())
    assert one.tab.input_value("#model") == entry.name
    assert one.text("#model-hint") == f"{entry.hf_id}, {entry.n_params:,} parameters"
    one.tab.fill("#search", "no such model")
    assert one.text("#found") == f"0 of {len(listed)} models"
    one.tab.fill("#search", "")
    assert one.text("#found") == f"{len(listed)} of {len(listed)} models"


def test_the_form_offers_what_the_books_recipes_differ_in(opened: Any) -> None:
    one = opened()
    assert one.tab.locator("#options legend").all_inner_texts() == ["Method"]
    assert sorted(one.tab.locator("#options .segments label").all_inner_texts()) == ["full", "lora", "qlora"]
    assert one.text("label[for=gradient_checkpointing]") == "Gradient checkpointing"
    assert one.tab.is_checked("#gradient_checkpointing")
    one.tab.uncheck("#gradient_checkpointing")
    one.tab.click("label[for=method-qlora]")
    assert one.fragment == "#gc=false&t=qlora"
