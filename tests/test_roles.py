"""The manifest of what each published row is used for: whole, current, and what README and CHANGELOG claim by it."""

import re
from pathlib import Path

import pytest

from benchmarks.tables import as_csv, read_csv
from tools import roles

ROOT = Path(__file__).parents[1]
MANIFEST = read_csv(roles.MANIFEST)


def numbers(text: str) -> list[int]:
    """The lines that a cell of the manifest names."""
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_it_is_what_the_benchmarks_tables_say() -> None:
    assert roles.MANIFEST.read_text() == as_csv(roles.manifest()), "rebuild it: python tools/roles.py"


@pytest.mark.parametrize("table", sorted({row["table"] for row in MANIFEST}))
def test_every_row_of_a_table_has_a_role(table: str) -> None:
    named = [line for row in MANIFEST if row["table"] == table for line in numbers(row["lines"])]
    assert set(named) == set(range(2, len(read_csv(ROOT / table)) + 2))


def test_every_table_of_published_figures_that_ships_is_in_it() -> None:
    shipped = {f"vramprobe/data/{path.name}" for path in (ROOT / "vramprobe" / "data").glob("published*.csv")}
    assert shipped < {row["table"] for row in MANIFEST}


def test_no_row_is_fitted_to_by_what_it_tests() -> None:
    for row in MANIFEST:
        assert int(row["number"]) == len(numbers(row["lines"])) > 0
        assert row["role"] in ("fitted to", "held out", "shown", "listed")
        assert not row["page"] or (ROOT / row["page"]).exists()
    for row in (row for row in MANIFEST if row["role"] in ("held out", "shown")):
        for other in MANIFEST:
            if (other["table"], other["use"], other["role"]) == (row["table"], row["use"], "fitted to"):
                assert not set(numbers(row["lines"])) & set(numbers(other["lines"]))


def test_readme_and_changelog_claim_what_it_has() -> None:
    (again,) = (row for row in MANIFEST if row["use"] == "runs repeated by emulation")
    assert again["role"] == "shown"
    readme, changelog = ((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md"))
    truth = (ROOT / "benchmarks" / "truth" / "README.md").read_text()
    assert re.search(rf"^\| all \| {again['number']} \|", readme, re.MULTILINE)
    assert re.findall(r"(\d+) published A100\s+runs", changelog + truth) == [again["number"]] * 2
    fitted = {row["use"] for row in MANIFEST if row["table"] == again["table"] and row["role"] == "fitted to"}
    assert fitted == {"context of an A100"}  # the device tier alone: no allocated or reserved byte is fitted to a run
