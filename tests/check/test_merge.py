"""Merging and contributing: each attempt once, nothing that cannot be, nothing that names a machine or a person."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe
from factories import make_environment, make_oom, make_record, make_spec, make_started

from vramprobe import api
from vramprobe.check.contribute import anonymous
from vramprobe.errors import IncomparableRecords, StoreError
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Error
from vramprobe.records.phase_memory import Peak
from vramprobe.records.record import RunRecord, Timing


def taken(number: int, **overrides: Any) -> RunRecord:
    """An attempt with times of its own."""
    timing = Timing(step_seconds=[0.02], total_seconds=0.5 + number / 1e6)
    words = {"attempt_id": f"attempt-{number}", "timing": timing}
    return make_record(make_spec(seq_len=16 * number), **(words | overrides))


def journal(path: Path, *records: RunRecord) -> Path:
    for record in records:
        writing.append(path, make_started(record))
        writing.append(path, record)
    return path


def test_shards_become_one_journal_with_each_attempt_once(tmp_path: Path) -> None:
    first = journal(tmp_path / "1" / "records.jsonl", taken(1), taken(2))
    other = make_environment(versions=make_environment().versions | {"torch": "2.12.0"})
    second = journal(tmp_path / "2" / "records.jsonl", taken(2), taken(3, environment=other))
    merged = api.merge([tmp_path / "1", second], tmp_path / "all.jsonl")
    assert store.read(merged.journal).records == (taken(1), taken(2), taken(3, environment=other))
    assert (merged.num_records, merged.num_repeated) == (3, 1)
    assert [(share.source, share.torch, share.num_records) for share in merged.shares] == [
        (str(tmp_path / "1"), "2.13.0+cpu", 2),
        (str(second), "2.12.0", 1),
    ]
    assert first.exists()
    with pytest.raises(StoreError, match="is there already"):
        api.merge([first], merged.journal)


def a_byte_more(record: RunRecord) -> Peak:
    return record.peak.model_copy(update={"allocated_bytes": record.peak.allocated_bytes + 1})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda good: good.model_copy(update={"warnings": ["edited"]}), "the same attempt has other values"),
        (lambda good: good.model_copy(update={"attempt_id": "attempt-new"}), "so it is a copy under another name"),
        (lambda good: taken(2, fingerprint="0" * 16), "fingerprint is '0000000000000000'"),
        (lambda good: taken(1, attempt_id="again", peak=a_byte_more(good)), "peak.allocated_bytes is"),
    ],
    ids=["edited", "copied", "fingerprint", "peak"],
)
def test_records_that_cannot_be_are_refused_and_nothing_is_written(bad: Any, said: str, tmp_path: Path) -> None:
    journal(tmp_path / "1" / "records.jsonl", taken(1))
    journal(tmp_path / "2" / "records.jsonl", bad(taken(1)))
    with pytest.raises(IncomparableRecords, match=f"nothing was merged: .*{said}"):
        api.merge([tmp_path / "1", tmp_path / "2"], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_merge_and_contribute_say_what_they_did(tmp_path: Path) -> None:
    journal(tmp_path / "1" / "records.jsonl", taken(1), taken(2))
    made = vramprobe("contribute", "1", "-o", "mine.jsonl", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "2 records (2 cpu) →" in made.stdout
    assert "stripped in 2: platform" in made.stdout
    assert "2 records →" in vramprobe("merge", "mine.jsonl", "-o", "all.jsonl", cwd=tmp_path).stdout
    told = json.loads(vramprobe("merge", "1", "-o", "b.jsonl", "--json", cwd=tmp_path).stdout)
    assert told["shares"][0]["num_cells"] == 2


def test_a_contribution_names_no_machine_and_no_person(tmp_path: Path) -> None:
    message = (
        "/home/jane/work/train.py, line 3: jane@acme.example on 10.1.2.3 (host apollo-7): see https://a.example/b/c"
    )
    failed = Error(error_type="ValueError", message=message, traceback='File "/home/jane/work/train.py", line 3')
    kernel = "Linux-6.1.0-apollo-x86_64"
    machine = make_environment(device_uuid="GPU-1234", platform=kernel, isolation_reason="/a/b/c no")
    said = {"outcome": failed, "warnings": ["see /tmp/x/y.log"], "sweep": "secret-plan"}
    record = make_record(make_spec(model="gpt2"), environment=machine, **said)
    journal(tmp_path / "records.jsonl", record, taken(2))
    made = api.contribute(tmp_path / "records.jsonl", tmp_path / "out.jsonl", strip=["apollo-7", "secret"])
    text = made.file.read_text()
    for word in ("jane", "acme", "10.1.2.3", "apollo", "GPU-1234", "/tmp/x", "secret", "/home"):
        assert word not in text, word
    clean = store.read(made.file).records
    assert clean[0].outcome.message == "…/train.py, line 3: … on … (host …): see https://a.example/b/c"
    assert clean[0].started_at == "2026-03-01"
    assert (clean[1].peak, clean[1].ledger, clean[1].timing) == (taken(2).peak, taken(2).ledger, taken(2).timing)
    assert made.stripped["device_uuid"] == 1
    assert api.check(made.file).ok


def test_a_model_that_is_a_folder_keeps_its_last_name_and_its_fingerprint() -> None:
    record = make_record()  # of the folder tests/data/tiny-llama, by its absolute path
    clean, fields = anonymous(record)
    assert (clean.spec.model, clean.cell_id) == ("…/tiny-llama", record.cell_id)
    assert clean.fingerprint == record.fingerprint
    assert "spec" in fields


def test_what_check_refuses_is_not_contributed(tmp_path: Path) -> None:
    journal(tmp_path / "records.jsonl", taken(1, fingerprint="0" * 16))
    with pytest.raises(IncomparableRecords, match="does not pass `vramprobe check`, 1 errors"):
        api.contribute(tmp_path / "records.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    journal(tmp_path / "good.jsonl", make_oom(make_spec(device="cuda"), instrument="cuda"))
    assert api.contribute(tmp_path / "good.jsonl", tmp_path / "out.jsonl").num_records == 1
    with pytest.raises(StoreError, match="is there already"):
        api.contribute(tmp_path / "good.jsonl", tmp_path / "out.jsonl")
