"""What the hook of `vramprobe profile` costs a training step: ``python benchmarks/profile_overhead.py [--write]``.

Pairs of steps of the same training, in processes that take turns on one emulated card: without the hook, and with it
under each ``--trace``. The host's work is real there, torch's and the hook's, and no kernel computes: the difference in
CPU seconds is the hook's own, measured; its share of a step on a GPU is predicted, from what others published of such
steps (``STEPS`` names each). What ``mem_get_info`` costs on a real driver is not in it. ``--write``: the .md beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.emulate import MACHINE_VARIABLE
from vramprobe.emulate.enter import entrance_for_command, installation_to_use
from vramprobe.profile.hook.journal import FOLDER_VARIABLE
from vramprobe.profile.launch import HOOK, Options, write_told
from vramprobe.emulate.values.hook import site_folder

TRACES = ("none", "step", "all")
ROUNDS, STEPS_A_ROUND, FIRST_STEPS = 12, 2, 5
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
    Step("llama-2-70b", "lora", 4, 4096, 4 * 4096 / 443.255,
         "Llama-2-70B QLoRA, 4 × 4096, A100, 443 tokens/s (fms-acceleration)"),
)  # fmt: skip

_WORKER = """
import json, os, sys, time
told = json.loads(sys.argv[1])
os.environ.pop(told["machine_variable"])  # who watches values belongs to the emulated card, not to the hook
if told["site"]:
    exec(open(told["site"] + "/vramprobe_watch.py").read())
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(told["config"])
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config)
torch.set_default_dtype(torch.float32)
if told["method"] == "lora":
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.train()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
tokens = torch.zeros(told["batch_size"], told["seq_len"], dtype=torch.long, device="cuda")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print(json.dumps(None), file=answers, flush=True)
for line in sys.stdin:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(int(line)):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]), file=answers, flush=True)
"""


class Worker:
    """One training that takes steps when it is told to."""

    def __init__(self, step: Step, trace: str | None, home: Path) -> None:
        self._way = entrance_for_command(installation_to_use().python, "H100-SXM x2")
        folder = home / f"{step.model}-{trace}"
        folder.mkdir()
        config = folder / "config"
        config.mkdir()
        catalog = Path(__file__).parents[1] / "vramprobe" / "data" / "models" / f"{step.model}.json"
        shutil.copy(catalog, config / "config.json")
        environment = self._way.environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        site = None
        if trace is not None:
            site = site_folder(str(folder), also=[HOOK])
            environment[FOLDER_VARIABLE] = str(folder)
            write_told(folder, {"options": asdict(Options(trace=trace, steps=None))})
        environment["PYTHONPATH"] = ""
        told = {"machine_variable": MACHINE_VARIABLE, "site": site, "config": str(config), "method": step.method,
                "batch_size": step.batch_size, "seq_len": step.seq_len}  # fmt: skip
        self._process = subprocess.Popen(
            [self._way.python, "-c", _WORKER, json.dumps(told)], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def steps(self, count: int) -> tuple[float, float]:
        """-> (CPU seconds, wall seconds) of each step."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        cpu, wall = self._answer()
        return cpu / count, wall / count

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._way.machine, ignore_errors=True)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Cost(NamedTuple):
    """Of one step under one trace, milliseconds; ``once``: more in the first five steps together."""

    plain_cpu: float
    more_cpu: float
    more_wall: float
    once_cpu: float


def measured(step: Step) -> dict[str, Cost]:
    """The hook's cost by trace: medians over pairs of rounds."""
    with tempfile.TemporaryDirectory() as home:
        workers = {trace: Worker(step, trace, Path(home)) for trace in (None, *TRACES)}
        first = {trace: worker.steps(FIRST_STEPS)[0] * FIRST_STEPS for trace, worker in workers.items()}
        rounds = [{trace: worker.steps(STEPS_A_ROUND) for trace, worker in workers.items()} for _ in range(ROUNDS)]
        for worker in workers.values():
            worker.close()
    plain = statistics.median(one[None][0] for one in rounds)
    found = {}
    for trace in TRACES:
        more_cpu, more_wall = (statistics.median(one[trace][k] - one[None][k] for one in rounds) for k in (0, 1))
        once = first[trace] - first[None] - FIRST_STEPS * more_cpu
        found[trace] = Cost(*(1e3 * seconds for seconds in (plain, more_cpu, more_wall, once)))
    return found


def main() -> None:
    lines = [
        "| training | `--trace` | the host's step without | the hook, a step | wall | the first five, more | share of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for step in STEPS:
        for trace, cost in measured(step).items():
            share = cost.more_cpu / 1e3 / step.published_seconds
            lines.append(
                f"| {step.model} {step.method}, {step.batch_size} × {step.seq_len} | {trace} | {cost.plain_cpu:.0f} ms | "
                f"{cost.more_cpu:.1f} ms | {cost.more_wall:.1f} ms | {cost.once_cpu:.0f} ms | {100 * share:.2f} % |"
            )
            print(lines[-1], flush=True)
    said = [f"- {step.model}: {step.published_seconds:.2f} s; {step.published_as}." for step in STEPS]
    if "--write" in sys.argv:
        PAGE.write_text("\n".join(["# What the hook costs a step", "", *_HEAD, *lines, "", *_FOOT, *said, ""]))


_HEAD = (
    "`python benchmarks/profile_overhead.py --write`. The hook's CPU time is measured, on two cores of this machine and "
    "an emulated card,",
    "where the host does all it does on a GPU and no kernel computes; the last column is predicted: that time against a "
    "published step.",
    "A host that runs ahead of its GPU hides what the hook takes; one that does not waits for it.",
    "",
)
_FOOT = ("Published steps that the share is of:", "")


if __name__ == "__main__":
    main()
