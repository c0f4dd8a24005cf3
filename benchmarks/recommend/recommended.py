"""Run what is recommended on an emulated GPU: ``python benchmarks/recommend/recommended.py`` (minutes).

Five questions as guides put them. On one card, of each: the cheapest that fits, the one that fits with the least room,
and what lacks least of those that do not fit, run for some steps by the real software on the emulated card, at the
setting that was recommended (of several micro-batches per step two, which take as much as many). On several cards: the
cheapest of several that fits, as rank 0 of its world, by recommended_rank.py under torchrun and accelerate. Memory
alone: an emulated card has no times. Written: benchmarks/recommend/recommended.md; ``--several`` runs the second table
alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramprobe.api import recommend
from vramprobe.cli.options import CELL_OPTIONS
from vramprobe.emulate.environment import find_environment
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.options import Option
from vramprobe.units import format_bytes

OUT = Path(__file__).resolve().with_suffix(".md")
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("QLoRA of an 8B on a consumer card", {"model": "llama-3-8b", "method": "qlora", "seq_len": 2048}),
    ("LoRA of an 8B", {"model": "llama-3-8b", "method": "lora", "seq_len": 2048}),
    (
        "full fine-tuning of a 7B with fp32 weights",
        {"model": "llama-2-7b", "method": "full", "recipe": "mixed", "seq_len": 2048},
    ),
    ("LoRA of a 14B", {"model": "qwen2.5-14b", "method": "lora", "seq_len": 2048}),
    ("QLoRA of a 70B on one card", {"model": "llama-3-70b", "method": "qlora", "seq_len": 4096}),
]
#: Of each question what is asked of several cards: the hub's id, and what recommended_rank.py is told of precision.
SEVERAL = [
    ("QLoRA of an 8B on a consumer card", "meta-llama/Meta-Llama-3-8B", []),
    ("LoRA of an 8B", "meta-llama/Meta-Llama-3-8B", []),
    ("full fine-tuning of a 7B with fp32 weights", "meta-llama/Llama-2-7b-hf", ["--dtype", "float32"]),
    ("LoRA of a 14B", "Qwen/Qwen2.5-14B", []),
]
RANK = Path(__file__).resolve().with_name("recommended_rank.py")
HEAD = """# Recommendations, run on an emulated GPU

Whether a recommended setting fits: predicted, and run by torch, transformers, peft and bitsandbytes themselves on an
emulated card, not measured; of several micro-batches per step two, which take as much as many. *Of*: what was usable
beside the 1 GiB that a verdict set aside then, in place of the card's own context. Rebuild:
`python benchmarks/recommend/recommended.py`.

## Five questions

| question | card | batch | predicted allocated | up to | of | verdict | emulated allocated | reserved | ended |
| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |
"""
SEVERAL_HEAD = """
## On several cards

The cheapest of several cards that fits, as rank 0 of its world on an emulated card: torchrun, accelerate (FSDP2 or
DDP), transformers and peft themselves, the other ranks not there (docs/one_rank.md). The peak of a step is held against
the prediction; to load, this script puts the whole model on the card first.

