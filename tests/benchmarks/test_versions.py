"""Memory by version: the journal survives, a jump has a cause or is unexplained."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from vramprobe.records.profile import ProfileRecord

FOLDER = Path(__file__).parents[2] / "benchmarks" / "versions"


def table_rows() -> list[dict[str, str]]:
    with (FOLDER / "versions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_runs_are_four_models_by_three_methods_by_two_trainers_and_a_whole_mixtral() -> None:
    runs = script("versions.runs").runs()
    assert len(runs) == len({one.name for one in runs}) == 4 * 3 * 2 + 2
    cut = next(one for one in runs if one.name == "llama-3-8b:8 lora trl")
    assert cut.config["num_hidden_layers"] == 8
    assert cut.command(Path("python"), Path("model"))[-3:] == ["model", "lora", "trl"]


def test_an_unknown_run_or_stack_is_told_what_there_is() -> None:
    for words, known in ((["--run", "gpt-9*"], "qwen2.5-0.5b full trainer"), (["--stack", "hf-1999"], "hf-2024-06")):
        command = [sys.executable, str(FOLDER / "versions.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert known in done.stderr


def test_what_the_journal_has_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, path, ran = script("versions.versions"), tmp_path / "journal.jsonl", []
    todo = [(stack, run) for run in script("versions.runs").runs()[:2] for stack in versions.dated_stacks()[:2]]

    def attempt(run: Any, python: Path, pins: dict[str, str], **_: Any) -> dict[str, Any]:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(run.name)
        told = {"run": run.name, "fingerprint": run.fingerprint}
        told |= {"pins_fingerprint": script("frameworks.stacks").fingerprint_of(pins)}
        return told | {"outcome": "error" if len(ran) == 2 else "ok", "peak_bytes": 1, "seconds": 1.0}

    monkeypatch.setattr(versions, "attempt", attempt)
    monkeypatch.setattr(versions, "environment", lambda *_, **__: Path("python"))
    with pytest.raises(KeyboardInterrupt):
        versions.campaign(todo, path=path, uv="uv", limit_seconds=1)
    with path.open("ab") as file:
        file.write(b'{"run": "torn')
    entries = versions.journal.read(path, "run")
    assert len(entries) == 3
    done = [versions.is_done(stack, run, entries, errors_too=False) for stack, run in todo]
    assert done == [True, True, True, False]
    assert [versions.is_done(stack, run, entries, errors_too=True) for stack, run in todo] == [True, False, True, False]


def test_a_run_that_did_not_repeat_is_no_figure() -> None:
    attempt = script("versions.attempt")
    rank = {"pid": 1, "device": 0, "phases": [], "peak": {"phase": "forward", "allocated_bytes": 5}, "num_steps": 3}
    profile = {"attempt_id": "a", "name": "n", "command": ["c"], "started_at": "2026-11-22T00:00:00Z"}
    profile |= {"instrument": "emulated", "outcome": {"kind": "ok"}, "environment": {}}
    for repeats, outcome in ((True, "ok"), (False, "error"), (None, "error")):
        record = ProfileRecord.model_validate_json(json.dumps(profile | {"ranks": [rank | {"repeats": repeats}]}))
        assert attempt.entry_of(record, "said")["outcome"] == outcome
    assert attempt.entry_of(None, "said") == {"outcome": "error", "said": "said"}


def test_every_jump_has_a_cause_or_is_called_unexplained() -> None:
    jumps = [row for row in table_rows() if row["change_percent"] and abs(float(row["change_percent"])) > 1]
    assert jumps
    assert all(row["cause"] for row in jumps)
    assert not [row for row in table_rows() if row["cause"] and row not in jumps]


def test_every_cause_is_of_a_jump_and_its_bisection_is_in_the_journal() -> None:
    causes, versions = script("versions.causes"), script("versions.versions")
    jumps, entries = [row for row in table_rows() if row["cause"]], versions.current(versions.JOURNAL)
    for cause in causes.list_causes():
        assert any(cause.applies(row["run"], row["since"], row["stack"]) for row in jumps), cause.release
        if cause.bisected:
            step = causes.step_of(cause, entries)
            assert step is not None, cause
            assert abs(step[2] / step[1] - 1) > 0.01, cause


def test_the_arithmetic_of_experts_as_linear_layers_is_what_transformers_4_and_5_held() -> None:
    from vramprobe.architecture import architecture
    from vramprobe.bounds.tensors import less_as_linears_bytes
    from vramprobe.resolve import resolve

    versions, base = script("versions.versions"), {}
    for entry in versions.current(versions.JOURNAL):
        if entry["run"] == "mixtral-8x7b:4 qlora trl" and entry["outcome"] == "ok" and "changed" not in entry:
            alive = entry["at_peak"]
            base[entry["stack"]] = alive["weights_bytes"] - alive["optimizer_state_bytes"] // 2  # without the adapters
    words = {"model": "mixtral-8x7b", "method": "qlora", "kbit_prep": "none", "device": "cuda"}
    cell = resolve(**words, num_layers=4, batch_size=4, seq_len=1024)
    less = less_as_linears_bytes(cell, architecture(cell.architecture))
    assert base["hf-2026-02"] - base["hf-2025-10"] == pytest.approx(less, rel=0.001)


def test_recordings_with_a_runs_own_libraries_are_within_a_third_of_a_percent() -> None:
    runs = {(row["run"], row["stack"]): row for row in table_rows()}
    kept = script("tables").read_csv(FOLDER / "recorded.csv")
    assert len(kept) > 20
    for row in kept:
        run = runs[row["run"], row["stack"]]
        assert row["run_bytes"] == (run["step_bytes"] or run["peak_bytes"])
        assert abs(int(row["recorded_bytes"]) / int(row["run_bytes"]) - 1) < 0.003
