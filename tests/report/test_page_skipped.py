"""Summary of tests without a browser: how many of the page were skipped, and what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grids import exhaustive, grid
from page_browser import NO_CHROMIUM

ROOT = Path(__file__).parents[2]
IN_A_TAB = "test_a_shared_link_opens_the_same_configuration"
BY_ITSELF = "test_random_events_on_two_streams and 3"
WITHOUT_BROWSER = "test_recipes_of_one_structure_share_it"


@pytest.mark.parametrize("num_workers", grid([0, 1], 1))
def test_the_summary_counts_what_was_skipped_for_want_of_a_browser(num_workers: int) -> None:
    *lines, last = summary(f"{IN_A_TAB} or ({BY_ITSELF}) or {WITHOUT_BROWSER}", num_workers)
    assert f"2 tests of the page skipped: {NO_CHROMIUM}" in lines
    assert last.startswith("1 passed, 2 skipped")


@exhaustive
def test_where_none_was_skipped_nothing_is_said() -> None:
    assert not [line for line in summary(WITHOUT_BROWSER, 0) if "of the page skipped" in line]


def summary(tests: str, num_workers: int) -> list[str]:
    """The lines of a run of these tests where no Chromium is found."""
    files = [f"tests/report/test_page_{name}.py" for name in ("form", "recipes")]
    options = ["-k", tests, "-q", "-n", str(num_workers), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *options],
        cwd=ROOT,
        env=os.environ | {"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
