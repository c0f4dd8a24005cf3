"""Analysis of a run's files: each cause by known answers, sums to the byte, outcomes, ranks, lines and modules."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from profile_factory import BATCH, SAVED, STATE, TEMPORARY, WEIGHT, WORKSPACE, Script, analysed, rounded, training

from vramprobe.profile.analyzed_rank import see
from vramprobe.profile.places import NOWHERE, Location, Places, pattern
from vramprobe.profile.ranks import merged, module_said
from vramprobe.profile.run_files import read_run
from vramprobe.records.profile import ProfileRecord, RankProfile

AT_PEAK = {
    "weights_bytes": 2 * WEIGHT,
    "gradients_bytes": WEIGHT,
    "optimizer_state_bytes": 2 * STATE,
    "batch_bytes": 0,
    "saved_activations_bytes": SAVED,
    "temporaries_bytes": 4 * TEMPORARY,
    "other_bytes": BATCH + WORKSPACE,
    "engine_weights_bytes": 0,
    "kv_cache_bytes": 0,
    "master_weights_bytes": 0,
}


def only(record: ProfileRecord) -> RankProfile:
    (rank,) = record.ranks
    return rank


def test_every_cause_at_the_peak_is_known(tmp_path: Path) -> None:
    """The peak's temporary stands where a saved activation was, and that where a temporary was."""
    record = analysed(tmp_path, training())
    rank = only(record)
    assert rank.at_peak.parts() == AT_PEAK
    assert rank.at_peak_of == "backward of step 2"
    assert record.warnings == []


def test_a_step_is_timed_on_a_real_gpu_alone(tmp_path: Path) -> None:
    """From the end of one optimizer step to the next, by hand: the median of those after the first."""
    script = training(num_steps=5, emulated=False)
    ends = [line["end_ns"] for line in script.lines if line["line"] == "phase" and line["name"] == "optimizer_step"]
    steps = sorted(there - here for here, there in pairwise(ends))
    for name in ("real", "few", "emulated"):
        (tmp_path / name).mkdir()
    record = analysed(tmp_path / "real", script)
    assert len(steps) == 4
    assert record.measured_step_seconds == pytest.approx((steps[1] + steps[2]) / 2e9)
    assert analysed(tmp_path / "few", training(num_steps=3, emulated=False)).measured_step_seconds is None
    assert analysed(tmp_path / "emulated", training(num_steps=5)).measured_step_seconds is None


def test_sums_are_equal_to_the_byte(tmp_path: Path) -> None:
    rank = only(analysed(tmp_path, training()))
    total = sum(AT_PEAK.values())
    assert rank.at_peak.total_bytes == rank.peak.requested_bytes == total
    for parts in (rank.by_line, rank.by_module):
        assert sum(one.num_bytes for one in parts) == total
    assert sum(one.total_bytes for one in rank.largest) == total  # there are fewer than ten
    blocks = [WEIGHT] * 3 + [STATE] * 2 + [SAVED, TEMPORARY, 3 * TEMPORARY, BATCH, WORKSPACE]
    assert rank.peak.allocated_bytes == sum(map(rounded, blocks))
    for cause in ("weights", "temporaries", "other"):
        assert sum(one.num_bytes for one in rank.by_line if one.cause == cause) == AT_PEAK[f"{cause}_bytes"]


def test_the_peak_is_the_first_whose_gradients_were_seen(tmp_path: Path) -> None:
    """Steps 2 and 3 are alike; only step 3's gradients were looked up, so that is where they are known."""
    script = training()
    script.held = [one for one in script.held if one["cause"] != "gradients"] + [
        [one for one in script.held if one["cause"] == "gradients"][-1]
    ]
    rank = only(analysed(tmp_path, script))
    assert rank.at_peak_of == "backward of step 3"
    assert rank.at_peak.parts() == AT_PEAK


