"""The writing of the benchmarks' tables: CSV that reads back, aligned Markdown, a check that names what is stale."""

import subprocess
import sys
from pathlib import Path

import pytest
from grids import exhaustive
from scripts import script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "script",
    [
        "truth/catalog.py",
        "truth/reproduce.py",
        pytest.param("truth/claims.py", marks=exhaustive),
        "versions/versions.py",
        *(f"frameworks/{name}.py" for name in ("frameworks", "programs", "run_phases")),
    ],
)
def test_a_committed_page_is_what_the_committed_journal_says(script: str) -> None:
    words = [sys.executable, f"benchmarks/{script}", "--check"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_table_reads_back_with_every_name_of_every_row(tmp_path: Path) -> None:
    tables, path = script("tables"), tmp_path / "table.csv"
    assert tables.read_csv(path) == []
    path.write_text(tables.as_csv([{"cell": "a, b", "bytes": 1}, {"cell": "c", "why": "oom"}]))
    assert path.read_bytes() == b'cell,bytes,why\n"a, b",1,\nc,,oom\n'
    assert tables.read_csv(path) == [
        {"cell": "a, b", "bytes": "1", "why": ""},
        {"cell": "c", "bytes": "", "why": "oom"},
    ]


def test_each_column_is_aligned_as_it_says() -> None:
    as_markdown = script("tables").as_markdown
    assert as_markdown(["cell", "bytes"], "lr", [["a", 1]]) == ["| cell | bytes |", "| --- | ---: |", "| a | 1 |"]
    with pytest.raises(AssertionError):
        as_markdown(["cell", "bytes"], "l", [])


def test_a_check_writes_nothing_and_names_what_is_stale(tmp_path: Path) -> None:
    write_or_check = script("tables").write_or_check
    page, table = tmp_path / "page.md", tmp_path / "table.csv"
    made = {page: "new\n", table: b"cell\n"}
    with pytest.raises(SystemExit, match=r"stale: page\.md, table\.csv; .* python benchmarks/truth/catalog.py"):
        write_or_check(made, "truth/catalog.py", check=True)
    assert not page.exists()
    write_or_check(made, "truth/catalog.py", check=False)
    with pytest.raises(SystemExit) as stopped:
        write_or_check(made, "truth/catalog.py", check=True)
    assert stopped.value.code == 0
    page.write_text("old\n")
    with pytest.raises(SystemExit, match=r"stale: page\.md;"):
        write_or_check(made, "truth/catalog.py", check=True)


def test_a_template_has_each_of_its_parts_filled_and_no_other(tmp_path: Path) -> None:
    filled, page = script("tables").filled, tmp_path / "page.md"
    page.with_suffix(".in.md").write_text("{count} rows:\n\n{table}\n")
    assert filled(page, count=2, table=["| {count} |", "| b |"]) == "2 rows:\n\n| {count} |\n| b |\n"
    with pytest.raises(AssertionError, match=r"page\.md"):
        filled(page, count=2)
    with pytest.raises(AssertionError, match=r"page\.md"):
        filled(page, count=2, table=[], more="")
