"""Records as one Parquet file: the rows of load, a batch at a time, whatever the journals hold."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command_line import vramprobe as run
from factories import OUTCOMES, make_environment, make_record, make_spec, make_started

import vramprobe
from vramprobe import api
from vramprobe.errors import SpecError, StoreError
from vramprobe.records import parquet, store

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vramprobe[hub]'")


def journal(folder: Path) -> Path:
    """Each outcome, libraries that only one record names, a started attempt, an attempt in two files, a torn line."""
    records = [
        make_record(make_spec(seed=number), outcome=outcome, attempt_id=f"attempt-{number}")
        for number, outcome in enumerate(OUTCOMES)
    ]
    other = make_environment(versions={"torch": "2.12.0", "liger-kernel": "0.8.5"})
    records.append(make_record(make_spec(seed=99), environment=other, attempt_id="other"))
    lines = [record.to_json_line() for record in records]
    lines.insert(1, make_started(records[0]).to_json_line())
    (folder / "one.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:100])
    (folder / "two.jsonl").write_text(lines[0])
    return folder


@pytest.mark.parametrize("batch", [3, 10_000])
def test_the_rows_are_those_of_load(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH", batch)
    told: list[int] = []
    place = tmp_path / "results"
    place.mkdir()
    journal(place)
    num_rows = parquet.export(place, tmp_path / "all.parquet", on_batch=told.append)
    assert num_rows == len(OUTCOMES) + 1 == told[-1]
    assert len(told) == -(-num_rows // batch)
    pd.testing.assert_frame_equal(vramprobe.load(tmp_path / "all.parquet"), vramprobe.load(place), check_like=True)


@pytest.mark.parametrize(("end", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_packed_journal_is_read_like_another(end: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """By every reader of records, named or in a folder, beside files that are not packed."""
    place = tmp_path / "results"
    (place / "claims").mkdir(parents=True)
    file = place / f"one.jsonl{end}"
    file.write_bytes(pack(make_record().to_json_line().encode()))
    (place / "claims" / "two.jsonl").write_text(make_record(make_spec(seed=7), attempt_id="two").to_json_line())
    for where, count in ((file, 1), (place, 2)):
        assert parquet.export(where, tmp_path / f"{count}.parquet") == count
        assert len(vramprobe.load(where)) == len(store.read(where).records) == count
        assert api.check(where).num_records == count
    assert sum(share.num_records for share in api.merge([place], tmp_path / "all.jsonl").shares) == 2
    if end:
        file.write_bytes(file.read_bytes()[:-20])
        for reads in (vramprobe.load, store.read, lambda where: parquet.export(where, tmp_path / "3.parquet")):
            with pytest.raises(StoreError, match=f"cannot read .*one.jsonl{end}: .*; restore the file from a copy"):
                reads(place)


def test_what_cannot_be_is_refused_and_a_file_that_was_there_stays(tmp_path: Path) -> None:
    place = journal(tmp_path)
    out = tmp_path / "all.parquet"
    parquet.export(place, out)
    before = out.read_bytes()
    edited = make_record(make_spec(seed=0), attempt_id="attempt-0", started_at="2027-01-01T00:00:00Z")
    (tmp_path / "two.jsonl").write_text(edited.to_json_line())
    with pytest.raises(StoreError, match="attempt attempt-0 is there a second time with other values"):
        parquet.export(place, out)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(SpecError, match=r"name a file that ends in \.parquet"):
        parquet.export(place, tmp_path / "all.csv")
    with pytest.raises(SpecError, match="holds records alone"):
        vramprobe.load(out, of="phases")
    with pytest.raises(StoreError, match="there are no results at"):
        vramprobe.load(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(StoreError, match="is no Parquet file"):
        vramprobe.load(tmp_path / "bad.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "one.jsonl").write_text("")
    with pytest.raises(StoreError, match="holds no record"):
        parquet.export(tmp_path / "empty", out)


def test_the_verb_says_how_many(tmp_path: Path) -> None:
    done = run("export", str(journal(tmp_path)), "-o", "all.parquet", cwd=tmp_path)
    assert done.stdout == f"{len(OUTCOMES) + 1} records → all.parquet\n", done.stderr
