"""A running sweep as it is shown: the live table, plain lines, JSON lines and the summary, from made-up events."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_record, make_spec
from predictions import some_prediction
from rich.console import Console

from vramprobe import units
from vramprobe.cli import display_plan, live
from vramprobe.cli.tally import COUNTED, Tally, prediction_error, worst_error
from vramprobe.measure.isolation import read_phase
from vramprobe.predict.prediction import Interval
from vramprobe.records.outcomes import Error, Interrupted, Oom, Outcome, Skipped
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Rate
from vramprobe.sweep.limits import SweepLimits
from vramprobe.sweep.plan import Plan, PlanRow
from vramprobe.sweep.progress import Progress, RunSummary

RATE = Rate(3.6, "as given")  # a tenth of a cent per second
OOM = Oom(phase="forward", step=1, requested_bytes=1024, message="out of memory")
ERROR = Error(phase="load", error_type="ValueError", message="it broke [bold]here[/]\nand there")
SKIPPED = Skipped(why="dominated", evidence="a smaller one ran out", evidence_attempt_id="attempt-of-old")
SPECS = [make_spec(seq_len=16 * 2**power) for power in range(4)]


class Clock:
    """A clock that a test moves."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def make_row(spec: CellSpec, off: float | None = 0.0, **overrides: Any) -> PlanRow:
    """A row to run that takes 10 s; ``off``: its prediction is so much above what make_record measured."""
    prediction = None
    if off is not None:
        peak = Interval(value=round(make_record(spec).peak.allocated_bytes * (1 + off)), low=0, high=10**12)
        prediction = some_prediction(peak_allocated_bytes=peak)
    values = {"num_params": 10**6, "action": "run", "reason": "no attempt yet", "seconds": 10.0}
    return PlanRow(spec=spec, prediction=prediction, **(values | overrides))


def make_plan(*rows: PlanRow, rate: Rate | None = None) -> Plan:
    return Plan(rows=rows or tuple(map(make_row, SPECS)), card=None, rate=rate, fit=None)


def event(plan: Plan, kind: str, index: int = 1, outcome: Outcome | None = None, **overrides: Any) -> Progress:
    """Return the progress that a runner would report of the row ``index`` of ``plan``."""
    row = overrides.pop("row", plan.rows[index - 1])
    record = None
    if kind in ("finished", "skipped"):
        record = make_record(row.spec, **({"outcome": outcome} if outcome else {}))
    values: dict[str, Any] = {"reason": row.reason, "record": record}
    if kind in ("started", "finished"):
        values |= {"log": Path("out/logs") / f"{index}.log", "expected_seconds": 10.0, "attempt_id": f"attempt-{index}"}
    return Progress(kind, plan, index, row, **(values | overrides))


def planned(plan: Plan) -> Progress:
    return Progress("planned", plan, left_seconds=plan.seconds)


def every_kind(plan: Plan) -> list[Progress]:
    """One event of each kind that concerns a cell."""
    kept = replace(plan.rows[0], action="kept", record=make_record(SPECS[0]))
    return [
        event(plan, "kept", 1, row=kept, reason="ok at some time"),
        event(plan, "quarantined", 1, reason="3 attempts did not end"),
        event(plan, "skipped", 2, SKIPPED, attempt_id="attempt-2"),
        event(plan, "started", 3, left_seconds=20.0, seconds=1.0),
        event(plan, "finished", 3, left_seconds=10.0, seconds=12.0),
        event(plan, "finished", 3, OOM, node="host-2"),
        event(plan, "finished", 3, ERROR),
        event(plan, "left", 4, reason="budget"),
    ]


def rendered(tally: Tally, width: int) -> str:
    """The table as a terminal of that width gets it; no line of it is wider."""
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO(), highlight=False)
    console.print(live.progress_table(tally))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= width
    return "\n".join(lines).rstrip()


def said(text: str) -> str:
    """``text`` without what wrapping does to it."""
    return re.sub(r"\s+", "", text)


