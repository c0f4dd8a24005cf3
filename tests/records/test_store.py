"""The journal: what was written survives a kill, a full disk and a torn line; a resume trusts only what finished."""

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from factories import OUTCOMES, make_environment, make_record, make_spec, make_started

from vramprobe.errors import StoreError
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Timeout
from vramprobe.records.record import RunRecord, record_from_json


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def records_of(count: int) -> list[RunRecord]:
    return [make_record(make_spec(seed=seed), attempt_id=f"attempt-{seed}") for seed in range(count)]


def write(path: Path, records: list[RunRecord]) -> bytes:
    for record in records:
        assert writing.append(path, record) is None
    return path.read_bytes()


# Writing and reading


@pytest.mark.parametrize("outcome", OUTCOMES, ids=[outcome.kind for outcome in OUTCOMES])
def test_every_outcome_comes_back_as_it_went(file: Path, outcome: object) -> None:
    record = make_record(outcome=outcome, warnings=["line\nbreak", "µ"])
    write(file, [record])
    assert store.read(file).records == (record,)


def test_every_outcome_is_tested() -> None:
    kinds = RunRecord.model_json_schema()["properties"]["outcome"]["discriminator"]["mapping"]
    assert set(kinds) == {outcome.kind for outcome in OUTCOMES}


def test_appending_leaves_what_is_there(file: Path) -> None:
    first, second = records_of(2)
    before = write(file, [first])
    after = write(file, [second])
    assert after.startswith(before)
    assert after.count(b"\n") == 2
    assert store.read(file).records == (first, second)
    assert (file.stat().st_mode & 0o777) == 0o644


def test_each_line_is_synced_and_so_is_the_folder_of_a_new_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write(file, records_of(2))
    assert synced == [str(file), str(file.parent), str(file)]


def test_a_folder_is_read_in_order_and_an_attempt_counts_once(tmp_path: Path) -> None:
    one, two, three = records_of(3)
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "x.jsonl", [two, three])
    write(tmp_path / "a.jsonl", [one, two])
    (tmp_path / "notes.txt").write_text("not a journal")
    contents = store.read(tmp_path)
    assert contents.records == (one, two, three)
    assert contents.files == (tmp_path / "a.jsonl", tmp_path / "b" / "x.jsonl")


def test_one_attempt_with_two_contents_is_refused(tmp_path: Path) -> None:
    (one,) = records_of(1)
    write(tmp_path / "a.jsonl", [one])
    write(tmp_path / "b.jsonl", [one.model_copy(update={"warnings": ["edited"]})])
    with pytest.raises(StoreError, match=r"b\.jsonl: attempt attempt-0 is there a second time"):
        store.read(tmp_path)


# Torn and damaged lines


def test_a_torn_last_line_is_left_out_of_reading_and_reported(file: Path) -> None:
    one, two = records_of(2)
    whole = write(file, [one, two])
    torn_at = whole.index(b"\n") + 1
    for end in (torn_at + 1, torn_at + 500, len(whole) - 2):
        file.write_bytes(whole[:end])
        contents = store.read(file)
        assert contents.records == (one,)
        assert f"half-written line of {end - torn_at} bytes" in contents.torn_tail
        assert file.read_bytes() == whole[:end]  # reading repairs nothing


def test_appending_moves_a_torn_line_aside_and_goes_on(file: Path) -> None:
    one, two, three = records_of(3)
    whole = write(file, [one, two])
    torn = whole[whole.index(b"\n") + 1 : -100]
    file.write_bytes(whole[:-100])
    warning = writing.append(file, three)
    assert f"half-written line of {len(torn)} bytes" in warning
    assert store.read(file).records == (one, three)
    beside = file.with_name("records.jsonl.torn")
    assert beside.read_bytes() == torn + b"\n"
    file.write_bytes(file.read_bytes() + b'{"again')
    assert writing.append(file, two) is not None
    assert beside.read_bytes() == torn + b'\n{"again\n'
    assert store.read(file).records == (one, three, two)


def test_a_file_that_is_nothing_but_a_torn_line(file: Path) -> None:
    file.write_bytes(b'{"format":1,' + b"x" * 200_000)  # longer than one block of the search for its start
    with pytest.raises(StoreError, match=r"holds no record.*half-written line of 200012 bytes"):
        store.read(file)
    assert store.read(file, allow_empty=True).records == ()  # a sweep resumes even here
    (one,) = records_of(1)
    assert writing.append(file, one)
    assert store.read(file).records == (one,)


