"""The hook in a command's processes: phases and counters as they are, nothing allocated otherwise, an end in time."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grids import exhaustive, grid
from run_command import NO_COMPILER, TRAIN, lines, profiled, told, unprofiled

from vramprobe.emulate import values
from vramprobe.profile import hook as profile_hook
from vramprobe.profile import launch

PARAMETERS_BYTES = 4 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
HOOKS = tuple(str(Path(package.__file__).parent) for package in (profile_hook, values))
STEP = ["forward", "backward", "other", "optimizer_step", "other", "zero_grad", "other"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a loop that nobody changed, ended after three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    assert profiled(folder, TRAIN, steps=3) == launch.Ended(exit_status=0, stopped=True, num_left=0)
    return folder


def test_phases_of_a_loop_that_nobody_changed(stopped: Path) -> None:
    phases = lines(stopped, "phase")
    assert [phase["name"] for phase in phases] == ["load", *STEP, *STEP, *STEP]
    assert [phase["step"] for phase in phases] == [None, *[1] * 7, *[2] * 7, *[3] * 7]
    assert {phase["micro_step"] for phase in phases if phase["name"] in ("forward", "backward")} == {1}
    assert all(after["start_ns"] == before["end_ns"] for before, after in pairwise(phases))
    load, _, backward, *_ = phases
    assert load["allocated_end_bytes"] == PARAMETERS_BYTES + 64 * 1024 * 4  # the first batch is made before the forward
    assert backward["allocated_end_bytes"] - load["allocated_end_bytes"] >= PARAMETERS_BYTES  # gradients
    assert phases[7]["allocated_end_bytes"] - load["allocated_end_bytes"] >= 2 * PARAMETERS_BYTES  # AdamW's state
    assert all(phase["allocated_peak_bytes"] >= phase["allocated_end_bytes"] for phase in phases)
    assert all(phase["device_used_bytes"] > phase["reserved_end_bytes"] for phase in phases)
    assert lines(stopped, "end")[0]["why"] == "stopped"
    assert told(stopped)["stopped"]


def test_what_is_held_stands_in_the_history(stopped: Path) -> None:
    import pickle

    (path,) = (stopped / "run").glob("*.history")
    history = pickle.loads(path.read_bytes())
    for cause, times in (("weights", 1), ("gradients", 1), ("optimizer_state", 2)):
        last = [held for held in history["held"] if held["cause"] == cause][-1]
        expected = times * PARAMETERS_BYTES
        assert expected <= sum(last["storages"].values()) <= expected + 8 * 512, cause
    assert set(history["held"][0]["names"].values()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not [frame for stack in history["stacks"] for frame in stack if frame[0].startswith(HOOKS)]
    assert any(frame[0].endswith("script.py") for stack in history["stacks"] for frame in stack)


@pytest.mark.parametrize("trace", grid(["all", "step", "none"], "all"))
def test_a_program_sees_and_allocates_the_same_with_and_without(tmp_path: Path, trace: str, capfd) -> None:
    """To the byte, and its own peaks are its own: it resets them once itself."""
    once = "    if step == 2: print(torch.cuda.max_memory_allocated()); torch.cuda.reset_peak_memory_stats()\n"
    resetting = TRAIN.replace("    optimizer.step()\n", f"    optimizer.step()\n{once}")
    without = unprofiled(tmp_path, resetting)
    capfd.readouterr()
    assert profiled(tmp_path, resetting, trace=trace).exit_status == 0
    assert capfd.readouterr().out == without
    peak = int(without.split()[2])
    assert max(phase["allocated_peak_bytes"] for phase in lines(tmp_path, "phase")) == peak
    assert (len(list((tmp_path / "run").glob("*.history"))) == 1) == (trace != "none")


@exhaustive
def test_a_program_with_a_memory_history_of_its_own_has_it_and_that_is_said(tmp_path: Path) -> None:
    own = "torch.cuda.memory._record_memory_history()\n"
    profiled(tmp_path, TRAIN.replace("optimizer =", own + "optimizer =", 1), num_steps=2)
    assert [line["message"] for line in lines(tmp_path, "warning")] == [
        "the program keeps a memory history of its own: which lines asked for memory is not known"
    ]
    assert not list((tmp_path / "run").glob("*.history"))


#: Loops of one program, two steps each, by what is special in them; each has a model of its own.
LOOPS = {
    "no gradients": """
