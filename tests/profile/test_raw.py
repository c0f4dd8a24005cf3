"""Raw files as the hook leaves them, whole, torn at any byte, missing, or somebody else's."""

import json
import pickle
from pathlib import Path

import pytest
from profile_factory import Script, training, write_launcher

from vramprobe.errors import StoreError
from vramprobe.profile.analyse import analyse
from vramprobe.profile.hook import history as hook_history
from vramprobe.profile.run_files import read_history, read_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    training(rank=1, device_index=0).write(tmp_path)
    training(200, rank=0).write(tmp_path)
    write_launcher(tmp_path)
    run = read_run(tmp_path)
    assert [raw.process.rank for raw in run.ranks] == [0, 1]
    raw = run.ranks[0]
    assert (raw.process.pid, raw.process.capability, raw.num_steps) == (200, (8, 9), 3)
    assert [phase.name for phase in raw.phases[:4]] == ["load", "other", "forward", "backward"]
    assert raw.end.why == "exit"
    assert raw.history.held[0].names == {0x1000000: "layers.0.up.weight", 0x2000000: "layers.1.up.weight"}
    assert run.launcher is not None
    assert run.warnings == ()


def test_the_last_line_may_be_cut_anywhere(tmp_path: Path) -> None:
    """Cut within the last line, what is before it stands; a line that lacks its newline alone is whole."""
    training().write(tmp_path)
    path = tmp_path / "100.jsonl"
    content = path.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    whole = read_run(tmp_path).ranks[0]
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        run = read_run(tmp_path)
        assert run.ranks[0].phases == whole.phases
        is_whole = cut == len(content) - 1
        assert (run.ranks[0].end is not None) is is_whole
        assert len(run.warnings) == (0 if is_whole or cut == last else 1)


def test_every_piece_of_a_process_s_first_line_is_no_process(tmp_path: Path) -> None:
    content = json.dumps(Script().lines[0]).encode()
    for cut in range(len(content)):
        (tmp_path / "100.jsonl").write_bytes(content[:cut])
        assert read_run(tmp_path).ranks == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{torn in the middle", "100.jsonl, line 2 is no line"),
        ("[1]", "line 2 is no line"),
        ('{"line": "phase", "name": "load"}', "line 2 is not whole: missing 4 required"),
        ('{"line": "moved", "phase": "backward", "step": 1, "counts": [[0, 2, 1]]}', r"line 2 counts \(0, 2, 1\)"),
        ('{"line": "moved", "phase": "backward", "step": 1, "counts": [[9, 2, 1, 8]]}', "a kind below 8"),
    ],
)
def test_a_damaged_line_within_is_named(line: str, said: str, tmp_path: Path) -> None:
    first = json.dumps(Script().lines[0])
    (tmp_path / "100.jsonl").write_text(f"{first}\n{line}\n{first}\n")
    with pytest.raises(StoreError, match=said) as found:
        read_run(tmp_path)
    assert "\n" not in str(found.value)


def test_a_line_before_the_process_s_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "100.jsonl").write_text('{"line": "step", "step": 1}\n')
    with pytest.raises(StoreError, match="before the line that says which process"):
        read_run(tmp_path)


def test_lines_and_fields_of_a_newer_hook_are_passed_over(tmp_path: Path) -> None:
    script = training(something_new=1)
    script.say("weather", sunny=True)
    script.write(tmp_path)
    assert len(read_run(tmp_path).ranks) == 1


def test_a_program_that_becomes_another_is_two(tmp_path: Path) -> None:
    """exec keeps the pid and its file; the history is the last one's."""
    one, other = training(num_steps=1), training()
    one.write(tmp_path)
    first = (tmp_path / "100.jsonl").read_text()
    other.write(tmp_path)
    (tmp_path / "100.jsonl").write_text(first + (tmp_path / "100.jsonl").read_text())
    ranks = read_run(tmp_path).ranks
    assert [(raw.num_steps, raw.history is None) for raw in ranks] == [(1, True), (3, False)]


def test_phases_of_several_cards_are_those_of_the_process_s_own(tmp_path: Path) -> None:
    script = training(device_index=1)
    own = [line | {"device": 1} for line in script.lines if line["line"] == "phase"]
    others = [line | {"allocated_peak_bytes": 10**12} for line in script.lines if line["line"] == "phase"]
    script.lines = [script.lines[0], *own, *others]
    script.write(tmp_path, with_history=False)
    assert {phase.device for phase in read_run(tmp_path).ranks[0].phases} == {1}


