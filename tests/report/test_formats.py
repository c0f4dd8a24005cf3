"""One table in five formats: the same rows, escaped for each, the conditions in the caption."""

import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from vramprobe.report.definition import Column, Document, Picture, Table
from vramprobe.report.formats import csv as csv_of
from vramprobe.report.formats import files_of, html, latex, markdown, terminal

EVIL = 'a|b <script>\n*c* `d` [e](f) & \\ ~x~ _y_ a_b $z$ {g} #h %i ^j "k" --l é ж 中'


def table(rows: list[tuple], **words: str) -> Table:
    """(name, count, whether) per row; the count is a number, the last two may be the same in every row."""
    columns = [
        Column("name", "the|name", lambda row: row[0]),
        Column("count", "count, B", lambda row: row[1], "{:,}".format, is_number=True),
        Column("whether", "whether", lambda row: row[2], lambda yes: "yes" if yes else "no", is_condition=True),
        Column("hidden", None, lambda row: "exact"),
    ]
    return Table(title="Counts", columns=columns, rows=rows, **words)


def document(*tables: Table) -> Document:
    return Document(
        name="counts",
        title="All counts",
        about=["About <it>."],
        tables=tables,
        data=tables[0],
        command="vramprobe report 'a b'",
        origin=["device X_1"],
        remarks=["A remark."],
    )


TWO = [("one", 1000, True), (None, 2, False)]


def test_conditions_that_all_rows_share_are_said_once() -> None:
    shared = table([("one", 1, True), ("two", 2, True)], note="A note.")
    assert [column.name for column in shared.shown] == ["name", "count"]
    assert shared.caption == "In every row: whether yes. A note."
    assert [column.name for column in table(TWO).shown] == ["name", "count", "whether"]
    assert table(TWO).caption == ""
    assert len(table([("one", 1, True)]).shown) == 3  # one row says nothing of others


def test_markdown_is_a_githubs_table() -> None:
    assert markdown.grid(table(TWO)).splitlines() == [
        r"| the\|name   |   count, B | whether   |",
        "|:------------|-----------:|:----------|",
        "| one         |      1,000 | yes       |",
        "| –           |          2 | no        |",
    ]
    assert markdown.escape(EVIL) == (
        r"a\|b &lt;script&gt; \*c\* \`d\` \[e\](f) &amp; \\ \~x\~ \_y\_ a_b \$z\$ {g} #h %i ^j "
        '"k" --l é ж 中'
    )


def test_csv_has_every_column_and_exact_values() -> None:
    text = csv_of(table([(EVIL, 1000, True), (None, None, False)]))
    assert list(csv.reader(io.StringIO(text))) == [
        ["name", "count", "whether", "hidden"],
        [EVIL, "1000", "true", "exact"],
        ["", "", "false", "exact"],
    ]


class Reader(HTMLParser):
    """Parser that keeps what a browser would see: every tag with its attributes, every text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))


def test_html_is_whole_escaped_and_accessible() -> None:
    page = Reader(
        html.page(document(table([(EVIL, 1000, True), ("two", 2, False)])).with_pictures(Picture("p", 'a "p"')))
    )
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    named = [(tag, attributes) for tag, attributes in page.tags if tag in ("th", "td")]
    assert [attributes.get("scope") for tag, attributes in named if tag == "th"] == ["col"] * 3 + ["row"] * 2
    assert ("table", {"class": "dataframe", "id": "table-1"}) in page.tags
    (style,) = (text for tag, text in page.texts if tag == "style" and "#table-1" in text)
    assert style.startswith("#table-1 tr :nth-child(2) { text-align: end;")
    assert ("th", " ".join(EVIL.split())) in page.texts
    assert ("caption", "Counts") not in page.texts  # it is in strong, within the caption
    assert [tag for tag, _ in page.tags].count("caption") == 1
    assert ("img", {"src": "p.svg", "alt": 'a "p"'}) in page.tags
    assert ("html", {"lang": "en"}) in page.tags
    assert ("pre", "vramprobe report 'a b'") in page.texts


def test_a_table_without_rows_is_a_sentence() -> None:
    empty = document(table([], otherwise="Nothing was <counted>."))
    assert "\n## Counts\n\nNothing was &lt;counted&gt;.\n" in markdown.page(empty)
    assert ("p", "Nothing was <counted>.") in Reader(html.page(empty)).texts
    assert "begin{table}" not in latex.tables(empty)


def test_latex_means_nothing_but_the_text() -> None:
    assert latex.escape(EVIL) == (
        r"a\ensuremath{|}b \ensuremath{<}script\ensuremath{>} {*}c{*} \textasciigrave{}d\textasciigrave{} {[}e{]}(f) "
        r"\& \textbackslash{} \textasciitilde{}x\textasciitilde{} \_y\_ a\_b \$z\$ \{g\} \#h \%i "
        r"\textasciicircum{}j ''k'' -{}-l e (U+0436) (U+4E2D)"
    )
    assert latex.escape("1 × 2 – ≤ 3 %") == r"1 \ensuremath{\times} 2 -- \ensuremath{\le} 3 \%"
    short = latex.tables(document(table(TWO)))
    assert r"\caption{All counts. Counts. device X\_1.}\label{tab:counts-1}" in short
    assert "one & 1,000 & yes \\\\\n" in short
    assert short.count(r"\begin{table}") == short.count(r"\toprule") == short.count(r"\bottomrule") == 1
    assert "% Rebuild: vramprobe report 'a b'\n" in short
    long = latex.tables(document(table([(f"row {number}", number, True) for number in range(41)])))
    assert r"\begin{longtable}" in long
    assert r"\begin{table}" not in long


def test_a_long_latex_table_wraps_words_to_fit_the_line() -> None:
    wide = [("some words " * 30, number, number % 2) for number in range(41)]
    (form,) = re.findall(r"begin\{longtable\}\{(.*)\}", latex.tables(document(table(wide))))
    (share,) = map(float, re.findall(r"p\{(0\.\d+)\\linewidth\}", form))
    assert 0.7 < share < 0.95
    assert form.endswith("rl@{}")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(tmp_path: Path) -> None:
    long = table([(EVIL, number, True) for number in range(41)])
    (tmp_path / "tables.tex").write_text(latex.tables(document(table([(EVIL, 1, True), ("[x]", 2, False)]), long)))
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,longtable,array,graphicx}\n"
        "\\begin{document}\\input{tables}\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_terminal_shows_text_and_no_markup() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, color_system=None)
    terminal.show([table([("[bold]x[/]", 1, True), ("y", 2, True)]), table([])], ["[red]remark"], console)
    shown = out.getvalue()
    assert "[bold]x[/]" in shown
    assert "In every row: whether yes." in shown
    assert shown.endswith("[red]remark\n")
    assert "Counts" not in shown  # one table needs no title


def test_every_format_is_written() -> None:
    files = files_of(document(table(TWO)))
    assert list(files) == ["counts.md", "counts.csv", "counts.tex", "counts.html"]
    assert files == files_of(document(table(TWO)))
    text = files["counts.md"].decode()
    assert text.startswith("# All counts\n\nAbout &lt;it&gt;.\n\n## Counts\n")
    assert text.endswith("A remark.\n\n---\n\n- device X_1\n\nRebuild this page:\n\n```\nvramprobe report 'a b'\n```\n")
