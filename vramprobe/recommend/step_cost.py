"""Step cost: a cell as it is on a named GPU -> the seconds of its step, and the dollars of a million tokens.

In: a CellSpec with its ranks, a Gpu, offers. Out: a StepCost with recommend's own figures for the same cell, or None
where these would take a recording. All are predicted. Light until it is asked: loads no torch, and NumPy for launches
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vramprobe.architecture import RunFails
from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError
from vramprobe.records.frozen import FrozenModel
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.spec import CellSpec
from vramprobe.speed.figure import Figure

if TYPE_CHECKING:
    from vramprobe.recommend.prices import Offer
    from vramprobe.speed.scaled import Estimate

#: The tokens whose cost is shown.
_TOKENS = 1_000_000


class StepCost(FrozenModel):
    """Time of an optimizer step on ``num_gpus`` and what a million tokens cost at the cheapest offer; predicted."""

    num_gpus: int
    step_seconds: Figure
    tokens_per_second: Figure  # of all GPUs together
    million_tokens_usd: Figure | None  # null without a price of so many
    provider: str | None  # of the offer
    price_date: str | None
    hourly_usd: float | None  # of the machines that hold so many, rented whole
    condition: str  # of the speed model's interval


def step_cost(spec: CellSpec, gpu: Gpu, offers: Sequence[Offer] | None = None) -> StepCost | None:
    """Return the cost of the cell's step; None where nothing is known without a recording, and for what recommend does
    not answer. ``offers``: of one kind of terms; by default those on demand that ship.
    """
    found = None if spec.limit_vram is not None else speed_at_hand(spec, gpu)
    if found is None:
        return None
    from vramprobe.recommend.money import cheapest, host_of, hours_of
    from vramprobe.recommend.prices import chosen, shipped_offers

    rate, seconds = found.tokens_per_second, found.seconds
    known = chosen(shipped_offers()) if offers is None else offers
    offer, usd = cheapest(known, hours_of(_TOKENS, rate), gpu.short_name, spec.num_gpus, host_of(spec))
    return StepCost(
        num_gpus=spec.num_gpus,
        step_seconds=Figure(value=seconds, low=seconds * rate.value / rate.high, high=seconds * rate.value / rate.low),
        tokens_per_second=rate,
        million_tokens_usd=usd,
        provider=None if offer is None else offer.provider,
        price_date=None if offer is None else offer.date,
        hourly_usd=None if offer is None else offer.hourly(spec.num_gpus),
        condition=found.condition,
    )


def slower_share(before: Estimate | None, then: CellSpec, gpu: Gpu) -> float | None:
    """Return by which share a token takes longer in a cell than at the speed ``before``; None where a recording would
    be needed to know."""
    if before is None or (after := speed_at_hand(then, gpu)) is None:
        return None
    return before.tokens_per_second.value / after.tokens_per_second.value - 1


def speed_at_hand(spec: CellSpec, gpu: Gpu, *, near: bool = False) -> Estimate | None:
    """Return the speed of a cell's step by the launches of a recipe of its shape at hand (or ``near`` it); None without
    one, and where recommend's estimate does not hold: ranks share by one group and offload nothing, and the card
    multiplies in the cell's dtype."""
    has_ranks = spec.sharding in (None, *ONE_GROUP) and spec.offload == "none" and spec.cp_size == 1
    has_dtype = gpu.bf16_dense_tflops is not None or "bf16" not in (spec.dtype, spec.autocast)
    if spec.device != "cuda" or gpu.is_size or not has_ranks or not has_dtype:
        return None
    from vramprobe.recommend.recorded import estimated_at_hand

    try:
        return estimated_at_hand(spec, gpu, near=near)
    except (SpecError, RunFails):  # the card's peak is not known; not recorded; no library runs the model
        return None
