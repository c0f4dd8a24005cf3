"""The page's HTML: everything escaped, nothing fetched, and a clear error where a part is missing. No browser here."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_example import content, published

from vramprobe.errors import StoreError, VramprobeError
from vramprobe.report import page as page_builder
from vramprobe.report.definition import Column, Table
from vramprobe.report.page import SCRIPTS, gather, json_for_html, page, page_data, part
from vramprobe.report.page.tables import Chapter, chapter_html, table_html

EVIL = "</script><img src=x onerror=alert(1)><!--"


class Seen(HTMLParser):
    """Every tag with its attributes, and the text inside scripts of data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(text: str) -> object:
    return json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.DOTALL)[1])


def test_what_others_wrote_is_text_everywhere() -> None:
    columns = [Column(f"c{index}", EVIL, lambda row: row) for index in range(2)]
    table = Table(title=EVIL, note=EVIL, columns=columns, rows=[EVIL])
    plot = page_builder.Plot(title=EVIL, svg="<svg/>", caption=EVIL, alt=EVIL)
    written = page_data.data() | {"catalog": [{"slug": EVIL, "name": EVIL, "num_params": 1, "family": EVIL}]}
    text = page(
        content(
            data=written,
            chapters=[Chapter(title=EVIL, about=EVIL, tables=[table])],
            plots=[plot],
            provenance=[EVIL],
            command=EVIL,
            predictor=EVIL,
        )
    )
    tags = Seen(text).tags
    assert [attrs for tag, attrs in tags if tag == "img" and not (attrs["src"] or "").startswith("data:image")] == []
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    assert len([tag for tag, _ in tags if tag == "script"]) == 4
    assert data_of(text) == json.loads(json.dumps(written))


def test_nothing_is_fetched_and_only_the_pages_own_script_may_run() -> None:
    text = page(published())
    for tag, attrs in Seen(text).tags:
        for name in ("src", "href", "action", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    assert "default-src 'none'; script-src 'sha256-" in text
    assert re.findall(r"'([^']*unsafe[^']*)'", text.split("</head>")[0].split("<style>")[0]) == ["wasm-unsafe-eval"]
    assert len(text.encode()) < 3_000_000
    assert text == page(published())


def test_published_results_are_tables_with_exact_values_behind_rounded_ones() -> None:
    chapters = {chapter.title: chapter for chapter in published().chapters}
    [measured] = [table for table in chapters["Measured peak memory"].tables if table.title == "Cells"]
    column = next(column for column in measured.shown if column.name == "measured_bytes")
    exact = column.published(measured.rows[0])
    assert isinstance(exact, int)
    assert f'data-sort="{exact}">{exact / 1024**2:.1f}</td>' in table_html(measured, "measured")
    claims = chapters["Published claims, checked"]
    assert len(claims.tables[0].rows) == 135
    assert "135 claims: " in claims.about
    assert published().plots[0].svg.lstrip().startswith("<?xml")
    assert any("torch" in line for line in published().provenance)


def test_a_table_sorts_by_value_marks_the_unknown_and_wraps_only_long_texts() -> None:
    columns = [
        Column("name", "name", lambda row: row[0]),
        Column("size_bytes", "size, KiB", lambda row: row[1], lambda value: f"{value / 1024:.0f}", is_number=True),
        Column("exact", None, lambda row: row[1]),
    ]
    text = table_html(Table(title="Sizes", columns=columns, rows=[("a", 2048), ("b" * 50, None)]), "sizes")
    assert '<th scope="row" class="long">a</th><td class="number" data-sort="2048">2</td>' in text
    assert '<td class="number">–</td>' in text
    assert "<input" not in text
    assert "<input" in table_html(Table(title="Many", columns=columns, rows=[("a", 1)] * 9), "many")


def test_a_chapter_has_one_heading_and_its_tables_smaller_ones_where_there_are_several() -> None:
    columns = [Column("name", "name", str)]
    tables = [Table(title=f"Part {part}", columns=columns, rows=["a"]) for part in range(3)]
    text = chapter_html(Chapter(title="All", about="How.", tables=tables), 2)
    assert re.findall(r"<(h\d) id=.(.*?).>(.*?)</", text) == [
        ("h3", "chapter-2-title", "All"),
        ("h4", "chapter-2-1-title", "Part 0"),
        ("h4", "chapter-2-2-title", "Part 1"),
        ("h4", "chapter-2-3-title", "Part 2"),
    ]
    assert "<h4" in chapter_html(Chapter(title="All", about="", tables=tables[:1]), 2)  # its title may be a condition
    alone = chapter_html(Chapter(title="Part 0", about="", tables=tables[:1]), 2)
    assert re.findall(r"<h\d", alone) == ["<h3"]
    assert 'aria-labelledby="chapter-2-title"' in alone
    html = page(published())
    headings = re.findall(r"<h[34][^>]*>(.*?)</h", html.split('id="tables"')[1].split('id="plots"')[0])
    assert len(headings) == len(set(headings)) > 10
    assert html.count(">Formulas that everybody quotes, scored</") == 2  # the heading, and the link to it
    assert "1 × 64 tokens, checkpointing off</h4>" in html
    labels = re.findall('aria-(?:labelled|described)by="(.*?)"', html)
    assert all(html.count(f'id="{label}"') == 1 for label in labels)


def test_claims_that_are_missing_or_no_claims_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read the claims .*vramprobe claims -o .* writes it"):
        gather.read_claims(tmp_path / "claims.csv")
    with pytest.raises(StoreError, match=r"is a folder; name the claims\.csv in it"):
        gather.read_claims(tmp_path)
    (tmp_path / "claims.csv").write_text("id,topic\nL1-01,formula\n")
    with pytest.raises(StoreError, match=r"is no claims\.csv: it has no column source; vramprobe claims -o"):
        gather.read_claims(tmp_path / "claims.csv")


def test_a_page_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_builder, "MAX_BYTES", 10_000)
    with pytest.raises(VramprobeError, match=r"more than the 10,000 .*report fewer results"):
        page(content())


def test_a_page_of_too_many_rows_says_how_many_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [Column("number", "number", lambda row: row)]
    tables = [Table(title=title, columns=columns, rows=range(600)) for title in ("One", "Two")]
    chapters = [Chapter(title="All", about="How.", tables=tables), Chapter(title="Few", about="", tables=tables[:1])]
    whole = page(content(chapters=chapters))
    assert "The first" not in whole
    monkeypatch.setattr(page_builder, "MAX_BYTES", len(whole) - 1)
    text = page(content(chapters=chapters))
    assert "How. The first 1,000 of 1,200 rows; the files beside this page have all." in text
    counts = re.findall(r'data-counts="chapter-(\S+)-rows">(\d+) rows', text)
    assert counts == [("1-1", "600"), ("1-2", "400"), ("2-1", "600")]


def test_json_cannot_end_its_element() -> None:
    value = {"a": [EVIL, "<!--<script>", "\u2028", "&lt;"]}
    text = json_for_html(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_the_scripts_are_few() -> None:
    written = "".join(part(name) for name in SCRIPTS)
    assert written.count("\n") <= 900