def test_gradients_that_nobody_looked_up_are_temporaries_and_that_is_said(tmp_path: Path) -> None:
    script = training()
    script.held = [one for one in script.held if one["cause"] != "gradients"]
    record = analysed(tmp_path, script)
    at_peak = only(record).at_peak
    assert (at_peak.gradients_bytes, at_peak.temporaries_bytes) == (0, 4 * TEMPORARY + WEIGHT)
    assert any("no gradients were looked up in backward of step 2" in text for text in record.warnings)


def test_a_peak_in_loading_is_said_and_named(tmp_path: Path) -> None:
    """Weights by what was held later; what loading leaves and nobody holds is other; the rest temporary."""
    script = Script()
    with script.phase("load"):
        script.alloc(0x1000, 5001)
        script.alloc(0x10000, 70_001)
        script.alloc(0x90000, 301)
        script.free(0x10000)
    script.holds("weights", 0x1000)
    with script.phase("forward", 1):
        script.alloc(0x20000, 100)
    rank = only(analysed(tmp_path, script))
    assert (rank.peak.phase, rank.peak.step) == ("load", None)
    expected = {"weights_bytes": 5001, "temporaries_bytes": 70_001, "other_bytes": 301}
    assert {name: size for name, size in rank.at_peak.parts().items() if size} == expected


def test_what_a_forward_does_not_keep_is_temporary(tmp_path: Path) -> None:
    script = Script()
    with script.phase("forward", 1):
        script.alloc(0x1000, 1001)
        script.alloc(0x2000, 3003)
        script.free(0x2000)
    at_peak = only(analysed(tmp_path, script)).at_peak
    assert (at_peak.saved_activations_bytes, at_peak.temporaries_bytes) == (1001, 3003)


def test_what_an_earlier_step_left_is_other(tmp_path: Path) -> None:
    script = Script()
    with script.phase("load"):
        script.alloc(0x1000, 999)
    for step in (1, 2):
        with script.phase("forward", step):
            script.alloc(0x100000 * step, 5000)
        with script.phase("backward", step):
            script.alloc(0x2000, 77)
            script.free(0x2000)
    at_peak = only(analysed(tmp_path, script)).at_peak
    assert {name: size for name, size in at_peak.parts().items() if size} == {
        "saved_activations_bytes": 5000,
        "other_bytes": 5000 + 999,
        "temporaries_bytes": 77,
    }


def test_what_a_forward_makes_for_good_is_other(tmp_path: Path) -> None:
    """As DDP's buckets in the second step: no later step frees it. What is kept into the next step is still saved."""
    script = Script()
    for step in (1, 2, 3):
        with script.phase("forward", step):
            if step == 2:
                script.alloc(0x50000, 7000)
                script.alloc(0x60000, 900)
            script.alloc(0x1000, 100)
        with script.phase("backward", step):
            script.free(0x1000)
            if step == 3:
                script.free(0x60000)
            elif step == 2:
                script.alloc(0x70000, 33)
                script.alloc(0x80000, 5000)
                script.free(0x80000)
    at_peak = only(analysed(tmp_path, script)).at_peak
    assert {name: size for name, size in at_peak.parts().items() if size} == {
        "saved_activations_bytes": 900,
        "temporaries_bytes": 5000,
        "other_bytes": 7000 + 33,
    }


def test_a_storage_inside_a_block_is_its_owner(tmp_path: Path) -> None:
    """As of a flat parameter's part; one on another card or the host lies in no block."""
    script = Script()
    with script.phase("load"):
        script.alloc(0x10000, 4096)
        script.alloc(0x30000, 100)
        script.holds("weights", 0x10000)
        script.held[-1]["storages"] = {0x10800: 10, 0x30064: 10, 0x1: 5}  # inside; just behind one of 100 B; nowhere
    at_peak = only(analysed(tmp_path, script)).at_peak
    assert (at_peak.weights_bytes, at_peak.other_bytes) == (4096, 100)


