"""Where there is no browser, the last line of the tests says how many of the page were skipped and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_browser import NO_CHROMIUM

ROOT = Path(__file__).parents[2]
IN_A_TAB = "test_a_shared_link_opens_the_same_configuration"  # by playwright
BY_ITSELF = "test_the_page_says_the_command_that_makes_the_cell"  # Chromium's own command line
WITHOUT_BROWSER = "test_python_that_has_no_rule_is_an_error_and_not_another_number"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_last_line_counts_what_was_skipped_for_want_of_a_browser(num_workers: int) -> None:
    assert last_line(f"{IN_A_TAB} or {BY_ITSELF}", num_workers) == f"2 tests of the page skipped: {NO_CHROMIUM}"


def test_where_none_was_skipped_nothing_is_said() -> None:
    assert last_line(WITHOUT_BROWSER, 0).startswith("1 passed")


def last_line(tests: str, num_workers: int) -> str:
    """Of a run of these tests where no Chromium is found."""
    files = [f"tests/report/test_page_{name}.py" for name in ("form", "arithmetic")]
    options = ["-k", tests, "-q", "-n", str(num_workers), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *options],
        cwd=ROOT, env=os.environ | {"PATH": "/nonexistent"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]
