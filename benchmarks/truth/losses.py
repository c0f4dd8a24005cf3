"""Losses and trainers by arithmetic against emulated runs: ``python benchmarks/truth/losses.py`` (rebuilds losses.csv
and its .md).

Each cell runs on an emulated GPU by TRL's or Cut Cross-Entropy's own code (``vramprobe run --emulate``, records under
``out/losses``), and is predicted. It runs those that the csv lacks (10 s each). ``--check`` predicts all anew and
compares. What TRL's whole trainer takes was read from ``vramprobe profile``: COMMANDS. Emulated, not measured on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check
from vramprobe import api
from vramprobe.records import store
from vramprobe.spec import resolve
from vramprobe.trainers import TRAINERS as ROWS

TABLE = Path(__file__).with_suffix(".csv")
OUT = Path(__file__).parents[2] / "out" / "losses"
CARD = "RTX-4090"
Words = dict[str, Any]
CKPT, TWO = {"gradient_checkpointing": True}, {"num_layers": 2}


def cell(model: str, method: str, batch_size: int, seq_len: int, **more: Any) -> Words:
    """A cell's words."""
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    what = {} if "trainer" in more or "loss" in more else {"loss": "chunked_nll"}
    return {"model": model, "method": method, **sizes, "timing_steps": 0} | what | more