def generate():
    with torch.no_grad():
        for _ in range(2): model(torch.randn(1, 1024, device="cuda"))
for _ in range(2):
    step()
    generate()
    with torch.no_grad(): model(torch.randn(64, 1024, device="cuda"))
""",
    "a reference model": """
for _ in range(2):
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    with torch.no_grad(): reference(torch.randn(64, 1024, device="cuda"))
    loss.backward(); optimizer.step(); optimizer.zero_grad()
""",
    "a gradient in forward": """
for _ in range(2): step()
""",
    "accumulated": """
for _ in range(2):
    loss_of(model).backward()
    step()
""",
    "a closure": """
def closure():
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss
for _ in range(2): optimizer.step(closure)
""",
    "two closures": """
class Twice(torch.optim.SGD):
    def step(self, closure):
        closure(), closure()
optimizer = Twice(model.parameters(), lr=1e-3)
for _ in range(2): optimizer.step(closure)
""",
    "the engine itself": """
for _ in range(2):
    loss = loss_of(model)
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False, create_graph=False, inputs=(),
        allow_unreachable=True, accumulate_grad=True)
    optimizer.step(); optimizer.zero_grad()
""",
    "functorch": """
def loss_with(values):
    return torch.func.functional_call(model, values, torch.randn(64, 1024, device="cuda")).square().mean()
for _ in range(2):
    gradients = torch.func.grad(loss_with)(dict(model.named_parameters()))
    for name, one in model.named_parameters(): one.grad = gradients[name].detach()
    optimizer.step(); optimizer.zero_grad()
""",
    "compiled autograd": """
