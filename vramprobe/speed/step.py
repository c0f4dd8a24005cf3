"""Step: work and a card -> seconds of an optimizer step, by part, and tokens per second with an interval.

In: Work, a Gpu, how many share the step and how. Out: an Estimate. Products and attention run at what kernels of their
shape reach, or wait for their bytes; the other kernels wait for bytes; the host launches them all; collectives run
beside, as fast as measured ones. Never imports numpy.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.speed.figure import Figure
from vramprobe.speed.rates import (
    GPUS_PER_MACHINE,
    SHORT_TOKENS,
    Condition,
    Rates,
    SpeedFit,
    shipped_speed,
)
from vramprobe.speed.shapes import attention_share, product_share, sent_bytes_per_second
from vramprobe.speed.work import Work, work_of

#: One GPU's share of its machine's network, bytes per second in one direction: 8 × 200 Gbit/s beside A100s, 8 × 400
#: beside later data-centre cards (NVIDIA DGX and HGX), 100 Gbit/s for the machine where there is no switch of NVLinks.
_NETWORK = {"Ampere": 25e9, "Hopper": 50e9, "Blackwell": 50e9, "Blackwell Ultra": 100e9}
_SLOW_NETWORK = 100e9 / 8 / GPUS_PER_MACHINE
Kernel = Literal["bitsandbytes", "gptq"]


class Estimate(BaseModel):
    """Speed of a step: predicted, not measured. ``parts`` are seconds of an optimizer step, which overlap."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float  # of an optimizer step: all its micro-steps on all GPUs
    tokens_per_second: Figure  # of all GPUs together
    mfu: float  # model operations, attention's too, without recomputation, over the peak
    parts: dict[str, float]  # as estimated, also where records of the card say that it is faster
    condition: Condition


class Parts(NamedTuple):
    """Seconds, by what takes them: of a micro-step but for the last three."""

    products: float
    attention: float
    stream: float
    dequantise: float
    launches: float
    collectives: float
    optimizer: float
    reduction: float
    rest: float

    def micro_seconds(self) -> float:
        """A micro-step: the GPU's kernels or the host's launches, and collectives half beside them."""
        gpu = self.products + self.attention + self.stream + self.dequantise
        busy = (gpu**4 + self.launches**4) ** 0.25
        return math.hypot(busy, self.collectives)

    def step_seconds(self, grad_accum: int) -> float:
        """An optimizer step; half of the reduction runs beside the last backward."""
        return grad_accum * self.micro_seconds() + self.optimizer + self.reduction / 2 + self.rest


class Ideal(NamedTuple):
    """Seconds at full rates, of a micro-step but for the last two: what any rates make of it needs no shape again."""

    products: tuple[tuple[float, float], ...]  # of operations, of bytes
    attention: tuple[float, float]
    stream: float
    dequantise: float
    num_kernels: float
    collectives: tuple[float, float]  # within machines, and on the network between them
    optimizer: float
    reduction: tuple[float, float]

    def at(self, rates: Rates, kernel: Kernel) -> Parts:
        """By these rates."""
        operations, num_bytes = self.attention
        product, stream = rates.product, rates.stream
        return Parts(
            products=sum(max(one[0] / product, one[1] / stream) for one in self.products),
            attention=max(operations / rates.attention, num_bytes / rates.stream),
            stream=self.stream / rates.stream,
            dequantise=self.dequantise / ((rates.dequantise_gptq if kernel == "gptq" else None) or rates.dequantise),
            launches=self.num_kernels * rates.kernel_seconds,
            collectives=_slower(self.collectives, rates),
            optimizer=self.optimizer / rates.stream,
            reduction=_slower(self.reduction, rates),
            rest=rates.step_seconds,
        )


def _slower(sent: tuple[float, float], rates: Rates) -> float:
    """Within machines and between them at once."""
    return max(sent[0] / rates.link, sent[1] / (rates.network or 1.0))


def ideal_of(work: Work, gpu: Gpu, num_gpus: int, sharding: Sharding) -> Ideal:
    """The step at full rates. Raises SpecError for a card whose peak is not known."""
    if gpu.half_dense_tflops is None:
        raise SpecError(f"the peak rate of {gpu.name} is not known, so its speed cannot be estimated")
    peak, bandwidth = gpu.half_dense_tflops * 1e12, gpu.bandwidth_gb_s * 1e9
    forward = attention_share(gpu, work.length, work.head_size, backward=False)
    backward = attention_share(gpu, work.length, work.head_size, backward=True)
    attention = work.attention_flops / forward + work.attention_backward_flops / backward
    rules = rules_of(sharding)
    gathers = num_gpus > 1 and rules.num_gathers > 0
    sent = [("all_gather", work.gathered_bytes * rules.num_gathers), ("reduce_scatter", work.gradient_bytes)]
    return Ideal(
        products=tuple(
            (
                one.count * one.flops / (peak * product_share(gpu, one.m, one.n, one.k)),
                one.count * one.num_bytes / bandwidth,
            )
            for one in work.products
        ),
        attention=(attention / peak, work.attention_bytes / bandwidth),
        stream=(work.stream_bytes + work.cast_bytes) / bandwidth,
        dequantise=work.dequantised_bytes / bandwidth,
        num_kernels=work.num_kernels,
        collectives=_sent_seconds(sent if gathers else [], gpu, num_gpus),
        optimizer=work.optimizer_bytes / bandwidth / (num_gpus if rules.divides_state else 1),
        reduction=_sent_seconds([] if gathers else [("all_reduce", work.gradient_bytes)], gpu, num_gpus),
    )