@pytest.mark.parametrize("shift_us", [-1100, -600, 300])
def test_two_clocks_that_differ_do_not_move_the_phases(shift_us: int, tmp_path: Path) -> None:
    """torch's events, 1 ms apart here, have their own clock; phases end where as much is alive as the counters say."""
    script = training()
    script.columns["times_us"] = type(script.columns["times_us"])(
        "q", [time + shift_us for time in script.columns["times_us"]]
    )
    rank = only(analysed(tmp_path, script))
    raw = read_run(tmp_path).ranks[0]
    assert raw.history is not None
    spans = see(raw).spans
    assert all(span.closes for span in spans)
    assert rank.at_peak.total_bytes == rank.peak.requested_bytes
    assert rank.at_peak.saved_activations_bytes == SAVED


def test_a_step_traced_from_its_middle_has_what_was_alive_before(tmp_path: Path) -> None:
    """One step of a real run: blocks from before it are known by the snapshot, and the phases before are not traced."""
    script = training()
    raw_start = next(line["start_ns"] for line in script.lines if line.get("name") == "other" and line["step"] == 3)
    cut = sum(time * 1000 <= raw_start for time in script.columns["times_us"])
    alive: dict[int, tuple[int, int]] = {}
    rows = list(zip(*script.columns.values(), strict=True))
    for action, address, size, _, _, stack in rows[:cut]:
        if action == 0:
            alive[address] = (size, stack)
        elif action == 1:
            del alive[address]
    for name, column in script.columns.items():
        script.columns[name] = column[cut:]
    script.before = [(address, rounded(size), size, stack) for address, (size, stack) in alive.items()]
    script.traced = "step"
    script.held = [one for one in script.held if one["cause"] == "gradients"][-1:]
    script.holds("weights", 0x1000000, 0x2000000)
    history = script.history() | {"first_ns": raw_start}
    script.history = lambda: history  # type: ignore[method-assign]
    record = analysed(tmp_path, script)
    rank = only(record)
    assert rank.at_peak_of == "backward of step 3"
    assert rank.at_peak.total_bytes == sum(AT_PEAK.values())
    assert rank.at_peak.other_bytes == BATCH + WORKSPACE + 2 * STATE  # nobody said whose these are
    assert record.warnings == []


def test_an_untraced_peak_is_said_to_be_one(tmp_path: Path) -> None:
    script = training()
    for line in script.lines:
        if line.get("name") == "forward" and line["step"] == 1:
            line["allocated_peak_bytes"] = 10**9
    script.traced = "step"
    start_ns = next(line["start_ns"] for line in script.lines if line.get("name") == "forward" and line["step"] == 3)
    history = script.history() | {"first_ns": start_ns}
    script.history = lambda: history  # type: ignore[method-assign]
    record = analysed(tmp_path, script)
    assert any("the peak was in forward of step 1, which was not traced" in text for text in record.warnings)


def test_a_counter_that_the_history_does_not_explain_is_said(tmp_path: Path) -> None:
    script = training()
    for line in script.lines:
        if line.get("name") == "backward":
            line["requested_peak_bytes"] += 1
    record = analysed(tmp_path, script)
    assert any("the difference is unexplained" in text for text in record.warnings)


def test_without_a_history_there_are_the_counters(tmp_path: Path) -> None:
    rank = only(analysed(tmp_path, training(), with_history=False))
    assert rank.at_peak is None
    assert rank.peak.phase == "backward"
    assert {one.name: one.num_phases for one in rank.phases}["backward"] == 3


def test_a_killed_process_keeps_what_it_had(tmp_path: Path) -> None:
    script = training()
    script.lines = script.lines[:-6]
    record = analysed(tmp_path, script, with_history=False, exit_status=None, signal=9, tail=["bye"])
    assert record.outcome.kind == "error"
    assert (record.outcome.signal, record.outcome.last_lines) == (9, ["bye"])
    assert only(record).num_alloc_retries is None
    assert any("it was killed" in text for text in record.warnings)


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        ({}, "ok"),
        ({"stopped": True, "exit_status": 0}, "ok"),
        ({"exit_status": 3}, "error"),
        ({"exit_status": 130}, "interrupted"),
        ({"exit_status": None, "signal": 2}, "interrupted"),
        ({"exit_status": None, "signal": 15}, "interrupted"),
        ({"ended_ns": None}, "lost"),
    ],
)
def test_how_it_ended(launcher: dict[str, object], kind: str, tmp_path: Path) -> None:
    assert analysed(tmp_path, training(num_steps=1), **launcher).outcome.kind == kind


