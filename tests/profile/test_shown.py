"""Views of profiles: differences, the terminal, the timeline, the report, the journal."""

import json
from pathlib import Path

import pytest
from factories import make_record, unpadded
from profile_factory import BATCH, SAVED, STATE, TEMPORARY, WEIGHT, WORKSPACE, Script, analysed, training
from test_analyse import ran_out

from vramprobe import api
from vramprobe.check import check
from vramprobe.cli import display_difference, display_profile
from vramprobe.cli.diff import ProfileLimits
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.profile import diff, timeline
from vramprobe.profile.analyse import analyse
from vramprobe.records import profile as profiles
from vramprobe.records import store, writing
from vramprobe.records.profile import ProfileRecord
from vramprobe.sweep.resume import open_journal
from vramprobe.units import format_bytes


def record_of(folder: Path, *scripts: Script, **launcher: object) -> ProfileRecord:
    return analysed(folder, *(scripts or (training(),)), **launcher)


def test_what_grew_is_named_by_cause_and_line(tmp_path: Path) -> None:
    found = diff.compare(record_of(tmp_path / "a"), record_of(tmp_path / "b", training(extra_bytes=1024)))
    assert {one.what: one.grown_bytes for one in found.causes if one.grown_bytes} == {"saved_activations": 1024}
    assert [(one.what, one.grown_bytes) for one in found.lines] == [
        ("models/llama.py:3 forward (saved activations)", 1024)
    ]
    assert found.tiers[0].what == "allocated"
    assert found.tiers[0].grown_bytes == 1024
    assert found.warnings == ()


def test_two_that_are_the_same_do_not_differ(tmp_path: Path) -> None:
    found = diff.compare(record_of(tmp_path / "a"), record_of(tmp_path / "b"))
    assert found.lines == ()
    assert {one.grown_bytes for one in (*found.tiers, *found.causes)} == {0}


@pytest.mark.parametrize(
    ("extra_bytes", "expected"), [(0, []), (1024, [("models/llama.py:10 forward (saved activations)", 1024)])]
)
def test_a_line_that_moved_is_one_line(extra_bytes: int, expected: list[tuple[str, int]], tmp_path: Path) -> None:
    moved = training(extra_bytes=extra_bytes)
    moved.stacks = {
        tuple((file, line + (0 if "torch" in file else 7), name) for file, line, name in stack): number
        for stack, number in moved.stacks.items()
    }
    found = diff.compare(record_of(tmp_path / "a"), record_of(tmp_path / "b", moved)).lines
    assert [(one.what, one.grown_bytes) for one in found] == expected


def test_what_makes_two_hard_to_compare_is_said(tmp_path: Path) -> None:
    other = record_of(tmp_path / "b", training(torch="2.12.0", rank=0), training(200, rank=1, torch="2.12.0"))
    said = diff.compare(record_of(tmp_path / "a"), other).warnings
    assert said == ("torch differs: 2.13.0+cu130 and 2.12.0", "number of ranks differs: 1 and 2")
    failed = record_of(tmp_path / "c", exit_status=3)
    assert diff.compare(failed, failed).warnings[0] == "before ended as error: its peak is what was seen until then"
    empty = record_of(tmp_path / "d", Script())
    assert diff.compare(empty, empty).lines == ()


def shown(record: ProfileRecord, capsys: pytest.CaptureFixture[str], width: int = 80) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        display_profile.print_profile(record)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width] == []
    return lines


LONG = ("/env/site-packages/" + "a_long_name_of_a_folder/" * 6 + "modeling.py", 1234, "forward_of_something_long")


def test_a_profile_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = training(argv=["/srv/" + "x" * 100, "--a"])
    script.stacks = {(LONG,): 0, (): -1} | {(LONG, LONG): 1}
    record_of(tmp_path, script, command=["python", "train.py", *["--option-of-the-trainer"] * 9])
    record = analyse(tmp_path, gpus="all")
    text = "\n".join(shown(record, capsys))
    for expected in (
        "emulated NVIDIA GeForce RTX 4090: real CUDA software on a stub driver",
        "peak 16.15 MiB allocated, in backward of step 2",
        "device, with an assumed context",
        "3 steps; the last two are byte-identical",
        "layers.*.up.weight",
        "RTX-3090  ",
        "unknown: T4, V100-16GB-PCIe",
    ):
        assert expected in text
    assert "measured" not in text
    assert "batch" not in text