LOSSES = [
    cell("llama-3.2-1b", "full", 2, 512, **TWO),
    cell("llama-3.2-1b", "full", 2, 512, recipe="mixed", **TWO),
    cell("llama-3.2-1b", "lora", 2, 512, **TWO),
    cell("llama-3.2-1b", "lora", 3, 2048, **CKPT),
    cell("qwen2.5-0.5b", "full", 4, 1024, **CKPT),
    cell("qwen2.5-0.5b", "full", 8, 1024, recipe="mixed", grad_accum=2, num_layers=4),
    cell("qwen2.5-1.5b", "qlora", 2, 4096, **CKPT),
    cell("gemma-2-2b", "lora", 2, 1024, **TWO, **CKPT),
    cell("smollm2-135m", "full", 2, 512, recipe="fp32", num_layers=4),
    cell("llama-3.1-8b", "qlora", 1, 4096, kbit_prep="trl", num_layers=4, **CKPT),
    cell("pythia-160m", "lora", 2, 1024),
    cell("smollm2-360m", "lora", 1, 512, lora_dropout=0.05),
    cell("qwen3-0.6b", "full", 1, 2048, optim="adamw_bnb_8bit", **TWO),
    cell("llama-3.2-1b", "full", 2, 1024, autocast="bf16", **CKPT),
]
CUT = {"loss": "cut_cross_entropy"}
LOSSES_WITHOUT_LOGITS = [
    cell("llama-3.2-1b", "full", 2, 512, **CUT, **TWO),
    cell("llama-3.2-1b", "lora", 2, 512, **CUT, **TWO),
    cell("llama-3.2-1b", "lora", 3, 2048, **CUT, **CKPT),
    cell("llama-3.2-1b", "full", 2, 1024, autocast="bf16", **CUT, **CKPT),
    cell("qwen2.5-0.5b", "full", 4, 1024, **CUT, **CKPT),
    cell("qwen2.5-0.5b", "full", 8, 1024, grad_accum=2, num_layers=4, **CUT),
    cell("qwen2.5-1.5b", "qlora", 2, 4096, kbit_prep="none", **CUT, **CKPT),
    cell("gemma-2-2b", "lora", 2, 1024, **CUT, **TWO, **CKPT),
    cell("llama-3.1-8b", "qlora", 1, 4096, kbit_prep="trl", num_layers=4, **CUT, **CKPT),
    cell("qwen3-0.6b", "full", 1, 2048, optim="adamw_bnb_8bit", **CUT, **TWO),
]
TRAINERS = {
    "dpo": [
        cell("llama-3.2-1b", "full", 1, 512, trainer="dpo", **TWO),
        cell("llama-3.2-1b", "full", 2, 512, trainer="dpo", recipe="mixed", **TWO),
        cell("llama-3.2-1b", "lora", 1, 512, trainer="dpo", **TWO),
        cell("llama-3.2-1b", "lora", 2, 1024, trainer="dpo", **CKPT),
        cell("qwen2.5-0.5b", "full", 2, 1024, trainer="dpo", **CKPT),
        cell("qwen2.5-0.5b", "full", 4, 1024, trainer="dpo", recipe="mixed", grad_accum=2, num_layers=4),
        cell("qwen2.5-1.5b", "qlora", 1, 2048, trainer="dpo", **CKPT),
        cell("gemma-2-2b", "lora", 1, 1024, trainer="dpo", **TWO, **CKPT),
        cell("smollm2-135m", "full", 1, 512, trainer="dpo", recipe="fp32", num_layers=4),
        cell("llama-3.1-8b", "qlora", 1, 4096, trainer="dpo", kbit_prep="trl", num_layers=4, **CKPT),
        cell("pythia-160m", "lora", 1, 1024, trainer="dpo"),
        cell("smollm2-360m", "lora", 1, 512, trainer="dpo"),
        cell("qwen3-0.6b", "full", 1, 2048, trainer="dpo", optim="adamw_bnb_8bit", **TWO),
        cell("llama-3.2-1b", "full", 2, 1024, trainer="dpo", autocast="bf16", **CKPT),
    ],
    "kto": [
        cell("llama-3.2-1b", "full", 2, 512, trainer="kto", **TWO),
        cell("llama-3.2-1b", "lora", 2, 512, trainer="kto", **TWO),
        cell("llama-3.2-1b", "lora", 4, 1024, trainer="kto", **CKPT),
        cell("qwen2.5-0.5b", "full", 4, 1024, trainer="kto", recipe="mixed", grad_accum=2, num_layers=4),
        cell("qwen2.5-1.5b", "qlora", 2, 2048, trainer="kto", **CKPT),
        cell("smollm2-360m", "lora", 2, 512, trainer="kto"),
    ],
    "orpo": [
        cell("llama-3.2-1b", "full", 1, 512, trainer="orpo", recipe="mixed", **TWO),
        cell("llama-3.2-1b", "lora", 2, 512, trainer="orpo", **TWO),
        cell("llama-3.2-1b", "lora", 1, 1024, trainer="orpo", **CKPT),
        cell("qwen2.5-0.5b", "full", 2, 512, trainer="orpo", autocast="bf16", grad_accum=2, num_layers=4),
        cell("qwen2.5-0.5b", "full", 2, 1024, trainer="orpo", num_layers=4, **CKPT),
        cell("qwen2.5-1.5b", "qlora", 1, 1024, trainer="orpo", **CKPT),
        cell("smollm2-135m", "full", 1, 512, trainer="orpo", recipe="fp32", num_layers=4),
    ],
    "reward": [
        cell("llama-3.2-1b", "full", 2, 512, trainer="reward", **TWO),
        cell("llama-3.2-1b", "full", 2, 512, trainer="reward", recipe="mixed", **TWO),
        cell("llama-3.2-1b", "lora", 1, 1024, trainer="reward", **CKPT),
        cell("llama-3.2-1b", "full", 2, 1024, trainer="reward", autocast="bf16", **CKPT),
        cell("qwen2.5-0.5b", "full", 4, 1024, trainer="reward", recipe="mixed", grad_accum=2, num_layers=4),
        cell("qwen2.5-1.5b", "qlora", 1, 2048, trainer="reward", **CKPT),
        cell("llama-3.1-8b", "qlora", 1, 4096, trainer="reward", kbit_prep="trl", num_layers=4, **CKPT),
        cell("gemma-2-2b", "lora", 1, 1024, trainer="reward", **TWO, **CKPT),
        cell("pythia-160m", "lora", 2, 1024, trainer="reward"),
        cell("smollm2-135m", "full", 1, 512, trainer="reward", recipe="fp32", num_layers=4),
    ],
}
CELLS = LOSSES + LOSSES_WITHOUT_LOGITS + [words for cells in TRAINERS.values() for words in cells]
_LIKE_PEFT = {"lora_targets": "q_v", **CKPT}
#: (TRL's command, GiB allocated in its profile, the cell that has its options).
COMMANDS: list[tuple[str, float, Words]] = [
    ("trl sft --use_peft", 2.73, cell("llama-3.2-1b", "lora", 2, 1024, lora_dropout=0.05, **_LIKE_PEFT)),
    ("trl sft", 9.72, LOSSES[-1]),
    ("trl dpo --use_peft", 3.11, cell("llama-3.2-1b", "lora", 2, 1024, trainer="dpo", **_LIKE_PEFT)),
    ("trl dpo", 12.07, TRAINERS["dpo"][-1]),
    ("trl kto --use_peft", 2.72, cell("llama-3.2-1b", "lora", 2, 1024, trainer="kto", **_LIKE_PEFT)),
    ("trl kto", 12.03, cell("llama-3.2-1b", "full", 2, 1024, trainer="kto", autocast="bf16", **CKPT)),
]
OPTIONS = (
    "--dtype bfloat16 --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name DATA --per_device_train_batch_size 2 "
    "--max_length 1024"
)