| question | cards | batch | predicted allocated | up to | of | verdict | emulated allocated | reserved | ended |
| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |
"""


def tried(found: Recommendation) -> Iterator[Option]:
    """The cheapest that fits, the one that fits with the least room, and what lacks least of the rest; each once."""
    fitting = [one for one in found.options if one.fits]
    others = [one for one in found.options if one.hours is None]
    seen = set()
    for one in (*fitting[:1], *sorted(fitting, key=_share)[-1:], *sorted(others, key=_share)[:1]):
        if one.gpu not in seen:
            seen.add(one.gpu)
            yield one


def _share(one: Option) -> float:
    return one.setting.verdict.needed_bytes.value / one.setting.verdict.usable_bytes


def emulated(words: dict[str, Any], one: Option) -> dict[str, Any]:
    """The record of the option's cell on its card."""
    setting = one.setting.words()
    setting["grad_accum"] = min(2, setting.get("grad_accum", 1))
    command = [sys.executable, "-m", "vramprobe", "measure", "--emulate", one.gpu, "--timing-steps", "0", "--json"]
    for name, value in {**words, **setting, "method": one.method}.items():
        assert name in CELL_OPTIONS
        flag = f"--{name.replace('_', '-')}"
        command += [flag] * value if isinstance(value, bool) else [flag, str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def of_several(words: dict[str, Any]) -> Option:
    """The cheapest that fits of several cards whose sharding accelerate has."""
    found = recommend(tokens="50M", max_gpus=8, replays=False, **words)
    assert isinstance(found, Recommendation)
    return next(
        one for one in found.options if one.fits and one.num_gpus > 1 and one.setting.sharding in ("fsdp", "ddp")
    )


def emulated_rank(one: Option, model: str, words: dict[str, Any], precision: list[str]) -> dict[str, Any]:
    """The profile of rank 0 of the option's world, by torchrun of the emulated environment."""
    environment = find_environment()
    assert environment is not None, "vramprobe emulate setup"
    setting = one.setting
    command = [
        sys.executable, "-m", "vramprobe", "profile", "--emulate", f"{one.gpu} x{one.num_gpus}", "--empty-weights",
        "--steps-only", "--only-rank", "0", "--world-size", str(one.num_gpus), "--json", "--",
        "torchrun", "--nproc-per-node", str(one.num_gpus), str(RANK), "--model", model, "--method", one.method,
        "--sharding", str(setting.sharding), "--batch-size", str(setting.batch_size), "--seq-len",
        str(words["seq_len"]), "--grad-accum", str(min(2, setting.grad_accum)), *precision,
        *(["--gradient-checkpointing"] if setting.gradient_checkpointing else []),
    ]  # fmt: skip
    env = os.environ | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if not done.stdout:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def several() -> str:
    """The second table. A step's peak: loading, which puts the whole model on the card first, is apart."""
    lines = []
    for question, model, precision in SEVERAL:
        words = dict(QUESTIONS)[question]
        one = of_several(words)
        profile, judged, setting = emulated_rank(one, model, words, precision), one.setting.verdict, one.setting
        phases = profile["ranks"][0]["phases"]
        peak = {
            tier: max((phase[tier] for phase in phases if phase["name"] != "load"), default=None)
            for tier in ("allocated_bytes", "reserved_bytes")
        }
        batch = f"{setting.batch_size} × {setting.grad_accum}{' ckpt' if setting.gradient_checkpointing else ''}"
        sizes = (judged.needed_bytes.value, judged.needed_bytes.high, judged.usable_bytes)
        ended = profile["outcome"]["kind"]
        lines.append(
            [
                question,
                f"{one.num_gpus} × {one.gpu}",
                f"{batch} {setting.sharding}",
                *map(format_bytes, sizes),
                judged.verdict,
                *map(format_bytes, peak.values()),
                ended,
            ]
        )
        print(*lines[-1], sep=" | ", flush=True)
    return SEVERAL_HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    if "--several" in sys.argv:
        OUT.write_text(OUT.read_text().partition("\n## On several cards")[0] + several())
        return
    lines = []
    for question, words in QUESTIONS:
        found = recommend(tokens="50M", max_gpus=1, replays=False, **words)
        assert isinstance(found, Recommendation)
        for one in tried(found):
            record, judged = emulated(words, one), one.setting.verdict
            peak, setting = record["peak"] or {}, one.setting
            batch = f"{setting.batch_size} × {setting.grad_accum}{' ckpt' if setting.gradient_checkpointing else ''}"
            sizes = (judged.needed_bytes.value, judged.needed_bytes.high, judged.usable_bytes)
            seen = (peak.get("allocated_bytes"), peak.get("reserved_bytes"))
            outcome = record["outcome"]
            ended = f"{outcome['kind']} in {outcome['phase']}" if outcome.get("phase") else outcome["kind"]
            lines.append(
                [question, one.gpu, batch, *map(format_bytes, sizes), judged.verdict, *map(format_bytes, seen), ended]
            )
            print(*lines[-1], sep=" | ", flush=True)
    OUT.write_text(HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + several())


if __name__ == "__main__":
    main()
