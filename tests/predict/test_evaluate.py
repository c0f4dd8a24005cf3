"""Evaluation: what is held out, the scores, the verdicts, and the errors that say what to do."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from factories import TRUE, make_environment, make_oom, make_record, make_spec, specs, synthetic
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli.verbs import app
from vramprobe.errors import FitError, IncomparableRecords, SpecError, VramprobeError
from vramprobe.predict.evaluate import evaluate
from vramprobe.predict.expected import fit_records
from vramprobe.records import store, writing
from vramprobe.records.condition import parse_condition
from vramprobe.records.record import RunRecord
from vramprobe.report.evaluation import evaluation_page
from vramprobe.units import GIB

HELD_OUT = "qwen2.5-0.5b"


@pytest.fixture(scope="module")
def records() -> list[RunRecord]:
    """Return records as if measured on an H100, 1.057 to 1.063 times what is predicted; one model is held out."""
    return [
        synthetic(spec, TRUE + (number % 7 - 3) / 1000, held_out=spec.model == HELD_OUT)
        for number, spec in enumerate(specs())
    ]


@pytest.fixture
def results(records: list[RunRecord], tmp_path: Path) -> str:
    for record in records:
        writing.append(tmp_path / "records.jsonl", record)
    return str(tmp_path)


# -- conditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("params>3e9", True),
        ("params > 9B", False),
        ("params<=8.1b", True),
        ("seq_len==512", True),
        ("tokens>=1K", True),
        ("tokens<1024", False),
        ("method==lora", True),
        ("method!=lora", False),
        ("method==full,lora", True),
        ("family==llama and seq_len<1000", True),
        ("family==llama and seq_len>1000", False),
        ("gradient_checkpointing==True", True),
        ("lora_r>8", True),
        ("model==llama-3.1-8b", True),
        ("batch_size!=2", False),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    spec = make_spec(model="llama-3.1-8b", method="lora", batch_size=2, seq_len=512, gradient_checkpointing=True)
    assert parse_condition(text)(spec) is expected


def test_a_rank_is_compared_where_there_is_one() -> None:
    assert not parse_condition("lora_r>0")(make_spec(method="full"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("params", "NAME OPERATOR VALUE"),
        ("", "NAME OPERATOR VALUE"),
        ("prams>3", "Nearest: params"),
        ("method>lora", "takes == or !="),
        ("params>many", "3e9 or 160M"),
        ("params>1.2.3", "3e9 or 160M"),
        ("__import__('os')==1", "NAME OPERATOR VALUE"),
    ],
)
def test_conditions_that_make_no_sense_say_what_does(text: str, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        parse_condition(text)


# -- folds -------------------------------------------------------------------------------------------------------------


def test_what_the_sweep_held_out_is_held_out(records: list[RunRecord]) -> None:
    found = evaluate(records)
    held_out = {record.fingerprint for record in records if record.held_out}
    assert {score.record.fingerprint for score in found.scores} == held_out
    assert found.summaries[0].num_records == 12
    assert 1e-4 < found.summaries[0].worst_absolute < 0.01


def test_a_condition_holds_out_by_itself(records: list[RunRecord]) -> None:
    """The sweep's own marks do not count."""
    found = evaluate(records, hold_out="model==smollm2-135m")
    assert {score.record.spec.model for score in found.scores} == {"smollm2-135m"}
    assert found.folds == ("model==smollm2-135m",)


@pytest.mark.parametrize(("leave_out", "num_folds"), [("model", 3), ("family", 2), ("length", 2)])
def test_each_is_left_out_in_turn(leave_out: Any, num_folds: int, records: list[RunRecord]) -> None:
    found = evaluate(records, leave_out=leave_out)
    assert len(found.folds) == num_folds
    judged = [score.record.fingerprint for score in found.scores if score.tier == "allocated"]
    assert sorted(judged) == sorted(store.latest_by_fingerprint(records))


def test_a_given_fit_is_judged_by_what_it_has_not_seen(records: list[RunRecord]) -> None:
    some = [record for record in records if record.spec.model != "smollm2-360m" and not record.held_out]
    found = evaluate(records, model=fit_records(some))
    assert "smollm2-360m" in {score.record.spec.model for score in found.scores}
    assert not {score.record.fingerprint for score in found.scores} & {record.fingerprint for record in some}


def test_a_fold_never_sees_what_it_is_judged_by() -> None:
    """A record made absurd is badly predicted when it is held out, and spoils nothing but its own score."""
    synthetics = [synthetic(spec, TRUE) for spec in specs()]
    victim = synthetics[3]
    doubled = victim.peak.model_copy(update={"allocated_bytes": 2 * victim.peak.allocated_bytes})
    synthetics[3] = victim.model_copy(update={"peak": doubled})
    others = {record.spec.model for record in synthetics} - {victim.spec.model}
    found = evaluate(synthetics, hold_out=f"model=={victim.spec.model_label}")
    errors = {score.record.fingerprint: score.error for score in found.scores if score.tier == "allocated"}
    assert errors[victim.fingerprint] == pytest.approx(-0.5, abs=0.01)
    assert others
    assert all(abs(error) < 0.01 for name, error in errors.items() if name != victim.fingerprint)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"hold_out": "params>1e12"}, "nothing is held out"),
        ({"hold_out": "params>0"}, "needs at least"),
        ({"hold_out": "params>1", "leave_out": "model"}, "not several"),
    ],
)
def test_splits_that_leave_nothing_say_so(options: dict[str, Any], word: str, records: list[RunRecord]) -> None:
    with pytest.raises(VramprobeError, match=word):
        evaluate(records, **options)