for _ in range(2):
    loss = loss_of(model)
    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")): loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    "partial backwards": """
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
for _ in range(2):
    given = torch.randn(64, 1024, device="cuda", requires_grad=True)
    loss = model(given).square().mean()
    _, groups = stage_backward_input([loss], None, [given], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    optimizer.step(); optimizer.zero_grad()
""",
}
#: As transformers does, it asks whether there is a torch before it imports it: both hooks wait for the import itself.
#: All models are called before the first backward, after which none is looked for.
_MADE = """
import importlib.util; importlib.util.find_spec("torch")
import torch
class Slope(torch.nn.Module):
    def forward(self, x):
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
def made(between):
    return torch.nn.Sequential(torch.nn.Linear(1024, 4096), between, torch.nn.Linear(4096, 1024)).cuda()
models = {loop: made(Slope() if loop == "a gradient in forward" else torch.nn.ReLU()) for loop in LOOPS}
reference = torch.nn.Linear(1024, 4096).cuda()
for model in (*models.values(), reference): model(torch.randn(1, 1024, device="cuda"))
def loss_of(model): return model(torch.randn(64, 1024, device="cuda")).square().mean()
def step():
    loss_of(model).backward(); optimizer.step(); optimizer.zero_grad()
"""
_BEGIN = """
model = models[LOOP]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program that runs all LOOPS."""
    folder = tmp_path_factory.mktemp("looped")
    loops = "".join(_BEGIN.replace("LOOP", repr(name)) + loop for name, loop in LOOPS.items())
    assert profiled(folder, _MADE.replace("LOOPS", str(list(LOOPS))) + loops, compiles=True).exit_status == 0
    return folder


def phases_of(looped: Path, loop: str) -> list[dict[str, Any]]:
    """Those of the loop's second step."""
    step = 2 * (list(LOOPS).index(loop) + 1)
    return [phase for phase in lines(looped, "phase") if phase["step"] == step]


def names_in(looped: Path, loop: str) -> list[str]:
    """To the step's end: what follows it is the next loop's beginning."""
    names = [phase["name"] for phase in phases_of(looped, loop)]
    return names[:-1] if names[-1] == "other" else names


def test_each_loop_has_its_steps_and_what_was_read_is_known(looped: Path) -> None:
    assert [line["step"] for line in lines(looped, "step")] == list(range(1, 2 * len(LOOPS) + 1))
    assert lines(looped, "values")


def test_a_forward_that_is_not_trained_is_evaluation_and_generation_is_told(looped: Path) -> None:
    expected = [*STEP, "generation", "other", "generation", "other", "evaluation"]
    assert names_in(looped, "no gradients") == expected


def test_a_reference_model_between_forward_and_backward_is_evaluation(looped: Path) -> None:
    """As DPO has one: its forward follows that of the model that trains, and precedes the backward."""
    assert names_in(looped, "a reference model") == ["forward", "evaluation", "forward", *STEP[1:-1]]


def test_a_gradient_that_the_forward_takes_is_a_part_of_it(looped: Path) -> None:
    """As for forces; and a compiler asks for one while it follows a forward."""
    assert names_in(looped, "a gradient in forward") == STEP[:-1]


def test_gradients_that_are_accumulated_make_one_step(looped: Path) -> None:
    found = [(phase["name"], phase["micro_step"]) for phase in phases_of(looped, "accumulated") if phase["micro_step"]]
    assert found == [("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]


@pytest.mark.parametrize(("loop", "times"), [("a closure", 1), ("two closures", 2)])
def test_an_optimizer_that_calls_the_loss_itself(looped: Path, loop: str, times: int) -> None:
    """As Lightning starts every optimizer; others, as LBFGS, call it more than once in a step."""
    names = [name for name in names_in(looped, loop) if name not in ("zero_grad", "other")]
    assert names == ["forward", "backward", "optimizer_step"] * times


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("the engine itself", STEP[:-1]),
        ("functorch", STEP[:-1]),
        ("compiled autograd", STEP[:-1]),
        ("partial backwards", ["forward", *["backward", "other"] * 2, *STEP[1:-1]]),  # inputs, then two layers
    ],
)
def test_a_backward_is_what_the_engine_does(looped: Path, loop: str, expected: list[str]) -> None:
    """As Megatron, functional programs and pipelines with two backwards call it."""
    assert names_in(looped, loop) == expected


def test_an_oom_is_kept_and_the_programs_own_status_stays(tmp_path: Path) -> None:
    ended = profiled(tmp_path, TRAIN.replace("    loss =", "    torch.empty(10**11, device='cuda')\n    loss ="))
    assert (ended.exit_status, ended.stopped) == (1, False)
    (oom,) = lines(tmp_path, "oom")
    assert oom["requested_bytes"] > oom["free_bytes"]
    assert any(frame[0].endswith("script.py") for frame in oom["stack"])
    assert not [frame for frame in oom["stack"] if frame[0].startswith(HOOKS)]
    assert "OutOfMemoryError" in "".join(told(tmp_path)["tail"])


@exhaustive
def test_a_step_that_runs_out_of_memory_is_none_and_its_state_is_known(tmp_path: Path) -> None:
    """AdamW makes two tensors for each parameter, one parameter after the other: the last ones do not fit."""
    full = (
        "    loss.backward()\n    import gc; full = torch.empty(torch.cuda.mem_get_info()[0] - 90 * 2**20, "
        "dtype=torch.uint8, device='cuda')\n"
    )
    profiled(tmp_path, TRAIN.replace("    loss.backward()\n", full))
    (oom,) = lines(tmp_path, "oom")
    assert oom["phase"] == "optimizer_step"
    assert not lines(tmp_path, "step")
    import pickle

    (path,) = (tmp_path / "run").glob("*.history")
    states = [held for held in pickle.loads(path.read_bytes())["held"] if held["cause"] == "optimizer_state"]
    assert sum(states[-1]["storages"].values()) >= 2**24


def test_a_stop_leaves_no_words_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Megatron's timers: a context of the program logs the exception that it is left by."""
    context = (
        "import contextlib, logging, traceback\n@contextlib.contextmanager\ndef timed():\n    try: yield\n"
        "    except BaseException: print(traceback.format_exc()); logging.warning(traceback.format_exc()); raise\n"
    )
    loop = TRAIN.replace("    loss =", "  with timed():\n    loss =")
    assert profiled(tmp_path, context + loop, steps=3).stopped
    said = capfd.readouterr()
    assert "SystemExit" not in said.out + said.err


def test_children_are_watched_each_by_itself_and_none_stays(tmp_path: Path) -> None:
    """A forked one without a card, one of its own interpreter that trains, and one that would stay for ever."""
    script = (
        f"\nimport os, subprocess, sys, time\nif os.fork() == 0:\n    os._exit(0)\n"
        f"subprocess.run([sys.executable, '-c', {NO_COMPILER + TRAIN.replace('NUM_STEPS', '1')!r}], check=True)\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n{TRAIN}"
    )
    ended = profiled(tmp_path, script, num_steps=1)
    assert ended == launch.Ended(exit_status=0, stopped=False, num_left=1)
    processes = lines(tmp_path, "process")
    assert len(processes) == 2
    assert processes[0]["pid"] != processes[1]["pid"]
