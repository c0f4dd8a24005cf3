"""GRPO, RLOO and online DPO by TRL with vLLM in the trainer's process, on one emulated H100; GRPO by verl, by ms-swift,
by Unsloth, and by TRL beside a server: who holds what, what fits.

Needs `vramprobe emulate` (a C compiler) and an interpreter with vLLM 0.32.0, TRL 1.16.0, torch 2.13.0 and no package of
NVIDIA's (grpo.md tells how, 4.6 GB); about two minutes of CPU a row. verl needs one of its own (stacks.md), pyarrow
here, ten minutes and 16 GB of memory a row; ms-swift and Unsloth ones of their own, seven minutes a row:

    python benchmarks/rollouts/grpo.py --python PATH    # the rows that are missing (QLoRA: vLLM 0.22), the tables
    python benchmarks/rollouts/grpo.py --verl PATH      # the same of verl
    python benchmarks/rollouts/grpo.py --ms-swift PATH  # the same of ms-swift
    python benchmarks/rollouts/grpo.py --unsloth PATH   # the same of Unsloth
    python benchmarks/rollouts/grpo.py                  # the tables alone
    python benchmarks/rollouts/grpo.py --check          # fails if they are stale
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import journal
from benchmarks.rollouts import stacks
from benchmarks.tables import as_markdown, filled, write_or_check
from vramprobe.predict.grpo import Grpo, grpo
from vramprobe.records.profile import ProfileRecord, RolloutStage
from vramprobe.units import GIB

HERE = Path(__file__).parent
JOURNAL, PAGE = HERE / "grpo.jsonl", HERE / "grpo.md"
STACKS, STACKS_PAGE = HERE / "stacks.jsonl", HERE / "stacks.md"
LLAMA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "completion": 256}
QWEN = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "completion": 1024}
ROWS = (
    {**LLAMA, "lora": True, "utilization": 0.5, "sleep": True},
    {**LLAMA, "lora": True, "utilization": 0.5, "sleep": False},
    {**LLAMA, "lora": True, "utilization": 0.8, "sleep": False},
    {**LLAMA, "lora": False, "utilization": 0.3, "sleep": True},
    {**LLAMA, "lora": False, "utilization": 0.3, "sleep": False},
    {"model": "Qwen/Qwen3-4B", "completion": 2048, "lora": True, "utilization": 0.4, "sleep": True},
    {**QWEN, "lora": False, "utilization": 0.3, "sleep": False, "beta": 0.04},
    {**QWEN, "lora": True, "4bit": True, "utilization": 0.3, "sleep": False},
    {**QWEN, "lora": False, "utilization": 0.3, "sleep": False, "trainer": "rloo"},
    {**QWEN, "lora": False, "utilization": 0.3, "sleep": False, "trainer": "online_dpo"},
)
#: Models → the catalog's.
MODELS = {LLAMA["model"]: "llama-3.1-8b", "Qwen/Qwen3-4B": "qwen3-4b", QWEN["model"]: "qwen2.5-1.5b"}
#: Trainers beside GRPO: none is predicted.
TRAINERS = {"rloo": "RLOO", "online_dpo": "online DPO"}
PROMPT_TOKENS = 16  # of grpo_train.py, by the replaced tokenizer
#: Which option has the interpreter of a stack.
STACK_OPTIONS = (
    ("--verl", "verl"), ("--ms-swift", "ms-swift"), ("--unsloth", "unsloth"), ("--python", "trl-server"),
)  # fmt: skip
STAGES = ("weight_sync", "generation", "log_probs", "forward", "backward", "optimizer_step")


def profiles() -> dict[int, ProfileRecord]:
    """The last profile of each row, by its command's last word."""
    known = {json.dumps(one): [at] for at, one in enumerate(ROWS)}
    return journal.latest_profiles(JOURNAL, lambda record: known.get(record.command[-1], ()))


def stacks_profiles() -> dict[int, ProfileRecord]:
    """The last profile of each row of stacks.py, by its command."""
    known = {tuple(stacks.words(one)): [at] for at, one in enumerate(stacks.ROWS)}
    return journal.latest_profiles(STACKS, lambda record: known.get(tuple(record.command), ()))


def run(python: str, row: int) -> None:
    """Profile one row."""
    _profile("H100-SXM", JOURNAL, [python, str(HERE / "grpo_train.py"), json.dumps(ROWS[row])])


