"""The hook in a command's processes: phases and counters as they are, nothing allocated otherwise, an end in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from emulated import require_emulation
from run_command import TRAIN, lines, profiled, told, unprofiled

from vramprobe.emulate import values
from vramprobe.profile import hook as profile_hook
from vramprobe.profile import launch

PARAMETERS_BYTES = 4 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
HOOKS = tuple(str(Path(package.__file__).parent) for package in (profile_hook, values))
STEP = ["forward", "backward", "other", "optimizer_step", "other", "zero_grad", "other"]


def test_phases_of_a_loop_that_nobody_changed(tmp_path: Path) -> None:
    assert profiled(tmp_path, TRAIN, steps=3) == launch.Ended(exit_status=0, stopped=True, num_left=0)
    phases = lines(tmp_path, "phase")
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
    assert lines(tmp_path, "end")[0]["why"] == "stopped"
    assert told(tmp_path)["stopped"]


@pytest.mark.parametrize("trace", ["all", "step", "none"])
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


def test_a_program_with_a_memory_history_of_its_own_has_it_and_that_is_said(tmp_path: Path) -> None:
    own = "torch.cuda.memory._record_memory_history()\n"
    profiled(tmp_path, TRAIN.replace("optimizer =", own + "optimizer =", 1), num_steps=2)
    assert [line["message"] for line in lines(tmp_path, "warning")] == [
        "the program keeps a memory history of its own: which lines asked for memory is not known"
    ]
    assert not list((tmp_path / "run").glob("*.history"))


def test_a_forward_that_is_not_trained_is_evaluation_and_generation_is_told(tmp_path: Path) -> None:
    script = TRAIN.replace("    optimizer.zero_grad()\n", """    optimizer.zero_grad()
    def generate():
        with torch.no_grad():
            for _ in range(2): model(torch.randn(1, 1024, device="cuda"))
    generate()
    with torch.no_grad(): model(torch.randn(64, 1024, device="cuda"))
""")  # fmt: skip
    profiled(tmp_path, script, num_steps=2)
    names = [phase["name"] for phase in lines(tmp_path, "phase") if phase["step"] == 1]
    assert names == [*STEP, "generation", "other", "generation", "other", "evaluation", "other"]


def test_a_reference_model_between_forward_and_backward_is_evaluation(tmp_path: Path) -> None:
    """As DPO has one: its forward follows that of the model that trains, and precedes the backward."""
    script = TRAIN.replace("optimizer =", "reference = torch.nn.Linear(1024, 4096).cuda()\noptimizer =").replace(
        "    loss.backward()\n",
        "    with torch.no_grad(): reference(torch.randn(64, 1024, device='cuda'))\n    loss.backward()\n",
    )
    profiled(tmp_path, script, num_steps=2)
    names = [phase["name"] for phase in lines(tmp_path, "phase") if phase["step"] == 1]
    assert names == ["forward", "evaluation", "forward", *STEP[1:]]
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2]


def test_a_gradient_that_the_forward_takes_is_a_part_of_it(tmp_path: Path) -> None:
    """As for forces; and a compiler asks for one while it follows a forward."""
    script = TRAIN.replace("torch.nn.ReLU()", "Slope()").replace("model =", """class Slope(torch.nn.Module):
    def forward(self, x):
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
model =""")  # fmt: skip
    profiled(tmp_path, script, num_steps=2)
    names = [phase["name"] for phase in lines(tmp_path, "phase") if phase["step"] == 1]
    assert names == STEP


def test_gradients_that_are_accumulated_make_one_step(tmp_path: Path) -> None:
    script = TRAIN.replace("    optimizer.step()\n    optimizer.zero_grad()\n",
                           "    if step % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n")  # fmt: skip
    profiled(tmp_path, script, num_steps=6)
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2, 3]
    found = [(p["name"], p["micro_step"]) for p in lines(tmp_path, "phase") if p["step"] == 2 and p["micro_step"]]
    assert found == [("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]


def test_a_program_that_asks_whether_there_is_a_torch_before_it_imports_it(tmp_path: Path) -> None:
    """As transformers does: both hooks wait for the import itself."""
    profiled(tmp_path, "import importlib.util; importlib.util.find_spec('torch')\n" + TRAIN, num_steps=2)
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2]
    assert lines(tmp_path, "values")


CLOSURE = """
import torch
class Twice(torch.optim.SGD):
    def step(self, closure):
        closure(), closure()
