"""Claims decided by runs: the tables are the records', and every record is of a cell that decides a claim."""

import csv
from pathlib import Path

from grids import exhaustive
from scripts import script

from vramprobe import api

FOLDER = Path(__file__).parents[2] / "benchmarks" / "truth"


@exhaustive
def test_every_case_that_a_card_holds_ran_on_it() -> None:
    """Runs of cells that were cases once stay: oracles rest on them (tests/oracles)."""
    claims = script("truth.claims")
    cards = {case.spec.fingerprint: claims.card_of(case) for case in claims.cases()}
    ran = claims.ran()
    for key, card in cards.items():
        if card is None:
            assert key not in ran
            continue
        record = ran[key]
        assert record.instrument == "emulated"
        assert record.emulation.card == card


def test_a_verdict_rests_on_the_run_where_there_is_one() -> None:
    (judged,) = api.claims(["L1-13"], results=script("truth.claims").RECORDS)
    assert judged.figure.engine == "emulated NVIDIA A100-SXM4-80GB"
    assert "vramprobe measure --emulate A100-80GB-SXM" in judged.sources[0].command


def test_predictions_are_near_every_run() -> None:
    with (FOLDER / "claims.csv").open(newline="") as file:
        off = [abs(float(row["difference_percent"])) for row in csv.DictReader(file) if row["difference_percent"]]
    assert max(off) < 0.1
