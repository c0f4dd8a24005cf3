"""Results of a real GPU: its page is what the records give, and lent.sh gets through whatever a part does."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import script

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def test_the_h200s_page_is_what_its_records_give() -> None:
    compare = script("gpu.compare")
    assert compare.page(FOLDER / "h200") == (FOLDER / "h200" / "README.md").read_text()


def test_the_page_of_workspaces_is_what_its_rows_give() -> None:
    table = script("gpu.workspace_table")
    assert table.page(FOLDER / "h200") == (FOLDER / "h200" / "workspaces.md").read_text()


def test_own_commands_were_predicted_to_the_byte() -> None:
    """README says nine of nine, and eight in reserved memory."""
    compare = script("gpu.compare")
    rows = [row for row in compare.program_rows(FOLDER / "h200") if row["predicted_allocated_bytes"]]
    assert [compare.difference(row, "allocated_bytes", "predicted") for row in rows] == [0] * 9
    assert sum(compare.difference(row, "reserved_bytes", "predicted") == 0 for row in rows) == 8


def test_nothing_kept_names_a_machine() -> None:
    for path in FOLDER.rglob("*.jsonl"):
        text = path.read_text()
        assert not [word for word in ("/opt/", "/tmp/", "GPU-") if word in text], path


@pytest.fixture
def lent(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """lent.sh with a python3 that does what PYTHON_DOES says."""
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\neval "$PYTHON_DOES"\n')
    stand_in.chmod(0o755)

    def run(*parts: str, does: str, seconds: int = 60) -> subprocess.CompletedProcess[str]:
        own = {"OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"), "SECONDS_IN_ALL": str(seconds)}
        own |= {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "PYTHON_DOES": does}
        words = ["bash", str(FOLDER / "lent.sh"), *parts]
        return subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=120)

    return run


def test_a_part_that_fails_keeps_no_other_from_its_turn(lent: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = lent("context", "doctor", does='case "$*" in *context.py*) exit 3;; esac')
    assert "== context: status 3" in done.stdout
    assert "== doctor: status 0" in done.stdout


def test_where_the_first_cell_does_not_run_nothing_else_is_tried(
    lent: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = lent("smoke", "context", does="echo no module named torch >&2; exit 1")
    assert done.returncode == 1
    assert "no module named torch" in done.stderr
    assert "context" not in done.stdout


def test_a_part_that_hangs_is_ended_with_the_time(lent: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = lent("context", "doctor", does="exec sleep 90", seconds=12)
    assert "== context: status 124" in done.stdout
    assert "no time left" in done.stderr
