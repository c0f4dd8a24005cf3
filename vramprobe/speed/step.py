"""Step: work and a card -> seconds of an optimizer step, by part, and tokens per second with an interval.

In: Work, a Gpu, how many share the step and how. Out: an Estimate. Products run at a share of the peak or wait for
their bytes; the other kernels wait for bytes; the host launches them all; collectives run beside. Never imports numpy.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.speed.rates import (
    GPUS_PER_MACHINE,
    SHORT_TOKENS,
    Condition,
    Rates,
    SpeedFit,
    generation_of,
    shipped_speed,
)
from vramprobe.speed.work import Work, work_of

#: One GPU's share of its machine's network, bytes per second in one direction: 8 × 200 Gbit/s beside A100s, 8 × 400
#: beside later data-centre cards (NVIDIA DGX and HGX), 100 Gbit/s for the machine where there is no switch of NVLinks.
_NETWORK = {"Ampere": 25e9, "Hopper": 50e9, "Blackwell": 50e9, "Blackwell Ultra": 100e9}
_SLOW_NETWORK = 100e9 / 8 / GPUS_PER_MACHINE
Kernel = Literal["bitsandbytes", "gptq"]


class Figure(BaseModel):
    """A number and where 80 % of the truths should lie."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    low: float
    high: float


class Estimate(BaseModel):
    """How fast a step is: predicted, not measured. ``parts`` are seconds of an optimizer step, which overlap."""

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


def parts_of(
    work: Work, gpu: Gpu, num_gpus: int, sharding: Sharding, rates: Rates, kernel: Kernel = "bitsandbytes"
) -> Parts:
    """The seconds of each part. Raises SpecError for a card whose peak is not known."""
    peak = gpu.half_dense_tflops
    if peak is None:
        raise SpecError(f"the peak rate of {gpu.name} is not known, so its speed cannot be estimated")
    generation = generation_of(gpu)
    flops = peak * 1e12 * rates.product * rates.generations.get(generation, 1.0)
    attention = peak * 1e12 * rates.attention * rates.attention_of.get(generation, 1.0)
    bandwidth = gpu.bandwidth_gb_s * 1e9
    stream = bandwidth * rates.stream
    packed = bandwidth * (rates.dequantise_gptq if kernel == "gptq" else rates.dequantise)
    rules = rules_of(sharding)
    gathers = num_gpus > 1 and rules.num_gathers > 0
    each = work.gathered_bytes * rules.num_gathers + work.gradient_bytes
    return Parts(
        products=sum(one.count * math.hypot(one.flops / flops, one.num_bytes / stream) for one in work.products),
        attention=math.hypot(work.attention_flops / attention, work.attention_bytes / stream),
        stream=(work.stream_bytes + work.cast_bytes) / stream,
        dequantise=work.dequantised_bytes / packed,
        launches=work.num_kernels * rates.kernel_seconds,
        collectives=_sent_seconds(each, gpu, num_gpus, rates) if gathers else 0.0,
        optimizer=work.optimizer_bytes / stream / (num_gpus if rules.divides_state else 1),
        reduction=0.0 if gathers or num_gpus == 1 else _sent_seconds(2 * work.gradient_bytes, gpu, num_gpus, rates),
        rest=rates.step_seconds,
    )


def _sent_seconds(num_bytes: float, gpu: Gpu, num_gpus: int, rates: Rates) -> float:
    """Gathering or reducing ``num_bytes``, each GPU with its share: within machines and between them at once."""
    near = min(num_gpus, GPUS_PER_MACHINE)
    machines = -(-num_gpus // GPUS_PER_MACHINE)
    within = num_bytes * (near - 1) / near / (gpu.link_bytes_per_second * rates.link)
    if machines == 1:
        return within
    network = _NETWORK.get(gpu.arch, _SLOW_NETWORK) if gpu.nvlink_joins == "all" else _SLOW_NETWORK
    return max(within, num_bytes * (machines - 1) / machines / GPUS_PER_MACHINE / (network * rates.link))


def condition_of(work: Work, gpu: Gpu, num_gpus: int, cards: list[str]) -> Condition:
    """What the interval goes by; the first that holds."""
    if gpu.short_name not in cards:
        return "card never seen"
    if num_gpus > GPUS_PER_MACHINE:
        return "several machines"
    return "short steps" if work.num_tokens < SHORT_TOKENS else "usual"


def estimate(
    spec: CellSpec, gpu: Gpu, *, num_gpus: int = 1, sharding: Sharding = "fsdp", fit: SpeedFit | None = None
) -> Estimate:
    """How fast the cell's step is on ``num_gpus`` of ``gpu``, each with the cell's batch.

    Raises UnsupportedArchitecture without arithmetic for the model, SpecError for a card whose peak is not known.
    """
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
    """The same of work that was counted before; ``faster`` and ``half_width`` are what records of the card say."""
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
