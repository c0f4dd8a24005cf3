"""Try recommendations on an emulated GPU: ``python benchmarks/recommended.py`` (minutes; `emulate setup` first).

Five questions as guides put them, on one card. Of each: the cheapest that fits, the one that fits with the least room,
and what lacks least of those that do not fit, run for some steps by the real software on the emulated card, at the
setting that was recommended (of several micro-batches per step two, which take as much as many). Memory alone: an
emulated card has no times. Written: benchmarks/recommended.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramprobe.api import recommend
from vramprobe.cli.options import CELL_OPTIONS
from vramprobe.recommend.answer import Option, Recommendation
from vramprobe.units import format_bytes

OUT = Path(__file__).resolve().with_suffix(".md")
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("QLoRA of an 8B on a consumer card", {"model": "llama-3-8b", "method": "qlora", "seq_len": 2048}),
    ("LoRA of an 8B", {"model": "llama-3-8b", "method": "lora", "seq_len": 2048}),
    ("full fine-tuning of a 7B with fp32 weights", {"model": "llama-2-7b", "method": "full", "recipe": "mixed",
                                                    "seq_len": 2048}),
    ("LoRA of a 14B", {"model": "qwen2.5-14b", "method": "lora", "seq_len": 2048}),
    ("QLoRA of a 70B on one card", {"model": "llama-3-70b", "method": "qlora", "seq_len": 4096}),
]  # fmt: skip
HEAD = """# Recommendations, run on an emulated GPU

Whether a recommended setting fits: predicted, and run by torch, transformers, peft and bitsandbytes themselves on an
emulated card, not measured; of several micro-batches per step two, which take as much as many. Rebuild:
`python benchmarks/recommended.py`.

## Five questions

| question | card | batch | predicted allocated | up to | of | verdict | emulated allocated | reserved | ended |
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


def main() -> None:
    lines = []
    for question, words in QUESTIONS:
        found = recommend(tokens="50M", max_gpus=1, **words)
        assert isinstance(found, Recommendation)
        for one in tried(found):
            record, judged = emulated(words, one), one.setting.verdict
            peak, setting = record["peak"] or {}, one.setting
            batch = f"{setting.batch_size} × {setting.grad_accum}{' ckpt' if setting.gradient_checkpointing else ''}"
            sizes = (judged.needed_bytes.value, judged.needed_bytes.high, judged.usable_bytes)
            seen = (peak.get("allocated_bytes"), peak.get("reserved_bytes"))
            outcome = record["outcome"]
            ended = f"{outcome['kind']} in {outcome['phase']}" if outcome.get("phase") else outcome["kind"]
            lines.append([question, one.gpu, batch, *map(format_bytes, sizes), judged.verdict,
                          *map(format_bytes, seen), ended])  # fmt: skip
            print(*lines[-1], sep=" | ", flush=True)
    OUT.write_text(HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
