"""Trainings on an emulated card, and what happens to them: what they did until then is known, and nothing is left."""

import os
import signal
import time
from pathlib import Path

import pytest
from grids import exhaustive, grid
from run_command import require_emulation
from run_verb import Verb

from vramprobe.emulate.build import ensure_build
from vramprobe.emulate.enter import installation_to_use
from vramprobe.records.profile import ProfileRecord, last_profile

#: ``train(n)``: n steps; ``at(k)``: what is done in step k.
TRAINING = """
import os, pathlib, signal, subprocess, sys, threading, time
HOME, RUN = os.environ["FAULT"], os.environ["VRAMPROBE_PROFILE"]
def ready(*words): pathlib.Path(HOME, "ready").write_text(" ".join(map(str, words)) or "yes")
def train(n=3, at=lambda step: None):
    import torch, types
    # For its first optimizer torch loads its compiler, a second of CPU that says nothing here.
    sys.modules["torch._dynamo"] = types.SimpleNamespace(disable=lambda step, *_, **__: step, graph_break=lambda: None)
    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, n + 1):
        model(torch.zeros(64, 256, device="cuda")).sum().backward()
        at(step)
        optimizer.step()
        optimizer.zero_grad()
def of_rank(rank): train()
def once(act): return lambda step: act() if step == 2 else None
if __name__ == "__main__":
"""
_LOADER = "torch.utils.data.DataLoader(torch.zeros(8, 4), num_workers=2, {})"
PLAIN, STAYING, SPAWN = "", "persistent_workers=True", "multiprocessing_context='spawn'"
_BEGIN = "p.start(); p.join(); sys.exit(p.exitcode)"