def of_lengths(*lengths: int) -> Script:
    """A model of 1 MiB, and in each step a batch that is as long as it says."""
    script = Script()
    with script.phase("load"):
        script.alloc(0x1000000, 2**20)
    for step, length in enumerate(lengths, start=1):
        with script.phase("forward", step, 1):
            script.alloc(0x2000000, length * 2**20)
            script.free(0x2000000)
        script.say("step", step=step)
    script.say("end", why="stopped", num_alloc_retries=0, num_ooms=0)
    return script


def test_a_run_that_is_stopped_while_its_steps_differ_has_no_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(tmp_path, of_lengths(9, 2, 5, 3, 4), stopped=True)
    text = " ".join(" ".join(shown(record, capsys)).split())
    assert "highest so far 10.00 MiB allocated, in forward of step 1" in text
    assert (
        "not the run's peak: it is the largest of 5 steps seen, and steps differ (peaks from 3.00 MiB to 6.00 MiB)"
        in text
    )
    assert "--whole" in text
    (card,) = analyse(tmp_path, gpus=["RTX-3090"]).cards
    assert (card.verdict, card.why.endswith("of the steps seen, a later one may need more")) == ("fits", True)
    whole = record_of(tmp_path / "whole", of_lengths(9, 2, 5, 3, 4))
    assert not whole.may_grow(whole.ranks[0])
    assert "peak 10.00 MiB allocated" in "\n".join(shown(whole, capsys))
    alike = record_of(tmp_path / "alike", of_lengths(9, 2, 5, 5), stopped=True)
    assert not alike.may_grow(alike.ranks[0])


def test_out_of_memory_is_shown_as_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(shown(record_of(tmp_path, ran_out(rank=0), exit_status=1), capsys))
    assert "out of memory: rank 0 in backward of step 2" in text
    assert "28.61 MiB  requested by models/llama.py:3 forward" in text
    alive = 2 * WEIGHT + 2 * STATE + SAVED + WEIGHT + BATCH + WORKSPACE
    assert f"live tensors then, {format_bytes(alive)}:" in text


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (
            {"exit_status": 3, "tail": ["Traceback", "\x1b[31mValueError: [bold]no[/bold]"]},
            ["exit status 3", r"\x1b[31mValueError: [bold]no[/bold]"],
        ),
        ({"exit_status": None, "signal": 9}, ["killed by signal 9"]),
        ({"exit_status": 130}, ["interrupted"]),
        ({"ended_ns": None}, ["lost"]),
        ({"stopped": True}, ["stopped after 3 steps (--steps)"]),
    ],
)
def test_every_end_is_shown(
    launcher: dict[str, object], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(shown(record_of(tmp_path, **launcher), capsys))
    for one in said:
        assert one in text


def test_each_group_of_equal_ranks_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [training(100 + rank, rank=rank, extra_bytes=(rank % 5 == 2) * 2**20) for rank in range(8)]
    scripts.append(Script(108, rank=8))
    text = " ".join(" ".join(shown(record_of(tmp_path, *scripts), capsys)).split())
    assert "9 ranks: ranks 0, 1, 3 to 6: 16.15 MiB allocated" in text
    assert "ranks 2, 7, the highest: 17.15 MiB allocated" in text
    assert "rank 8: no memory seen spread: 1.00 MiB" in text
    assert "peak of rank 2 17.15 MiB" in text


def test_processes_that_have_no_rank_are_not_called_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = {"line": "train.py:8", "operator": "item", "state": "uncomputed", "kind": "control", "max_elements": 1}
    read |= {"num_reads": 1, "could_have_steered": True, "new": 1}
    forks = [training(100 + number) for number in range(2)]
    policy = {"contents": "zeros", "routing": "even"}
    forks[0].say("values", policy=policy, num_reads=1, num_reads_that_could_have_steered=1, reads=[read])
    text = " ".join(" ".join(shown(record_of(tmp_path, *forks), capsys)).split())
    assert "2 processes: process 100, process 101" in text
    assert "1 read of uncomputed values; it could affect control flow: train.py:8 item, 1 time" in text
    assert "1 times" not in text


def test_steps_that_differ_by_little_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.5 % of 16 MiB; what differs is said from there on."""
    script = training(num_steps=4)
    of_last = [line for line in script.lines if line.get("name") == "backward" and line["step"] == 4]
    for more, said in (
        (0, "4 steps; their peaks are equal"),
        (2**16, "4 steps; their peaks differ by 64.00 KiB"),
        (2**18, "steps differ (peaks from 16.15 MiB to 16.46 MiB): steps 3 and 4 allocate the same and free it at"),
    ):
        of_last[0]["allocated_peak_bytes"] += more
        of_last[0]["allocated_end_bytes"] += 1
        record = record_of(tmp_path / str(more), script, stopped=True)
        assert said in " ".join(" ".join(shown(record, capsys)).split())
        assert record.may_grow(record.ranks[0]) == (more == 2**18)


def test_equal_requests_in_other_blocks_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An allocator may alternate between two layouts of the same requests."""
    script = training(num_steps=4)
    for line in (line for line in script.lines if line["line"] == "phase"):
        line |= {"requested_peak_bytes": 2**23, "requested_end_bytes": 2**22}
    of_last = next(line for line in script.lines if line.get("name") == "backward" and line["step"] == 4)
    of_last["allocated_peak_bytes"] += 2**16
    text = " ".join(" ".join(shown(record_of(tmp_path, script, stopped=True), capsys)).split())
    assert "their peaks differ by 64.00 KiB: equal requests, which the allocator put into blocks of other" in text


def test_what_differs_between_steps_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*lengths: int, evaluates: bool = False, **launcher: object) -> str | None:
        script, folder = of_lengths(*lengths), tmp_path / "_".join(map(str, (*lengths, evaluates)))
        if evaluates:
            script.lines[-3]["name"] = "evaluation"
        return record_of(folder, script, stopped=True).ranks[0].step_peaks.what

    assert said(9, 2, 5, 3) == "steps 2 and 3 make as many allocations of other sizes: their batches have other shapes"
    assert said(9, 5, 2, 2) == "step 2 is the last that allocates for a first use; the steps after it are alike"
    assert said(9, 2, 2, 5, evaluates=True) == "step 4 has evaluation in it, step 3 has not"
    assert said(9, 2, 2) is None


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Megatron's that only evaluates; it is no result for a limit."""
    script = Script()
    with script.phase("load"):
        script.alloc(0x1000000, 2**20)
    with script.phase("evaluation"):
        script.alloc(0x2000000, 2**20)
    record = record_of(tmp_path, script)
    text = " ".join(" ".join(shown(record, capsys)).split())
    assert "no training step was seen: it was seen in load, evaluation" in text
    assert ProfileLimits("1GiB", None, None).exceeded_by(record, None)
    assert "no training step was seen" in capsys.readouterr().err
    trained = record_of(tmp_path / "trained", training())
    assert not ProfileLimits("1GiB", None, None).exceeded_by(trained, None)
    (tmp_path / "nothing").mkdir()
    nothing = analysed(tmp_path / "nothing")
    assert "emulated RTX-4090: no process used it" in " ".join(shown(nothing, capsys))


