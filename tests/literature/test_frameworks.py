"""The committed table of training frameworks on an emulated GPU: as its CSV says, and what is promised of it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "frameworks.py"


@pytest.mark.parametrize("script", ["frameworks.py", "run_phases.py"])
def test_the_page_is_what_the_table_says(script):
    done = subprocess.run([sys.executable, BENCHMARK.with_name(script), "--check"], capture_output=True, text=True)
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


def test_each_run_goes_through_its_phases():
    with BENCHMARK.with_name("run_phases.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    whole = [row for row in found if not row["notes"]]  # a note says what ended the others
    assert len(whole) > len(found) / 2
    for row in whole:
        phases = ["training", "evaluation", "save", *(["load_best"] if row["name"].startswith("Trainer") else [])]
        assert all(int(row[f"{phase}_bytes"]) > 0 for phase in phases), row["name"]
        num_parameters = 134_105_856  # each rank initializes them in float32 on the host
        if "ZeRO-3" not in row["name"] and "LoRA" not in row["name"]:
            num_loading = 1 if row["name"].startswith("Axolotl") else 2  # its FSDP2 loads on rank 0 alone
            assert int(row["host_bytes"]) >= num_loading * 4 * num_parameters, row["name"]