def test_a_line_that_lacks_only_its_newline_is_whole(file: Path) -> None:
    one, two = records_of(2)
    file.write_bytes(write(file, [one])[:-1])
    assert store.read(file) == store.StoreContents(records=(one,), unfinished=(), torn_tail=None, files=(file,))
    assert writing.append(file, two) is None
    assert store.read(file).records == (one, two)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda line: line[:100], "line 2 is not a record"),
        (lambda line: b"\0" * 50, "line 2 is not a record"),
        (lambda line: b"[1, 2]", "line 2 is not a record"),
        (lambda line: b"[" * 100_000, "line 2 is not a record"),
        (lambda line: b"{}", "line 2 is not a record"),
        (lambda line: line.replace(b'"format":1', b'"format":99'), "line 2 has format 99.*upgrade vramprobe"),
        (lambda line: line.replace(b'"format":1', b'"format":[1]'), r"line 2 has format \[1\]"),
        (lambda line: line.replace(b'"instrument":"cpu"', b'"instrument":"guess"'), "line 2 .* instrument cannot be"),
        (lambda line: line.replace(b'"cell_id"', b'"cell"'), "line 2 .*cell"),
    ],
)
def test_a_damaged_middle_line_is_an_error_with_its_number(file: Path, damage, complaint: str) -> None:
    lines = write(file, records_of(3)).splitlines()
    lines[1] = damage(lines[1])
    content = b"\n".join(lines) + b"\n"
    file.write_bytes(content)
    with pytest.raises(StoreError, match=complaint) as caught:
        store.read(file)
    assert str(file) in str(caught.value)
    writing.append(file, make_record(attempt_id="later"))  # writing goes on, and mends nothing by itself
    assert file.read_bytes().startswith(content)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there are no results at .*nowhere"):
        store.read(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"no \.jsonl file in"):
        store.read(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(StoreError, match=r"holds no record; run a sweep first: vramprobe run"):
        store.read(tmp_path)


# Kills and full disks

KILLED_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from factories import make_record
from vramprobe.records import store, writing
record = make_record()
number = 0
while True:
    changed = {"attempt_id": f"attempt-{number}", "warnings": ["x" * 300_000]}
    writing.append(sys.argv[1], record.model_copy(update=changed))
    print(number, flush=True)
    number += 1
"""


def test_a_killed_writer_loses_nothing_it_reported(file: Path) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, str(file), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        reported = [int(writer.stdout.readline()) for _ in range(5)]
        writer.send_signal(signal.SIGKILL)
        reported += [int(line) for line in writer.stdout]
    contents = store.read(file)
    written = [record.attempt_id for record in contents.records]
    assert written[: len(reported)] == [f"attempt-{number}" for number in reported]
    writing.append(file, make_record(attempt_id="after"))
    assert [record.attempt_id for record in store.read(file).records] == [*written, "after"]
    assert store.read(file).torn_tail is None


def test_a_full_disk_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = records_of(2)
    before = write(file, [one])
    real_write = os.write
    with monkeypatch.context() as patch:

        def write_half_then_fail(descriptor: int, data: bytes) -> int:
            if len(data) > 1000:
                return real_write(descriptor, data[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "write", write_half_then_fail)
        patch.setattr(os, "fsync", lambda _: pytest.fail("nothing whole to sync"))
        with pytest.raises(StoreError, match=r"records\.jsonl: the disk \(or your quota\) is full: free some space"):
            writing.append(file, two)
    assert file.read_bytes() == before
    assert writing.append(file, two) is None
    assert store.read(file).records == (one, two)


def test_a_real_full_device_says_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(StoreError, match="cannot write to /dev/full: the disk"):
        writing.append("/dev/full", make_record())


def test_a_torn_tail_is_not_cut_off_when_it_cannot_be_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(file, records_of(1))[:-10]
    file.write_bytes(content)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(StoreError, match="is full"):
            writing.append(file, make_record())
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "no permission to write there"),
        (errno.EROFS, "no permission to write there"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "name a file in a folder that exists and can be written"),
    ],
)
def test_what_the_system_refuses_is_explained(file: Path, monkeypatch, number: int, advice: str) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError) as caught:
        writing.append(file, make_record())
    assert advice in str(caught.value)
    assert os.strerror(number) in str(caught.value)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="no permission to write there: choose another folder"):
            writing.append(tmp_path / "records.jsonl", make_record())
        with pytest.raises(StoreError, match="no permission"), writing.lock(tmp_path):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_paths_that_cannot_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a folder has that name"):
        writing.append(tmp_path, make_record())
    assert writing.append(tmp_path / "new" / "folder" / "records.jsonl", make_record()) is None
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="a file stands where a folder is needed"):
        writing.append(tmp_path / "file" / "records.jsonl", make_record())
    with pytest.raises(StoreError, match="a file stands where a folder is needed"), writing.lock(tmp_path / "file"):
        pass


def test_writers_at_the_same_time_keep_their_lines_whole(file: Path) -> None:
    long = "x" * 2_000_000  # more than one write of the page cache
    records = [make_record(attempt_id=f"attempt-{number}", warnings=[long]) for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda record: writing.append(file, record), records)) == {None}
    assert {record.attempt_id for record in store.read(file).records} == {f"attempt-{number}" for number in range(12)}


# The lock


def test_the_lock_is_held_once_and_freed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with writing.lock(folder):
        message = rf"another sweep writes to .*folder \(process {os.getpid()}\); wait for it, stop it, or choose"
        with pytest.raises(StoreError, match=message), writing.lock(folder):
            pytest.fail("held twice")
    with writing.lock(folder):
        pass


LOCK_HOLDER = """
import sys, time
from vramprobe.records import store, writing
with writing.lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=f"process {holder.pid}"), writing.lock(tmp_path):
            pass
        holder.kill()
    with writing.lock(tmp_path):
        pass


