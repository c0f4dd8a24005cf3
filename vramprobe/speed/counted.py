"""Counted: what one step of a command launched -> its seconds on a card, by class of operator and by line: predicted.

In: a Count (emulate/values/count wrote it on an emulated card), a Gpu. Out: CountedTime. Each product and attention
takes its share of the card's peak by its shape (shapes.py), all else its bytes; the host launches while the card
computes, and each phase ends when both have. The levels were fitted to counted published steps, of which each source
was left out in turn: benchmarks/speed/counted_steps.md says how far off that was. Never imports torch or numpy.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest

from vramprobe.catalog import Gpu, fp32_tflops
from vramprobe.errors import SpecError
from vramprobe.speed.rates import GPUS_PER_MACHINE, SHORT_TOKENS, Condition, SpeedFit, shipped_counted
from vramprobe.speed.shapes import LARGE_MESSAGE, attention_share, product_share, sent_bytes_per_second, times_faster

#: Share of a PCIe link's data-sheet rate that a copy from pageable memory reaches, and one on a stream of its own, from
#: pinned memory: assumed, no row of ours has them.
_COPY_SHARE, _COPY_BESIDE_SHARE = 0.4, 0.8
#: Where a card's clock is not known, fp32 products run at this share of the 16-bit ones.
_FP32_SHARE_ELSEWHERE = 1 / 16
#: TF32's peak by the 16-bit one: NVIDIA's data sheets of all cards with it, A100 156 of 312 TFLOPS, H100 495 of 989.
_TF32_SHARE = 1 / 2
_NUM_LINES = 10
#: Phases in the order of a step; a checkpoint repeats its forward within backward.
PHASES = (("forward",), ("recompute", "backward"), ("optimizer",))
KERNELS = ("products", "attention", "memory-bound", "dequantize", "optimizer")
Line = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True)
class CountRow:
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
    is_beside: bool = False  # a copy on a stream of its own, which runs while the card computes
    line: Line | None = None

    @cached_property
    def kind(self) -> str:
        """products, attention, optimizer, dequantize, memory-bound, copies or collectives."""
        if self.what in ("host_to_device", "device_to_host"):
            return "copies"
        if self.what in ("product", "attention"):
            return {"product": "products", "attention": "attention"}[self.what]
        if "c10d" in self.name.partition("::")[0]:
            return "collectives"  # the driver counts their bytes
        if self.phase == "optimizer":
            return "optimizer"
        if "dequant" in self.name:
            return "dequantize"
        return "memory-bound"

    @cached_property
    def phase_number(self) -> int:
        """Its place in :data:`PHASES`; the first's for a phase that is none of them."""
        return next((at for at, names in enumerate(PHASES) if self.phase in names), 0)

    @cached_property
    def product_shape(self) -> tuple[int, int, int]:
        """(m, n, k) of one product: its result's rows, of a batch all together, and columns, and by its FLOPs what it
        sums over; without shapes those of a cube of as many FLOPs.
        """
        shapes, flops = _shapes(self.shapes.partition(" -> ")[2]), max(self.flops // max(self.calls, 1), 1)
        if not shapes or len(shapes[0]) < 2:
            side = max(1, round((flops / 2) ** (1 / 3)))
            return side, side, side
        *rows, n = shapes[0]
        return math.prod(rows), n, max(1, flops // (2 * math.prod(shapes[0])))

    @cached_property
    def attention_shape(self) -> tuple[int, int]:
        """(keys, width of a head) of one attention; queries, keys, values come first, after a backward's gradient."""
        shapes = [one for one in _shapes(self.shapes.partition(" -> ")[0]) if len(one) in (3, 4)]
        at = 2 if "backward" in self.name else 1
        if len(shapes) <= at:
            return SHORT_TOKENS, self.width or 128
        key = shapes[at]
        if len(key) == 4:
            return key[2] if "scaled_dot_product" in self.name else key[1], key[3]
        return key[0], key[2]


@dataclass(frozen=True, kw_only=True)
class Count:
    """One step of one process. ``num_launches``: by the driver, without cuBLAS's; ``link_bytes`` by kind of collective:
    (bytes that this rank sends, ranks); ``message_bytes``: of each of these the mean payload of a call;
    ``num_sharing``: how many ranks the same tokens go through, as under tensor and pipeline parallelism."""

    step: int
    num_launches: int
    num_claimed: int
    rows: tuple[CountRow, ...]
    unclaimed: tuple[tuple[str, int], ...] = ()
    link_bytes: tuple[tuple[str, int, int], ...] = ()
    message_bytes: tuple[float, ...] = ()
    num_sharing: int = 1

    @cached_property
    def flops(self) -> tuple[int, int]:
        """(the model's operations, those with what a checkpoint repeats)."""
        return sum(row.flops for row in self.rows if row.phase != "recompute"), sum(row.flops for row in self.rows)

    @cached_property
    def launches(self) -> int:
        """Number of launches, of all rows."""
        return sum(row.launches for row in self.rows)

    @cached_property
    def looked_up(self) -> tuple[int | None, int | None, int | None]:
        """(tokens, samples, tokens of one micro-step) by what the largest embedding of the forward looks up."""
        found: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
        for row in self.rows:
            if row.phase == "forward" and row.name == "aten::embedding":
                table, indices = _shapes(row.shapes.partition(" -> ")[0])[:2]
                found.setdefault(table, []).append((row.calls, indices))
        if not found:
            return None, None, None
        lookups = found[max(found)]  # by the number of its rows
        sizes = [math.prod(indices) for _, indices in lookups]
        tokens = sum(calls * size for (calls, _), size in zip(lookups, sizes, strict=True))
        all_rows = all(len(indices) > 1 for _, indices in lookups)
        return tokens, sum(calls * indices[0] for calls, indices in lookups) if all_rows else None, max(sizes)

    @property
    def unclaimed_share(self) -> float:
        """Share of the driver's launches that no operator claimed."""
        return max(0, self.num_launches - self.num_claimed) / self.num_launches if self.num_launches else 0.0


@dataclass(frozen=True, kw_only=True)
class CountedTime:
    """``by_class``: seconds, which overlap; ``by_line``: seconds of kernels, the longest first."""

    seconds: float
    low_seconds: float
    high_seconds: float
    condition: Condition
    tokens: int | None  # of one GPU: its share of those that several work on
    samples: int | None
    mfu: float
    hfu: float
    by_class: dict[str, float]
    by_line: list[tuple[Line, float]] = field(default_factory=list)
    num_kernels: int


def time_of(count: Count, gpu: Gpu, *, fit: SpeedFit | None = None) -> CountedTime:
    """The step's time on ``gpu``. Raises SpecError for a card whose peak is not known."""
    fit = fit or shipped_counted()
    seconds_of = Roofline(gpu, fit)
    by_class: dict[str, float] = dict.fromkeys(("products", "attention", "memory-bound", "dequantize"), 0.0)
    by_class |= dict.fromkeys(("optimizer", "copies", "collectives"), 0.0)
    by_line: dict[Line, float] = {}
    phases = [[0.0, 0.0] for _ in PHASES]  # seconds of the host, of the card
    copied_beside = 0.0
    for row in count.rows:
        seconds, kind = seconds_of.row(row), row.kind
        by_class[kind] += seconds
        copied_beside += seconds if row.is_beside else 0.0
        if row.line is not None:
            by_line[row.line] = by_line.get(row.line, 0.0) + seconds
        phase = phases[row.phase_number]
        phase[0] += row.launches * fit.rates.kernel_seconds
        phase[1] += seconds if kind in KERNELS else 0.0
    num_unclaimed = max(0, count.num_launches - count.num_claimed)
    phases[0][0] += num_unclaimed * fit.rates.kernel_seconds
    num_kernels = count.launches + num_unclaimed
    by_class["launches"] = num_kernels * fit.rates.kernel_seconds
    by_class["collectives"] = sum(
        seconds_of.collective(*one, message)
        for one, message in zip_longest(count.link_bytes, count.message_bytes, fillvalue=LARGE_MESSAGE)
    )
    by_class["rest"] = fit.rates.step_seconds
    seconds = math.hypot(replayed(phases), by_class["collectives"], copied_beside)
    seconds += by_class["copies"] - copied_beside + by_class["rest"]
    tokens, samples, shortest = count.looked_up
    tokens, samples = (one and round(one / count.num_sharing) for one in (tokens, samples))
    condition = _condition(gpu, count, by_class, shortest, fit)
    factor = math.exp(fit.half_widths[condition])
    peak = seconds_of.peak * seconds
    model_flops, all_flops = count.flops
    return CountedTime(
        seconds=seconds,
        low_seconds=seconds / factor,
        high_seconds=seconds * factor / max(1 - count.unclaimed_share, 0.01),
        condition=condition,
        tokens=tokens,
        samples=samples,
        mfu=model_flops / peak,
        hfu=all_flops / peak,
        by_class={name: value for name, value in by_class.items() if value},
        by_line=sorted(by_line.items(), key=lambda pair: -pair[1])[:_NUM_LINES],
        num_kernels=num_kernels,
    )


def row_seconds(count: Count, gpu: Gpu) -> list[float]:
    """Seconds of each row's calls on the card together, collectives 0. Raises SpecError as :func:`time_of`."""
    seconds_of = Roofline(gpu, shipped_counted())
    return [seconds_of.row(row) for row in count.rows]


def replayed(phases: Iterable[Sequence[float]]) -> float:
    """Two clocks, phase by phase: the host issues a phase's launches and does not wait for the card; the card computes
    them in order, none before it was issued. -> seconds until both are done.
    """
    host = card = 0.0
    for issuing, computing in phases:
        started = max(card, host)  # the phase's first kernel
        host += issuing
        card = max(started + computing, host)
    return card


class Roofline:
    """Seconds of rows on one card."""

    def __init__(self, gpu: Gpu, fit: SpeedFit) -> None:
        if gpu.half_dense_tflops is None:
            raise SpecError(f"the peak rate of {gpu.name} is not known, so a step's time cannot be predicted")
        rates = fit.rates
        self.gpu, self.peak = gpu, gpu.half_dense_tflops * 1e12
        self._product = self.peak * rates.product
        self._attention = self.peak * rates.attention
        plain = fp32_tflops(gpu)
        fp32_share = plain / gpu.half_dense_tflops if plain else _FP32_SHARE_ELSEWHERE
        self._share_of = {"float32": fp32_share, "float64": fp32_share, "tf32": max(_TF32_SHARE, fp32_share)}
        self._stream = gpu.bandwidth_gb_s * 1e9 * rates.stream
        self._packed = gpu.bandwidth_gb_s * 1e9 * rates.dequantise
        self._link = gpu.pcie_gb_s / 2 * 1e9
        self._link_share = rates.link

    def row(self, row: CountRow) -> float:
        """Seconds of all its calls; a collective's are counted by its bytes."""
        return max(self.parts(row))

    def parts(self, row: CountRow) -> tuple[float, float]:
        """(seconds of its FLOPs, seconds of its bytes), of which the longer counts."""
        moved, what = row.read + row.written, row.kind
        if what == "copies":
            return 0.0, row.read / (self._link * (_COPY_BESIDE_SHARE if row.is_beside else _COPY_SHARE))
        if what == "collectives":
            return 0.0, 0.0
        if what in ("products", "attention"):
            rate = self._product_rate(row) if what == "products" else self._attention_rate(row)
            rate *= self._share_of.get(row.dtype, 1.0)
            return row.flops / rate, moved / self._stream
        return 0.0, moved / (self._packed if what == "dequantize" else self._stream)

    def _product_rate(self, row: CountRow) -> float:
        """FLOPs per second by the product's shape; the measured share holds its bytes, too."""
        m, n, k = row.product_shape
        return self._product * product_share(self.gpu, m, n, k) * times_faster(self.gpu, row.dtype, m)

    def _attention_rate(self, row: CountRow) -> float:
        length, width = row.attention_shape
        return self._attention * attention_share(self.gpu, length, width, backward="backward" in row.name)

    def collective(self, kind: str, link_bytes: int, num_ranks: int, message_bytes: float = LARGE_MESSAGE) -> float:
        """Seconds of what a rank sends. Raises SpecError beyond one machine, whose network is not known."""
        if num_ranks > GPUS_PER_MACHINE:
            raise SpecError(
                f"{num_ranks} ranks share a collective: the time of a step is predicted for up to {GPUS_PER_MACHINE}, "
                "which share a machine"
            )
        return link_bytes / (sent_bytes_per_second(self.gpu, kind, num_ranks, message_bytes) * self._link_share)


@cache
def _shapes(said: str) -> list[tuple[int, ...]]:
    parts = [part.partition("[")[2] for part in said.split("]") if "[" in part]
    return [tuple(int(size) for size in part.split(",") if size.strip()) for part in parts]


def _condition(
    gpu: Gpu, count: Count, by_class: dict[str, float], micro_tokens: int | None, fit: SpeedFit
) -> Condition:
    """Return the condition of the interval: the first that holds. A step is short if its launches take longer than its
    kernels.
    """
    if gpu.short_name not in fit.cards:
        return "card never seen"
    kernels = sum(by_class[name] for name in KERNELS)
    is_short = by_class["launches"] > kernels or (micro_tokens is not None and micro_tokens < SHORT_TOKENS)
    return "short steps" if is_short else "usual"
