"""Predict random cells, to show that a change of the code changes no prediction.

    python tools/predictions.py --out before.jsonl             # on the old commit
    python tools/predictions.py --out after.jsonl --against before.jsonl

Each line has the words of a cell and its Prediction, or the kind of error. Its warnings and the cell's name are text,
and the comparison leaves them out. The same seed gives the same cells.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from vramprobe import api
from vramprobe.errors import VramprobeError

GPUS = ("H100-SXM", "A100-80GB", "RTX-4090", "T4", "L40S", "V100-32GB", "B200", None)
OPTIMS = {
    "adamw_torch": 6,
    "adamw_torch_fused": 3,
    "adamw_bnb_8bit": 2,
    "paged_adamw_8bit": 1,
    "paged_adamw_32bit": 1,
    "lion_8bit": 1,
    "adafactor": 2,
    "sgd": 1,
    "adagrad": 1,
    "rmsprop": 1,
}


def one_of(chance: random.Random, weights: dict[Any, int]) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]


def random_words(chance: random.Random, models: list[str]) -> dict[str, Any]:
    """The words of one cell, most of which can run."""
    method = one_of(chance, {"full": 4, "lora": 4, "qlora": 3})
    words: dict[str, Any] = {
        "model": chance.choice(models),
        "method": method,
        "batch_size": one_of(chance, {1: 4, 2: 3, 3: 1, 4: 2, 8: 2, 16: 1}),
        "seq_len": one_of(chance, {1: 1, 64: 1, 250: 1, 512: 3, 1024: 3, 2048: 3, 4096: 2}),
        "grad_accum": one_of(chance, {1: 6, 2: 2, 8: 1}),
        "gradient_checkpointing": chance.random() < 0.5,
        "optim": one_of(chance, OPTIMS),
        "attn": one_of(chance, {"sdpa": 6, "eager": 2, "flash_attention_2": 2}),
        "padding": chance.random() < 0.15,
        "fused_linear_cross_entropy": chance.random() < 0.15,
        "device": one_of(chance, {"cuda": 9, "cpu": 1}),
    }
    recipes = {"all-bf16": 4, "mixed": 4, "fp32": 1} | ({"lora-usual": 6} if method != "full" else {})
    if chance.random() < 0.8:
        words["recipe"] = one_of(chance, recipes)
    if chance.random() < 0.3:
        words["num_layers"] = chance.randint(1, 7)
    if method != "full":
        words |= {
            "lora_r": one_of(chance, {4: 1, 8: 2, 16: 3, 64: 1}),
            "lora_dropout": one_of(chance, {0.0: 3, 0.05: 2}),
            "lora_targets": one_of(chance, {"all-linear": 2, "q_v": 1}),
            "dora": chance.random() < 0.1,
        }
    if method == "qlora":
        words["quant"] = one_of(chance, {"nf4": 4, "nf4-single": 1, "fp4": 1, "int8": 1})
        words["kbit_prep"] = one_of(chance, {"none": 2, "peft": 2, "trl": 1})
    return words


def prediction_of(words: dict[str, Any]) -> dict[str, Any]:
    try:
        return api.predict(**words).model_dump(mode="json")
    except VramprobeError as error:
        return {"error": type(error).__name__}


def lines(num_cells: int, seed: int) -> list[str]:
    """As many cells as are predicted, and those that are refused between them."""
    chance = random.Random(seed)
    models = sorted(entry.name for entry in api.models())
    found: list[str] = []
    num_predicted = 0
    while num_predicted < num_cells:
        words = random_words(chance, models)
        words |= {"gpu": chance.choice(GPUS), "engine": "formula"}
        words |= {"fit": "none"} if chance.random() < 0.2 else {}
        prediction = prediction_of(words)
        found.append(json.dumps({"words": words, "prediction": prediction}, sort_keys=True))
        num_predicted += "error" not in prediction
        if num_predicted % 500 == 0 and "error" not in prediction:
            print(f"{num_predicted} of {num_cells}", file=sys.stderr)
    return found


def figures(line: str) -> dict[str, Any]:
    """A line of a file without its prediction's warnings and the cell's name."""
    told = json.loads(line)
    for name in ("warnings", "cell_id"):
        told["prediction"].pop(name, None)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="fail where a prediction differs from this file's")
    given = parser.parse_args()
    made = lines(given.cells, given.seed)
    given.out.write_text("\n".join(made) + "\n")
    if given.against is None:
        return
    before = given.against.read_text().splitlines()
    differing = [(old, new) for old, new in zip(before, made, strict=False) if figures(old) != figures(new)]
    for old, new in differing[:5]:
        print(f"- {old}\n+ {new}\n")
    print(f"{given.cells} predictions and {len(made) - given.cells} refusals, of which {len(differing)} differ")
    sys.exit(bool(differing) or len(before) != len(made))


if __name__ == "__main__":
    main()
