"""How fast recommending is: ``python benchmarks/speed/recommend_speed.py`` prints a table beside the limits.

``vramprobe recommend`` as a process, one method and all three, the inverse questions; and a pipeline: 200 recipes
(method, checkpointing, sharding, micro-batch, accumulation, length of llama-3.1-8b) on 1 to 128 of each card of the
catalog that names its memory, each with predict's verdict and the estimate of its speed, nothing kept from before.
Wall and CPU seconds: on a busy machine look at the second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vramprobe.catalog import list_gpus
from vramprobe.recommend.options import COUNTS
from vramprobe.recommend.recipes import Kitchen, Recipe
from vramprobe.speed.rates import shipped_speed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.predict_speed import as_process
from benchmarks.speed.speed import RECOMMEND

NUM_RECIPES = 200
MODEL, LENGTHS, METHODS = "llama-3.1-8b", (1024, 2048, 4096, 8192), ("full", "lora", "qlora")
BATCHES = ((1, 1), (1, 16), (2, 8), (4, 4), (8, 2))  # (micro-batch, accumulation)
ONE_METHOD = f"{RECOMMEND} --method qlora"
INVERSE = (
    f"recommend --model {MODEL} --method lora --seq-len 2048 --budget 40",
    f"recommend --model {MODEL} --method qlora --tokens 10M --budget 10 --longest",
    "recommend --largest-model --method qlora --seq-len 2048 --tokens 10M --budget 10",
)


def pipeline() -> tuple[int, int, int]:
    """(cards, recipes, verdicts with speeds); on one card there is nothing to shard, so that recipes differ less."""
    cards = [gpu for gpu in list_gpus() if gpu.total_bytes is not None]
    made, num_recipes = 0, 0
    for method in METHODS:
        for length in LENGTHS:
            words = {"model": MODEL, "method": method, "seq_len": length}
            kitchen = Kitchen(words, global_batch=16, sharding=None, fit=shipped_speed())
            recipes = [
                Recipe(*batch, checkpointing, sharding)
                for sharding in ("ddp", "fsdp")
                for checkpointing in (False, True)
                for batch in BATCHES
            ]
            recipes = recipes[: NUM_RECIPES - num_recipes]
            num_recipes += len(recipes)
            for count in COUNTS:
                for recipe in recipes:
                    here = recipe if count > 1 else recipe._replace(sharding=None)
                    for gpu in cards:
                        setting = kitchen.setting(here, gpu, count)
                        made += setting is not None and setting.estimate.tokens_per_second.value > 0
    return len(cards), num_recipes, made


def main() -> None:
    table = Table("what", "wall s", "CPU s", "limit s")
    began, spent = time.perf_counter(), time.process_time()
    cards, recipes, made = pipeline()
    whole = time.perf_counter() - began, time.process_time() - spent
    rows = [(f"vramprobe {command}", as_process(command), 1.0) for command in (ONE_METHOD, RECOMMEND)]
    rows += [(f"vramprobe {command}", as_process(command), None) for command in INVERSE]
    rows += [(f"{cards} cards × {len(COUNTS)} counts × {recipes} recipes: {made:,} verdicts and speeds", whole, 5.0)]
    for what, (wall, cpu), limit in rows:
        table.add_row(what, f"{wall:.2f}", f"{cpu:.2f}", "" if limit is None else f"{limit:g}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