def run() -> list[Words]:
    """The rows of all cells; those that the table lacks run."""
    rows = {row["fingerprint"]: row for row in read_csv(TABLE)}
    specs = [resolve(device="cuda", **words) for words in CELLS]
    missing = [words for spec, words in zip(specs, CELLS, strict=True) if spec.fingerprint not in rows]
    if missing:
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "losses.yaml").write_text(yaml.safe_dump({"name": "losses", "cells": missing}))
        command = ["run", str(OUT / "losses.yaml"), "--emulate", CARD, "--out", str(OUT), "--no-skip"]
        subprocess.run([sys.executable, "-m", "vramprobe", *command], check=True)
        for record in store.read(OUT).records:
            peak = record.peak
            assert record.outcome.kind == "ok", record.outcome
            assert peak is not None
            rows[record.fingerprint] = {
                "fingerprint": record.fingerprint,
                "gpu": CARD,
                "cell": record.cell_id,
                "phase": peak.phase,
                "emulated_allocated_bytes": peak.allocated_bytes,
                "emulated_reserved_bytes": peak.reserved_bytes,
            }
    return [rows[spec.fingerprint] for spec in specs]


def predicted(words: Words) -> tuple[int, int]:
    """Bytes (allocated, reserved) by arithmetic, with the fit that ships."""
    found = api.predict(gpu=CARD, **words)
    assert found.reserved_bytes is not None
    return found.peak_allocated_bytes.value, found.reserved_bytes.value


def compared(cells: list[Words], rows: dict[str, Words], other: Words) -> tuple[list[list[str]], float]:
    """(a line for each of these cells, the largest error in %); the last column: the same cell with ``other`` words."""
    lines, worst = [], 0.0
    for words in cells:
        row = rows[resolve(device="cuda", **words).fingerprint]
        emulated = int(row["emulated_allocated_bytes"]), int(row["emulated_reserved_bytes"])
        counted = predicted(words)
        errors = [100 * (mine / theirs - 1) for mine, theirs in zip(counted, emulated, strict=True)]
        worst = max(worst, abs(errors[0]))
        numbers = [f"{size / 2**30:.3f}" for size in (emulated[0], counted[0])]
        otherwise = f"{predicted(words | other)[0] / 2**30:.3f}"
        lines.append([row["cell"], *numbers, *(f"{error:+.3f}" for error in errors), otherwise])
    return lines, worst


def page(rows: list[Words]) -> str:
    """The page of these rows."""
    by_cell = {row["fingerprint"]: row for row in rows}
    head = ["cell", "emulated GiB", "arithmetic GiB", "error, %", "error of reserved, %"]
    lines, worst = compared(LOSSES, by_cell, {"loss": "nll"})
    text = [
        "# Losses and trainers by arithmetic",
        "",
        f"{len(lines)} cells with `--loss chunked_nll`, run by TRL 1.16's own code on an emulated {CARD} and",
        f"predicted. Allocated memory differs by at most {worst:.3f} %. Neither was measured on a GPU.",
        "",
        *as_markdown([*head, "with loss nll, GiB"], "lrrrrr", lines),
        "",
        "The last column is the same cell with all logits, by arithmetic.",
        "",
    ]
    lines, worst = compared(LOSSES_WITHOUT_LOGITS, by_cell, {"loss": "nll"})
    text += [
        "## `--loss cut_cross_entropy`",
        "",
        f"{len(lines)} cells, run by Axolotl's build of `cut-cross-entropy`. Allocated memory differs by at most",
        f"{worst:.3f} %. The last column is the same cell with all logits, by arithmetic.",
        "",
        *as_markdown([*head, "with loss nll, GiB"], "lrrrrr", lines),
        "",
    ]
    for name, cells in TRAINERS.items():
        lines, worst = compared(cells, by_cell, {"trainer": "sft", "loss": "chunked_nll"})
        text += [
            f"## `--trainer {name}`",
            "",
            f"{len(lines)} cells, whose loss `trl.{ROWS[name].trl}` computes. Allocated memory differs by at most",
            f"{worst:.3f} %. The last column is TRL's supervised training with the same options, by arithmetic.",
            "",
            *as_markdown([*head, "with sft, GiB"], "lrrrrr", lines),
            "",
        ]
    whole = []
    for command, allocated, words in COMMANDS:
        counted = predicted(words)[0] / 2**30
        whole.append([f"`{command}`", f"{allocated:.2f}", f"{counted:.2f}", f"{100 * (counted / allocated - 1):+.2f}"])
    return "\n".join(
        [
            *text,
            "## TRL's whole trainers",
            "",
            f"`vramprobe profile --emulate {CARD} --empty-weights --steps-only -- COMMAND {OPTIONS}`,",
            "beside the cell that has these options. DATA is `trl-lib/Capybara` for `sft`,",
            "`trl-lib/ultrafeedback_binarized` for `dpo` and `trl-lib/kto-mix-14k` for `kto`. A profile prints two",
            "decimals, so that its error is known to 0.2 %.",
            "",
            *as_markdown(["command", "emulated GiB", "arithmetic GiB", "error, %"], "lrrr", whole),
            "",
        ]
    )


def main() -> None:
    """Run what is missing, and write or compare."""
    check = "--check" in sys.argv
    rows = read_csv(TABLE) if check else run()
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "truth/losses.py", check=check)


if __name__ == "__main__":
    main()