def parts_of(
    work: Work, gpu: Gpu, num_gpus: int, sharding: Sharding, rates: Rates, kernel: Kernel = "bitsandbytes"
) -> Parts:
    """The seconds of each part. Raises SpecError for a card whose peak is not known."""
    return ideal_of(work, gpu, num_gpus, sharding).at(rates, kernel)


def _sent_seconds(sent: list[tuple[str, float]], gpu: Gpu, num_gpus: int) -> tuple[float, float]:
    """Collectives over so many bytes, in large messages: within machines, and on the network between them."""
    near = min(num_gpus, GPUS_PER_MACHINE)
    machines = -(-num_gpus // GPUS_PER_MACHINE)
    if near == 1:
        return 0.0, 0.0
    network = _NETWORK.get(gpu.arch, _SLOW_NETWORK) if gpu.nvlink_joins == "all" else _SLOW_NETWORK
    each = [(kind, num_bytes * (2 if kind == "all_reduce" else 1)) for kind, num_bytes in sent]
    within = sum(num_bytes * (near - 1) / near / sent_bytes_per_second(gpu, kind, near) for kind, num_bytes in each)
    between = sum(num_bytes for _, num_bytes in each) * (machines - 1) / machines / GPUS_PER_MACHINE / network
    return within, between


def condition_of(work: Work, gpu: Gpu, num_gpus: int, cards: list[str]) -> Condition:
    """Return the condition of the interval: the first that holds."""
    if gpu.short_name not in cards:
        return "card never seen"
    if num_gpus > GPUS_PER_MACHINE:
        return "several machines"
    return "short steps" if work.num_tokens < SHORT_TOKENS else "usual"


def estimate(
    spec: CellSpec, gpu: Gpu, *, num_gpus: int = 1, sharding: Sharding = "fsdp", fit: SpeedFit | None = None
) -> Estimate:
    """Estimate the speed of the cell's step on ``num_gpus`` of ``gpu``, each with the cell's batch.

    Raises UnsupportedArchitecture for a step that is recorded, SpecError for a card whose peak is not known.
    """
    counted_architecture(spec)
    return estimate_work(work_of(spec), spec.grad_accum, gpu, num_gpus=num_gpus, sharding=sharding, fit=fit)


def tokens_per_second(work: Work, grad_accum: int, gpu: Gpu, num_gpus: int, sharding: Sharding, rates: Rates) -> float:
    """The rate of all GPUs together, by itself."""
    seconds = parts_of(work, gpu, num_gpus, sharding, rates).step_seconds(grad_accum)
    return num_gpus * grad_accum * work.num_tokens / seconds


def estimate_work(
    work: Work,
    grad_accum: int,
    gpu: Gpu,
    *,
    num_gpus: int,
    sharding: Sharding,
    fit: SpeedFit | None = None,
    faster: float = 1.0,
    half_width: float | None = None,
) -> Estimate:
    """Estimate the speed of counted work; ``faster`` and ``half_width`` come from records of the card."""
    fit = fit or shipped_speed()
    parts = parts_of(work, gpu, num_gpus, sharding, fit.rates)
    seconds = parts.step_seconds(grad_accum) / faster
    rate = num_gpus * grad_accum * work.num_tokens / seconds
    condition: Condition = condition_of(work, gpu, num_gpus, fit.cards) if half_width is None else "measured"
    factor = math.exp(fit.half_widths[condition] if half_width is None else half_width)
    peak = (gpu.half_dense_tflops or 0.0) * 1e12
    once = {"optimizer": parts.optimizer, "reduction": parts.reduction, "rest": parts.rest}
    return Estimate(
        seconds=seconds,
        tokens_per_second=Figure(value=rate, low=rate / factor, high=rate * factor),
        mfu=grad_accum * work.model_flops / seconds / peak,
        parts={name: grad_accum * value for name, value in parts._asdict().items() if name not in once} | once,
        condition=condition,
    )
