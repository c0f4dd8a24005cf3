"""Shapes: which share of its peak a card reaches in a product or an attention by its shape; links by message size.

In: data/rates/kernels.json, measured kernels of nine cards (tools/kernel_tables.py). Out: shares and bytes per second,
between the measured points by interpolation of logarithms, beyond them those of the nearest. A card without a table
has that of its architecture's, by how much of its peak the best product of either reaches. Never imports numpy.
"""

import math
from functools import cache

from vramprobe.catalog import Gpu, find_gpu
from vramprobe.speed.rates import kernel_tables

_FP8_SINCE = (8, 9)  # compute capability whose tensor cores multiply in FP8
_PCIE_5_GB_S = 128  # both directions of 16 lanes
#: FlashAttention's backward over its forward, share by share: SimuMax's A100 (0.86), cuDNN's GB200 and GB300 (0.72).
_BACKWARD = {"Ampere": 0.86, "Ada Lovelace": 0.86, "Hopper": 0.72, "Blackwell": 0.72, "Blackwell Ultra": 0.72}
#: PyTorch's attention on Hopper and later is slower than what was measured there (FlashAttention-3, TensorRT-LLM).
_PYTORCH = {"Hopper": 0.75, "Blackwell": 0.75, "Blackwell Ultra": 0.75}
_NARROW_WIDTH = 64
#: Of heads of 64 where no card of its kind was measured: three others' are 0.76 to 0.85 of 128's.
_NARROW = 0.8
#: As large as layers are gathered and buckets are reduced.
LARGE_MESSAGE = float(1 << 27)


def stand_in(gpu: Gpu) -> str:
    """The card whose table is read for ``gpu``: itself where it was measured."""
    if gpu.short_name in kernel_tables().products:
        return gpu.short_name
    alike = kernel_tables().alike
    of_board = alike.get(f"{gpu.arch}, {'NVLink' if gpu.nvlink_joins else 'PCIe'}")
    return of_board or alike.get(gpu.arch) or alike["another"]


@cache
def _reached(gpu: Gpu) -> tuple[float, float]:
    """(by what the shares of a stand-in are multiplied: how much of its peak the best product reaches, of either card;
    the most that a share can be).
    """
    best, other = kernel_tables().best_tflops, find_gpu(stand_in(gpu))
    if other.short_name == gpu.short_name or gpu.short_name not in best or other.short_name not in best:
        return 1.0, 1.0
    mine, theirs = (best[one.short_name] / (one.half_dense_tflops or math.inf) for one in (gpu, other))
    return mine / theirs, mine


def product_share(gpu: Gpu, m: int, n: int, k: int) -> float:
    """Share of the 16-bit peak in a product of [m, k] by [k, n]."""
    return _product_share(gpu.short_name, m, n, k)


@cache  # by name: a Gpu's hash is that of all its fields
def _product_share(name: str, m: int, n: int, k: int) -> float:
    tables, gpu = kernel_tables(), find_gpu(name)
    table, depth, width = tables.products[stand_in(gpu)], len(tables.k), len(tables.n)
    total = 0.0
    for i, a in _between(tables.m, m):
        for j, b in _between(tables.n, n):
            for h, c in _between(tables.k, k):
                total += a * b * c * math.log(table[(i * width + j) * depth + h])
    factor, most = _reached(gpu)
    return min(math.exp(total) / 1000 * factor, most)


def times_faster(gpu: Gpu, dtype: str, m: int) -> float:
    """Return the speed of a product in ``dtype`` (``float8_e4m3fn``) relative to 16 bit; 1 for any other dtype."""
    kind = "fp8" if dtype.startswith("float8") else "nvfp4" if dtype.startswith("float4") else ""
    if not kind:
        return 1.0
    tables = kernel_tables()
    by_card = tables.faster.get(kind, {})
    card = stand_in(gpu)
    if card not in by_card or not (gpu.capability or (0, 0)) >= _FP8_SINCE:
        return 1.0
    return sum(part * by_card[card][at] for at, part in _between(tables.narrow_m, m))


def attention_share(gpu: Gpu, length: int, width: int, *, backward: bool) -> float:
    """Share of the 16-bit peak in a causal attention over ``length`` keys with heads of ``width``."""
    return _attention_share(gpu.short_name, length, width, backward)


@cache
def _attention_share(name: str, length: int, width: int, backward: bool) -> float:
    tables, gpu = kernel_tables(), find_gpu(name)
    by_width = tables.attention[stand_in(gpu)]
    narrow = width <= _NARROW_WIDTH
    shares = by_width.get("64" if narrow else "128")
    factor = 1.0
    if shares is None:
        shares, factor = by_width["128"], _NARROW
    total = sum(part * math.log(shares[at]) for at, part in _between(tables.lengths, length))
    reached, most = _reached(gpu)
    share = min(math.exp(total) / 1000 * factor * reached, most) * _PYTORCH.get(gpu.arch, 1.0)
    return share * (_BACKWARD.get(gpu.arch, _BACKWARD["Ampere"]) if backward else 1.0)


def sent_bytes_per_second(gpu: Gpu, kind: str, num_gpus: int, num_bytes: float = LARGE_MESSAGE) -> float:
    """Bytes per second that one GPU of ``num_gpus`` in a machine sends in a collective whose whole message has
    ``num_bytes``.

    A kind that was not measured (a broadcast, a send to one other) counts as an all-gather.
    """
    tables, other = kernel_tables(), _linked_alike(gpu)
    by_kind = tables.collectives[other.short_name]
    kind = {"all_to_all": "alltoall"}.get(kind, kind)
    by_number = by_kind[kind if kind in by_kind else "all_gather"]
    near = min(by_number, key=lambda number: abs(math.log(int(number) / num_gpus)))
    speeds = by_number[near]
    total = sum(part * math.log(speeds[at]) for at, part in _between(tables.sizes, num_bytes))
    sent = (2 if kind == "all_reduce" else 1) * (int(near) - 1) / int(near)
    return math.exp(total) * 1e9 * sent * gpu.link_bytes_per_second / other.link_bytes_per_second


@cache
def _linked_alike(gpu: Gpu) -> Gpu:
    """The measured card whose links are of the same kind: a switch of NVLinks, or PCIe of the generation."""
    if gpu.nvlink_joins == "all":
        return find_gpu(stand_in(gpu))
    return find_gpu(kernel_tables().alike["PCIe 4" if gpu.pcie_gb_s < _PCIE_5_GB_S else "PCIe 5"])


def _between(grid: list[int], value: float) -> list[tuple[int, float]]:
    """The points around ``value`` and their weights, by logarithms; the first or last alone beyond the ends."""
    if value <= grid[0]:
        return [(0, 1.0)]
    if value >= grid[-1]:
        return [(len(grid) - 1, 1.0)]
    at = next(i for i, point in enumerate(grid) if point >= value)
    low, high = grid[at - 1], grid[at]
    part = math.log(value / low) / math.log(high / low)
    return [(at - 1, 1.0 - part), (at, part)]