@pytest.fixture
def busy(tmp_path: Path) -> tuple[Tally, Clock]:
    """One ok, one OOM, one failed, one running for 4 of 10 s in step 2; a budget of a dollar."""
    plan = make_plan(*map(make_row, SPECS, (-0.02, 0.01, 0.0, 0.0)), rate=RATE)
    clock = Clock()
    tally = Tally(clock)
    (tmp_path / "status").write_text("backward 2".ljust(32))
    budget = SweepLimits(max_seconds=1000.0, limited_by="budget")
    tally.add(planned(plan))
    tally.add(event(plan, "finished", 1, left_seconds=30.0, seconds=12.0))
    tally.add(event(plan, "finished", 2, OOM, left_seconds=20.0, seconds=20.0))
    tally.add(event(plan, "finished", 3, ERROR, left_seconds=10.0, seconds=30.0))
    running = {"status": tmp_path / "status", "left_seconds": 10.0, "seconds": 31.0, "limits": budget}
    tally.add(event(plan, "started", 4, **running))
    clock.seconds += 4.0
    return tally, clock


def test_of_several_cells_that_run_at_once_the_table_says_how_many() -> None:
    plan, tally = make_plan(), Tally()
    for index in (1, 3):
        tally.add(event(plan, "started", index))
    assert tally.num_running == 2
    assert "and 1 more at once" in rendered(tally, 80)
    tally.add(event(plan, "finished", 3, node="host-2"))
    assert tally.num_running == 1


@pytest.mark.parametrize("width", [100, 80, 50, 30])
def test_the_table_says_it_all_at_any_width(busy: tuple[Tally, Clock], width: int) -> None:
    shown = rendered(busy[0], width)
    for text in (
        f"4/4 {SPECS[3].cell_id}",
        "4.0 s of about 10 s, in backward of step 2",
        "1 ok, 1 oom, 1 failed, 1 left",
        "35 s of 17 min used, about 6.0 s to go",
        "$0.04 spent, about $0.01 to go, $0.96 left of $1.00",  # 35 s and 6 s at a tenth of a cent
        f"-2.00 % at worst, {SPECS[0].cell_id}",
    ):
        assert said(text) in said(shown), shown


def test_before_the_plan_and_between_cells_there_is_less_to_show() -> None:
    tally, plan = Tally(Clock()), make_plan()
    assert rendered(tally, 80) == "planning the sweep …"
    tally.add(planned(plan))
    assert "cell " not in rendered(tally, 80)
    tally.add(event(plan, "finished", 1, left_seconds=30.0))
    assert "of about" not in rendered(tally, 80)
    assert "$" not in rendered(tally, 80)  # without a price


@pytest.mark.parametrize(
    "left_behind", [None, b"", b"   ", b"back", b"backward two", b"backward 2 3", b"\xff\xfe\x00", b"forward -1"]
)
def test_a_missing_or_torn_status_file_shows_nothing(left_behind: bytes | None, tmp_path: Path) -> None:
    status = tmp_path / "status"
    if left_behind is not None:
        status.write_bytes(left_behind)
    tally, plan = Tally(Clock()), make_plan()
    tally.add(event(plan, "started", 1, status=status, left_seconds=40.0))
    assert "0.0 s of about 10 s\n" in rendered(tally, 80)
    assert read_phase(status) is None


def test_the_last_announced_phase_may_be_over(tmp_path: Path) -> None:
    status, plan = tmp_path / "status", make_plan()
    for text, shown in (("load", "in load\n"), ("zero_grad 2", "of step 2\n"), ("zero_grad 3", "of step 3 or later\n")):
        status.write_text(text)
        tally = Tally(Clock())
        tally.add(event(plan, "started", 1, status=status))
        assert shown in rendered(tally, 80)


