"""Rebuild data/rates/kernels.json from measured kernel times: ``python tools/kernel_tables.py FOLDER`` (seconds).

FOLDER holds gemm_bf16.parquet, gemm_fp8_nvfp4.parquet, attention_forward_bf16.parquet and nccl.csv, of
ai-dynamo/aiconfigurator at 095f58a (Apache-2.0), aic-core/…/systems/data, as tables of one row per measurement. Out: by
card, which share of its peak a matrix product reaches by shape, how much faster it is in FP8 and NVFP4, attention
forward by length, and the bytes per second of each collective by size.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramprobe.catalog import find_gpu

OUT = Path(__file__).parents[1] / "vramprobe" / "data" / "rates" / "kernels.json"
SOURCE = "ai-dynamo/aiconfigurator 095f58a, aic-core/…/systems/data (Apache-2.0): fastest of vLLM, SGLang, TensorRT-LLM"
#: Theirs → ours.
CARDS = {
    "a100_sxm": "A100-80GB-SXM",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}
#: The card with a table that stands in for others of its architecture, or whose links are alike.
ALIKE = {
    "Turing": "A100-80GB-SXM",
    "Volta": "A100-80GB-SXM",
    "Ampere": "A100-80GB-SXM",
    "Ada Lovelace": "L40S",
    "Hopper": "H100-SXM",
    "Blackwell": "B200",
    "Blackwell, PCIe": "RTX-PRO-6000-Server",
    "Blackwell Ultra": "B300",
    "another": "H100-SXM",
    "PCIe 4": "L40S",
    "PCIe 5": "RTX-PRO-6000-Server",
}
M = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
N = K = [256, 512, 1024, 2048, 4096, 8192, 16384, 65536]
NARROW_M = [256, 1024, 4096, 16384]
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]
SIZES = [1 << power for power in (10, 15, 20, 23, 26, 29)]
#: A grid point is the median of what was measured within this factor of it in each dimension.
_NEAR = 2**0.51
#: An attention with less work is decided by its launch.
_LEAST_FLOPS = 5e10
#: nccl.csv's message_size counts elements: a half message takes as long as an int8 one of twice as many.
_ELEMENT_BYTES = {"int8": 1, "half": 2}
#: TFLOP/s in 16 bit of the best of many shapes: what a card without a table reaches beside one that has.
BEST = {
    "A100-80GB-SXM": 271,
    "A100-40GB-SXM": 271,
    "A100-80GB-PCIe": 253,
    "A100-40GB-PCIe": 253,
    "H100-SXM": 795,
    "GH200": 829,
    "B200": 1745,
    "GB200": 1822,
    "H100-PCIe": 500,
    "H100-NVL": 489,
    "L40S": 252,
    "L40": 170,
    "L4": 91,
    "A10G": 70,
    "RTX-3090": 78,
    "RTX-4090": 179,
    "RTX-6000-Ada": 279,
    "RTX-A6000": 131,
    "V100-16GB-SXM": 95,
    "V100-32GB-SXM": 95,
}
BEST_SOURCE = "stas00/ml-engineering 744d01e, mag-/gpu_benchmark 93322b7: best matmul of a search"


def main(folder: Path) -> None:
    in_16_bit = pd.read_parquet(folder / "gemm_bf16.parquet")
    told = {
        "source": SOURCE,
        "alike": ALIKE,
        "m": M,
        "n": N,
        "k": K,
        "products": products(in_16_bit),
        "narrow_m": NARROW_M,
        "faster": faster(in_16_bit, pd.read_parquet(folder / "gemm_fp8_nvfp4.parquet")),
        "lengths": LENGTHS,
        "attention": attention(pd.read_parquet(folder / "attention_forward_bf16.parquet")),
        "sizes": SIZES,
        "collectives": collectives(pd.read_csv(folder / "nccl.csv")),
        "best_source": BEST_SOURCE,
        "best_tflops": BEST,
    }
    OUT.write_text(json.dumps(told, separators=(",", ":")).replace('],"', '],\n"') + "\n")


def products(rows: pd.DataFrame) -> dict[str, list[int]]:
    """Per mille of the peak, by m, then n, then k."""
    rows = rows.assign(ms=rows[["sglang_ms", "trtllm_ms", "vllm_ms"]].min(axis=1))
    found = {}
    for name, card in CARDS.items():
        one = rows[rows.card == name]
        share = (2e-9 * one.m * one.n * one.k / one.ms / peak(card)).to_numpy()
        near = [
            [np.abs(np.log2(one[dim] / at)) < np.log2(_NEAR) for at in grid]
            for dim, grid in zip("mnk", (M, N, K), strict=True)
        ]
        values = [_median(share[a & b & c]) for a in near[0] for b in near[1] for c in near[2]]
        found[card] = [
            round(1000 * value) for value in _without_holes(np.array(values).reshape(len(M), len(N), len(K)))
        ]
    return found


def faster(wide: pd.DataFrame, narrow: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """By dtype and card: how many times as fast as in 16 bit, by m, the median of n and k from 1,024 on."""
    wide = wide.assign(ms=wide[["sglang_ms", "trtllm_ms", "vllm_ms"]].min(axis=1))
    both = narrow.merge(wide, on=["card", "m", "n", "k"])
    both = both[(both.n >= N[2]) & (both.k >= K[2])].assign(times=lambda rows: rows.ms / rows.best_ms)
    found: dict[str, dict[str, list[float]]] = {}
    for (dtype, name), one in both.groupby(["gemm_dtype", "card"]):
        by_m = [float(f"{one[one.m == m].times.median():.3g}") for m in NARROW_M]
        found.setdefault(dtype, {})[CARDS[name]] = by_m
    return found


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _without_holes(grid: np.ndarray) -> list[float]:
    """Fill what was not measured with the mean of its neighbors by one n and by one k less."""
    for at in np.argwhere(np.isnan(grid)):
        a, b, c = at
        grid[a, b, c] = np.nanmean([grid[a, b - 1, c], grid[a, b, c - 1]])
    return [float(value) for value in grid.ravel()]


def attention(rows: pd.DataFrame) -> dict[str, dict[str, list[int]]]:
    """Per mille of the peak of a causal forward, by length, of heads 64 and 128 wide where both are known."""
    rows = rows[rows.num_heads * rows.head_dim >= 2048]
    flops = 4.0 * rows.batch_size * rows.num_heads * rows.head_dim * rows.isl * (rows.isl + 1) / 2
    rows = rows.assign(flops=flops)[flops > 0]
    found: dict[str, dict[str, list[int]]] = {}
    for name, card in CARDS.items():
        for width in (64, 128):
            one = rows[(rows.card == name) & (rows.head_dim == width)]
            if one.empty:
                continue
            one = one.assign(share=1e-9 * one.flops / one.ms / peak(card))
            best = (
                one.groupby(["batch_size", "isl", "num_heads", "num_key_value_heads"])
                .agg(share=("share", "max"), flops=("flops", "first"))
                .reset_index()
            )
            by_length = []
            for length in LENGTHS:
                there = best[
                    (best.isl == length) & (best.flops > min(_LEAST_FLOPS, best[best.isl == length].flops.max() / 2))
                ]
                by_length.append(round(1000 * float(there.share.median())))
            found.setdefault(card, {})[str(width)] = by_length
    return found


def collectives(rows: pd.DataFrame) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By card, kind and number of GPUs: GB/s of the whole message, by its size."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, card in CARDS.items():
        for (kind, number), one in rows[rows.card == name].groupby(["op_name", "num_gpus"]):
            num_bytes = one.message_size * one.nccl_dtype.map(_ELEMENT_BYTES)
            best = one.groupby(num_bytes).latency.median()
            speeds = [float(f"{size / best[size] / 1e6:.3g}") for size in SIZES]
            found.setdefault(card, {}).setdefault(kind, {})[str(number)] = speeds
    return found


def peak(card: str) -> Any:
    return find_gpu(card).half_dense_tflops


if __name__ == "__main__":
    main(Path(sys.argv[1]))