def ran_out(**process: object) -> Script:
    """In the backward of step 2, with one gradient made and the other asked for."""
    script = training(num_steps=1, **process)
    script.lines.pop()  # its end
    with script.phase("forward", 2):
        script.alloc(0x5000000, SAVED)
    start_ns, line = script.now_ns, len(script.lines)
    with script.phase("backward", 2):
        script.alloc(0x7000000, WEIGHT)
        script.event("oom", 0, 10 * WEIGHT, (("/env/site-packages/models/llama.py", 3, "forward"),))
        script.free(0x7000000, 0x5000000)
    assert script.lines[line]["start_ns"] == start_ns
    script.say("step", step=2)  # the hook counts a step in which an optimizer has begun
    script.say(
        "oom",
        time_ns=start_ns + 2_000_000,
        requested_bytes=10 * WEIGHT,
        allocated_bytes=5,
        reserved_bytes=6,
        free_bytes=7,
        total_bytes=8,
        phase="backward",
        step=2,
        stack=[["/env/site-packages/models/llama.py", 3, "forward"]],
    )
    return script


def test_out_of_memory_is_a_result(tmp_path: Path) -> None:
    record = analysed(tmp_path, ran_out(rank=0), exit_status=1, tail=["torch.OutOfMemoryError"])
    outcome = record.outcome
    assert outcome.kind == "oom"
    assert (outcome.phase, outcome.step, outcome.requested_bytes, outcome.free_bytes) == ("backward", 2, 10 * WEIGHT, 7)
    assert (outcome.line, outcome.function, outcome.rank) == ("models/llama.py:3", "forward", 0)
    assert {name: size for name, size in outcome.alive.parts().items() if size} == {
        "weights_bytes": 2 * WEIGHT,
        "optimizer_state_bytes": 2 * STATE,
        "saved_activations_bytes": SAVED,
        "temporaries_bytes": WEIGHT,
        "other_bytes": BATCH + WORKSPACE,
    }


def test_one_that_was_caught_is_no_end(tmp_path: Path) -> None:
    record = analysed(tmp_path, ran_out())
    assert record.outcome.kind == "ok"
    said = "process 100 ran out of memory once and went on: in backward of step 2, for 28.61 MiB, at models/llama.py:3"
    assert f"{said} forward" in record.warnings
    script = ran_out()
    with script.phase("forward", 3):
        script.alloc(0x7000000, 1)
    assert analysed(tmp_path, script, exit_status=1).outcome.kind == "error"


def test_ranks_the_highest_and_the_spread(tmp_path: Path) -> None:
    scripts = [training(100 + rank, rank=rank, extra_bytes=rank * 512) for rank in (2, 0, 1)]
    record = analysed(tmp_path, *scripts)
    assert [one.rank for one in record.ranks] == [0, 1, 2]
    assert record.highest_rank is record.ranks[2]
    assert record.allocated_spread_bytes == 1024
    assert only(analysed_alone(tmp_path / "one")) is not None


def analysed_alone(folder: Path) -> ProfileRecord:
    folder.mkdir()
    record = analysed(folder, training())
    assert record.allocated_spread_bytes is None
    return record


