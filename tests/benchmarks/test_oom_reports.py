"""The table of out-of-memory errors: what explain says of each report is what the table says, and a run is repeated."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import ModuleType

import pytest

from vramprobe.explain.report import report_of

Script = Callable[[str], ModuleType]


def test_explain_says_of_each_report_what_the_table_says(script: Script) -> None:
    tables, oom = script("tables"), script("truth.oom")
    rows = {row["source"]: row for row in tables.read_csv(oom.TABLE)}
    reports = oom.reports()
    assert [report["source"] for report in reports] == list(rows)
    for report in reports:
        said, row = report_of(io.BytesIO(report["text"].encode())), rows[report["source"]]
        assert said.oom is not None
        assert said.explanation is not None
        assert row["requested_bytes"] == str(said.oom.requested)
        assert (row["explained_cause"], row["explained_phase"]) == (said.explanation.cause, said.phase.name)
        assert "cell" in report or report["why"].startswith("not repeated: ")
        assert "cell" not in report or report["assumed"]


def test_a_run_is_repeated_from_its_configuration_and_the_memory_left(script: Script) -> None:
    oom = script("truth.oom")
    (report,) = (one for one in oom.reports() if one["source"] == "hiyouga/LlamaFactory#260")
    again = oom.repeated(report, room=31 * 2**30)
    assert again.phase == "load"
    # DeepSpeed's flat copy of all 7,000,559,616 parameters in fp32 beside the model, to 2 MiB
    assert again.requested == pytest.approx(7_000_559_616 * 4, abs=2 * 2**20)
    assert again.allocated == pytest.approx(7_000_559_616 * 4, rel=1e-3)


def test_a_phase_counts_as_the_same_as_far_as_a_repetition_tells_it(script: Script) -> None:
    same = script("truth.oom").same_phase
    assert same({"phase": "backward", "repeated_phase": "forward or backward"})
    assert same({"phase": "prepare", "repeated_phase": "load"})
    assert same({"phase": "optimizer_step", "repeated_phase": "fits"}) is False
    assert same({"phase": "evaluation", "repeated_phase": "forward"}) is None
    assert same({"phase": "", "repeated_phase": "load"}) is None
