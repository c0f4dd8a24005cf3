"""A measured cell's snapshot for memory_viz: its way from the command line to the instrument, without a GPU."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from factories import make_record, make_spec
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli import display_record, verbs
from vramprobe.errors import SpecError, StoreError
from vramprobe.measure.isolation import new_ticket, run_isolated
from vramprobe.records.outcomes import Ok, Oom
from vramprobe.records.record import RunRecord
from vramprobe.sweep import runner

torch = pytest.importorskip("torch")


class FakeMemory:
    """torch.cuda.memory's recorder: notes its calls, and dumps what it has seen."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def record(self, **options: Any) -> None:
        self.calls.append(options)

    def dump(self, path: str) -> None:
        if self.error:
            raise self.error
        Path(path).write_bytes(pickle.dumps({"segments": [], "device_traces": [self.calls.copy()]}))


@pytest.fixture
def instrument(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeMemory]:
    from vramprobe.measure.cuda import CudaInstrument

    memory, made = FakeMemory(), CudaInstrument.__new__(CudaInstrument)
    made.warnings = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", memory.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", memory.dump)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: memory.calls.append("synchronize"))
    return made, memory


def test_one_step_is_recorded_with_stacks_and_dumped(instrument: tuple[Any, FakeMemory], tmp_path: Path) -> None:
    made, memory = instrument
    made.snapshot_step(lambda: memory.calls.append("step"), tmp_path / "step.pickle")
    began, *during, ended = memory.calls
    assert began.items() >= {"enabled": "all", "context": "all", "stacks": "python", "clear_history": True}.items()
    assert during == ["step", "synchronize"]
    assert ended == {"enabled": None}
    assert pickle.loads((tmp_path / "step.pickle").read_bytes())["device_traces"] == [memory.calls[:-1]]
    assert made.warnings == []


def test_the_real_recorder_takes_these_options() -> None:
    import inspect

    taken = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert {"enabled", "context", "stacks", "max_entries", "clear_history"} <= set(taken)


def test_a_snapshot_that_fails_costs_no_measurement(instrument: tuple[Any, FakeMemory], tmp_path: Path) -> None:
    made, memory = instrument
    memory.error = OSError("No space left on device")
    made.snapshot_step(lambda: None, tmp_path / "step.pickle")
    assert made.warnings == ["no snapshot: OSError: No space left on device"]
    assert memory.calls[-1] == {"enabled": None}


def test_the_worker_takes_it_after_all_that_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU's instrument with the method of the other: the record is that of a cell without a snapshot."""
    from vramprobe.measure import cpu
    from vramprobe.measure.run_cell import run_cell

    seen: list[Any] = []

    def snapshot_step(self: Any, step: Any, path: Path) -> None:
        seen.append((path, self._observation is not None))
        step()

    monkeypatch.setattr(cpu.CpuInstrument, "snapshot_step", snapshot_step, raising=False)
    spec = make_spec(timing_steps=1)
    record = run_cell(spec, isolation="spawn", snapshot=tmp_path / "x")
    assert seen == [(tmp_path / "x", True)]
    assert isinstance(record.outcome, Ok)
    assert record.peak == run_cell(spec, isolation="spawn").peak


@pytest.mark.parametrize("asked", [True, False])
def test_the_request_names_the_file(asked: bool, tmp_path: Path) -> None:
    requests: list[dict[str, str]] = []

    class Launcher:
        isolation, isolation_reason = "spawn", None

        def start(self) -> None: ...

        def run(self, request: dict[str, str], timeout_seconds: float | None) -> int:
            requests.append(request)
            Path(request["record"]).write_text(make_record(attempt_id=request["attempt_id"]).to_json_line())
            return 0

    ticket = new_ticket(tmp_path, tmp_path / "step.pickle" if asked else None)
    run_isolated(make_spec(), Launcher(), ticket, tmp_path / "log", None)
    assert requests[0]["snapshot"] == (str(tmp_path / "step.pickle") if asked else "")


def test_a_cpu_cell_has_none_and_says_what_to_do(tmp_path: Path) -> None:
    cell = {"model": "gpt2", "method": "lora", "batch_size": 1, "seq_len": 8, "device": "cpu"}
    with pytest.raises(SpecError, match=r"CUDA's caching allocator, .* measure it on a GPU, or on an emulated one"):
        api.measure(snapshot=tmp_path / "a.pickle", **cell)


def measure_with(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def measure(spec: Any, *, log: Path, timeout_seconds: float, snapshot: Path | None, verify: bool) -> RunRecord:
        asked.append(snapshot)
        return record

    monkeypatch.setattr(runner, "measure", measure)
    return asked


WORDS = ["measure", "--model", "gpt2", "--method", "lora", "--batch-size", "1", "--seq-len", "8", "--device", "cuda"]


def test_the_verb_says_where_it_is_or_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--snapshot", "step.pickle"]
    asked = measure_with(make_record(), monkeypatch)
    done = CliRunner().invoke(verbs.app, words)
    assert "snapshot written to step.pickle; open it at pytorch.org/memory_viz" in done.output
    assert asked == [tmp_path / "step.pickle"]  # the worker's folder is another
    measure_with(make_record(warnings=["no snapshot: OSError: full"]), monkeypatch)
    assert "no snapshot: OSError: full" in CliRunner().invoke(verbs.app, words).output
    measure_with(make_record(outcome=Oom(phase="backward", message="x")), monkeypatch)
    assert "the cell ended as oom before that step" in CliRunner().invoke(verbs.app, words).output
    assert json.loads(CliRunner().invoke(verbs.app, [*words, "--json"]).output)["outcome"]["kind"] == "oom"
    assert asked


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measure_with(make_record(), monkeypatch)
    with pytest.raises(StoreError, match="a folder has that name"):
        api.measure(snapshot=tmp_path, model="gpt2", method="lora", batch_size=1, seq_len=8, device="cuda")
    assert asked == []


def test_nothing_is_said_where_none_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    display_record.print_snapshot(make_record(), None)
    assert capsys.readouterr().out == ""
