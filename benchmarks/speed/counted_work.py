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
#: More of them: model, method, whether checkpointed, each one sequence of 1,024 tokens and two layers.
MORE = """
llama-3.2-1b full ckpt, tinyllama-1.1b lora, llama-3.2-3b qlora ckpt, mistral-nemo-12b lora ckpt, qwen2.5-0.5b full,
qwen2.5-1.5b lora ckpt, qwen3-0.6b full, qwen3-8b qlora ckpt, qwen3-4b lora, gemma-2b full, gemma-7b lora ckpt,
gemma-2-2b full ckpt, gemma-3-1b full, phi-3-mini full ckpt, phi-4-mini lora, phi-4 qlora ckpt, smollm2-135m full,
hunyuan-1.8b lora ckpt, pythia-70m full, pythia-1.4b lora, gpt2-medium lora ckpt, opt-125m full, opt-1.3b lora ckpt,
falcon-7b lora, bloomz-560m full, olmo-2-1b full ckpt, qwen3-30b-a3b lora, granite-3.3-2b qlora
"""
IMAGES = {"batch_size": 1, "seq_len": 512, "images": 1, "image_size": "640x480"}
CELLS += [
    {
        "model": model,
        "method": method,
        "batch_size": 1,
        "seq_len": 1024,
        "num_layers": 2,
        "gradient_checkpointing": ckpt,
    }
    for one in MORE.split(",")
    for model, method, ckpt in [(*one.split()[:2], one.split()[-1] == "ckpt")]
]
CELLS += [
    {"model": "qwen2.5-vl-3b", "method": "lora", "num_layers": 2, "gradient_checkpointing": True} | IMAGES,
    {"model": "qwen3-vl-4b", "method": "full", "num_layers": 3} | IMAGES,
]
HEAD = """# Work: counted by arithmetic, and as the real software asked for it

Operations of a micro-step with its backward, in units of 10^12: counted by `vramprobe/speed/work.py`, and by torch's
FlopCounterMode over transformers, peft and bitsandbytes on an emulated {card}, which computes nothing. Torch counts
attention's scores whole; below the diagonal, where a causal kernel computes, are half of them and half a diagonal, and
that is set beside the arithmetic's. Eager attention (batched products) is among the products; that of a vision tower,
windows and all, is the same in arithmetic and in the count of `vramprobe profile`, to the last operation. Rebuild:
`python benchmarks/speed/counted_work.py`.

{differs}

| cell | products: arithmetic | counted | differs | attention: arithmetic | counted | differs |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


#: Differences above 3 %.
DIFFERS = """Two cells differ by more than 3 %. Gemma 3 has windows of 512, shorter than these sequences: torch's
counter takes all scores, arithmetic those within windows. Falcon's attention is batched products, which are counted
among the products: sdpa has no fused kernel for its one head of keys as it is given here;
arithmetic has FlashAttention."""


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
    """A row of the table; eager attention is products, and a tower's scores are whole."""
    spec = api.cell(device="cuda", **words)
    work = work_of(spec)
    attention = sum(count for name, count in counted.items() if "attention" in name)
    products = _pair(work.product_flops, sum(counted.values()) - attention)
    if spec.images or spec.attn == "eager":
        return [spec.cell_id, *products, "", "", ""]
    computed = attention * (spec.seq_len + 1) / (2 * spec.seq_len)
    return [spec.cell_id, *products, *_pair(work.attention_flops + work.attention_backward_flops, computed)]


def _pair(ours: float, counted: float) -> list[str]:
    differs = f"{ours / counted - 1:+.2%}" if counted else "-"
    return [f"{ours / 1e12:.4f}", f"{counted / 1e12:.4f}", differs]


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        Path(sys.argv[3]).write_text(json.dumps(inside(json.loads(Path(sys.argv[2]).read_text()))))
        return
    lines = [line(words, counted) for words, counted in zip(CELLS, emulated(CELLS), strict=True)]
    OUT.write_text(HEAD.format(card=CARD, differs=DIFFERS) + "".join(f"| {' | '.join(one)} |\n" for one in lines))
    print(OUT.read_text())


if __name__ == "__main__":
    main()