# Starts, and what counts


def test_a_start_is_unfinished_until_its_record_is_there(file: Path) -> None:
    one, two = records_of(2)
    for record in (one, two):
        assert writing.append(file, make_started(record)) is None
    writing.append(file, two)
    contents = store.read(file)
    assert contents.records == (two,)
    assert contents.unfinished == (make_started(one),)


def test_a_damaged_start_is_an_error_like_any_other_line(file: Path) -> None:
    (one,) = records_of(1)
    writing.append(file, make_started(one))
    file.write_bytes(file.read_bytes().replace(b'"started_at"', b'"begun_at"'))
    with pytest.raises(StoreError, match=r"line 1 .*cannot be"):
        store.read(file)


def test_a_start_that_finds_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    monkeypatch.setattr(writing.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(StoreError, match="cannot write to /dev/full: the disk"):
        writing.append("/dev/full", make_started(make_record()))
    assert list(tmp_path.iterdir()) == []


def test_a_finished_attempt_counts_more_than_a_later_failure() -> None:
    old = make_record(attempt_id="1", started_at="2026-03-01T00:00:00Z")
    new = make_record(attempt_id="2", started_at="2026-03-02T00:00:00Z")
    failed = make_record(attempt_id="3", started_at="2026-03-03T00:00:00Z", outcome=Timeout(limit_seconds=1))
    assert store.latest_by_fingerprint([new, failed, old]) == {old.fingerprint: new}
    assert store.latest_by_fingerprint([failed]) == {old.fingerprint: failed}


def test_one_cell_on_two_devices_counts_twice() -> None:
    here, there = make_record(), make_record(environment=make_environment(device_name="Other CPU"))
    assert store.latest_by_device([here, there]) == [here, there]
    assert len(store.latest_by_fingerprint([here, there])) == 1


def test_an_older_records_name_of_a_field_is_read() -> None:
    record = make_record(make_spec(device="cuda", limit_vram="24GiB"))
    older = record.to_json_line().replace('"limit_vram"', '"emulate_vram"')
    assert '"emulate_vram"' in older
    assert record_from_json(older) == record


def test_a_folder_that_vanishes_while_it_is_walked_hides_no_other(tmp_path, monkeypatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "run.jsonl").touch()
    scandir = os.scandir

    def gone(folder):
        if str(folder).endswith("a"):
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", gone)
    assert store.journals(tmp_path) == (tmp_path / "b" / "run.jsonl",)
