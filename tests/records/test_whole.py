"""A record with an architecture that no model can have is named: where it stands, which attempt, which key."""

from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA, make_record, make_spec

from vramprobe import api
from vramprobe.errors import StoreError
from vramprobe.records import writing
from vramprobe.records.whole import read_whole
from vramprobe.spec import CellSpec


def record_of(config: dict[str, Any]) -> Any:
    return make_record(CellSpec(**(make_spec().model_dump() | {"architecture": config})))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Two good records, and between them one whose number of layers cannot be; its cell id stays as it was."""
    for config in (TINY_LLAMA, TINY_LLAMA | {"num_hidden_layers": -3}, TINY_LLAMA | {"num_hidden_layers": 3}):
        writing.append(tmp_path / "records.jsonl", record_of(config))
    return tmp_path


@pytest.mark.parametrize(
    "ask",
    [
        api.fit,
        api.calibrate,
        lambda path: api.evaluate(path, leave_out="model"),
        lambda path: api.report(path, path / "out"),
    ],
    ids=["fit", "calibrate", "evaluate", "report"],
)
def test_every_verb_names_the_record_of_a_broken_architecture(broken: Path, ask: Any) -> None:
    with pytest.raises(StoreError) as error:
        ask(broken)
    attempt = record_of(TINY_LLAMA | {"num_hidden_layers": -3}).attempt_id
    assert str(error.value).startswith(f"{broken / 'records.jsonl'}, line 2: the llama config.json has")
    assert "num_hidden_layers -3; it must be a whole number of 1 or more" in str(error.value)
    assert f"attempt {attempt} of " in str(error.value)


def test_what_has_no_arithmetic_is_read(tmp_path: Path) -> None:
    writing.append(tmp_path / "records.jsonl", record_of({"model_type": "mamba"}))
    assert len(read_whole(tmp_path).records) == 1