def test_the_last_whole_step_s_traffic_is_told(tmp_path: Path) -> None:
    script = training(rank=0)
    for step in (1, 3, 4):  # the third is the last whole one
        script.say("moved", phase="forward", step=step, counts=[[3, 4, 2, 400 * step]])
        script.say("moved", phase="backward", step=step, counts=[[3, 4, 1, 100], [4, 4, 1, 800]])
    script.say("moved", phase="backward", step=3, counts=[[4, 4, 1, 200]])
    script.say("moved", phase="load", counts=[[1, 4, 9, 9000]])
    traffic = only(analysed(tmp_path, script)).traffic
    assert [(one.phase, one.kind, one.num_calls, one.payload_bytes, one.link_bytes) for one in traffic or ()] == [
        ("forward", "all_gather", 2, 1200, 900),
        ("backward", "all_gather", 1, 100, 75),
        ("backward", "reduce_scatter", 2, 1000, 750),
    ]


def test_a_real_card_s_traffic_is_not_known(tmp_path: Path) -> None:
    assert only(analysed(tmp_path, training(emulated=False))).traffic is None


def test_steady_steps_repeat_or_do_not(tmp_path: Path) -> None:
    assert only(analysed(tmp_path, training())).repeats is True
    assert only(analysed(tmp_path, training(num_steps=2))).repeats is None
    script = training()
    last = next(line for line in script.lines if line.get("name") == "forward" and line["step"] == 3)
    last["allocated_peak_bytes"] += 1
    assert only(analysed(tmp_path, script)).repeats is False


def test_nothing_used_a_gpu(tmp_path: Path) -> None:
    record = analysed(tmp_path)
    assert record.ranks == []
    assert record.instrument == "emulated"  # as the launcher says
    assert any("no process used a GPU" in text for text in record.warnings)
    assert record.highest_rank is None


def test_an_emulated_run_says_what_it_rests_on(tmp_path: Path) -> None:
    script = training()
    read = {
        "line": "a.py:1",
        "function": "f",
        "torch_line": None,
        "script_line": None,
        "operator": "aten::item",
        "state": "uncomputed",
        "kind": "control",
        "dtype": "int64",
        "num_reads": 3,
        "max_elements": 1,
        "could_have_steered": True,
        "new": 1,
    }
    script.say(
        "values",
        policy={"contents": "zeros", "routing": "even"},
        num_reads=3,
        num_reads_that_could_have_steered=3,
        reads=[read],
    )
    script.say("verification", contents=["zeros", "ones"], num_events=12, same=True, parted_at=None)
    record = analysed(tmp_path, script)
    emulation = record.emulation
    assert record.instrument == "emulated"
    assert (emulation.card, emulation.contents, emulation.num_steering_reads) == ("RTX-4090", "zeros", 3)
    assert emulation.verification is not None
    assert emulation.reads[0].line == "a.py:1"
    assert record.environment.device_said == "emulated NVIDIA GeForce RTX 4090"


def test_what_was_replaced_is_named_and_what_could_not_be_is_a_warning(tmp_path: Path) -> None:
    replaced = {"kind": "weights", "what": "org/name", "by": "empty checkpoint files"}
    missing = {"kind": "missing", "what": "--empty-weights knows no model 'org/other'"}
    (tmp_path / "replaced").write_text(f'{json.dumps(replaced)}\n{json.dumps(missing)}\n{{"kind": "da')
    record = analysed(tmp_path, training())
    assert [one.model_dump() for one in record.replaced] == [replaced]
    assert missing["what"] in record.warnings


def test_a_launcher_that_took_nothing_is_no_rank(tmp_path: Path) -> None:
    launcher = Script(pid=99)
    launcher.say("end", why="exit", num_alloc_retries=0, num_ooms=0)
    record = analysed(tmp_path, launcher, training())
    assert [one.pid for one in record.ranks] == [100]


def test_a_real_run_knows_its_context(tmp_path: Path) -> None:
    record = analysed(tmp_path, training(emulated=False), emulate=None, emulator=None)
    assert (record.instrument, record.emulation, record.environment.emulator) == ("cuda", None, None)
    assert record.context_bytes == 480 * 2**20


SOURCE = """
class Outer:
    def forward(self, x):
        return helper(x)


def helper(x):
    return x + 1
"""


