"""The data set: every record a row, nothing lost, every column explained; pushing is one commit, when told."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from factories import make_environment, make_record, make_spec
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli import verbs
from vramprobe.errors import MissingDependency, StaleReport, StoreError, VramprobeError
from vramprobe.records import store, writing
from vramprobe.records.outcomes import Oom
from vramprobe.records.record import RunRecord, record_from_json
from vramprobe.report import dataset
from vramprobe.report.dataset.card import card
from vramprobe.report.dataset.push import push

pq = pytest.importorskip("pyarrow.parquet")
hub = pytest.importorskip("huggingface_hub")

QUICKSTART = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"


def table_of(records: list[RunRecord]) -> Any:
    return pq.read_table(io.BytesIO(dataset.parquet(dataset.frame_of(records))))


def various() -> list[RunRecord]:
    """Two measured cells, a failure and an emulated run, of two machines."""
    versions = {"torch": "2.13.0", "new": "1"}
    other = make_environment(device_name="<img> GPU", device_total_bytes=2**62, versions=versions)
    return [
        make_record(attempt_id="one", held_out=True, sweep="tiny"),
        make_record(make_spec(method="lora", lora_dropout=0.1), attempt_id="two", environment=other),
        make_record(attempt_id="three", outcome=Oom(phase="load", message="no")),
        make_record(make_spec(device="cuda"), attempt_id="four", instrument="emulated"),
    ]


def test_every_record_is_a_row_and_nothing_is_lost() -> None:
    records = various()
    rows = table_of(records).to_pylist()
    assert [record_from_json(row["record_json"]) for row in rows] == records
    assert [row["outcome"] for row in rows] == ["ok", "ok", "oom", "ok"]
    assert [row["instrument"] for row in rows] == ["cpu", "cpu", "cpu", "emulated"]
    assert rows[0]["peak_allocated_bytes"] == records[0].peak.allocated_bytes
    assert (rows[0]["held_out"], rows[0]["sweep"], rows[1]["sweep"]) == (True, "tiny", None)
    assert (rows[0]["lora_r"], rows[1]["lora_r"], rows[1]["lora_dropout"]) == (None, 16, 0.1)
    assert rows[1]["device_total_bytes"] == 2**62  # no float has been near it
    assert rows[2]["peak_allocated_bytes"] is None
    assert (rows[0]["version_new"], rows[1]["version_new"], rows[1]["version_peft"]) == (None, "1", None)


def test_columns_have_the_type_their_name_stands_for() -> None:
    schema = table_of(various()).schema
    types = {field.name: str(field.type) for field in schema}
    assert types["peak_allocated_bytes"] == types["seed"] == types["num_params"] == "int64"
    assert types["step_seconds"] == types["lora_alpha"] == "double"
    assert types["gradient_checkpointing"] == types["dirty"] == "bool"
    assert types["alloc_conf"] == types["record_json"] == "large_string"
    assert types["peak_device_bytes"] == "int64"  # also where every row is null


def test_every_column_is_explained() -> None:
    """Also those that only some records have; a column without documentation is an error, not an empty cell."""
    contents = store.read(QUICKSTART)
    assert card(contents, list(dataset.frame_of(contents.records)), "x").count("\n| ") > 80
    with pytest.raises(KeyError):
        card(contents, ["brand_new_bytes"], "x")


def test_the_card_is_what_the_hub_reads(tmp_path: Path) -> None:
    for record in various():
        writing.append(tmp_path / "results" / "records.jsonl", record)
    written = api.dataset(tmp_path / "results", tmp_path / "out")
    assert [path.name for path in written] == ["README.md", "records.parquet"]
    text = (tmp_path / "out" / "README.md").read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    assert matter["license"] == "apache-2.0"
    assert matter["size_categories"] == ["n<1K"]
    (config,) = matter["configs"]
    assert config["data_files"] == [{"split": "train", "path": "records.parquet"}]
    assert "4 attempts at 3 configurations" in text
    assert "- outcomes: 3 ok, 1 oom\n" in text
    assert "- instruments: cpu (3), emulated (1)\n" in text
    assert "&lt;img&gt; GPU (1)" in text
    assert "torch 2.13.0 (1)" in text
    assert "| peak\\_" not in text
    assert "| peak_allocated_bytes | Int64 | peak allocated by tensors; of a cell, over its training steps |" in text
    assert text.endswith(f"```\nvramprobe report {tmp_path}/results --dataset {tmp_path}/out\n```\n")
    rows = re.findall(r"^\| (\w+) \| (?:Int64|Float64|boolean|string|datetime64\[ms, UTC\]) \|", text, re.M)
    assert rows == pq.read_table(written[1]).column_names
    before = [path.read_bytes() for path in written]
    assert api.dataset(tmp_path / "results", tmp_path / "out", check=True) == written
    (tmp_path / "out" / "README.md").write_text("x")
    with pytest.raises(StaleReport, match=r"1 of 2 files are stale:\n  .*README\.md differs"):
        api.dataset(tmp_path / "results", tmp_path / "out", check=True)
    assert [path.read_bytes() for path in api.dataset(tmp_path / "results", tmp_path / "out")] == before


def test_no_records_make_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there are no results"):
        api.dataset(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_pyarrow_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from vramprobe.cli.verbs import main\n"
        f"sys.argv[1:] = ['report', {str(QUICKSTART)!r}, '--dataset', '/nonexistent/x']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "vramprobe: a data set needs pyarrow, not installed here: pip install 'vramprobe[hub]'\n"
    assert (done.returncode, done.stderr) == (1, said)


# -- pushing -----------------------------------------------------------------------------------------------------------


class FakeHub:
    """HfApi's two methods that are used, with the signatures that it has; nothing leaves the machine."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, []

    def __call__(self, token: str) -> FakeHub:
        self.token = token
        return self

    def create_repo(self, repo_id: str, *, repo_type: str, exist_ok: bool) -> None:
        if self.error:
            raise self.error
        self.calls.append(("create_repo", repo_id, repo_type, exist_ok))

    def create_commit(self, repo_id: str, operations: list[Any], *, commit_message: str, repo_type: str) -> Any:
        self.calls.append(("create_commit", repo_id, repo_type, {one.path_in_repo: one for one in operations}))
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub()
    monkeypatch.setattr(hub, "HfApi", made)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_secret")
    return made