def test_a_last_cell_that_is_late_promises_nothing() -> None:
    clock, plan = Clock(), make_plan(rate=RATE)
    tally = Tally(clock)
    tally.add(event(plan, "started", 4, left_seconds=10.0))
    assert "to go" in rendered(tally, 80)
    clock.seconds += 11.0
    assert "to go" not in rendered(tally, 80)


def test_every_outcome_is_counted_once() -> None:
    tally, plan = Tally(), make_plan(*(make_row(make_spec(seq_len=size)) for size in range(16, 26)))
    outcomes = [None, OOM, ERROR, Interrupted(message="stopped by SIGINT")]
    for index, outcome in enumerate(outcomes, start=1):
        tally.add(event(plan, "started", index))
        tally.add(event(plan, "finished", index, outcome))
    tally.add(event(plan, "skipped", 5, SKIPPED))
    tally.add(event(plan, "kept", 6))
    tally.add(event(plan, "quarantined", 7))
    tally.add(event(plan, "left", 8))
    assert tally.counts == dict.fromkeys(COUNTED, 1)
    assert tally.num_left == 4  # the interrupted one, the one that was not started, and the two behind it


def test_what_is_left_shrinks_with_the_running_cell_until_it_is_late() -> None:
    clock, plan = Clock(), make_plan()
    tally = Tally(clock)
    tally.add(event(plan, "started", 2, left_seconds=30.0, seconds=5.0))
    expected = {0.0: (5.0, 30.0), 4.0: (9.0, 26.0), 10.0: (15.0, 20.0), 60.0: (65.0, 20.0)}
    for elapsed, (used, left) in expected.items():
        clock.seconds = 100.0 + elapsed
        assert (tally.cell_seconds, tally.seconds, tally.left_seconds) == (elapsed, used, left)
    tally.add(event(plan, "finished", 2, left_seconds=70.0, seconds=66.0))
    clock.seconds += 1.0
    assert (tally.cell_seconds, tally.seconds, tally.left_seconds) == (None, 67.0, 70.0)


def test_the_error_is_predicted_less_measured_over_measured() -> None:
    spec = make_spec()
    peak = make_record(spec).peak.model_copy(update={"allocated_bytes": 1000})
    record = make_record(spec, peak=peak)
    row = make_row(spec)
    for predicted, error in ((1003, 0.003), (980, -0.02), (1000, 0.0)):
        at = row.prediction.model_copy(update={"peak_allocated_bytes": Interval(value=predicted, low=0, high=2000)})
        assert prediction_error(replace(row, prediction=at), record) == pytest.approx(error)
    assert prediction_error(make_row(spec, off=None), record) is None
    assert prediction_error(row, make_record(spec, outcome=OOM)) is None


def test_the_worst_error_is_the_farthest_from_zero() -> None:
    rows = [*map(make_row, SPECS, (0.01, -0.03, 0.02, None))]
    error, cell = worst_error(rows, map(make_record, SPECS))
    assert error == pytest.approx(-0.03, abs=1e-5)
    assert cell == SPECS[1].cell_id
    assert worst_error(rows, []) is None
    assert worst_error(rows[3:], [make_record(SPECS[3])]) is None


class Terminal(io.StringIO):
    """Stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_ids_and_messages_are_shown_literally(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "[red]new\n\x1b[2Jline[bold]"
    folder.mkdir()
    (folder / "config.json").write_text((Path(make_spec().model) / "config.json").read_text())
    row = make_row(make_spec(model=str(folder)))
    plan = make_plan(row)
    literal = f"[red]new  [2Jline[bold]_{row.spec.cell_id.split('_', 1)[1]}"
    tally = Tally()
    tally.add(event(plan, "finished", 1))
    tally.add(event(plan, "started", 1))
    shown = said(rendered(tally, 80))
    assert said(f"1/1 {literal}") in shown
    assert said(f"at worst, {literal}") in shown
    stderr = shown_on(Terminal(), [planned(plan), event(plan, "finished", 1, ERROR)], monkeypatch)
    broke = "error  in load: ValueError: it broke [bold]here[/] and there"
    assert f"[1/1] {literal}  {broke}  log: out/logs/1.log" in stderr
    assert "\x1b[2J" not in stderr


def shown_on(stderr: io.StringIO, events: list[Progress], monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> str:
    """Return what sweep_progress writes to ``stderr``."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", stderr)
    with live.sweep_progress(as_json=False) as on_event:
        for each in events:
            on_event(each)
    return stderr.getvalue()


