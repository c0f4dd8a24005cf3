"""The gate: a clean record passes every rule, and one broken in one way is found by that rule alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from factories import make_environment, make_record, make_spec, make_started
from pydantic import BaseModel
from typer.testing import CliRunner

from vramprobe import api, check
from vramprobe.cli import verbs
from vramprobe.errors import StoreError
from vramprobe.records import writing
from vramprobe.records.outcomes import Contaminated, Error, Interrupted, Invalid, Oom
from vramprobe.records.phase_memory import Peak, PhaseMemory
from vramprobe.records.record import RunRecord
from vramprobe.units import MIB

QUICKSTART = Path(__file__).parents[2] / "results" / "cpu" / "quickstart"
CONTEXT_BYTES = 500 * MIB


def edited(value: BaseModel, **changes: Any) -> Any:
    """A copy with other fields, checked again."""
    return type(value).model_validate(value.model_dump() | changes)


def with_phase(record: RunRecord, name: str, step: int | None, **changes: Any) -> RunRecord:
    """``record`` with one phase edited; a number is what is added to the field, null what it becomes."""

    def changed(phase: PhaseMemory) -> PhaseMemory:
        values = {key: change and getattr(phase, key) + change for key, change in changes.items()}
        return edited(phase, **values) if (phase.name, phase.step) == (name, step) else phase

    assert any((phase.name, phase.step) == (name, step) for phase in record.phases)
    return edited(record, phases=[changed(phase) for phase in record.phases])


def without(record: RunRecord, *gone: tuple[str, int | None]) -> RunRecord:
    return edited(record, phases=[phase for phase in record.phases if (phase.name, phase.step) not in gone])


def with_ledger(record: RunRecord, **changes: int) -> RunRecord:
    """``record`` with these added to fields of its ledger."""
    added = {name: getattr(record.ledger, name) + change for name, change in changes.items()}
    return edited(record, ledger=edited(record.ledger, **added))


def with_at_peak(record: RunRecord, **changes: int) -> RunRecord:
    at_peak = record.ledger.at_peak
    added = {name: getattr(at_peak, name) + change for name, change in changes.items()}
    return edited(record, ledger=edited(record.ledger, at_peak=edited(at_peak, **added)))


def with_more_idle(record: RunRecord, more_bytes: int, **changes: Any) -> RunRecord:
    """``record`` with this much more allocated all through training, by nothing known; consistent with itself."""
    for phase in record.phases:
        if phase.step is not None:
            fields = ("allocated_end_bytes", "allocated_peak_bytes")
            record = with_phase(record, phase.name, phase.step, **dict.fromkeys(fields, more_bytes))
    record = with_ledger(record, unaccounted_bytes=more_bytes)
    record = with_at_peak(record, total_bytes=more_bytes, temporaries_bytes=more_bytes)
    peak = edited(record.peak, allocated_bytes=record.peak.allocated_bytes + more_bytes)
    return edited(record, **({"peak": peak} | changes))


def cuda_record(*, reserved_bytes: int = 64 * MIB, **overrides: Any) -> RunRecord:
    """A record with all tiers: allocated is requested rounded up, the segments of the cache and the context on top."""
    record = make_record(
        make_spec(device="cuda"),
        instrument="cuda",
        num_alloc_retries=0,
        context_bytes=CONTEXT_BYTES,
        environment=make_environment(device_name="Test GPU", driver_version="580.1"),
    )
    phases = []
    for phase in record.phases:
        values: dict[str, int] = {"device_used_bytes": reserved_bytes + CONTEXT_BYTES}
        for moment in ("end", "peak"):
            requested = getattr(phase, f"allocated_{moment}_bytes")
            values |= {f"requested_{moment}_bytes": requested, f"reserved_{moment}_bytes": reserved_bytes}
            values |= {f"{tier}_{moment}_bytes": requested + 512 for tier in ("allocated", "active")}
        phases.append(edited(phase, **values))
    peak = edited(
        record.peak,
        allocated_bytes=record.peak.allocated_bytes + 512,
        load_allocated_bytes=record.peak.load_allocated_bytes + 512,
        reserved_bytes=reserved_bytes,
        device_bytes=reserved_bytes + CONTEXT_BYTES,
    )
    return edited(record, **({"phases": phases, "peak": peak} | overrides))


def changed_machine(record: RunRecord, **changes: Any) -> RunRecord:
    """Another cell and attempt on a machine that differs in this."""
    versions = record.environment.versions | changes.pop("versions", {})
    other = make_environment(**(record.environment.model_dump() | changes | {"versions": versions}))
    instrument = record.instrument if record.spec.device == "cpu" else "cuda"
    spec = edited(record.spec, seq_len=8)
    fields = {"spec": spec, "cell_id": spec.cell_id, "fingerprint": spec.fingerprint, "attempt_id": "other"}
    return edited(record, environment=other, instrument=instrument, **fields)


def again(record: RunRecord, **changes: Any) -> RunRecord:
    """A second attempt at the same cell."""
    return edited(record, **({"attempt_id": "again"} | changes))


CPU, CUDA = make_record(), cuda_record()
HIGHEST = ("requested_peak_bytes", "allocated_peak_bytes", "active_peak_bytes")
CLEAN = {
    "cpu": [CPU],
    "cuda": [CUDA],
    "lora": [make_record(make_spec(method="lora"))],
    "no trace of the peak": [edited(CPU, ledger=edited(CPU.ledger, at_peak=None))],
    "traced in allocated bytes": [with_at_peak(CUDA, total_bytes=512, temporaries_bytes=512)],
    "a higher first step": [
        edited(
            with_phase(CUDA, "backward", 1, **dict.fromkeys(HIGHEST, 10**6)),
            peak=edited(CUDA.peak, step=1, allocated_bytes=CUDA.phases[2].allocated_peak_bytes + 10**6),
        )
    ],
    "installed, not a checkout": [edited(CPU, environment=make_environment(commit=None, dirty=None))],
    "out of memory": [make_record(outcome=Oom(phase="load", message="full"), num_alloc_retries=2)],
    "interrupted": [make_record(outcome=Interrupted(message="SIGTERM"))],
    "an error repeated": [make_record(outcome=Error(error_type="OSError", message="boom")), again(CPU)],
    "replicates": [CPU, again(CPU)],
    "replicates a segment apart": [CUDA, again(cuda_record(reserved_bytes=84 * MIB))],
    "replicates with other threads on a GPU": [CUDA, again(CUDA, environment=edited(CUDA.environment, num_threads=7))],
    "a driver that a dead worker's record does not know": [
        CUDA,
        changed_machine(CUDA, driver_version=None, versions={"peft": None}),
    ],
}


class Case(NamedTuple):
    """Records in one file, and the one finding they must give."""

    rule: str
    severity: str
    said: str
    records: list[RunRecord]


def _doubt(rule: str, said: str, record: RunRecord, *, severity: str = "error") -> Case:
    return Case(rule, severity, said, [record])


CASES = [
    _doubt("identity", "fingerprint", edited(CPU, fingerprint="0" * 16)),
    _doubt("identity", "cell_id", edited(CPU, cell_id="gpt2_full")),
    _doubt("identity", "the instrument is cuda", edited(CPU, instrument="cuda")),
    _doubt("complete", "lacks peak", edited(CPU, peak=None)),
    _doubt("complete", "lacks ledger", edited(CPU, ledger=None)),
    _doubt("complete", "phases were left out", edited(CPU, phases=[]), severity="warning"),
    _doubt("complete", "phases of loading", without(CPU, ("load", None))),
    _doubt("complete", "steps 1 to 3", edited(CPU, phases=[phase for phase in CPU.phases if phase.step != 3])),
    _doubt("complete", "steps 1 to 3", edited(CPU, phases=[*CPU.phases, edited(CPU.phases[-1], step=4)])),
    _doubt("code", "uncommitted", edited(CPU, environment=make_environment(dirty=True)), severity="warning"),
    _doubt("code", "neither a commit", edited(CPU, environment=make_environment(commit=None, versions={})),
           severity="warning"),
    _doubt("tiers", "requested", with_phase(CUDA, "load", None, requested_peak_bytes=513)),
    _doubt("tiers", "allocated", with_phase(CUDA, "load", None, active_end_bytes=-1)),
    _doubt("tiers", "active", with_phase(CUDA, "load", None, reserved_end_bytes=-64 * MIB)),
    _doubt("tiers", "ends above its own peak", with_phase(CPU, "load", None, allocated_end_bytes=1)),
    _doubt("tiers", "device", with_phase(CUDA, "load", None, device_used_bytes=-CONTEXT_BYTES - 1)),
    _doubt("tiers", "context_bytes", edited(CUDA, context_bytes=-1)),
    _doubt("steady", "step 3, forward", with_phase(CPU, "forward", 3, allocated_peak_bytes=1)),
    _doubt("steady", "step 3, forward", with_phase(CUDA, "forward", 3, requested_peak_bytes=1)),
    _doubt("steady", "phases of step 2", without(CPU, ("optimizer_step", 3))),
    _doubt("ledger", "saved_activations", with_ledger(CPU, saved_activations_bytes=1)),
    _doubt("ledger", "unaccounted", with_ledger(CPU, unaccounted_bytes=1)),
    _doubt("ledger", "unaccounted", with_ledger(CPU, weights_bytes=-1)),
    _doubt("ledger", "7 B less between steps", with_more_idle(CPU, -7)),
    _doubt("ledger", "below the live tensors", with_ledger(CPU, gradients_bytes=10**9)),
    _doubt("ledger", "have no cause", with_more_idle(CPU, MIB + 1), severity="warning"),
    *[
        _doubt("peak", f"peak.{name} is", edited(CUDA, peak=edited(CUDA.peak, **{name: wrong})))
        for name, wrong in (dict.fromkeys(Peak.model_fields, 12345) | {"phase": "forward"}).items()
    ],
    _doubt("composition", "add up to", with_at_peak(CPU, temporaries_bytes=1)),
    _doubt("composition", "B allocated", with_at_peak(CPU, total_bytes=1, temporaries_bytes=1)),
    _doubt("composition", "B requested or", with_at_peak(CUDA, total_bytes=-1, temporaries_bytes=-1)),
    _doubt("retries", "num_alloc_retries is 2", edited(CUDA, num_alloc_retries=2), severity="warning"),
    _doubt("outcomes", "without a reason", make_record(outcome=Invalid(reasons=[]))),
    _doubt("outcomes", "step 3", make_record(outcome=Invalid(reasons=["step 3"])), severity="warning"),
    _doubt("outcomes", "boom", make_record(outcome=Error(error_type="OSError", message="boom")), severity="warning"),
    _doubt("outcomes", "16.00 MiB", severity="warning", record=make_record(
        outcome=Contaminated(baseline_before_bytes=0, baseline_after_bytes=16 * MIB))),
    Case("outcomes", "warning", "step 3", [make_record(outcome=Invalid(reasons=["step 3"])), again(CPU)]),
    Case("replicates", "error", "to the byte", [CPU, again(with_more_idle(CPU, 8))]),
    Case("replicates", "warning", "code changed", [
        CPU, again(with_more_idle(CPU, 8, environment=make_environment(commit="f" * 40)))]),
    Case("replicates", "warning", "reserved", [CUDA, again(cuda_record(reserved_bytes=84 * MIB + 1))]),
    Case("environment", "warning", "instrument", [CPU, edited(CUDA, environment=CPU.environment)]),
    Case("environment", "warning", "num_threads is 2 in 1, 3 in 1", [CPU, changed_machine(CPU, num_threads=3)]),
    Case("environment", "warning", "device_name is 'Other' in 1", [CPU, changed_machine(CPU, device_name="Other")]),
    Case("environment", "warning", "report refuse", [CPU, changed_machine(CPU, versions={"torch": "2.12.0"})]),
    Case("environment", "warning", "unknown in 1 of 2", [CPU, changed_machine(CPU, versions={"torch": None})]),
    Case("environment", "warning", "one is usual", [CPU, changed_machine(CPU, versions={"torch": "2.13.1"})]),
    Case("environment", "warning", "peft is '0.21.0' in 1, '9' in 1 of 2 records", [
        CPU, changed_machine(CPU, versions={"peft": "9"})]),
    Case("environment", "warning", "driver_version", [CUDA, changed_machine(CUDA, driver_version="999")]),
    Case("environment", "warning", "cuda_version", [
        edited(CUDA, environment=edited(CUDA.environment, cuda_version="12.8")),
        changed_machine(CUDA, cuda_version="13.0")]),
]  # fmt: skip


LINE, EDITED = CPU.to_json_line(), edited(CPU, sweep="other").to_json_line()


def of_architecture(**architecture: Any) -> str:
    changed = json.loads(LINE)
    changed["spec"]["architecture"] = architecture
    return json.dumps(changed)


#: The finding, and the lines of a file, or of two.
FILE_CASES: list[tuple[str, str, str, list[str]]] = [
    ("readable", "error", "line 1 is not a record", [f'{{"half": \n{LINE}\n']),
    ("readable", "error", "format 99", [json.dumps(json.loads(LINE) | {"format": 99}) + "\n"]),
    ("readable", "error", "no record", [""]),
    ("readable", "error", "must name its model_type", [of_architecture() + "\n"]),
    ("identity", "error", "fingerprint", [of_architecture(model_type="gpt2", n_positions="many") + "\n"]),
    ("readable", "error", "a second time", [f"{LINE}\n{EDITED}\n"]),
    ("readable", "warning", "half-written", [f"{LINE}\n{again(CPU).to_json_line()[:99]}"]),
    ("readable", "warning", "started, and no attempt has ended", [make_started(CPU).to_json_line() + "\n"]),
    ("duplicates", "error", "other values", [f"{LINE}\n", f"{EDITED}\n"]),
]


def check_records(records: list[RunRecord], folder: Path, **options: Any) -> check.CheckReport:
    for record in records:
        writing.append(folder / "records.jsonl", record)
    return api.check(folder, **options)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_clean_records(name: str, tmp_path: Path) -> None:
    report = check_records(CLEAN[name], tmp_path, strict=True)
    assert report.findings == []
    assert report.ok
    assert report.num_records == len(CLEAN[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.said}")
def test_a_record_broken_in_one_way_gives_that_one_finding(case: Case, tmp_path: Path) -> None:
    report = check_records(case.records, tmp_path)
    assert [(found.rule, found.severity) for found in report.findings] == [(case.rule, case.severity)], report.findings
    assert case.said in report.findings[0].message
    if case.rule == "environment":
        assert report.findings[0].where == str(tmp_path)
    else:
        broken = report.findings[0].where
        assert broken.startswith(f"{tmp_path / 'records.jsonl'}: {case.records[0].cell_id}, attempt ")
    assert report.ok == (case.severity == "warning")
    assert not api.check(tmp_path, strict=True).ok


@pytest.mark.parametrize(("rule", "severity", "said", "texts"), FILE_CASES, ids=[said for *_, said, _ in FILE_CASES])
def test_a_broken_file_gives_one_finding_and_its_neighbours_are_checked(
    rule: str, severity: str, said: str, texts: list[str], tmp_path: Path
) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"broken{number}.jsonl").write_text(text)
    neighbour = edited(CUDA, attempt_id="neighbour", num_alloc_retries=1)
    writing.append(tmp_path / "other" / "records.jsonl", neighbour)
    report = api.check(tmp_path)
    found = {(found.rule, found.severity) for found in report.findings}
    assert (found, len(report.findings)) == ({(rule, severity), ("retries", "warning")}, 2)
    found = next(found for found in report.findings if found.rule == rule)
    assert said in found.message
    assert str(tmp_path) in found.where
    assert report.ok == (severity == "warning")


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} | {rule for rule, *_ in FILE_CASES} == set(check.RULES)
    assert len(set(check.RULES)) == len(check.RULES)


def test_folders_may_differ_in_their_environment(tmp_path: Path) -> None:
    writing.append(tmp_path / "one" / "records.jsonl", CPU)
    other = changed_machine(CPU, device_name="Other", versions={"torch": "2.12.0"})
    writing.append(tmp_path / "two" / "records.jsonl", other)
    writing.append(tmp_path / "three" / "records.jsonl", again(with_more_idle(CPU, 8), environment=other.environment))
    report = api.check(tmp_path, strict=True)
    assert report.findings == []
    assert (report.num_records, report.num_cells, report.num_replicated_cells) == (3, 3, 0)


def test_files_of_one_folder_may_not(tmp_path: Path) -> None:
    writing.append(tmp_path / "one.jsonl", CPU)
    writing.append(tmp_path / "two.jsonl", changed_machine(CPU, device_name="Other"))
    assert [found.rule for found in api.check(tmp_path).findings] == ["environment"]


def test_the_same_record_in_two_files_is_one_attempt(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        writing.append(tmp_path / name, CPU)
    report = api.check(tmp_path)
    assert report.findings == []
    assert (report.num_records, report.num_replicated_cells) == (1, 0)


def test_replicated_cells_are_counted(tmp_path: Path) -> None:
    report = check_records([CPU, again(CPU), CUDA.model_copy(update={"attempt_id": "gpu"})], tmp_path)
    assert (report.num_cells, report.num_replicated_cells) == (2, 1)
    assert report.outcomes == {"ok": 3}


def test_a_place_without_files_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="jsonl file in"):
        api.check(tmp_path)


def test_the_committed_results_have_no_errors() -> None:
    report = api.check(QUICKSTART)
    assert report.ok
    assert report.num_records == 33


# -- the command ----------------------------------------------------------------------------------------------------


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(verbs.app, ["check", *words])
    return done.exit_code, done.stdout


def test_the_exit_code_is_the_verdict(tmp_path: Path) -> None:
    clean, doubtful, wrong = tmp_path / "clean", tmp_path / "doubtful", tmp_path / "wrong"
    check_records([CPU], clean)
    check_records([edited(CUDA, num_alloc_retries=1)], doubtful)
    check_records([edited(CPU, cell_id="gpt2_full")], wrong)
    expected = {clean: (0, 0), doubtful: (0, 1), wrong: (1, 1)}
    for folder, (normal, strict) in expected.items():
        for words, code in (([], normal), (["--strict"], strict)):
            for form in ([], ["--json"]):
                exit_code, text = invoke(str(folder), *words, *form)
                assert exit_code == code, (folder, words, form)
                if form:
                    assert json.loads(text)["ok"] == (code == 0)
                else:
                    assert text.splitlines()[-1].startswith("passes: " if code == 0 else "fails: ")


def test_json_is_the_report(tmp_path: Path) -> None:
    report = check_records([edited(CPU, cell_id="gpt2_full")], tmp_path)
    _, text = invoke(str(tmp_path), "--json")
    assert check.CheckReport.model_validate_json(text) == report


def test_findings_are_grouped_by_rule_errors_first_and_shortened(tmp_path: Path) -> None:
    names, dirty = [f"attempt-{number:02}" for number in range(12)], make_environment(dirty=True)
    records = [edited(CPU, attempt_id=name, environment=dirty) for name in names]
    check_records([*records, edited(CPU, attempt_id="wrong", cell_id="gpt2_full")], tmp_path)
    _, text = invoke(str(tmp_path))
    lines = text.splitlines()
    assert lines[0] == "error: identity, 1 found"
    assert lines[3] == "warning: code, 12 found"
    assert text.count("uncommitted changes") == 1  # said once for all of its places
    assert [name for name in names if name in text] == names[:10]
    assert lines[-4].strip() == "and 2 more; --json lists all"
    assert lines[-3:] == [
        "13 records in 1 file: 13 ok",
        "replicated: 1 of 1 cells (about 5 % show that it repeats)",
        "fails: 1 error, 12 warnings",
    ]


def test_others_text_is_shown_as_it_is_and_on_one_line(tmp_path: Path) -> None:
    name = "[red]x[/] :smile: [/nothing]\n::error::\x1b[2J\\"
    check_records([edited(CPU, cell_id=name)], tmp_path / "[bold]folder")
    code, text = invoke(str(tmp_path / "[bold]folder"))
    assert code == 1
    assert r"[red]x[/] :smile: [/nothing]\n::error::\x1b[2J" in text
    assert "[bold]folder" in text
    assert "\x1b" not in text
    assert not any(line.startswith("::") for line in text.splitlines())