def test_what_was_replaced_is_shown_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by = "empty files of LlamaForCausalLM, 8.03 billion parameters in bfloat16, assumed"
    replaced = {"kind": "weights", "what": "meta-llama/Llama-3.1-8B", "by": by}
    (tmp_path / "replaced").write_text(json.dumps(replaced) + "\n")
    said = shown(record_of(tmp_path, training()), capsys)
    at = said.index("replaced by --empty-weights:")
    assert " ".join(line.strip() for line in said[at + 1 : at + 3]) == f"weights of meta-llama/Llama-3.1-8B: {by}"
    assert max(map(len, said)) <= 80


def test_nothing_seen_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert any("no process used a GPU" in line for line in shown(analysed(tmp_path), capsys))


def test_a_real_run_is_called_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(shown(record_of(tmp_path, training(emulated=False)), capsys))
    assert "measured on NVIDIA GeForce RTX 4090" in text
    assert "emulated" not in text
    assert "assumed" not in text


def test_a_difference_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = training(extra_bytes=2**20)
    other.stacks = {(LONG,): 0, (): -1} | {(LONG, LONG): 1}
    found = diff.compare(record_of(tmp_path / "a"), record_of(tmp_path / "b", other))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        display_difference.print_difference(found)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "saved_activations" in text
    assert "+1.00 MiB" in text


