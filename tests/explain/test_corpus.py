"""Texts of failed runs of many programs, each with its known answer: ``corpus.toml``."""

import contextlib
import io
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vramprobe.errors import VramprobeError
from vramprobe.explain.failure import in_words
from vramprobe.explain.log import read
from vramprobe.explain.messages import forms
from vramprobe.explain.report import report_of

CORPUS = (Path(__file__).parent / "corpus.toml").read_text(encoding="utf-8")
REPORTS: list[dict[str, Any]] = tomllib.loads(CORPUS)["report"]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report['program']}: {report['source']}")
def test_what_is_said_of_each(report: dict[str, Any]) -> None:
    found = report_of(io.BytesIO(report["text"].encode()))
    said = {"phase": found.phase.name, "detail": found.phase.detail}
    said |= {"cause": found.explanation.cause, "owner": found.oom.owner}
    assert said == {"detail": "", **{name: report[name] for name in said if name in report}}
    assert report["first"] in found.explanation.changes[0].text
    assert len(found.explanation.changes) <= 3
    assert "/job/" not in "\n".join(in_words(found))


def test_it_has_sixty_texts_of_twenty_programs_and_each_owner() -> None:
    assert len(REPORTS) >= 60
    assert len({report["program"] for report in REPORTS}) >= 20
    assert {report["owner"] for report in REPORTS} == {form.owner for form in forms()}


def test_the_page_says_how_many_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    assert f"[{len(REPORTS)} texts]" in page
    assert f"of {len({report['program'] for report in REPORTS})} programs" in page.replace("\n", " ")


#: Forms that are a word and no more.
WITHOUT_TEXT = {"LSF", "ROCm", "operating system", "Python"}


def test_every_form_is_found_in_a_text() -> None:
    found = {one.form for report in REPORTS for one in read(io.BytesIO(report["text"].encode())).failures}
    assert {form for form in forms() if form.program not in WITHOUT_TEXT} <= found


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report['program']}: {report['source']}")
def test_a_text_that_is_cut_anywhere_ends_in_an_answer_or_one_line(report: dict[str, Any]) -> None:
    for end in range(1, len(report["text"]), 29):
        with contextlib.suppress(VramprobeError):
            in_words(report_of(io.BytesIO(report["text"][:end].encode())))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all went well\nan ominous message: insufficient memory for the widget\n", "line 2 speaks of memory"),
        ("my own tool: memory is short today\n", "line 1 speaks of memory"),
        ("[metal::malloc] Attempting to allocate 12884901888 bytes, which is too many\n", "line 1 speaks of memory"),
        ("well\nVRAM budget: 3 of 4\n", "line 2 speaks of memory"),
        ("memory pool exhausted: no available memory\nx\nmalloc failed to allocate\n", "lines 1, 3 speak of memory"),
    ],
)
def test_a_line_in_no_known_form_is_quoted_by_its_number(text: str, said: str) -> None:
    with pytest.raises(VramprobeError, match=f"{said}, in no known form"):
        report_of(io.BytesIO(text.encode()))
