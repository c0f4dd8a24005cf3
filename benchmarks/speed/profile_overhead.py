"""What the hook of `vramprobe profile` costs a step: ``python benchmarks/speed/profile_overhead.py [--write]``.

The same training under each ``--trace`` and without the hook, in processes that take turns on one emulated card, where
the host does what it does on a GPU and no kernel computes. Measured: the CPU time of the hook's own functions in a step
(the least of many), and of the whole step with the hook and without; their difference has torch's recording of
allocations in it, and whatever else disturbs the machine. Predicted: the share of a step on a GPU, from what others
published of such steps (``STEPS`` names each). What ``mem_get_info`` costs on a real driver is not in it. ``--write``:
the .md beside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.emulate import MACHINE_VARIABLE
from vramprobe.emulate.enter import entrance_for_command, installation_to_use
from vramprobe.emulate.values.hook import site_folder
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.profile.launch import HOOK, Options, write_told

TRACES = ("none", "step", "all")
ROUNDS, FIRST_STEPS = 16, 5
PAGE = Path(__file__).with_suffix(".md")


class Step(NamedTuple):
    """A training step, and how long others say that one like it takes on a GPU."""

    model: str
    method: str
    batch_size: int
    seq_len: int
    published_seconds: float
    published_as: str


STEPS = (
    Step("smollm2-135m", "full", 1, 256, 256 / 1462.86,
         "a short one: Qwen-1.8B QLoRA, 1 × 256, A100, 1,463 tokens/s (Qwen's README)"),
    Step("tinyllama-1.1b", "full", 4, 2048, 4 * 2048 / 17188.3,
         "SantaCoder 1.1B full, 4 × 2048, A100, 17,188 tokens/s (fms-acceleration)"),
    Step("mistral-7b-v0.3", "lora", 8, 4096, 8 * 4096 / 4267.73,
         "Mistral-7B QLoRA, 8 × 4096, A100, 4,268 tokens/s (fms-acceleration)"),
)  # fmt: skip

_WORKER = """
import json, os, sys, time
told = json.loads(sys.argv[1])
os.environ.pop(told["machine_variable"])  # who watches values belongs to the emulated card, not to the hook
if told["site"]:
    exec(open(told["site"] + "/vramprobe_watch.py").read())
import torch
own = depth = 0
def clocked(kind, name):
    function = getattr(kind, name)
    def wrapped(*words, **more):
        global own, depth
        begun, depth = time.thread_time(), depth + 1
        try:
            return function(*words, **more)
        finally:
            depth -= 1
            own += 0 if depth else time.thread_time() - begun
    setattr(kind, name, wrapped)
if told["site"]:
    from vramprobe_profile import phases, watch
    clocked(phases.Phases, "mark")
    for name in ("_forward", "_backward_ended", "_optimizer_stepped"):
        clocked(watch.ValuesWatch, name)
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(told["config"])
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config)
torch.set_default_dtype(torch.float32)
if told["method"] == "lora":
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
tokens = torch.zeros(told["batch_size"], told["seq_len"], dtype=torch.long, device="cuda")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print(json.dumps(None), file=answers, flush=True)
for line in sys.stdin:
    begun, own = time.process_time(), 0
    for _ in range(int(line)):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([time.process_time() - begun, own]), file=answers, flush=True)
"""


class Worker:
    """One training that takes steps when it is told to."""

    def __init__(self, step: Step, trace: str | None, home: Path) -> None:
        self._way = entrance_for_command(installation_to_use().python, "H100-SXM x2")
        folder = home / f"{step.model}-{trace}"
        folder.mkdir()
        config = folder / "config"
        config.mkdir()
        catalog = Path(__file__).parents[2] / "vramprobe" / "data" / "models" / f"{step.model}.json"
        shutil.copy(catalog, config / "config.json")
        environment = self._way.environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        site = None
        if trace is not None:
            site = site_folder(str(folder), also=[HOOK])
            environment[FOLDER_VARIABLE] = str(folder)
            write_told(folder, {"options": asdict(Options(trace=trace, steps=None))})
        environment["PYTHONPATH"] = ""
        told = {
            "machine_variable": MACHINE_VARIABLE,
            "site": site,
            "config": str(config),
            "method": step.method,
            "batch_size": step.batch_size,
            "seq_len": step.seq_len,
        }
        self._process = subprocess.Popen(
            [self._way.python, "-c", _WORKER, json.dumps(told)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def steps(self, count: int) -> list[float]:
        """-> CPU seconds of all together; those in the hook's functions."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._way.machine, ignore_errors=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Cost(NamedTuple):
    """Of one step under one trace, CPU milliseconds; ``first``: of the hook in the first five steps together."""

    own: float
    more: float  # the fastest step with the hook less the fastest without
    first: float


def measured(step: Step) -> tuple[float, dict[str, Cost]]:
    """-> (the host's step without the hook, ms; the hook's cost by trace)."""
    with tempfile.TemporaryDirectory() as home:
        workers = {trace: Worker(step, trace, Path(home)) for trace in (None, *TRACES)}
        first = {trace: worker.steps(FIRST_STEPS) for trace, worker in workers.items()}
        rounds = [{trace: worker.steps(1) for trace, worker in workers.items()} for _ in range(ROUNDS)]
        for worker in workers.values():
            worker.close()
    least = {trace: [1e3 * min(one[trace][k] for one in rounds) for k in (0, 1)] for trace in workers}
    plain = least[None][0]
    return plain, {trace: Cost(least[trace][1], least[trace][0] - plain, 1e3 * first[trace][1]) for trace in TRACES}


def main() -> None:
    lines = [
        "| training | `--trace` | the host's step | the hook in a step | in the first 5 | whole step, more | share |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    for step in STEPS:
        plain, costs = measured(step)
        for trace, cost in costs.items():
            name = f"{step.model} {step.method}, {step.batch_size} × {step.seq_len}"
            share = max(cost.own, cost.more if trace == "all" else 0) / 1e3 / step.published_seconds
            lines.append(
                f"| {name} | {trace} | {plain:.0f} ms | {cost.own:.1f} ms | {cost.first:.0f} ms "
                f"| {round(cost.more)} ms | {100 * share:.2f} % |"
            )
            print(lines[-1], flush=True)
    said = [f"- {step.model}: {step.published_seconds:.2f} s; {step.published_as}." for step in STEPS]
    if "--write" in sys.argv:
        PAGE.write_text("\n".join(["# What the hook costs a step", "", *_HEAD, *lines, "", *_FOOT, *said, ""]))


_HEAD = (
    *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(),
    "",
    "``share``: the hook's own functions, under ``all`` the whole difference, of the published step. Under ``step`` it",
    "is that of the steps after the traced one; ``in the first 5`` has that one.",
    "",
)
_FOOT = ("Published steps that the share is of:", "")


if __name__ == "__main__":
    main()