def test_the_timeline_has_the_peak(tmp_path: Path) -> None:
    record = record_of(tmp_path / "a")
    drawn = timeline.timeline_of_profile(tmp_path / "a", record)
    assert drawn.peak_bytes == record.ranks[0].peak.requested_bytes
    at_peak = dict(zip(drawn.causes, drawn.live_bytes[drawn.peak_column].tolist(), strict=True))
    assert at_peak["saved_activations"] == SAVED
    assert at_peak["temporaries"] == 4 * TEMPORARY
    assert at_peak["weights"] == 2 * WEIGHT
    assert [phase.name for phase in drawn.phases] == ["other", "forward", "backward", "optimizer_step", "zero_grad"]
    timeline.write(tmp_path / "a", record, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "live memory, emulated" in page
    assert "Emulated: the real CUDA software on no GPU." in page
    assert "imulated" not in page
    timeline.write(tmp_path / "a", record, tmp_path / "picture.svg")


def test_a_timeline_of_loading(tmp_path: Path) -> None:
    script = Script()
    with script.phase("load"):
        script.alloc(0x1000, 5000)
        script.alloc(0x9000, 3000)
        script.free(0x9000)
    drawn = timeline.timeline_of_profile(tmp_path, analysed(tmp_path, script))
    assert (drawn.peak_bytes, drawn.subject.step) == (8000, None)


def test_no_timeline_without_a_history(tmp_path: Path) -> None:
    record = analysed(tmp_path, training(), with_history=False)
    with pytest.raises(VramprobeError, match="no process left a history"):
        timeline.write(tmp_path, record, tmp_path / "page.html")


def test_a_profile_is_one_line_and_back(tmp_path: Path) -> None:
    record_of(tmp_path)
    record = analyse(tmp_path, gpus=["L4"])
    assert [one.gpu for one in record.cards] == ["L4"]
    line = record.to_json_line()
    assert "\n" not in line
    assert profiles.ProfileRecord.model_validate_json(line) == record
    assert store.is_profile(line.encode())


def test_a_journal_of_profiles_is_appended_to_and_read(tmp_path: Path) -> None:
    record, path = record_of(tmp_path / "run"), tmp_path / "journal" / "profiles.jsonl"
    assert writing.append(path, record) is None
    path.write_bytes(path.read_bytes() + b'{"format":1,"kind":"prof')
    assert "half-written line" in writing.append(path, record)
    assert len(profiles.read_profiles(path)) == 2
    path.write_bytes(path.read_bytes()[:-9])
    assert profiles.read_profiles(path) == (record,)


@pytest.mark.parametrize(("change", "said"), [({"format": 9}, "format 9"), ({"ranks": 1}, "its ranks cannot be")])
def test_a_profile_that_is_none_is_named(change: dict[str, object], said: str, tmp_path: Path) -> None:
    content = json.loads(record_of(tmp_path / "run").to_json_line()) | change
    (tmp_path / "p.jsonl").write_text(json.dumps(content) + "\n")
    with pytest.raises(StoreError, match=f"p.jsonl, line 1 .*{said}"):
        profiles.read_profiles(tmp_path / "p.jsonl")


def test_profiles_may_lie_among_a_sweep_s_records(tmp_path: Path) -> None:
    """Each line says its kind: check, resume and the store take theirs, and the report has a page for both."""
    folder, path = tmp_path / "results", tmp_path / "results" / "records.jsonl"
    cell, profiled = make_record(), record_of(tmp_path / "run")
    for entry in (profiled, cell, profiled):
        writing.append(path, entry)
    assert store.read(folder).records == (cell,)
    assert open_journal(path).attempts[cell.fingerprint][0].line_number == 2
    assert check(folder).num_records == 1
    assert not [one for one in check(folder).findings if one.rule == "readable"]
    written = api.report(folder, tmp_path / "out")
    names = {file.name for file in written}
    assert {"measured.md", "profiles.md", "profiles.csv", "index.html"} <= names


def test_a_report_of_profiles_alone(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    writing.append(folder / "p.jsonl", record_of(tmp_path / "run", training(rank=0), training(200, rank=1)))
    assert not check(folder).findings
    written = api.report(folder, tmp_path / "out")
    assert {file.name for file in written} == {f"profiles.{ending}" for ending in ("md", "csv", "tex", "html")}
    page = unpadded((tmp_path / "out" / "profiles.md").read_text())
    assert "Emulated: the real CUDA software" in page
    assert "| train.py --lr 1 | 0 | ok | backward | 16.1 |" in page
    with pytest.raises(StoreError, match="holds no record"):
        store.read(folder)


def test_the_last_profile_of_a_journal_counts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for folder in ("a", "b"):
        writing.append(path, record := record_of(tmp_path / folder))
    assert profiles.last_profile(path) == record
    path.write_text("")
    with pytest.raises(StoreError, match="holds no profile; make one: vramprobe profile"):
        profiles.last_profile(path)


def test_a_difference_is_json_with_what_grew(tmp_path: Path) -> None:
    found = diff.compare(record_of(tmp_path / "a"), record_of(tmp_path / "b", training(extra_bytes=1024)))
    assert json.loads(found.model_dump_json())["tiers"][0]["grown_bytes"] == 1024
