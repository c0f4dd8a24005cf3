"""The documentation site: what it holds, and that every link of it leads somewhere."""

import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from tools import site
from vramprobe import api
from vramprobe.cli.help import VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def navigation() -> dict[str, list[tuple[str, str]]]:
    """(title, page) of each group of mkdocs.yml, whose tag for Python is not read here."""
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    groups = {name: entries for group in yaml.safe_load(text)["nav"] for name, entries in group.items()}
    return {
        name: [titled for entry in entries for titled in entry.items()]
        for name, entries in groups.items()
        if name != "Start"
    }


def test_the_navigation_is_that_of_the_first_page_and_of_the_command_line() -> None:
    groups = navigation()
    assert [*groups] == [*VERBS, "Reference"]
    first = (DOCS / "index.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", first, re.MULTILINE | re.DOTALL))
    assert groups == {name: re.findall(r"^\| \[(.+?)\]\((.+?)\)", sections[name], re.MULTILINE) for name in groups}
    named = [page for pages in groups.values() for _, page in pages]
    assert sorted([*named, "index.md"]) == sorted(page.name for page in DOCS.glob("*.md"))


def test_every_link_of_every_page_is_staged(tmp_path: Path) -> None:
    staged = site.stage(tmp_path)
    assert {path for path in DOCS.iterdir() if path.is_file()} < set(staged)
    assert ROOT / "benchmarks" / "truth" / "reproduce.md" in staged
    assert {tmp_path / site.site_path(path) for path in staged} == {
        path for path in tmp_path.rglob("*") if path.is_file()
    }


def test_a_link_to_nothing_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "```\n[kept](no/where.md)\n```\n\n[a page](../elsewhere/gone.md#here)\n"
    )
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "_DOCS", tmp_path / "docs")
    with pytest.raises(SystemExit, match=re.escape("docs/index.md links to ../elsewhere/gone.md: give a file")):
        site.stage(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "gone.md").write_text("# Here\n[back](../docs/index.md)\n")
    site.stage(tmp_path / "out")
    assert (
        (tmp_path / "out" / "index.md").read_text().endswith("(no/where.md)\n```\n\n[a page](elsewhere/gone.md#here)\n")
    )
    assert "[back](../index.md)" in (tmp_path / "out" / "elsewhere" / "gone.md").read_text()


def test_a_long_command_is_folded_before_an_option_and_stays_the_same() -> None:
    long = f"vramprobe profile --emulate {'H' * 40} --lengths 'p50=250 max=4096' -- trl sft {' '.join(['--flag'] * 20)}"
    lines = site.folded(long).split(" \\\n")
    assert max(map(len, lines)) <= 110
    assert len(lines) == 3
    assert " ".join(line.strip() for line in lines) == long
    assert site.folded("note " * 40) == "note " * 40


class Anchors(HTMLParser):
    """A page's anchors, and the targets of its links, pictures, scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        self.targets |= {given[name] or "" for name in ("href", "src") if name in given}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (find_spec("zensical") and find_spec("mkdocstrings")),
    reason="the site's builder is not here: pip install '.[docs]'",
)
def test_the_site_is_built_without_a_warning_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = site.build(tmp_path)
    assert done.returncode == 0, done.stdout
    top = tmp_path / "html"
    pages = {path: Anchors(path.read_text()) for path in top.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 80
    lost = []
    for page, read in pages.items():
        for target in read.targets:
            if re.match(r"(https?|data|mailto|javascript|blob):", target):
                continue
            name, _, anchor = unquote(target).partition("#")
            to = (page.parent / name).resolve() if name else page
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file() or (anchor and to in pages and anchor not in pages[to].anchors | {"__skip"}):
                lost.append(f"{page.relative_to(top)}: {target}")
    assert lost == []
    functions = pages[top / "api.html"]
    assert {f"vramprobe.api.{name}" for name in api.__all__} <= functions.anchors
    text = (top / "api.html").read_text()
    assert not re.search(r":(?:func|class|mod):|results//", text)
    assert "results/&lt;" in text
    drawn = [page for page in pages if page.parent == top]
    assert [page.name for page in drawn if re.search(r"<p>[^<]*\n- |<p>\|", page.read_text())] == []
