"""Step cost: a cell as it is on a named GPU -> the seconds of its step, and the dollars of a million tokens.

In: a CellSpec with its ranks, a Gpu, offers. Out: a StepCost with recommend's own figures for the same cell, or None
where these would take a recording. All are predicted. Light until it is asked: loads no torch, and NumPy for launches
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from vramprobe.architecture import RunFails, UnsupportedArchitecture
from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError
from vramprobe.predict.prediction import Frozen
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.spec import CellSpec
from vramprobe.speed.figure import Figure

if TYPE_CHECKING:
    from vramprobe.recommend.prices import Offer
    from vramprobe.speed.step import Estimate

#: The tokens whose cost is shown.
_TOKENS = 1_000_000


class StepCost(Frozen):
    """Time of an optimizer step on ``num_gpus`` and what a million tokens cost at the cheapest offer; predicted."""

    num_gpus: int
    step_seconds: Figure
    tokens_per_second: Figure  # of all GPUs together
    million_tokens_usd: Figure | None  # null without a price of so many
    provider: str | None  # of the offer
    price_date: str | None
    hourly_usd: float | None  # of the machines that hold so many, rented whole
    basis: Literal["arithmetic", "launches"]  # what the time follows from
    condition: str  # of the speed model's interval


def step_cost(spec: CellSpec, gpu: Gpu, offers: Sequence[Offer] | None = None) -> StepCost | None:
    """Return the cost of the cell's step; None where nothing is known without a recording, and for what recommend does
    not answer. ``offers``: of one kind of terms; by default those on demand that ship.
    """
    if spec.device != "cuda" or gpu.is_size or spec.limit_vram is not None or not _runs(spec, gpu):
        return None
    try:
        has_arithmetic = has_architecture(spec)
        found = _by_arithmetic(spec, gpu) if has_arithmetic else _by_launches(spec, gpu)
    except (SpecError, RunFails):  # the card's peak is not known; no library runs the model
        return None
    if found is None:
        return None
    from vramprobe.recommend.money import cheapest, host_of, hours_of
    from vramprobe.recommend.prices import chosen, shipped_offers

    rate, seconds = found.tokens_per_second, found.seconds
    host = host_of(spec) if has_arithmetic else None
    known = chosen(shipped_offers()) if offers is None else offers
    offer, usd = cheapest(known, hours_of(_TOKENS, rate), gpu.short_name, spec.num_gpus, host)
    return StepCost(
        num_gpus=spec.num_gpus,
        step_seconds=Figure(value=seconds, low=seconds * rate.value / rate.high, high=seconds * rate.value / rate.low),
        tokens_per_second=rate,
        million_tokens_usd=usd,
        provider=None if offer is None else offer.provider,
        price_date=None if offer is None else offer.date,
        hourly_usd=None if offer is None else offer.hourly(spec.num_gpus),
        basis="arithmetic" if has_arithmetic else "launches",
        condition=found.condition,
    )


def slower_share(now: CellSpec, then: CellSpec, gpu: Gpu) -> float | None:
    """Return by which share a token takes longer in one cell than in another, by arithmetic; None where it has none."""
    try:
        if now.device != "cuda" or not (_runs(now, gpu) and _runs(then, gpu) and has_architecture(now)):
            return None
        rates = [_by_arithmetic(one, gpu).tokens_per_second.value for one in (now, then)]
    except (SpecError, RunFails):
        return None
    return rates[0] / rates[1] - 1


def has_architecture(spec: CellSpec) -> bool:
    """Return True if recommend counts the cell's work by arithmetic. Raises RunFails."""
    try:
        counted_architecture(spec)
    except RunFails:
        raise
    except UnsupportedArchitecture:
        return False
    return True


def _runs(spec: CellSpec, gpu: Gpu) -> bool:
    """Return True if recommend's estimate holds for the cell: its ranks share by one group and offload nothing, and the
    card multiplies in the cell's dtype."""
    has_ranks = spec.sharding in (None, *ONE_GROUP) and spec.offload == "none" and spec.cp_size == 1
    return has_ranks and (gpu.bf16_dense_tflops is not None or "bf16" not in (spec.dtype, spec.autocast))


def _by_arithmetic(spec: CellSpec, gpu: Gpu) -> Estimate:
    from vramprobe.speed.step import estimate

    return estimate(spec, gpu, num_gpus=spec.num_gpus, sharding=spec.sharding or "ddp")


def _by_launches(spec: CellSpec, gpu: Gpu) -> Estimate | None:
    from vramprobe.predict.at_hand import launches_at_hand
    from vramprobe.recipe.book import MOST_MICRO_STEPS

    counted = spec.model_copy(update={"grad_accum": min(spec.grad_accum, MOST_MICRO_STEPS)})
    launches = launches_at_hand(counted, gpu=gpu)
    if launches is None:
        return None
    from vramprobe.speed.raw_count import count_of
    from vramprobe.speed.scaled import counted_estimate

    return counted_estimate(counted, count_of(launches), spec.grad_accum, gpu)