def test_one_model_cannot_be_left_out(records: list[RunRecord]) -> None:
    with pytest.raises(FitError, match="every record is of one model"):
        evaluate([record for record in records if record.spec.model == HELD_OUT], leave_out="model")


def test_a_fit_that_has_seen_everything_cannot_be_judged(records: list[RunRecord]) -> None:
    seen = [record for record in records if not record.held_out]
    with pytest.raises(FitError, match="seen every record"):
        evaluate(seen, model=fit_records(seen))


def test_records_of_two_devices_are_not_mixed(records: list[RunRecord]) -> None:
    spec, machine = make_spec(device="cuda", seq_len=77), make_environment(device_name="another")
    other = make_record(spec, instrument="cuda", environment=machine)
    with pytest.raises(IncomparableRecords, match="device_name"):
        evaluate([*records, other])


# -- scores ------------------------------------------------------------------------------------------------------------


def test_failures_are_left_out_with_their_reason_and_ooms_are_bounds(records: list[RunRecord]) -> None:
    longer = [specs()[0].model_copy(update={"seq_len": length}) for length in (5000, 6000, 99_000)]
    failed = make_record(longer[0], instrument="cuda", outcome={"kind": "timeout", "limit_seconds": 3.0})
    ooms = [make_oom(spec, instrument="cuda") for spec in longer[1:]]
    needed = ooms[0].outcome.model_copy(update={"allocated_bytes": 900 * GIB})
    ooms = [oom.model_copy(update={"outcome": needed, "environment": records[0].environment}) for oom in ooms]
    found = evaluate([*records, failed, *ooms], hold_out="seq_len>4096")
    assert found.left_out == {
        "outcome timeout": 1,
        "no recipe of the cell is at hand: vramprobe predict with its options records one": 1,
    }
    assert (found.num_lower_bounds, found.num_below_bound) == (1, 1)
    assert found.scores == ()


def test_sums_are_those_of_the_scores(records: list[RunRecord]) -> None:
    found = evaluate(records, leave_out="model")
    total = found.summaries[0]
    errors = [score.error for score in found.scores if score.tier == "allocated"]
    assert total.num_records == len(errors) == 36
    assert total.worst_absolute == max(map(abs, errors))
    assert total.worst_under_prediction == min(errors)
    by_method = [one for one in found.summaries if one.group in ("full", "lora", "qlora")]
    assert sum(one.num_records for one in by_method) == total.num_records


def test_verdicts_on_cards(records: list[RunRecord]) -> None:
    """Three cells on a 16 GB card have two right verdicts and a false fit."""
    synthetics = [synthetic(spec, TRUE) for spec in specs()]
    small = sorted(synthetics, key=lambda record: record.peak.reserved_bytes)[:3]
    assert small[-1].peak.reserved_bytes < 12 * GIB

    def grown(record: RunRecord) -> RunRecord:
        return record.model_copy(update={"peak": record.peak.model_copy(update={"reserved_bytes": 40 * GIB})})

    others = [record for record in synthetics if record not in small]
    held = [record.model_copy(update={"held_out": True}) for record in (small[0], grown(small[1]), small[2])]
    found = evaluate([*others, *held])
    t4 = next(card for card in found.cards if card.gpu == "T4")
    assert (t4.num_false_fits, t4.num_false_refusals) == (1, 0)
    assert t4.num_right == 2


# -- the page and the verb ---------------------------------------------------------------------------------------------


def test_the_page_has_every_score_and_the_command(records: list[RunRecord]) -> None:
    found = evaluate(records)
    files = evaluation_page(found, "vramprobe evaluate X")
    text = files["evaluation.md"].decode()
    assert "vramprobe evaluate X" in text
    num_wrong = sum(card.num_right < 12 for card in found.cards)
    assert num_wrong
    assert text.count("\n| ") == len(found.scores) + len(found.summaries) + num_wrong + 3
    rows = list(csv.DictReader(io.StringIO(files["evaluation.csv"].decode())))
    assert [int(row["measured_bytes"]) for row in rows] == [score.measured_bytes for score in found.scores]
    assert files["predicted_vs_measured.png"].startswith(b"\x89PNG")
    assert files == evaluation_page(found, "vramprobe evaluate X")


def test_the_verb(results: str, tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(app, ["evaluate", results, "-o", str(tmp_path / "page")])
    assert shown.exit_code == 0, shown.output
    assert "coverage" in shown.output
    assert (tmp_path / "page" / "evaluation.md").exists()
    found = json.loads(run(app, ["evaluate", results, "--leave-out", "family", "--json"]).stdout)
    assert len(found["records"]) == 2 * 36
    assert found["summaries"][0]["group"] == "all"


def test_an_unknown_way_to_split_is_an_error(results: str) -> None:
    with pytest.raises(SpecError, match="leave_out: 'colour' given; allowed: model, family, length"):
        api.evaluate(results, leave_out="colour")


@pytest.mark.parametrize(("instrument", "words"), [("cpu", "of the CPU, which is measured"), ("emulated", "emulated")])
def test_records_that_say_nothing_of_a_gpu_are_refused_by_name(
    instrument: str, words: str, records: list[RunRecord]
) -> None:
    others = [record.model_copy(update={"instrument": instrument}) for record in records]
    with pytest.raises(FitError, match=f"nothing to evaluate, of 36 records: 36 left out: {words}"):
        evaluate(others)