def test_a_line_is_the_innermost_outside_torch_and_its_class_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lib" / "python3.11" / "site-packages" / "models" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    torch = "/env/site-packages/torch/nn/functional.py"
    stack = (
        (torch, 5, "relu"),
        (str(file), 8, "helper"),
        (torch, 9, "_call_impl"),
        (str(file), 4, "forward"),
        ("/srv/train.py", 7, "<module>"),
    )
    places = Places([stack, ((torch, 5, "relu"),), (("/srv/sub/train.py", 7, "<module>"),)], ["/srv"])
    assert places.of(0).line == "models/a.py:8"
    assert (places.of(0).function, places.of(0).module) == ("helper", "Outer.forward")
    assert (places.of(1).line, places.of(1).module) == ("torch/nn/functional.py:5", None)
    assert places.of(2).line == "sub/train.py:7"
    assert places.of(-1) == NOWHERE


@pytest.mark.parametrize(
    "behind",
    [
        "/env/site-packages/triton/runtime.py",
        "/srv/vramprobe/emulate/values/mode.py",
        "<frozen importlib>",
        "/tmp/torchinductor_me/ab/cab.py",
        "/env/site-packages/vramprobe/profile/hook/marks.py",
    ],
)
def test_who_asks_on_behalf_of_others_is_not_named(behind: str) -> None:
    places = Places([((behind, 1, "f"), ("/srv/torch/train.py", 2, "g"))])
    assert places.of(0).function == "g"


def test_numbers_in_names_stand_as_stars() -> None:
    assert pattern("model.layers.11.mlp.up_proj.weight") == "model.layers.*.mlp.up_proj.weight"
    assert pattern("h.0.c1.0") == "h.*.c1.*"


def test_layers_alike_are_one_row(tmp_path: Path) -> None:
    rank = only(analysed(tmp_path, training()))
    first = rank.largest[0]
    assert (first.parameter, first.num_blocks, first.size_bytes) == ("layers.*.up.weight", 2, WEIGHT)
    assert first.line == "models/llama.py:3"


def test_what_was_reserved_and_never_allocated(tmp_path: Path) -> None:
    rank = only(analysed(tmp_path, training()))
    assert rank.fragmentation_bytes == rank.peak.reserved_bytes - rank.peak.allocated_bytes


def test_a_script_started_by_its_name_is_read_where_it_was_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE)
    places = Places([(("train.py", 4, "forward"),), ((str(tmp_path / "train.py"), 4, "forward"),)], [str(tmp_path)])
    for number in (0, 1):
        assert places.of(number).line == "train.py:4"
        assert places.of(number).module == "Outer.forward"


def test_what_the_hook_warns_of_is_told(tmp_path: Path) -> None:
    script = training(rank=0)
    script.say("warning", message="no two steps were alike")
    assert "rank 0: no two steps were alike" in analysed(tmp_path, script).warnings


def test_threads_of_autograd_have_no_line() -> None:
    """Whoever intercepts operators there leaves torch's way to itself on the stack."""
    dispatch = [("/env/site-packages/torch/_ops.py", 875, "__call__"), ("<string>", 1, "f")]
    places = Places([tuple(dispatch), (*dispatch, ("/env/site-packages/torch/optim/adam.py", 7, "step"))])
    assert places.of(0) == NOWHERE
    assert places.of(1).line == "torch/optim/adam.py:7"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Location("models/a.py:8", "helper", "Outer.forward"), "Outer.forward"),
        (NOWHERE, "no Python line"),
        (Location("models/a.py:8", "helper", None), "helper in a.py"),
        (Location("train.py:7", "<module>", None), "train.py"),
    ],
)
def test_a_module_has_a_name_anyway(place: Location, said: str) -> None:
    assert module_said(place) == said


def test_a_remark_of_many_processes_is_said_once() -> None:
    killed = [f"process {pid}: it was killed" for pid in range(100, 127)]
    few = ["rank 0: no history", "rank 1: no history", "memory is a lower bound"]
    assert merged([*killed[:3], *few, *killed[3:]]) == ["27 processes: it was killed", *few]
