"""Receipts of records: figures, a command that resolves to the cell, and a hash that follows the record."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.receipt import command_of_cell, receipt_of
from vramprobe.resolve import resolve

QUICKSTART = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"


@pytest.fixture(scope="module")
def records() -> tuple[RunRecord, ...]:
    return store.read(QUICKSTART).records


def test_it_has_the_record_s_figures_and_its_hash(records: tuple[RunRecord, ...]) -> None:
    record = records[0]
    found = receipt_of(record)
    assert record.peak is not None
    assert (found["grade"], found["allocated_bytes"]) == ("measured", record.peak.allocated_bytes)
    assert found["device_bytes"] is None  # a CPU has none
    assert found["libraries"]["torch"] == record.environment.versions["torch"]
    assert found["sha256"] == hashlib.sha256(record.to_json_line().encode()).hexdigest()
    changed = record.model_copy(update={"num_alloc_retries": 1})
    assert receipt_of(changed)["sha256"] != found["sha256"]
    assert str(record.environment.device_uuid) not in json.dumps(found)


def test_its_command_resolves_to_the_cell(records: tuple[RunRecord, ...]) -> None:
    for record in records:
        command = command_of_cell(record.spec)
        assert command is not None
        words = shlex.split(command)[2:]
        options: dict[str, object] = {}
        for index, word in enumerate(words):
            if word.startswith("--"):
                value = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else True
                name = word[2:].replace("-", "_")
                options[name.removeprefix("no_")] = False if name.startswith("no_") else value
        numbers = {name: int(value) for name, value in options.items() if str(value).isdigit()}
        assert resolve(**{**options, **numbers}) == record.spec


def test_a_changed_option_is_in_the_command_and_a_default_is_not(records: tuple[RunRecord, ...]) -> None:
    spec = resolve(device="cuda", model="qwen2.5-0.5b", method="lora", batch_size=2, seq_len=64, lora_r=8)
    command = command_of_cell(spec, "T4")
    assert command is not None
    assert command.startswith("vramprobe measure --emulate T4 --model qwen2.5-0.5b --method lora")
    assert "--lora-r 8" in command
    assert "--optim" not in command


def asked(*words: str) -> str:
    """Return what ``vramprobe export`` prints, errors too."""
    return CliRunner().invoke(app, ["export", str(QUICKSTART), *words]).output


def test_the_verb_writes_one_or_all(tmp_path: Path) -> None:
    found = api.receipts(QUICKSTART)
    assert json.loads(asked("--receipt", "--cell", found[0]["cell"], "--json")) == found[:1]
    out = tmp_path / "receipts.md"
    assert f"{len(found)} receipts" in asked("--receipt", "-o", str(out))
    text = out.read_text()
    assert text.count("## ") == len(found)
    assert f"| allocated | {found[0]['allocated_bytes']:,} B (" in text


def test_what_it_cannot_be_asked_is_refused() -> None:
    with pytest.raises(SpecError, match="has no record of it; it has, for instance, pythia-70m"):
        api.receipts(QUICKSTART, "gpt5")
    assert "--cell is read with --receipt only" in asked("--cell", "x")
    assert "give the new file" in asked()
    assert "a .md or a .json file" in asked("--receipt", "-o", "x.parquet")
