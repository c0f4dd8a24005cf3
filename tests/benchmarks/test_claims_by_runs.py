"""Claims decided by runs: the tables are the records', and every record is of a cell that decides a claim."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from grids import exhaustive

from vramprobe import api
from vramprobe.records import store

FOLDER = Path(__file__).parents[2] / "benchmarks" / "truth"
Script = Callable[[str], ModuleType]


@exhaustive
def test_the_committed_tables_are_what_the_committed_records_give() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "claims.py"), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@exhaustive
def test_every_case_that_a_card_holds_ran_and_no_other_cell(script: Script) -> None:
    claims = script("truth.claims")
    cells = {case.spec.fingerprint: case.spec for case in claims.cases()}
    assert set(claims.ran()) == {key for key, spec in cells.items() if claims.card_of(spec) is not None}
    for record in store.read(claims.RECORDS).records:
        assert record.instrument == "emulated"
        assert record.emulation is not None
        assert record.emulation.card == claims.card_of(record.spec)


def test_a_verdict_rests_on_the_run_where_there_is_one(script: Script) -> None:
    (judged,) = api.claims(["L1-13"], results=script("truth.claims").RECORDS)
    assert judged.figure is not None
    assert judged.figure.engine == "emulated NVIDIA A100-SXM4-80GB"
    assert "vramprobe measure --emulate A100-80GB-SXM" in judged.sources[0].command


def test_arithmetic_is_near_every_run() -> None:
    with (FOLDER / "claims.csv").open(newline="") as file:
        off = [abs(float(row["difference_percent"])) for row in csv.DictReader(file) if row["difference_percent"]]
    assert max(off) < 1