def test_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no run at"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text('{"command": ["pyth')
    run = read_run(tmp_path)
    assert run.launcher is None
    assert "torn" in run.warnings[0]
    assert analyse(tmp_path).outcome.kind == "lost"


class _Evil:
    def __reduce__(self):
        return (print, ("owned",))


def test_a_pickle_that_names_a_function_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "100.history"
    path.write_bytes(pickle.dumps({"device": 0, "actions": _Evil()}))
    with pytest.raises(StoreError, match=r"100.history is not read: it names builtins.print, and a history holds") as e:
        read_history(path)
    assert "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


def test_a_damaged_history_is_one_line(tmp_path: Path) -> None:
    training().write(tmp_path)
    path = tmp_path / "100.history"
    content = path.read_bytes()
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        with pytest.raises(StoreError, match="is not read") as found:
            read_history(path)
        assert "\n" not in str(found.value)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(StoreError, match="it holds a list"):
        read_history(path)
    path.write_bytes(pickle.dumps(training().history() | {"sizes": None}))
    with pytest.raises(StoreError, match="columns are missing"):
        read_history(path)
    path.write_bytes(pickle.dumps({"device": 0}))
    with pytest.raises(StoreError, match="columns are missing"):
        read_history(path)


def frames(*lines: int) -> list[dict[str, object]]:
    return [{"filename": "m.py", "line": line, "name": "f"} for line in lines]


def snapshot() -> dict[str, object]:
    """One block from before that stays, one from before that is freed, one made here; an OOM and a snapshot entry."""
    same = frames(1, 2)

    def entry(action: str, addr: int, size: int, stack: list) -> dict[str, object]:
        return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 5, "frames": stack}

    trace = [
        entry("free_requested", 0x100, 700, []),
        entry("free_completed", 0x100, 700, []),
        entry("segment_alloc", 0x9000, 2**21, same),
        entry("alloc", 0x9000, 1000, same),
        entry("alloc", 0x100, 300, frames(1, 2)),
        {"action": "oom", "size": 99, "stream": 0, "time_us": 6, "frames": [], "device_free": 1},
        entry("snapshot", 0, 0, []),
    ]
    blocks = [
        {"address": 0x100, "size": 512, "requested_size": 300, "state": "active_allocated", "frames": frames(1, 2)},
        {"address": 0x300, "size": 1024, "requested_size": 801, "state": "active_allocated", "frames": frames(3)},
        {"address": 0x700, "size": 1024, "requested_size": 0, "state": "inactive", "frames": []},
        {"address": 0x9000, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": same},
    ]
    return {
        "device_traces": [[], trace],
        "segments": [
            {"device": 1, "address": 0x100, "blocks": blocks},
            {"device": 0, "address": 0x100, "blocks": blocks[:1]},
        ],
    }


def test_a_snapshot_of_torch_s_becomes_columns() -> None:
    found = hook_history.compact(snapshot(), 1)
    assert found["device"] == 1
    assert found["actions"].tolist() == [1, 2, 3, 0, 0, 7]
    assert found["addresses"].tolist() == [0x100, 0x100, 0x9000, 0x9000, 0x100, 0]
    assert found["sizes"].tolist() == [700, 700, 2**21, 1000, 300, 99]
    assert found["stacks"] == [(("m.py", 1, "f"), ("m.py", 2, "f")), (("m.py", 3, "f"),)]
    assert found["stacks_of"].tolist() == [-1, -1, 0, 0, 0, -1]  # one stack, though torch made two lists of it
    assert found["alive_before"] == [(0x100, 1024, 700, -1), (0x300, 1024, 801, 1)]
    assert hook_history.compact(snapshot(), 7)["actions"].tolist() == []


def test_a_history_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "1.history"
    hook_history.write(hook_history.compact(snapshot(), 1), path)
    read = read_history(path)
    assert read.sizes.tolist() == [700, 700, 2**21, 1000, 300, 99]
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        hook_history.write({"held": lambda: None}, path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["1.history"]
    with pytest.raises(OSError, match="No such file"):
        hook_history.write({}, tmp_path / "nowhere" / "1.history")