def test_the_stub_has_the_real_signatures() -> None:
    import inspect

    for name in ("create_repo", "create_commit"):
        wanted = {one for one in inspect.signature(getattr(FakeHub, name)).parameters if one != "self"}
        assert wanted <= set(inspect.signature(getattr(hub.HfApi, name)).parameters)


def test_a_push_is_one_commit_of_both_files(tmp_path: Path, fake: FakeHub) -> None:
    writing.append(tmp_path / "results" / "records.jsonl", make_record())
    written = api.dataset(tmp_path / "results", tmp_path / "out", push="someone/vram-runs")
    (made, committed) = fake.calls
    assert made == ("create_repo", "someone/vram-runs", "dataset", True)
    assert committed[:3] == ("create_commit", "someone/vram-runs", "dataset")
    assert {name: one.path_or_fileobj for name, one in committed[3].items()} == {
        path.name: path.read_bytes() for path in written
    }
    assert fake.token == "hf_secret"


@pytest.mark.parametrize("name", ["vram-runs", "a/b/c", "some one/x", "-/x", "a/b.git", "/x", ""])
def test_a_bad_name_is_refused_before_anything_is_written(name: str, tmp_path: Path, fake: FakeHub) -> None:
    writing.append(tmp_path / "results" / "records.jsonl", make_record())
    with pytest.raises(VramprobeError, match=r"is no name of a data set: .*; write NAMESPACE/NAME"):
        api.dataset(tmp_path / "results", tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()
    assert fake.calls == []


def test_without_a_token_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(MissingDependency, match=r"no token to push a/b with: set HF_TOKEN .* or log in"):
        push({"README.md": b""}, "a/b")
    assert fake.calls == []


def test_the_hubs_refusal_is_said_without_the_token(fake: FakeHub) -> None:
    for error in (
        ConnectionError("[Errno -2] Name or service not known"),
        hub.errors.OfflineModeIsEnabled("offline mode is enabled"),
        getattr(hub.errors, "HTTPError", OSError)("403 Forbidden\nmore"),
    ):
        fake.error = error
        with pytest.raises(VramprobeError, match=r"^a/b was not pushed \(") as caught:
            push({"README.md": b""}, "a/b")
        assert str(error).splitlines()[0] in str(caught.value)
        assert "hf_secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_verb_writes_the_data_set_alone_or_too(tmp_path: Path) -> None:
    writing.append(tmp_path / "results" / "records.jsonl", make_record())
    run = CliRunner().invoke
    words = ["report", str(tmp_path / "results"), "--dataset", str(tmp_path / "set")]
    done = run(verbs.app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == [str(tmp_path / "set" / name) for name in ("README.md", "records.parquet")]
    both = run(verbs.app, [*words, "-o", str(tmp_path / "out"), "--json"])
    assert str(tmp_path / "out" / "measured.md") in json.loads(both.stdout)
    assert run(verbs.app, [*words, "--check"]).output == "fresh: 2 files are what the records give\n"
    for wrong in ([*words, "--check", "--push", "a/b"], [*words[:2], "--push", "a/b"]):
        assert run(verbs.app, wrong).exit_code == 2
