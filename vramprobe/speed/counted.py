"""Counted: what one step of a command launched -> its seconds on a card, by class of operator and by line: predicted.

In: a Count (profile/hook/count wrote it on an emulated card), a Gpu. Out: CountedTime. A roofline as step.py's, with
the same rates. These were fitted to arithmetic's own work, not to counted work, so the interval is the speed model's,
wider by :data:`WIDER`, and by the launches that nobody claimed. Never imports torch or numpy.

How far a prototype of this count was off with the shipped rates: on 22 published rows of one A100 (fms-acceleration,
revision 876e2ed6), tokens per second were -9.6 to +4.4 % off, 6.5 % in the median. On other sources and cards, for
steps that the host or collectives decide, and for several ranks nothing has been shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError
from vramprobe.speed.rates import GPUS_PER_MACHINE, SHORT_TOKENS, Condition, SpeedFit, generation_of, shipped_speed

#: Logarithm of 1.14: counted seconds were 0.99 to 1.14 of arithmetic's, to which rates and intervals were fitted, over
#: the 20 rows that have both.
WIDER = math.log(1.14)
#: Share of a PCIe link's data-sheet rate that a copy from pageable memory reaches: assumed, no row of ours has it.
_COPY_SHARE = 0.4
#: Products in fp32 without TF32 run on the CUDA cores: their peak over the tensor cores' 16-bit one, in TFLOP/s of
#: NVIDIA's data sheets, of one data-centre card of each compute capability, and of the GeForce cards of Ada.
_FP32_SHARE = {"7.5": 8.1 / 65, "8.0": 19.5 / 312, "8.6": 31.2 / 125, "8.9": 91.6 / 362, "9.0": 67 / 989}
_FP32_SHARE_GEFORCE = 82.6 / 165.2
_FP32_SHARE_ELSEWHERE = 1 / 16
_NUM_LINES = 10
Line = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Calls of one operator with the same shapes from one line, summed up. Bytes and FLOPs are of all calls."""

    phase: str  # forward, recompute, backward, optimizer
    what: str  # product, attention, other, host_to_device, device_to_host
    name: str  # aten::mm
    shapes: str = ""
    dtype: str = ""
    calls: int = 1
    flops: int = 0
    read: int = 0
    written: int = 0
    launches: int = 0
    width: int = 0
    line: Line | None = None


@dataclass(frozen=True, kw_only=True)
class Count:
    """One step of one process. ``num_launches``: by the driver, without cuBLAS's; ``link_bytes`` by kind of collective:
    (bytes that this rank sends, ranks)."""

    step: int
    num_launches: int
    num_claimed: int
    rows: tuple[Row, ...]
    unclaimed: tuple[tuple[str, int], ...] = ()
    link_bytes: tuple[tuple[str, int, int], ...] = ()

    @property
    def unclaimed_share(self) -> float:
        """Of the driver's launches."""
        return max(0, self.num_launches - self.num_claimed) / self.num_launches if self.num_launches else 0.0


@dataclass(frozen=True, kw_only=True)
class CountedTime:
    """``by_class``: seconds, which overlap; ``by_line``: seconds of kernels, the longest first."""

    seconds: float
    low_seconds: float
    high_seconds: float
    condition: Condition
    tokens: int | None
    samples: int | None
    mfu: float
    hfu: float
    by_class: dict[str, float]
    by_line: list[tuple[Line, float]] = field(default_factory=list)
    num_kernels: int


def class_of(row: Row) -> str:
    """products, attention, optimizer, dequantize, memory-bound, copies or collectives."""
    if row.what in ("host_to_device", "device_to_host"):
        return "copies"
    if row.what in ("product", "attention"):
        return {"product": "products", "attention": "attention"}[row.what]
    if "c10d" in row.name.partition("::")[0]:
        return "collectives"  # the driver counts their bytes
    if row.phase == "optimizer":
        return "optimizer"
    if "dequant" in row.name:
        return "dequantize"
    return "memory-bound"


def time_of(count: Count, gpu: Gpu, *, fit: SpeedFit | None = None) -> CountedTime:
    """The step's time on ``gpu``. Raises SpecError for a card whose peak is not known."""
    fit = fit or shipped_speed()
    seconds_of = _Roofline(gpu, fit)
    by_class: dict[str, float] = dict.fromkeys(("products", "attention", "memory-bound", "dequantize"), 0.0)
    by_class |= dict.fromkeys(("optimizer", "copies", "collectives"), 0.0)
    by_line: dict[Line, float] = {}
    for row in count.rows:
        seconds = seconds_of.row(row)
        by_class[class_of(row)] += seconds
        if row.line is not None:
            by_line[row.line] = by_line.get(row.line, 0.0) + seconds
    num_kernels = sum(row.launches for row in count.rows) + max(0, count.num_launches - count.num_claimed)
    by_class["launches"] = num_kernels * fit.rates.kernel_seconds
    by_class["collectives"] = sum(seconds_of.collective(size, ranks) for _, size, ranks in count.link_bytes)
    by_class["rest"] = fit.rates.step_seconds
    seconds = _together(by_class)
    tokens, samples, shortest = _tokens(count.rows)
    condition = _condition(gpu, count, by_class, shortest, fit)
    factor = math.exp(fit.half_widths[condition] + WIDER)
    peak = seconds_of.peak * seconds
    model_flops = sum(row.flops for row in count.rows if row.phase != "recompute")
    return CountedTime(
        seconds=seconds,
        low_seconds=seconds / factor,
        high_seconds=seconds * factor / max(1 - count.unclaimed_share, 0.01),
        condition=condition,
        tokens=tokens,
        samples=samples,
        mfu=model_flops / peak,
        hfu=sum(row.flops for row in count.rows) / peak,
        by_class={name: value for name, value in by_class.items() if value},
        by_line=sorted(by_line.items(), key=lambda pair: -pair[1])[:_NUM_LINES],
        num_kernels=num_kernels,
    )