#: What the program does: its lines, its exit status, for each process that used the card the steps that it made.
PROGRAMS: dict[str, tuple[str, int, list[int]]] = {
    "no CUDA": ("import torch; torch.nn.Linear(2, 2)(torch.zeros(2))", 0, []),
    "a card and no step": ("import torch; torch.zeros(9, device='cuda')", 0, [0]),
    "leaves early": ("train(2); sys.exit(0)", 0, [2]),
    "leaves at once": ("train(3, once(lambda: os._exit(3)))", 3, [1]),
    "is killed": ("train(3, once(lambda: os.kill(os.getpid(), 9)))", 137, [1]),
    "is interrupted": ("train(3, once(lambda: os.kill(os.getpid(), 2)))", 130, [1]),
    "crashes": ("import ctypes; train(3, once(lambda: ctypes.string_at(0)))", 128 + signal.SIGSEGV, [1]),
    "raises": ("train(3, once(lambda: 1 / 0))", 1, [1]),
    "runs out of memory": ("import torch; train(3, once(lambda: torch.empty(10**11, device='cuda')))", 1, [1]),
    "runs out of memory and goes on": (
        "import torch\ntry: torch.empty(10**11, device='cuda')\nexcept torch.OutOfMemoryError: pass\ntrain()", 0, [3]),
    "trains in a forked process": (
        "if os.fork() == 0: train(); sys.exit(0)\nsys.exit(os.waitstatus_to_exitcode(os.wait()[1]))", 0, [3]),
    "trains in a forked process that leaves at once": ("if os.fork() == 0: train(); os._exit(0)\nos.wait()", 0, [2]),
    "multiprocessing, forked": (
        f"import multiprocessing as m\np = m.get_context('fork').Process(target=train)\n{_BEGIN}", 0, [3]),
    "multiprocessing, spawned": (
        f"import multiprocessing as m\np = m.get_context('spawn').Process(target=train)\n{_BEGIN}", 0, [3]),
    "multiprocessing, from a server": (
        f"import multiprocessing as m\np = m.get_context('forkserver').Process(target=train)\n{_BEGIN}", 0, [3]),
    "torch.multiprocessing": ("import torch.multiprocessing as m\nm.spawn(of_rank, nprocs=2)", 0, [3, 3]),
    "trains on the CPU in a forked process": (
        "def cpu():\n    import torch\n    if os.fork(): return os.wait()\n"
        "    torch.nn.Linear(2, 2)(torch.zeros(2)).sum().backward(); sys.exit(0)\ntrain(3, once(cpu))", 0, [3]),
    "forks between steps": ("train(3, once(lambda: os.fork() or os._exit(0)))", 0, [3]),
    "a loader's workers": (f"import torch; data = {_LOADER.format(PLAIN)}\ntrain(3, lambda step: list(data))", 0, [3]),
    "a loader's workers that stay": (f"import torch; data = {_LOADER.format(STAYING)}\n"
                                     "train(3, lambda step: list(data))", 0, [3]),
    "a loader's workers, spawned": (f"import torch; data = {_LOADER.format(SPAWN)}\n"
                                    "train(2, once(lambda: list(data)))", 0, [2]),
    "a loader's worker that is killed": (
        f"import torch; data = {_LOADER.format(STAYING)}\ndef kill(): os.kill(iter(data)._workers[0].pid, 9)\n"
        "def at(step): once(kill)(step); list(data)\ntrain(3, at)", 1, [1]),
    "becomes itself again": (
        "train(2)\nif len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, __file__, '1'])", 0, [1, 2]),
    "deletes its folder": ("import shutil; train(3, once(lambda: shutil.rmtree(os.getcwd())))", 0, [3]),
    "empties its environment": ("os.environ.clear(); train()", 0, [3]),
    "replaces the excepthook": ("sys.excepthook = lambda *a: os._exit(4)\ntrain(3, once(lambda: 1 / 0))", 4, [1]),
    "closes its streams": ("train(3, once(lambda: [os.close(f) for f in (0, 1, 2)]))", 0, [3]),
    "closes all it does not know": ("train(3, once(lambda: os.closerange(3, 4096)))", 0, [3]),
    "closes all and opens its own": (
        "def reopen():\n    os.closerange(3, 4096)\n"
        "    for k in range(99): os.open(HOME + f'/own{k}', os.O_CREAT | os.O_WRONLY)\n"
        "train(3, once(reopen))\nassert not any(os.path.getsize(HOME + f'/own{k}') for k in range(99))", 0, [3]),
    "keeps a history of its own": ("import torch; train(3, once(torch.cuda.memory._record_memory_history))", 0, [3]),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _driver() -> None:
    """Built before anything is said of it."""
    require_emulation()
    ensure_build(installation_to_use())


def profile_of(folder: Path) -> ProfileRecord:
    return last_profile(folder / "profile.jsonl")


def started(folder: Path, script: str, *options: str, words: list[str] | None = None, **more: dict[str, str]) -> Verb:
    path = folder / "script.py"
    path.write_text(TRAINING + "".join(f"    {line}\n" for line in script.splitlines()))
    python = require_emulation()
    command = [str(python), *(words or []), str(path)]
    options = ("--emulate", "RTX-4090 x2", "--save", str(folder / "profile.jsonl"), *options)
    return Verb(folder, command, *options, **more)


ALWAYS = ("is killed", "a loader's workers that stay", "becomes itself again")


@pytest.mark.parametrize("what", grid(PROGRAMS, *ALWAYS))
def test_a_training(tmp_path: Path, what: str) -> None:
    script, status, steps = PROGRAMS[what]
    left = started(tmp_path, script, "--whole").left()
    left.check(status)
    record = profile_of(tmp_path)
    assert [one.num_steps for one in record.ranks] == steps, (left.out, left.err)


#: What happens to the files that the profile is made of: lines said, folders kept, steps known (None: no profile).
FILES = {
    "no file may grow": (
        "import resource; train(3, once(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))))",
        1,
        0,
        None,
    ),
    "the folder is gone": ("import shutil; train(3, once(lambda: shutil.rmtree(RUN)))", 3, 0, None),
    "a line is torn": (
        "train(); f = open(f'{RUN}/{os.getpid()}.jsonl', 'a'); f.write('{\"line\": \"pha'); f.flush(); os._exit(0)",
        0,
        0,
        [2],
    ),
    "a line is damaged": (
        "train(3, once(lambda: print('nothing', file=open(f'{RUN}/{os.getpid()}.jsonl', 'a'))))",
        2,
        1,
        None,
    ),
    "the history's place is taken": ("train(3, once(lambda: os.mkdir(f'{RUN}/{os.getpid()}.history')))", 1, 0, [3]),
    "another's history is torn": ("open(f'{RUN}/1.history', 'w').write('no'); train()", 0, 0, [3]),
}


@pytest.mark.parametrize("what", grid(FILES, "the folder is gone"))
def test_the_profiles_own_files(tmp_path: Path, what: str) -> None:
    """The program never notices; what can still be read is shown."""
    script, said, kept, steps = FILES[what]
    left = started(tmp_path, script, "--whole").left()
    assert (left.running, left.stray, len(left.kept), len(left.said)) == ([], [], kept, said), left.err
    assert "Traceback" not in left.err
    if steps is not None:
        assert left.status == 0
        assert [one.num_steps for one in profile_of(tmp_path).ranks] == steps


LONG = "train(10**9, lambda step: (step == 2 and ready(os.getpid()), time.sleep(0.01)))"
RANKS = """import torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
def at(step):
    dist.all_reduce(torch.zeros(9, device="cuda"))
    if step == 2 and rank == 1: ready(os.getpid(), os.getppid())
    time.sleep(0.01)
train(10**9, at)
"""
_RUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize(("number", "status"), grid([(2, 130), (15, 143), (9, 137), (1, 129)], (2, 130), (9, 137)))
def test_a_training_that_is_ended(tmp_path: Path, number: int, status: int) -> None:
    """From outside, in the middle of a step: what it did is known, also where vramprobe itself was killed."""
    verb = started(tmp_path, LONG, "--whole")
    verb.wait_until_ready()
    if number == 2:
        os.killpg(verb.process.pid, number)
    else:
        verb.process.send_signal(number)
    left = verb.left()
    left.check(status, kept=int(number == 9), said=int(number == 9))
    if number == 9:
        assert str(left.kept[0]) in left.said[0]
        again = Verb(tmp_path, [], "--from", str(left.kept[0]), "--save", str(tmp_path / "profile.jsonl")).left()
        again.check(0, kept=1)
    record = profile_of(tmp_path)
    assert record.outcome.kind == ("lost" if number == 9 else "interrupted")
    assert record.ranks[0].num_steps >= 1


@pytest.mark.parametrize(("whom", "status"), grid([("rank", 1), ("launcher", 137), ("verb", 143)], ("launcher", 137)))
def test_a_rank_or_a_launcher_that_is_killed(tmp_path: Path, whom: str, status: int) -> None:
    verb = started(tmp_path, RANKS, "--whole", words=_RUN)
    rank, launcher = map(int, verb.wait_until_ready().split())
    if whom == "verb":
        verb.process.terminate()
    else:
        os.kill(rank if whom == "rank" else launcher, signal.SIGKILL)
    left = verb.left()
    peers = [line for line in left.said if "rank 0 of 2: a peer has ended" in line]  # unless torchrun ends it before
    left.check(status, said=len(peers))
    assert len(peers) <= (whom == "rank")
    assert [(one.rank, one.num_steps > 0) for one in profile_of(tmp_path).ranks] == [(0, True), (1, True)]


CAUGHT = ["KeyboardInterrupt", "SystemExit", "BaseException"]


@pytest.mark.parametrize("caught", grid(CAUGHT, "BaseException"))
def test_a_training_that_catches_its_end(tmp_path: Path, caught: str) -> None:
    """The one that comes after three steps; whoever goes on is ended a little later."""
    script = f"try: train(9)\nexcept {caught}: train(2)"
    left = started(tmp_path, script).left()
    left.check(0)
    assert profile_of(tmp_path).outcome.stopped


#: Its model and batch live as long as the program, so that the last step is like the one before.
THREE_STEPS = """import torch
model, batch = torch.nn.Linear(256, 256).cuda(), torch.zeros(64, 256, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@exhaustive
def test_a_training_that_ends_on_the_step_that_would_stop_it(tmp_path: Path) -> None:
    """It has come to its own end, and its history is kept."""
    left = started(tmp_path, THREE_STEPS).left()
    left.check(0)
    record = profile_of(tmp_path)
    (rank,) = record.ranks
    assert (record.outcome.kind, record.outcome.stopped, rank.num_steps) == ("ok", False, 3)
    assert rank.at_peak is not None
    assert record.warnings == []


#: A model, a layer that is too large for the card; and the same, but that its end is another error.
LOADING = "import torch\nmodel = torch.nn.Linear(4096, 4096).cuda()\n"
ENDS_IN_LOADING = {
    "out of memory": "torch.nn.Linear(4096, 9 * 2**20, device='cuda')",
    "another error": "raise RuntimeError('in loading')",
}


@pytest.mark.parametrize("what", grid(ENDS_IN_LOADING, "out of memory"))
def test_weights_are_known_where_a_training_ends_in_loading(tmp_path: Path, what: str) -> None:
    started(tmp_path, LOADING + ENDS_IN_LOADING[what]).left().check(1)
    record = profile_of(tmp_path)
    assert record.outcome.kind == ("oom" if "memory" in what else "error")
    for alive in (record.ranks[0].at_peak, *([record.outcome.alive] if record.outcome.kind == "oom" else [])):
        assert (alive.weights_bytes, alive.other_bytes) == (4 * (4096 * 4096 + 4096), 0)


@pytest.mark.parametrize("seconds", grid([0.9, 2.1], 2.1))
@pytest.mark.parametrize("number", grid([9, 15], 15))
def test_a_training_that_is_ended_at_any_moment(tmp_path: Path, number: int, seconds: float) -> None:
    verb = started(tmp_path, LONG, "--whole")
    time.sleep(seconds)
    verb.process.send_signal(number)
    left = verb.left()
    assert (left.status, left.running, left.stray) == (128 + number, [], [])
    assert len(left.kept) <= int(number == 9)


#: Two ranks with a launcher that waits for both; the second crashes in its third step, then the first reaches its own.
ONE_CRASHES = """
if len(sys.argv) == 1:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in range(2)]
    sys.exit(max(one.wait() for one in ranks))
os.environ["RANK"], os.environ["WORLD_SIZE"] = sys.argv[1], "2"
def late(step):
    if step == 3 and sys.argv[1] == "1": raise RuntimeError("rank 1 crashed")
    if step == 3: time.sleep(2)
train(9, late)
"""


def test_a_rank_that_crashes_is_the_runs_end_although_another_made_its_steps(tmp_path: Path) -> None:
    left = started(tmp_path, ONE_CRASHES).left()
    left.check(1)
    outcome = profile_of(tmp_path).outcome
    assert (outcome.kind, outcome.exit_status) == ("error", 1)
    assert "RuntimeError: rank 1 crashed" in outcome.last_lines
