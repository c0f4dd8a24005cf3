"""Operations of a step: arithmetic against what torch counts: ``python benchmarks/speed/counted_work.py``.

Each cell trains two steps on an emulated card, by transformers, peft and bitsandbytes themselves; in the second torch's
own FlopCounterMode sees every matrix product and attention with its shape, as autograd, checkpointing and adapters
issue them. Operations, not time: an emulated card has none. Written: benchmarks/speed/counted_work.md. Not counted so,
since neither the driver nor torch says it: bytes that other kernels read and write, and launches by what they are.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vramprobe import api
from vramprobe.emulate.environment import find_environment
from vramprobe.speed.work import work_of

OUT = Path(__file__).resolve().with_suffix(".md")
CARD = "H100-SXM"
#: Two layers of a large model are as much alike as all: each layer is counted so many times.
CELLS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "method": "full", "batch_size": 2, "seq_len": 1024, "num_layers": 2},
    {"model": "llama-3.1-8b", "method": "full", "batch_size": 2, "seq_len": 1024, "num_layers": 2,
     "gradient_checkpointing": True},
    {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 2048, "num_layers": 2},
    {"model": "llama-3.1-8b", "method": "lora", "batch_size": 1, "seq_len": 2048, "num_layers": 2,
     "gradient_checkpointing": True},
    {"model": "llama-3.1-8b", "method": "qlora", "batch_size": 4, "seq_len": 512, "num_layers": 2},
    {"model": "llama-3.1-8b", "method": "qlora", "batch_size": 4, "seq_len": 512, "num_layers": 2,
     "gradient_checkpointing": True, "lora_targets": "q_v"},
    {"model": "qwen2.5-7b", "method": "lora", "batch_size": 2, "seq_len": 1024, "num_layers": 2, "lora_r": 64},
    {"model": "mistral-7b-v0.3", "method": "qlora", "batch_size": 1, "seq_len": 4096, "num_layers": 2,
     "gradient_checkpointing": True},
    {"model": "gpt2", "method": "full", "batch_size": 4, "seq_len": 512},
    {"model": "pythia-410m", "method": "full", "batch_size": 4, "seq_len": 512, "gradient_checkpointing": True},
    {"model": "gemma-2-9b", "method": "lora", "batch_size": 1, "seq_len": 1024, "num_layers": 2},
    {"model": "phi-3-mini", "method": "qlora", "batch_size": 2, "seq_len": 1024, "num_layers": 2},
]  # fmt: skip
HEAD = """# Work: counted by arithmetic, and as the real software asked for it

Operations of a micro-step with its backward, in units of 10^12: counted by `vramprobe/speed/work.py`, and by torch's
FlopCounterMode over transformers, peft and bitsandbytes on an emulated {card}, which computes nothing. Torch counts
attention's scores whole; below the diagonal, where a causal kernel computes, are half of them and half a diagonal, and
that is set beside the arithmetic's. Rebuild: `python benchmarks/speed/counted_work.py`.

What differs has a cause. Adapters without checkpointing: the first layer's frozen projections hand no gradient further
down, which is one layer of all (these cells have two). Eager attention computes the scores above the diagonal, too, and
none again in backward.

| cell | products: arithmetic | counted | differs | attention: arithmetic | counted | differs |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def inside(cells: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Under the emulated card: operations by operator, of each cell's second step."""
    import bitsandbytes  # noqa: F401 (defines its operators)
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from vramprobe.workload import training

    def packed(shape: list[int], *others: Any, out_shape: list[int], **more: Any) -> int:
        return 2 * math.prod(shape) * out_shape[-1]

    found, own = [], {torch.ops.bitsandbytes.gemm_4bit: packed}
    for words in cells:
        work = training.set_up(api.cell(device="cuda", **words), training.NOBODY)
        for step in (1, 2):
            counter = FlopCounterMode(display=False, custom_mapping=own)
            with counter:
                training._forward(work, work.batch).backward()
            work.optimizer.step()
            work.optimizer.zero_grad(set_to_none=True)
            counts = counter.get_flop_counts()["Global"] if step == 2 else {}
        found.append({str(name): int(count) for name, count in counts.items()})
        del work, counter
        torch.cuda.empty_cache()
    return found


def emulated(cells: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The same from here: a process of the emulated environment under an emulated card."""
    environment = find_environment()
    assert environment is not None, "vramprobe emulate setup"
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "cells.json", Path(folder) / "found.json"
        given.write_text(json.dumps(cells))
        env = os.environ | {
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(OUT.parents[2]),
        }
        command = [sys.executable, "-m", "vramprobe", "profile", "--emulate", CARD, "--trace", "none", "--whole", "--"]
        command += ["python", __file__, "--inside", str(given), str(found)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if not found.exists():
            sys.exit(done.stderr[-3000:])
        return json.loads(found.read_text())


def line(words: dict[str, Any], counted: dict[str, int]) -> list[str]:
    """A row of the table."""
    spec = api.cell(device="cuda", **words)
    work = work_of(spec)
    eager = spec.attn == "eager"
    attention = sum(count for name, count in counted.items() if ("bmm" if eager else "attention") in name)
    products = sum(counted.values()) - attention
    computed = attention if eager else attention * (spec.seq_len + 1) / (2 * spec.seq_len)
    ours = work.attention_flops + work.attention_backward_flops
    return [spec.cell_id, *_pair(work.product_flops, products), *_pair(ours, computed)]


def _pair(ours: float, counted: float) -> list[str]:
    differs = f"{ours / counted - 1:+.2%}" if counted else "-"
    return [f"{ours / 1e12:.4f}", f"{counted / 1e12:.4f}", differs]


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        Path(sys.argv[3]).write_text(json.dumps(inside(json.loads(Path(sys.argv[2]).read_text()))))
        return
    lines = [line(words, counted) for words, counted in zip(CELLS, emulated(CELLS), strict=True)]
    OUT.write_text(HEAD.format(card=CARD) + "".join(f"| {' | '.join(one)} |\n" for one in lines))
    print(OUT.read_text())


if __name__ == "__main__":
    main()
