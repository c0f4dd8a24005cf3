"""The committed table of training frameworks on an emulated GPU: as its CSV says, and what is promised of it."""

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "frameworks.py"


def test_the_page_is_what_the_table_says():
    done = subprocess.run([sys.executable, BENCHMARK, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ten_frameworks_run_and_the_hook_changes_no_byte():
    """Each row that works was stopped after three steps or a few more, with the bytes that it has without the hook."""
    with BENCHMARK.with_suffix(".csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    working = [row for row in found if not row["missing"]]
    assert len(working) >= 10
    for row in working:
        assert (int(row["steps"]) >= 3, row["stopped"]) == (True, "yes"), row["name"]
        assert row["equal"] in ("yes", "whole"), row["name"]
        phases = {"load", "forward", "backward"}
        if "within the backward" not in row["remark"]:
            phases.add("optimizer_step")
        assert phases <= set(row["phases"].split()), row["name"]
        assert int(row["ranks"]) == (2 if row["card"].endswith("x2") else 1)