def row_seconds(count: Count, gpu: Gpu, *, fit: SpeedFit | None = None) -> list[float]:
    """What each row's calls take on the card together, collectives 0. Raises SpecError as :func:`time_of`."""
    seconds_of = _Roofline(gpu, fit or shipped_speed())
    return [seconds_of.row(row) for row in count.rows]


def _together(by_class: dict[str, float]) -> float:
    """Kernels or the host's launches, collectives half beside them, then what nothing hides (as step.py's Parts)."""
    gpu = sum(by_class[name] for name in ("products", "attention", "memory-bound", "dequantize"))
    busy = (gpu**4 + by_class["launches"] ** 4) ** 0.25
    return math.hypot(busy, by_class["collectives"]) + sum(by_class[name] for name in ("optimizer", "copies", "rest"))


class _Roofline:
    """Seconds of rows on one card."""

    def __init__(self, gpu: Gpu, fit: SpeedFit) -> None:
        if gpu.half_dense_tflops is None:
            raise SpecError(f"the peak rate of {gpu.name} is not known, so a step's time cannot be predicted")
        rates, generation = fit.rates, generation_of(gpu)
        self.peak = gpu.half_dense_tflops * 1e12
        self._product = self.peak * rates.product * rates.generations.get(generation, 1.0)
        self._attention = self.peak * rates.attention * rates.attention_of.get(generation, 1.0)
        known = _FP32_SHARE.get(gpu.compute_capability, _FP32_SHARE_ELSEWHERE)
        self._fp32_share = _FP32_SHARE_GEFORCE if generation == "GeForce" else known
        self._stream = gpu.bandwidth_gb_s * 1e9 * rates.stream
        self._packed = gpu.bandwidth_gb_s * 1e9 * rates.dequantise
        self._copy = gpu.pcie_gb_s / 2 * 1e9 * _COPY_SHARE
        self._link = gpu.link_bytes_per_second * rates.link

    def row(self, row: Row) -> float:
        """Seconds of all its calls; a collective's are counted by its bytes."""
        moved, what = row.read + row.written, class_of(row)
        if what == "copies":
            return row.read / self._copy
        if what == "collectives":
            return 0.0
        if what in ("products", "attention"):
            rate = self._product if what == "products" else self._attention
            rate *= self._fp32_share if row.dtype in ("float32", "float64") else 1.0
            return math.hypot(row.flops / rate, moved / self._stream)
        return moved / (self._packed if what == "dequantize" else self._stream)

    def collective(self, link_bytes: int, num_ranks: int) -> float:
        """Seconds of what a rank sends. Raises SpecError beyond one machine, whose network is not known."""
        if num_ranks > GPUS_PER_MACHINE:
            raise SpecError(
                f"{num_ranks} ranks share a collective: the time of a step is predicted for up to {GPUS_PER_MACHINE}, "
                "which share a machine"
            )
        return link_bytes / self._link


def _tokens(rows: Iterable[Row]) -> tuple[int | None, int | None, int | None]:
    """(tokens, samples, tokens of one micro-step) by what the largest embedding of the forward looks up."""
    found: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
    for row in rows:
        if row.phase == "forward" and row.name == "aten::embedding":
            table, indices = _shapes(row.shapes.partition(" -> ")[0])[:2]
            found.setdefault(table, []).append((row.calls, indices))
    if not found:
        return None, None, None
    lookups = found[max(found)]  # by the number of its rows
    sizes = [math.prod(indices) for _, indices in lookups]
    tokens = sum(calls * size for (calls, _), size in zip(lookups, sizes, strict=True))
    samples = sum(calls * indices[0] for calls, indices in lookups) if all(len(i) > 1 for _, i in lookups) else None
    return tokens, samples, max(sizes)


def _shapes(said: str) -> list[tuple[int, ...]]:
    parts = [part.partition("[")[2] for part in said.split("]") if "[" in part]
    return [tuple(int(size) for size in part.split(",") if size.strip()) for part in parts]


def _condition(
    gpu: Gpu, count: Count, by_class: dict[str, float], micro_tokens: int | None, fit: SpeedFit
) -> Condition:
    """What the interval goes by: the first that holds. A step whose launches take longer than its kernels is short."""
    if gpu.short_name not in fit.cards:
        return "card never seen"
    kernels = sum(by_class[name] for name in ("products", "attention", "memory-bound", "dequantize", "optimizer"))
    is_short = by_class["launches"] > kernels or (micro_tokens is not None and micro_tokens < SHORT_TOKENS)
    return "short steps" if is_short else "usual"