model = torch.nn.Linear(1024, 4096).cuda()
optimizer = OPTIMIZER(model.parameters(), lr=1e-3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    loss.backward()
    return loss
for step in range(NUM_STEPS): optimizer.step(closure)
"""


@pytest.mark.parametrize(("optimizer", "times"), [("torch.optim.AdamW", 1), ("Twice", 2)])
def test_an_optimizer_that_calls_the_loss_itself(tmp_path: Path, optimizer: str, times: int) -> None:
    """As Lightning starts every optimizer; others, as LBFGS, call it more than once in a step."""
    profiled(tmp_path, CLOSURE.replace("OPTIMIZER", optimizer), num_steps=3)
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2, 3]
    names = [phase["name"] for phase in lines(tmp_path, "phase") if phase["step"] == 2]
    assert [name for name in names if name not in ("zero_grad", "other")] == [
        "forward", "backward", "optimizer_step",
    ] * times  # fmt: skip


def test_what_is_held_stands_in_the_history(tmp_path: Path) -> None:
    import pickle

    profiled(tmp_path, TRAIN, steps=3)
    (path,) = (tmp_path / "run").glob("*.history")
    history = pickle.loads(path.read_bytes())
    for cause, times in (("weights", 1), ("gradients", 1), ("optimizer_state", 2)):
        last = [held for held in history["held"] if held["cause"] == cause][-1]
        expected = times * PARAMETERS_BYTES
        assert expected <= sum(last["storages"].values()) <= expected + 8 * 512, cause
    assert set(history["held"][0]["names"].values()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not [frame for stack in history["stacks"] for frame in stack if frame[0].startswith(HOOKS)]
    assert any(frame[0].endswith("script.py") for stack in history["stacks"] for frame in stack)


def test_an_oom_is_kept_and_the_programs_own_status_stays(tmp_path: Path) -> None:
    ended = profiled(tmp_path, TRAIN.replace("    loss =", "    torch.empty(10**11, device='cuda')\n    loss ="))
    assert (ended.exit_status, ended.stopped) == (1, False)
    (oom,) = lines(tmp_path, "oom")
    assert oom["requested_bytes"] > oom["free_bytes"]
    assert any(frame[0].endswith("script.py") for frame in oom["stack"])
    assert not [frame for frame in oom["stack"] if frame[0].startswith(HOOKS)]
    assert "OutOfMemoryError" in "".join(told(tmp_path)["tail"])


def test_a_step_that_runs_out_of_memory_is_none_and_its_state_is_known(tmp_path: Path) -> None:
    """AdamW makes two tensors for each parameter, one parameter after the other: the last ones do not fit."""
    full = "    loss.backward()\n    import gc; full = torch.empty(torch.cuda.mem_get_info()[0] - 90 * 2**20, " \
           "dtype=torch.uint8, device='cuda')\n"  # fmt: skip
    profiled(tmp_path, TRAIN.replace("    loss.backward()\n", full))
    (oom,) = lines(tmp_path, "oom")
    assert oom["phase"] == "optimizer_step"
    assert not lines(tmp_path, "step")
    import pickle

    (path,) = (tmp_path / "run").glob("*.history")
    states = [held for held in pickle.loads(path.read_bytes())["held"] if held["cause"] == "optimizer_state"]
    assert sum(states[-1]["storages"].values()) >= 2**24


LEAVES = {
    "exits with a status of its own": ("raise SystemExit(7)", 7),
    "is killed": ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    "prints binary": ("sys.stderr.buffer.write(bytes(range(256)) * 99); sys.stdout.buffer.write(b'\\xff')", 0),
    "closes stdin": ("import os, sys; os.close(0)", 0),
    "execs": ("import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(5)'])", 5),
}  # fmt: skip


@pytest.mark.parametrize("what", LEAVES)
def test_a_program_that_leaves_otherwise(tmp_path: Path, what: str) -> None:
    last, status = LEAVES[what]
    ended = profiled(tmp_path, TRAIN + last, num_steps=2)
    assert ended == launch.Ended(exit_status=status, stopped=False, num_left=0)
    assert [line["step"] for line in lines(tmp_path, "step")][:1] == [1]  # what was seen until then is kept


def test_a_program_that_catches_the_end_is_ended(tmp_path: Path) -> None:
    script = "try:\n" + textwrap.indent(TRAIN, "    ") + "except BaseException:\n    print('caught')\n"
    ended = profiled(tmp_path, script, steps=2)
    assert ended == launch.Ended(exit_status=0, stopped=True, num_left=0)


def test_children_are_watched_each_by_itself_and_none_stays(tmp_path: Path) -> None:
    """A forked one without a card, one of its own interpreter that trains, and one that would stay for ever."""
    script = (
        f"import os, subprocess, sys, time\nif os.fork() == 0:\n    os._exit(0)\n"
        f"subprocess.run([sys.executable, '-c', {TRAIN.replace('NUM_STEPS', '1')!r}], check=True)\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n{TRAIN}"
    )
    ended = profiled(tmp_path, script, num_steps=1)
    assert ended == launch.Ended(exit_status=0, stopped=False, num_left=1)
    processes = lines(tmp_path, "process")
    assert len(processes) == 2
    assert processes[0]["pid"] != processes[1]["pid"]


def test_a_loader_with_workers(tmp_path: Path) -> None:
    script = TRAIN.replace("import sys, torch\n", """import sys, torch
data = torch.utils.data.DataLoader(torch.zeros(64, 1024), batch_size=64, num_workers=2)
""").replace("    loss = ", "    list(data)\n    loss = ")  # fmt: skip
    ended = profiled(tmp_path, script, num_steps=3)
    assert ended == launch.Ended(exit_status=0, stopped=False, num_left=0)
    assert len(lines(tmp_path, "process")) == 1


def test_a_full_folder_costs_the_profile_and_not_the_program(tmp_path: Path) -> None:
    script = TRAIN.replace("for step", "import glob, os, shutil\nshutil.rmtree(os.environ['VRAMPROBE_PROFILE'] + '/x', "
                           "ignore_errors=True)\nos.chmod(os.environ['VRAMPROBE_PROFILE'], 0)\nfor step")  # fmt: skip
    try:
        assert profiled(tmp_path, script, num_steps=2).exit_status == 0
    finally:
        (tmp_path / "run").chmod(0o700)


def test_an_interrupt_reaches_the_command_and_ends_the_verb(tmp_path: Path) -> None:
    python = require_emulation()
    script = tmp_path / "script.py"
    script.write_text(TRAIN.replace("NUM_STEPS", "10 ** 9"))
    (tmp_path / "run").mkdir()
    code = (
        "import sys, pathlib\nfrom vramprobe.profile import launch\n"
        f"print(launch.run([{str(python)!r}, {str(script)!r}], pathlib.Path({str(tmp_path / 'run')!r}), "
        "launch.Options(trace='all', steps=None), emulate='RTX-4090'))"
    )
    verb = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    for _ in range(600):
        if (tmp_path / "run").is_dir() and len(lines(tmp_path, "step")) > 1:
            break
        time.sleep(0.1)
    os.killpg(verb.pid, signal.SIGINT)
    out, error = verb.communicate(timeout=60)
    assert b"stopped=False" in out, error
    assert lines(tmp_path, "end")  # the program unwound, and said what it had seen
    marked = [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_words(p))]
    assert not marked


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
