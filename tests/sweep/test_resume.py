"""Actions of a resumed sweep: it trusts the cells that finished here, and retries the rest, not for ever."""

from pathlib import Path

import pytest
from factories import OUTCOMES, make_environment, make_record, make_spec, make_started

from vramprobe.errors import StoreError
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Interrupted, Timeout
from vramprobe.records.record import Environment, RunRecord, Started
from vramprobe.spec import CellSpec
from vramprobe.sweep.resume import MAX_RETRIES, ResumedCell, open_journal, resume

HERE = make_environment()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def write(file: Path, *entries: RunRecord | Started) -> None:
    for entry in entries:
        assert writing.append(file, entry) is None


def resumed(file: Path, *specs: CellSpec, here: Environment | None = HERE, retry: bool = False) -> list[ResumedCell]:
    return resume(specs, open_journal(file), lambda spec: here, retry_quarantined=retry)


def attempt(number: int, **overrides: object) -> RunRecord:
    return make_record(attempt_id=f"attempt-{number}", started_at=f"2026-03-0{number}T00:00:00Z", **overrides)


def test_a_journal_that_is_not_there_yet_has_no_attempts(file: Path) -> None:
    (cell,) = resumed(file, make_spec())
    assert (cell.action, cell.reason, cell.record) == ("run", "no attempt yet", None)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.kind)
def test_what_finished_is_kept_and_everything_else_is_run_again(file: Path, outcome: object) -> None:
    record = make_record(outcome=outcome)
    write(file, make_started(record), record)
    (cell,) = resumed(file, record.spec)
    assert cell.record == record
    if outcome.kind in store.FINISHED:
        assert (cell.action, cell.reason) == ("kept", f"{outcome.kind} at {record.started_at}")
    else:
        assert (cell.action, cell.reason) == ("run", f"the last attempt ended as {outcome.kind}")


def test_the_finished_attempt_counts_whatever_came_after(file: Path) -> None:
    failed = attempt(2, outcome=Interrupted(message="SIGTERM"))
    write(file, attempt(1), failed, make_started(attempt(3)))
    (cell,) = resumed(file, make_spec())
    assert cell.action == "kept"


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ({"device_name": "Other CPU"}, "measured with device Other CPU (now Test CPU @ 2.00GHz)"),
        ({"versions": HERE.versions | {"torch": "2.12.1"}}, "measured with torch 2.12 (now 2.13)"),
        (
            {"versions": HERE.versions | {"peft": "0.18.0", "transformers": "5.17.0"}},
            "measured with transformers 5.17 (now 5.23), peft 0.18 (now 0.21)",
        ),
    ],
)
def test_what_was_measured_in_another_context_is_stale(file: Path, then: dict, reason: str) -> None:
    record = make_record(environment=make_environment(**then))
    write(file, record)
    (cell,) = resumed(file, record.spec)
    assert (cell.action, cell.reason, cell.record) == ("stale", reason, record)
    assert resumed(file, record.spec, here=None)[0].action == "kept"  # planned elsewhere: nothing to compare with


@pytest.mark.parametrize(
    "then",
    [
        {"versions": HERE.versions | {"torch": "2.13.1", "vramprobe": "0.0.1"}},
        {"versions": HERE.versions | {"bitsandbytes": None}},
        {"driver_version": "1.2", "commit": None, "platform": "another", "isolation": "spawn"},
    ],
)
def test_a_patch_release_and_another_host_are_not_stale(file: Path, then: dict) -> None:
    record = make_record(environment=make_environment(**then))
    write(file, record)
    assert resumed(file, record.spec)[0].action == "kept"


def test_a_cell_that_never_ends_is_retried_twice_and_then_quarantined(file: Path) -> None:
    for number in range(1, MAX_RETRIES + 2):
        write(file, make_started(attempt(number)))
        (cell,) = resumed(file, make_spec())
        if number <= MAX_RETRIES:
            expected = (
                f"the attempt of 2026-03-0{number}T00:00:00Z has no end (killed); retry {number} of {MAX_RETRIES}"
            )
            assert (cell.action, cell.reason) == ("run", expected)
    assert cell.action == "quarantined"
    assert cell.reason.startswith("3 attempts did not end by themselves, the last one started at 2026-03-03")
    (again,) = resumed(file, make_spec(), retry=True)
    assert again.action == "run"
    assert again.reason.startswith("out of quarantine, as you asked")


def test_a_limit_counts_as_no_end_and_a_signal_does_not(file: Path) -> None:
    for number in range(1, 4):
        write(file, attempt(number, outcome=Interrupted(message="stopped by SIGTERM")))
    assert resumed(file, make_spec())[0].action == "run"
    for number in range(4, 7):
        write(file, attempt(number, outcome=Interrupted(message="stopped by max-time", by_limit=True)))
    assert resumed(file, make_spec())[0].action == "quarantined"


def test_a_cell_that_times_out_again_and_again_is_quarantined(file: Path) -> None:
    for number in range(1, 4):
        assert resumed(file, make_spec())[0].action == "run"
        write(file, attempt(number, outcome=Timeout(limit_seconds=900)))
    assert resumed(file, make_spec())[0].action == "quarantined"


def test_a_torn_tail_is_left_out_and_reported(file: Path) -> None:
    record = make_record()
    write(file, record)
    whole = file.read_bytes()
    for tail in (b'{"format":1,"attempt_id":"half', b"\0\0\0"):
        file.write_bytes(whole + tail)
        journal = open_journal(file)
        assert f"half-written line of {len(tail)} bytes" in journal.torn_tail
        assert [len(found) for found in journal.attempts.values()] == [1]
    file.write_bytes(whole[:-1])  # lacks only its newline
    assert open_journal(file).torn_tail is None
    assert resumed(file, record.spec)[0].action == "kept"


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:100],
        lambda line: b"\0" * 50,
        lambda line: line.replace(b'"format":1', b'"format":99', 1),
        lambda line: line[:300] + line,  # a torn line that another writer went on
        lambda line: line[1:],
        lambda line: line.replace(b'"attempt-', b'"\xffttempt-', 1),
    ],
)
def test_a_damaged_middle_line_is_an_error_with_its_number(file: Path, damage) -> None:
    lines = [attempt(number).to_json_line().encode() for number in (1, 2, 3)]
    lines[1] = damage(lines[1])
    file.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(StoreError, match=r"records\.jsonl, line 2"):
        open_journal(file)


def test_damage_within_a_record_that_counts_is_found_when_it_is_needed(file: Path) -> None:
    record = make_record()
    file.write_bytes(record.to_json_line().encode().replace(b'"device_name"', b'"device_nome"') + b"\n")
    with pytest.raises(StoreError, match="line 1 is a record of format 1, but its environment"):
        resumed(file, record.spec)


def test_the_head_of_a_line_tells_what_the_whole_record_tells(file: Path) -> None:
    """The index reads heads only; whatever a record may hold, it must come to the same."""
    records = [
        make_record(
            make_spec(seed=seed),
            attempt_id=f"attempt-{seed}",
            outcome=outcome,
            sweep=None if seed % 2 else "a-sweep",
            held_out=bool(seed % 3),
            cell_id='named "strangely" \\ {"format":1,',
        )
        for seed, outcome in enumerate(OUTCOMES)
    ]
    write(file, *records)
    journal = open_journal(file)
    found = [found for attempts in journal.attempts.values() for found in attempts]
    assert [(one.attempt_id, one.fingerprint, one.started_at, one.outcome) for one in found] == [
        (record.attempt_id, record.fingerprint, record.started_at, record.outcome.kind) for record in records
    ]
    assert [journal.record(one) for one in found] == records
