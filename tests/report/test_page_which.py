"""*Which GPU?* as a person uses it, in headless Chromium: what it shows is what `vramprobe recommend` says.

That the engine's figures are the command's is tested in test_page_recommend.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from grids import exhaustive
from page_browser import asked, waiting
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli.verbs import app
from vramprobe.recommend import words
from vramprobe.recommend.answer import Recommendation

LINK = "#m=llama-3-8b&t=lora&mg=4&dl=12&bu=40"
DONE = "#which-rows[data-done]"


@pytest.fixture(scope="module")
def found() -> Recommendation:
    made = api.recommend(
        model="llama-3-8b", method="lora", seq_len=2048, tokens="50M", max_gpus=4, deadline="12h", budget=40
    )
    assert isinstance(made, Recommendation)
    return made


def test_it_shows_the_options_and_answers_of_the_command(opened: Any, found: Recommendation) -> None:
    one = opened(LINK, replays=False)
    one.tab.wait_for_selector(DONE)
    for column, text in (
        (1, words.cards_of),
        (3, words.setting_of),
        (4, words.rate_of),
        (5, words.time_of),
        (6, words.cost_of),
        (9, words.price_of),
    ):
        assert one.cells("which-rows", column) == [text(option) or "–" for option in found.options]
    said = one.tab.locator("#answers li").all_inner_texts()
    assert len(said) == len(found.answers) == 3
    for text, answer in zip(said, found.answers, strict=True):
        option = answer.option
        assert option is not None
        assert text.startswith(f"{answer.question}\n{words.cards_of(option)}, lora {words.setting_of(option)}: ")
        assert f"{words.time_of(option)} · {words.cost_of(option)} · {words.price_of(option)}" in text
        assert text.endswith(answer.doubt)
    assert one.text("#which-rows tbody tr:nth-child(3)").startswith(words.cards_of(found.options[2]))
    command = one.text("#which-command").split()
    assert " ".join(command) == (
        "vramprobe recommend --model llama-3-8b --method lora --seq-len 2048 --tokens 50M --deadline 12h --budget 40 "
        "--max-gpus 4"
    )
    outcome = CliRunner().invoke(app, [*command[1:], "--json"])
    again = Recommendation.model_validate_json(outcome.output)
    assert [option.usd for option in again.options] == [option.usd for option in found.options]


def test_the_table_sorts_by_cost_time_and_headroom(opened: Any, found: Recommendation) -> None:
    one = opened(LINK, replays=False)
    one.tab.wait_for_selector(DONE)

    def room(option: Any) -> int:
        judged = option.setting.verdict
        return judged.usable_bytes - judged.needed_bytes.value

    for heading, column, key, text in (
        ("time", 5, lambda option: option.hours.value, words.time_of),
        ("cost", 6, lambda option: option.usd.value, words.cost_of),
    ):
        one.tab.click(f"#which-rows thead th:nth-child({column}) button")
        able = sorted((option for option in found.options if option.hours), key=key)
        assert one.cells("which-rows", column)[: len(able)] == [text(option) for option in able], heading
    one.tab.locator("#which-rows thead th:nth-child(7) button").press("Enter")
    one.tab.locator("#which-rows thead th:nth-child(7) button").press("Enter")  # the most first
    most = max(found.options, key=room)
    assert one.cells("which-rows", 1)[0] == words.cards_of(most)
    assert one.tab.get_attribute("#which-rows thead th:nth-child(7)", "aria-sort") == "descending"
    one.tab.fill("[data-filters=which-rows]", "4090")
    assert set(one.cells("which-rows", 1)) == {"1 × RTX-4090", "2 × RTX-4090", "4 × RTX-4090"}


def test_the_plot_draws_every_option_and_the_line_of_the_best(opened: Any, found: Recommendation) -> None:
    one = opened(LINK, replays=False)
    one.tab.wait_for_selector(DONE)
    assert one.tab.locator(".tradeoff .dot").count() == sum(option.usd is not None for option in found.options)
    able = [option for option in found.options if option.fits]
    best = [
        option
        for option in able
        if not any(
            other.usd.value <= option.usd.value and other.hours.value <= option.hours.value and other is not option
            for other in able
        )
    ]
    assert len(best) > 1
    best.sort(key=lambda option: option.hours.value)
    spoken = one.tab.get_attribute(".tradeoff", "aria-label")
    assert spoken.split(": ", 1)[1].split("; ") == [
        f"{words.cards_of(option)} lora, {words.time_of(option)}, {words.cost_of(option)}" for option in best
    ]
    drawn = re.findall(r"[ML]([\d.]+) ([\d.]+)", one.tab.get_attribute(".frontier", "d"))
    places = [(float(left), float(top)) for left, top in drawn]
    assert places == sorted(places, key=lambda place: place[0])
    assert [top for _, top in places] == sorted(top for _, top in places)  # later is cheaper: lower down
    assert one.tab.locator(".dot.best").count() == len(best) == len(places)


@exhaustive
def test_the_question_is_in_the_link_and_starts_over(opened: Any) -> None:
    first = opened("#m=pythia-70m&t=full", replays=False)
    first.tab.fill("#q-tokens", "0.5")
    first.tab.fill("#q-deadline", "2")
    first.tab.fill("#q-budget", "7.5")
    first.tab.fill("#q-max_gpus", "2")
    first.tab.fill("#q-global_batch", "8")
    first.tab.select_option("#q-terms", "reserved")
    first.tab.check("#q-every_method")
    assert first.fragment == "#m=pythia-70m&t=full&tk=0.5&dl=2&bu=7.5&mg=2&gb=8&pt=reserved&am=1"
    first.tab.wait_for_selector(DONE)
    second = opened(first.fragment, replays=False)
    second.tab.wait_for_selector(DONE)
    for place in ("#answers", "#which-rows tbody", "#which-command"):
        assert second.text(place) == first.text(place)
    assert set(second.cells("which-rows", 2)) == {"full", "lora", "qlora"}
    second.tab.click("#reset")
    assert second.fragment == ""
    assert second.tab.input_value("#q-tokens") == "50"
    assert not second.tab.is_checked("#q-every_method")
    bad = opened("#tk=many&pt=stolen&mg=2", replays=False)
    assert 'the part "tk" of the link is damaged' in bad.text("#link-problems")
    assert 'the part "pt" of the link is damaged' in bad.text("#link-problems")
    assert bad.tab.input_value("#q-max_gpus") == "2"


def test_what_cannot_be_is_said_and_no_figure_is_left(opened: Any) -> None:
    one = opened("#m=pythia-70m&t=full&mg=1", replays=False)
    one.tab.wait_for_selector(DONE)
    one.tab.fill("#q-tokens", "")
    assert one.text("#which-problems") == "tokens: nothing given; must be millions, more than 0"
    assert one.tab.get_attribute("#q-tokens", "aria-invalid") is not None
    assert one.tab.locator("#which-rows tbody tr").count() == one.tab.locator("#answers li").count() == 0
    assert one.tab.locator(".tradeoff").count() == 0
    assert one.text("#which-command") == ""
    one.tab.fill("#q-tokens", "1")
    one.tab.fill("#q-max_gpus", "1000")
    assert one.text("#which-problems") == "max_gpus: 1000 given; must be a whole number from 1 to 128"
    one.tab.fill("#q-max_gpus", "2")
    one.tab.wait_for_selector(DONE)
    assert one.tab.locator("#which-problems").is_hidden()
    one.tab.fill("#seq_len", "0")
    assert one.text("#which-state") == "Mend what the form marks to see a prediction."
    other = opened("#m=deepseek-v3", replays=False)
    waiting(other.tab.locator("#which-state")).to_contain_text("'deepseek_v3' cannot be predicted by this version")
    assert other.text("#which-command").startswith("vramprobe recommend --model deepseek-v3")


@exhaustive
def test_an_option_is_taken_over_by_the_keyboard_and_its_memory_shown(opened: Any, found: Recommendation) -> None:
    one = opened(LINK)
    one.tab.wait_for_selector(DONE)
    option = next(option for option in found.options if option.num_gpus == 4 and option.gpu == "L4")
    one.tab.locator("#which-rows [data-option='4 L4 lora'] button").press("Enter")
    setting = option.setting
    assert one.tab.input_value("#batch_size") == str(setting.batch_size)
    assert one.tab.input_value("#num_gpus") == "4"
    assert one.tab.input_value("#sharding") == setting.sharding
    assert one.tab.is_checked("#gradient_checkpointing") == setting.gradient_checkpointing
    alone, replayed = asked(
        one.tab,
        "[false, true].map((replays) => vramprobe.verdict("
        "vramprobe.predict(spec, config, null, replays), vramprobe.gpus.find(gpu => gpu.slug === 'L4')))",
    )
    assert alone["reason"] == setting.verdict.reason
    assert replayed["reason"].split(": ")[1] in one.text("#verdicts [data-gpu=L4] .reason")
    assert one.text("#verdicts [data-gpu=L4] .verdict")[2:] == replayed["verdict"]
    assert one.tab.evaluate("document.activeElement.id") == "result"
    one.tab.wait_for_selector(DONE)
    assert one.cells("which-rows", 1) == [words.cards_of(option) for option in found.options]  # the same question


def test_a_phone_shows_it_without_scrolling_sideways(opened: Any) -> None:
    one = opened("#m=pythia-70m&t=full&mg=2", viewport={"width": 360, "height": 740}, has_touch=True, replays=False)
    one.tab.wait_for_selector(DONE)
    assert one.tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert one.tab.evaluate("document.querySelector('.tradeoff').getBoundingClientRect().right") <= 360
    assert one.tab.locator("#q-tokens").bounding_box()["height"] >= 44
