"""Several ranks: predicted beside measured: ``python benchmarks/speed/ranks.py`` (seconds).

In: vtrain.csv, iterations of GPT on two to eight A100s of one machine under data parallelism that vTrain's authors
measured (VIA-Research/vTrain at f8dda84, MIT; heads 16, length 1,024), to which no rate is fitted; and
speed_model.csv, whose errors are of fits that have not seen the source. Out: ranks.md. ``--check`` writes nothing and
fails where the page is not what they give.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.speed_model import percent, table
from benchmarks.tables import read_csv, write_or_check
from vramprobe.catalog import find_gpu
from vramprobe.spec import CellSpec, checked, with_defaults
from vramprobe.speed.rates import shipped_speed
from vramprobe.speed.step import parts_of
from vramprobe.speed.work import work_of

OUT = Path(__file__).resolve().with_suffix(".md")
GPU = find_gpu("A100-80GB-SXM")
Row = dict[str, Any]  # a row of vtrain.csv, with the error as a share of the seconds


def cell(row: Row, attention: str) -> CellSpec:
    """As its configurations say: checkpointing, GPT-2's vocabulary in a multiple of 128; 16 bit with fp32 weights."""
    hidden, layers, batch, ranks = (int(row[name]) for name in ("hidden", "layers", "micro_batch", "num_gpus"))
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": 16,
        "n_inner": 4 * hidden,
        "vocab_size": 50_304,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    }
    words = {"method": "full", "device": "cuda", "dtype": "fp32", "autocast": "bf16", "attn": attention}
    given = {"model": "gpt", "architecture": config, "batch_size": batch, "seq_len": 1024}
    given |= {"grad_accum": int(row["global_batch"]) // ranks // batch, "gradient_checkpointing": True}
    return checked(CellSpec, given | with_defaults(words, "gpt2"))


def error_of(row: Row, attention: str) -> float:
    """Predicted over measured seconds, less one, by the rates that ship."""
    spec = cell(row, attention)
    parts = parts_of(work_of(spec, is_reentrant=True), GPU, int(row["num_gpus"]), "ddp", shipped_speed().rates)
    return 1000 * parts.step_seconds(spec.grad_accum) / float(row["milliseconds"]) - 1


def line(name: str, errors: Sequence[float]) -> list[str]:
    """Number, median, 90 % below, and the median with its sign."""
    sizes = sorted(map(abs, errors))
    most = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    signed = f"{100 * statistics.median(errors):+.1f} %"
    return [name, str(len(sizes)), percent(statistics.median(sizes)), percent(most), signed]


def measured() -> str:
    """vTrain's iterations, by what decides how long the kernels are."""
    rows = read_csv(OUT.with_name("vtrain.csv"))
    errors = {attention: [error_of(row, attention) for row in rows] for attention in ("sdpa", "eager")}
    groups: dict[str, list[float]] = {"all": errors["sdpa"], "all, were the scores in memory": errors["eager"]}
    for row, error in zip(rows, errors["sdpa"], strict=True):
        groups.setdefault(f"hidden {row['hidden']}, {int(row['micro_batch']) * 1024:,} tokens", []).append(error)
    return table(_HEAD, [line(name, found) for name, found in sorted(groups.items())])


def by(rows: Sequence[dict[str, str]], name: Callable[[dict[str, str]], str]) -> str:
    """Errors of seconds of speed_model.csv's rows, by a group's name."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(1 / (1 + float(row["error_source_left_out"])) - 1)
    return table(_HEAD, [line(group, found) for group, found in sorted(groups.items())])


def page() -> str:
    """Both tables as Markdown."""
    several = [row for row in read_csv(OUT.with_name("speed_model.csv")) if int(row["num_gpus"]) > 1]
    near = [row for row in several if int(row["num_gpus"]) <= 8]
    return HEAD + "\n".join(
        [
            measured(),
            PUBLISHED,
            by(near, lambda row: f"{row['sharding']}, {row['method']}"),
            "Of more than eight GPUs:\n",
            by([row for row in several if row not in near], lambda row: row["sharding"]),
        ]
    )


_HEAD = ["steps", "number", "median", "90 % below", "median with its sign"]
HEAD = """# Several ranks: predicted beside measured

Errors are |predicted / measured − 1| of the seconds of a step; plus is predicted too slow. Rebuild:
`python benchmarks/speed/ranks.py`.

## Iterations that vTrain's authors measured

GPT of 12 to 24 layers and 16 heads on two to eight A100s of one machine, data parallel, predicted by the rates that
ship, to which none of these steps was fitted. Tensor and pipeline parallel steps have no time here. The source does not
say how its attention was computed: FlashAttention is assumed, and one line shows the scores in memory.

Steps of hidden size 2,048 are 3 to 10 % off, by length. Those of 1,024, with heads of 64 and short
kernels, are predicted 20 to 38 % too fast, the shorter the more: what the host takes for a launch is
fitted to other hosts, and kernels this small are slower than their bytes and operations say.

"""
PUBLISHED = """## Published steps of several GPUs of one machine

Each source by a fit without it.
"""


def main() -> None:
    write_or_check({OUT: page()}, "speed/ranks.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
