"""DataFrames: one row per record, phase or rank; every column is documented, typed, and NA where nothing is known."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from factories import TINY_LLAMA_PARAMS, make_environment, make_record, make_spec

import vramprobe
from vramprobe.errors import SpecError, StoreError
from vramprobe.records import writing
from vramprobe.records.columns import COLUMNS
from vramprobe.records.outcomes import Oom
from vramprobe.records.phase_memory import PhaseMemory
from vramprobe.records.profile import ProfileEnvironment, ProfileRecord, RankProfile
from vramprobe.records.profile_memory import PhaseHighest, ProfilePeak
from vramprobe.records.profile_outcomes import ProfileOk
from vramprobe.records.record import RankRecord, RunRecord
from vramprobe.records.traffic import CollectiveTraffic

ROOT = Path(__file__).parents[2]


def saved(folder: Path, *records: RunRecord | ProfileRecord) -> Path:
    for number, record in enumerate(records):
        writing.append(folder / "records.jsonl", record.model_copy(update={"attempt_id": f"attempt-{number}"}))
    return folder


def profile() -> ProfileRecord:
    peak = ProfilePeak(phase="backward", step=2, allocated_bytes=9, requested_bytes=8, reserved_bytes=10)
    phase = PhaseHighest(name="backward", num_phases=3, allocated_bytes=9, reserved_bytes=10)
    ranks = [RankProfile(rank=rank, pid=1, device=rank, phases=[phase], peak=peak, num_steps=3) for rank in (0, 1)]
    run = {"attempt_id": "x", "name": "train.py", "command": ["python", "train.py"], "outcome": ProfileOk()}
    run |= {"started_at": "2026-03-01T00:00:00Z", "instrument": "emulated"}
    return ProfileRecord(**run, environment=ProfileEnvironment(device_name="NVIDIA H100 80GB HBM3"), ranks=ranks)


def two_ranks() -> RunRecord:
    """A cell of two GPUs, whose ranks keep their own phases; the second sends 5 and 7 bytes."""
    record = make_record()
    call = {"phase": "backward", "kind": "all_reduce", "num_ranks": 2, "num_calls": 1, "payload_bytes": 5}
    moved = [CollectiveTraffic(**call, link_bytes=sent) for sent in (5, 7)]
    own = {"peak": record.peak, "ledger": record.ledger, "phases": record.phases[:2]}
    ranks = [RankRecord(rank=rank, **own, traffic=moved[: rank * 2]) for rank in (0, 1)]
    return record.model_copy(update={"ranks": ranks})


@pytest.mark.parametrize("of", COLUMNS)
def test_every_column_is_documented_with_its_dtype(of: str, tmp_path: Path) -> None:
    """The page, the code's own list and a real DataFrame have the same columns, in one order."""
    section = (ROOT / "docs" / "dataframes.md").read_text().split(f"## {of.capitalize()}\n")[1].split("\n## ")[0]
    said = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.M)
    assert said == [(name, *column) for name, column in COLUMNS[of].items()]
    frame = vramprobe.load(saved(tmp_path, two_ranks(), profile()), of=of)
    assert len(frame) > 0
    own = [name for name in frame if not name.startswith("version_")]
    assert own == list(COLUMNS[of])
    assert {name: str(frame[name].dtype) for name in own} == {name: one.dtype for name, one in COLUMNS[of].items()}
    versions = frame.drop(columns=own)
    assert {str(dtype) for dtype in versions.dtypes} == ({"string"} if of == "records" else set())


def test_units_are_the_last_word_of_a_name() -> None:
    for columns in COLUMNS.values():
        for name, (dtype, _) in columns.items():
            assert (dtype == "Int64") >= name.endswith("_bytes"), name
            assert (dtype == "Float64") >= name.endswith("_seconds"), name
            assert (dtype == "Int64") >= name.startswith("num_"), name


def test_every_record_is_a_row_with_exact_values(tmp_path: Path) -> None:
    other = make_environment(device_total_bytes=2**62, versions={"torch": "2.13.0", "new": "1"})
    records = [
        make_record(sweep="tiny", held_out=True),
        make_record(make_spec(method="lora", lora_dropout=0.1), environment=other),
        make_record(outcome=Oom(phase="load", message="no")),
        make_record(make_spec(device="cuda"), instrument="emulated"),
    ]
    frame = vramprobe.load(saved(tmp_path, *records))
    assert frame.outcome.tolist() == ["ok", "ok", "oom", "ok"]
    assert frame.instrument.tolist() == ["cpu", "cpu", "cpu", "emulated"]
    assert frame.peak_allocated_bytes[0] == records[0].peak.allocated_bytes
    assert frame.num_params[0] == TINY_LLAMA_PARAMS
    assert frame.device_total_bytes[1] == 2**62  # never a float
    assert frame.lora_dropout[1] == 0.1
    assert frame.held_out.tolist() == [True, False, False, False]
    assert (frame.version_new[1], frame.started_at.dt.year[0]) == ("1", int(records[0].started_at[:4]))
    unknown = frame.isna()
    assert unknown.peak_allocated_bytes.tolist() == [False, False, True, False]
    assert unknown.peak_device_bytes.all()
    assert unknown.version_new.tolist() == [True, False, True, True]
    assert unknown.sweep.tolist() == [False, True, True, True]


def test_ranks_of_cells_and_of_commands_are_rows(tmp_path: Path) -> None:
    record = two_ranks()
    frame = vramprobe.load(saved(tmp_path, make_record(), record, profile()), of="ranks")
    assert frame.attempt_id.tolist() == ["attempt-0", "attempt-1", "attempt-1", "attempt-2", "attempt-2"]
    assert frame["rank"].tolist() == [0, 0, 1, 0, 1]
    assert frame.peak_allocated_bytes.tolist() == [record.peak.allocated_bytes] * 3 + [9, 9]
    assert frame.peak_phase.tolist() == ["backward"] * 5
    assert frame.link_bytes.tolist() == [pd.NA, 0, 12, pd.NA, pd.NA]
    assert frame.command.tolist() == [pd.NA, pd.NA, pd.NA, "train.py", "train.py"]
    assert frame.cell_id.isna().tolist() == [False, False, False, True, True]
    assert frame.weights_bytes.tolist()[:3] == [record.ledger.weights_bytes] * 3


def test_phases_are_those_of_each_rank_where_they_are_kept(tmp_path: Path) -> None:
    one, record = make_record(), two_ranks()
    assert len(one.phases) > 2
    frame = vramprobe.load(saved(tmp_path, one, record, profile()), of="phases")
    assert frame.groupby(["attempt_id", "rank"]).size().tolist() == [len(one.phases), 2, 2, 1, 1]
    first = frame.iloc[0]
    for name in set(PhaseMemory.model_fields) - {"name"}:
        value = getattr(one.phases[0], name)
        assert pd.isna(first[name]) if value is None else first[name] == value
    last = frame.iloc[-1]
    assert (last.phase, last.num_phases, last.allocated_peak_bytes, last.reserved_peak_bytes) == ("backward", 3, 9, 10)
    assert pd.isna(last.allocated_end_bytes)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="use records, phases or ranks"):
        vramprobe.load(tmp_path, of="cells")
    with pytest.raises(StoreError, match="there are no results"):
        vramprobe.load(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="holds no record"):
        vramprobe.load(saved(tmp_path, profile()))
    assert len(vramprobe.load(tmp_path, of="ranks")) == 2


def test_the_example_groups_pivots_and_plots(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "examples/analysis.py", str(tmp_path / "plot.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| opt-125m" in done.stdout
    assert "|   optimizer_step |" in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