def run_stack(python: str, row: dict[str, Any]) -> None:
    """Profile one row of stacks.py; verl's by Ray, which a profile ends with its command."""
    stacks.write_rows()
    # One thread: no process of the compiler's for each, which would take memory of the host.
    told = {"RAY_ADDRESS": "local", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    told["UNSLOTH_COMPILE_LOCATION"] = str(stacks.FOLDER / "unsloth")
    told["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    gpu = row.get("gpu", "H100-SXM")
    cards = f"{gpu} x{row['gpus']}" if row["gpus"] > 1 else gpu
    rows = ("--seq-len", str(row["prompt"])) if row["stack"] == "unsloth" else ()  # the others read their own
    _profile(cards, STACKS, stacks.words(row), "--whole", *rows, **told)


def _profile(gpus: str, into: Path, command: Sequence[str], *options: str, **told: str) -> None:
    words = ["--emulate", gpus, "--empty-weights", "--no-speed", *options, "--save", str(into), "--", *command]
    inside = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"} | told
    subprocess.run([sys.executable, "-m", "vramprobe", "profile", *words], env=inside)


def stacks_page() -> str:
    """stacks.md: a row for each setting and GPU, its stages, the phases of processes with a GPU of their own."""
    lines, details, apart = [], [], []
    for number, record in sorted(stacks_profiles().items()):
        row = stacks.ROWS[number]
        name = stacks.name(row)
        for rank in (one for one in record.ranks if one.rollout):
            stages = {one.name: one for one in rank.rollout}
            device = [_gib(stages[stage].device_bytes) if stage in stages else "-" for stage in STAGES]
            lines.append([name, _outcome(record), rank.rank or 0, *device])
            details += [f"\n{name}, GPU of rank {rank.rank or 0}:\n", *_stages(rank.rollout)]
        if row["stack"] == "trl-server":
            apart += _phases(record)
    return filled(
        STACKS_PAGE,
        settings=_table(("setting", "outcome", "GPU", *STAGES), lines),
        stages=details,
        apart=as_markdown(("process", "phase", "allocated", "device"), "llrr", apart),
    )


def page() -> str:
    """grpo.md: a row for each setting, then the stages of those that fit."""
    lines, against, details = [], [], []
    for number, record in sorted(profiles().items()):
        told, stages = ROWS[number], {one.name: one for one in record.ranks[0].rollout} if record.ranks else {}
        method = _method(told)
        model = told["model"].partition("/")[2].removesuffix("-Instruct")
        name = [model, str(told["completion"]), method, str(told["utilization"]), "yes" if told["sleep"] else "no"]
        device = [_gib(stages[stage].device_bytes) if stage in stages else "-" for stage in STAGES]
        lines.append([*name, _outcome(record), *device])
        setting = ", ".join(name)
        if "trainer" not in told:
            against.append([setting, _outcome(record), *_against(predicted(told), stages)])
        if record.outcome.kind == "ok":
            details += [
                f"\n{setting} (model, completion, method, utilization, sleep):\n",
                *_stages(list(stages.values())),
            ]
    return filled(
        PAGE,
        settings=_table(("model", "completion", "method", "utilization", "sleep", "outcome", *STAGES), lines),
        predicted=_table(("setting", "outcome", "predicted", *STAGES), against),
        stages=details,
    )


def _table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> list[str]:
    return as_markdown(head, "l" * len(head), lines)


def _method(told: dict[str, Any]) -> str:
    method = ("QLoRA" if "4bit" in told else "LoRA") if told["lora"] else "full"
    reference = ", reference model" if told.get("beta") or "trainer" in told else ""
    return ", ".join(filter(None, [TRAINERS.get(told.get("trainer", "")), method])) + reference


def predicted(told: dict[str, Any]) -> Grpo:
    """Return what vramprobe says of the step; records the trainer's, in a minute, where no recipe is at hand."""
    return grpo(
        gpu="H100-SXM",
        model=MODELS[told["model"]],
        method=("qlora" if "4bit" in told else "lora") if told["lora"] else "full",
        vllm_release="0.19" if "4bit" in told else "0.32",
        autocast="bf16",
        gradient_checkpointing=True,
        max_prompt_length=PROMPT_TOKENS,
        max_completion_length=told["completion"],
        beta=told.get("beta", 0.0),
        sleep=told["sleep"],
        gpu_memory_utilization=told["utilization"],
        searches=False,
    )


def _against(found: Grpo, stages: dict[str, RolloutStage]) -> list[str]:
    """Verdict, then live memory of each stage: emulated / predicted."""
    sizes = {one.name: one.total_bytes for one in found.stages}
    live = {name: _gib(one.live.total_bytes) for name, one in stages.items()}
    return [found.verdict, *(f"{live.get(name, '-')} / {_gib(sizes[name])}" for name in STAGES)]


def _outcome(record: ProfileRecord) -> str:
    match record.outcome:
        case one if one.kind == "ok":
            return "fits"
        case one if one.kind == "oom":
            return f"out of memory in {one.phase}" + (f" of step {one.step}" if one.step else "")
        case one:
            lines = [line for line in getattr(one, "last_lines", []) if "Error" in line]
            return f"vLLM refuses to start: {lines[-1].partition(': ')[2][:160]}" if lines else one.kind


def _stages(stages: list[RolloutStage]) -> list[str]:
    parts = ("weights", "engine_weights", "kv_cache", "gradients", "optimizer_state")
    head = ["stage", "device", *(part.replace("_", " ") for part in parts), "activations and others", "asleep"]
    rows = []
    for one in stages:
        sizes = [getattr(one.live, f"{part}_bytes") for part in parts]
        rest = one.live.total_bytes - sum(sizes)
        rows.append([one.name, *map(_gib, (one.device_bytes, *sizes, rest, one.asleep_bytes))])
    return as_markdown(head, "l" + "r" * (len(head) - 1), rows)


def _phases(record: ProfileRecord) -> list[list[str]]:
    """A row for each phase of processes that have a GPU of their own."""
    rows = []
    for rank in record.ranks:
        process = "server" if any(one.name == "serving" for one in rank.phases) else "trainer"
        for one in rank.phases:
            device_bytes = one.reserved_bytes + (record.context_bytes or 0)
            rows.append([process, one.name, _gib(one.allocated_bytes), _gib(device_bytes)])
    return rows


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def main() -> None:
    """Run what is missing if an interpreter is given; write the pages, or say which are stale."""
    if "--python" in sys.argv:
        for row in range(len(ROWS)):
            if row not in profiles():
                run(sys.argv[sys.argv.index("--python") + 1], row)
    for option, stack in STACK_OPTIONS:
        for number, row in enumerate(stacks.ROWS if option in sys.argv else ()):
            if row["stack"] == stack and number not in stacks_profiles():
                run_stack(sys.argv[sys.argv.index(option) + 1], row)
    write_or_check({PAGE: page(), STACKS_PAGE: stacks_page()}, "rollouts/grpo.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