def test_on_a_terminal_finished_cells_stay_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(rate=RATE)
    shown = shown_on(Terminal(), [planned(plan), *every_kind(plan)], monkeypatch)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown.splitlines()]
    assert [line for line in lines if line.startswith("[3/4]") and "error" in line and "log: out/logs/3.log" in line]
    assert [line for line in lines if line.startswith("[2/4]") and "skipped: " in line]
    assert [line for line in lines if line.startswith("[1/4]") and "quarantined: 3 attempts" in line]
    assert not [line for line in lines if "kept: " in line]  # hundreds of them, on a resume
    assert "\x1b[1;31m[3/4]" in shown  # the failed one is bold and red
    assert "1 failed" in shown
    assert shown.endswith(8 * "\x1b[1A\x1b[2K")  # the rows of the table and the line below it are gone


@pytest.mark.parametrize(("stderr", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_elsewhere_there_is_one_plain_line_per_cell(
    stderr: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(make_row(SPECS[0], 0.003), *map(make_row, SPECS[1:]), rate=RATE)
    ended = event(plan, "finished", 1, left_seconds=30.0, seconds=20.0)
    events = [planned(plan), event(plan, "started", 1), ended, *every_kind(plan)]
    shown = shown_on(stderr, events, monkeypatch, term)
    assert "\x1b" not in shown
    lines = shown.splitlines()
    peak = units.format_bytes(make_record(SPECS[0]).peak.allocated_bytes)
    first = f"[1/4] {SPECS[0].cell_id}  ok  {peak} in backward (predicted +0.30 %)  0.5 s"
    assert lines[0] == display_plan.plan_in_words(plan)
    assert lines[1] == f"{first}  [about 30 s to go, $0.02 spent]"
    kinds = ("kept: ", "quarantined: ", "skipped: ", "  ok  ", "  oom  ", "  error  ")
    assert [kind in line for kind, line in zip(kinds, lines[2:], strict=True)] == [True] * 6
    assert "log: out/logs/3.log" in lines[-1]


def documented(function: Callable[..., Any]) -> set[str]:
    """The keys that a docstring lists."""
    found = re.findall(r"^    - (.*?):", function.__doc__, re.M)
    return {key for line in found for key in re.findall(r"``(\w+)``", line)}


def json_lines(events: list[Progress], capsys: pytest.CaptureFixture) -> list[dict[str, Any]]:
    with live.sweep_progress(as_json=True) as on_event:
        for each in events:
            on_event(each)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_have_the_documented_keys(capsys: pytest.CaptureFixture) -> None:
    plan = make_plan(rate=RATE)
    first, *lines = json_lines([planned(plan), *every_kind(plan)], capsys)
    assert documented(display_plan.plan_as_json) == set(first)
    assert [line["kind"] for line in lines] == [each.kind for each in every_kind(plan)]
    for line in lines:
        assert documented(live.event_as_json) == set(line)
    for key in documented(live.event_as_json):
        assert any(line[key] is not None for line in lines), key
    live.print_summary(make_summary([], plan), as_json=True)
    (summary,) = capsys.readouterr().out.splitlines()
    assert documented(live.summary_as_json) == set(json.loads(summary))


def test_json_lines_hold_the_numbers(capsys: pytest.CaptureFixture) -> None:
    plan = make_plan(make_row(SPECS[0], 0.01), *map(make_row, SPECS[1:]), rate=RATE)
    kept, _, skipped, started, *_, error, _ = json_lines(every_kind(plan), capsys)
    (ok,) = json_lines([event(plan, "finished", 1, left_seconds=9.96, seconds=12.0)], capsys)
    measured = make_record(SPECS[0]).peak.allocated_bytes
    assert (ok["peak_allocated_bytes"], ok["predicted_bytes"]) == (measured, round(measured * 1.01))
    assert ok["prediction_error"] == pytest.approx(0.01, abs=1e-5)
    assert (ok["seconds"], ok["dollars"], ok["left_seconds"], ok["expected_seconds"]) == (12.0, 0.012, 10.0, 10.0)
    assert (ok["log"], ok["detail"], ok["attempt_id"]) == (None, None, "attempt-1")
    assert (error["log"], error["outcome"]) == ("out/logs/3.log", "error")
    assert "it broke" in error["detail"]
    assert (started["log"], started["outcome"], started["attempt_id"]) == ("out/logs/3.log", None, "attempt-3")
    assert skipped["skipped"] == SKIPPED.model_dump(exclude={"kind"})
    assert skipped["log"] is None
    assert kept["attempt_id"] == f"attempt-{SPECS[0].fingerprint}"


def make_summary(records: list[RunRecord], plan: Plan, **overrides: Any) -> RunSummary:
    return RunSummary(Path("out/records.jsonl"), plan, records=records, **({"seconds": 100.0} | overrides))


def test_the_summary_says_how_it_ended_and_how_to_go_on(capsys: pytest.CaptureFixture) -> None:
    rows = map(make_row, SPECS, (0.01, 0.0, 0.0, 0.0))
    at_rest = [make_row(make_spec(seq_len=size), action=action) for size, action in ((20, "kept"), (24, "quarantined"))]
    plan = make_plan(*at_rest, *rows, rate=RATE)
    records = [make_record(SPECS[0]), make_record(SPECS[1], outcome=ERROR)]
    summary = make_summary(records, plan, kept=1, stopped_by="budget", notes=["a [torn] line was moved"])
    live.print_summary(summary, as_json=False)
    shown = capsys.readouterr().out
    log = f"out/logs/{SPECS[1].cell_id}.{SPECS[1].fingerprint}.log"
    assert shown.splitlines() == [
        "note: a [torn] line was moved",
        f"error: {SPECS[1].cell_id}  log: {log}",
        "1 error, 1 ok; 1 kept, 1 quarantined, 2 left of 6 cells → out/records.jsonl",
        f"2 min used, $0.10 spent; prediction error +1.00 % at worst, {SPECS[0].cell_id}",
        "stopped by budget",
        "run the same command again to go on (2 left, 1 to try again)",
        "run it with --retry-quarantined for the 1 that never ended",
    ]
    found = live.summary_as_json(summary)
    assert (found["left"], found["kept"], found["quarantined"], found["dollars"]) == (2, 1, 1, 0.1)
    assert found["worst_prediction_error"]["cell_id"] == SPECS[0].cell_id
    assert found["failed"] == [
        {"cell_id": SPECS[1].cell_id, "attempt_id": records[1].attempt_id, "outcome": "error", "log": log}
    ]


def test_a_sweep_that_is_done_asks_for_nothing(capsys: pytest.CaptureFixture) -> None:
    plan = make_plan(*(make_row(spec, off=None) for spec in SPECS[:2]))
    live.print_summary(make_summary([make_record(SPECS[0]), make_record(SPECS[1], outcome=OOM)], plan), as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "1 ok, 1 oom; 0 kept, 0 left of 2 cells → out/records.jsonl",
        "2 min used",
    ]


def test_of_many_failures_ten_are_listed(capsys: pytest.CaptureFixture) -> None:
    specs = [make_spec(seq_len=size) for size in range(16, 29)]
    records = [make_record(spec, outcome=ERROR) for spec in specs]
    live.print_summary(make_summary(records, make_plan(*map(make_row, specs))), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 10
    assert lines[10] == "and 3 more that failed"
