"""Trainings on an emulated card, and what happens to them: what they did until then is known, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_command import require_emulation
from run_verb import Verb

from vramprobe.records.profile import ProfileRecord, last_profile

#: ``train(n)``: n steps; ``at(k)``: what is done in step k.
TRAINING = """
import os, pathlib, signal, subprocess, sys, threading, time
HOME, RUN = os.environ["FAULT"], os.environ["VRAMPROBE_PROFILE"]
def ready(*words): pathlib.Path(HOME, "ready").write_text(" ".join(map(str, words)) or "yes")
def train(n=3, at=lambda step: None):
    import torch
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
    "leaves before torch": ("sys.exit(0)\nimport torch", 0, []),
    "leaves early": ("train(2); sys.exit(0)", 0, [2]),
    "leaves at once": ("train(3, once(lambda: os._exit(3)))", 3, [1]),
    "is killed": ("train(3, once(lambda: os.kill(os.getpid(), 9)))", 137, [1]),
    "is terminated": ("train(3, once(lambda: os.kill(os.getpid(), 15)))", 143, [1]),
    "is interrupted": ("train(3, once(lambda: os.kill(os.getpid(), 2)))", 130, [1]),
    "crashes": ("import ctypes; train(3, once(lambda: ctypes.string_at(0)))", 128 + signal.SIGSEGV, [1]),
    "raises": ("train(3, once(lambda: 1 / 0))", 1, [1]),
    "raises and goes on": ("try: train(3, once(lambda: 1 / 0))\nexcept ZeroDivisionError: train(2)", 0, [3]),
    "raises in a thread": ("train(3, once(lambda: threading.Thread(target=lambda: 1 / 0).start()))", 0, [3]),
    "runs out of memory": ("import torch; train(3, once(lambda: torch.empty(10**11, device='cuda')))", 1, [1]),
    "runs out of memory and goes on": (
        "import torch\ntry: torch.empty(10**11, device='cuda')\nexcept torch.OutOfMemoryError: pass\ntrain()", 0, [3]),
    "trains in a forked process": (
        "if os.fork() == 0: train(); sys.exit(0)\nsys.exit(os.waitstatus_to_exitcode(os.wait()[1]))", 0, [3]),
    "trains in a forked process that leaves at once": ("if os.fork() == 0: train(); os._exit(0)\nos.wait()", 0, [2]),
    "multiprocessing, forked": (
        f"import multiprocessing as m\np = m.get_context('fork').Process(target=train)\n{_BEGIN}", 0, [3]),
    "multiprocessing, forked after torch": (
        f"import torch, multiprocessing as m\np = m.get_context('fork').Process(target=train)\n{_BEGIN}", 0, [3]),
    "multiprocessing, spawned": (
        f"import multiprocessing as m\np = m.get_context('spawn').Process(target=train)\n{_BEGIN}", 0, [3]),
    "multiprocessing, from a server": (
        f"import multiprocessing as m\np = m.get_context('forkserver').Process(target=train)\n{_BEGIN}", 0, [3]),
    "torch.multiprocessing": ("import torch.multiprocessing as m\nm.spawn(of_rank, nprocs=2)", 0, [3, 3]),
    "forks between steps": ("train(3, once(lambda: os.fork() or os._exit(0)))", 0, [3]),
    "a loader's workers": (f"import torch; data = {_LOADER.format(PLAIN)}\ntrain(3, lambda step: list(data))", 0, [3]),
    "a loader's workers that stay": (f"import torch; data = {_LOADER.format(STAYING)}\n"
                                     "train(3, lambda step: list(data))", 0, [3]),
    "a loader's workers, spawned": (f"import torch; data = {_LOADER.format(SPAWN)}\n"
                                    "train(2, once(lambda: list(data)))", 0, [2]),
    "a loader's worker that is killed": (f"import torch; data = iter({_LOADER.format(STAYING)})\n"
                                         "os.kill(data._workers[0].pid, 9); train(3, lambda step: list(data))", 1, [0]),
    "becomes itself again": (
        "train(2)\nif len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, __file__, '1'])", 0, [2, 2]),
    "starts another": (
        "train(1); len(sys.argv) == 1 and subprocess.run([sys.executable, __file__, '1'], check=True)", 0, [1, 1]),
    "changes its folder": ("os.chdir('/'); train()", 0, [3]),
    "deletes its folder": ("import shutil; shutil.rmtree(os.getcwd()); train()", 0, [3]),
    "empties its environment": ("os.environ.clear(); train()", 0, [3]),
    "replaces the excepthook": ("sys.excepthook = lambda *a: os._exit(4)\ntrain(3, once(lambda: 1 / 0))", 4, [1]),
    "closes its streams": ("train(3, once(lambda: [os.close(f) for f in (0, 1, 2)]))", 0, [3]),
    "closes all it does not know": ("train(3, once(lambda: os.closerange(3, 4096)))", 0, [3]),
    "closes all and opens its own": (
        "def reopen():\n    os.closerange(3, 4096)\n"
        "    for k in range(99): os.open(HOME + f'/own{k}', os.O_CREAT | os.O_WRONLY)\n"
        "train(3, once(reopen))\nassert not any(os.path.getsize(HOME + f'/own{k}') for k in range(99))", 0, [3]),
    "resets peaks": ("import torch; train(3, lambda step: torch.cuda.reset_peak_memory_stats())", 0, [3]),
    "keeps a history of its own": ("import torch; train(3, once(torch.cuda.memory._record_memory_history))", 0, [3]),
    "empties the cache": ("import torch; train(3, lambda step: torch.cuda.empty_cache())", 0, [3]),
    "prints binary": ("train(3, lambda step: [os.write(f, bytes(range(256))) for f in (1, 2)])", 0, [3]),
}  # fmt: skip


def profile_of(folder: Path) -> ProfileRecord:
    return last_profile(folder / "profile.jsonl")


def started(folder: Path, script: str, *options: str, words: list[str] | None = None, **more: dict[str, str]) -> Verb:
    path = folder / "script.py"
    body = script if script.startswith("\n") else "".join(f"    {line}\n" for line in script.splitlines())
    path.write_text(TRAINING + body)
    python = require_emulation()
    command = [str(python), *(words or []), str(path)]
    options = ("--emulate", "RTX-4090 x2", "--save", str(folder / "profile.jsonl"), *options)
    return Verb(folder, command, *options, **more)


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_training(tmp_path: Path, what: str) -> None:
    script, status, steps = PROGRAMS[what]
    left = started(tmp_path, script, "--whole").left()
    left.check(status)
    record = profile_of(tmp_path)
    assert [one.num_steps for one in record.ranks] == steps, (left.out, left.err)
    assert left.err.count("not fully profiled") == 0, left.err
