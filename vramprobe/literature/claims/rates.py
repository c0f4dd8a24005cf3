"""Readings of claims that are no matter of a peak: times, costs and rates, host memory, ZeRO's stages, fp8.

In: a claim, all claims (a time needs the rate that the same guide prints) and the cells. Out: its Reading. Times are
tokens ÷ rate, costs are times × the shipped price, written out; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe import catalog
from vramprobe.catalog import Claim, Gpu
from vramprobe.literature.claims.conditions import RECIPES, stand_ins
from vramprobe.literature.claims.figures import Cells, Figure, figure
from vramprobe.literature.claims.judge import Case, Reading
from vramprobe.literature.claims.memory import floor_of, num_params, usable

#: Floating-point operations per parameter and token: forward 2, backward through frozen weights 2, forward again 2.
_FORWARD, _BACKWARD_FROZEN, _RECOMPUTE = 2, 2, 2
#: The guide says 10 B tokens for every time it prints; this is what its rates give in these times.
TOKENS, TOKENS_THAT_FIT = "10e9", "10e6"
_HOURS = 3600


def throughput_reading(claim: Claim, cells: Cells) -> Reading:
    """Tokens per second: not memory, but the card's peak rate and its size rule some out."""
    gpu = claim.gpus[0]
    flops = f"({_flops(claim)} * {num_params(stand_ins(claim)[0]):_})"
    ceiling = figure("tokens/s", f"{claim.num_gpus or 1} * {gpu.bf16_dense_tflops:g}e12 / {flops}")
    note = f"A rate, to be timed; {gpu.short_name}'s peak rate would allow {ceiling.value:,.0f} tokens/s."
    blocked = _too_small(claim, gpu, cells)
    if blocked is None:
        return Reading(cases=(), ceiling=ceiling, note=note)
    note = f"There is no such run: its weights alone take {blocked.value:.0%} of the card: {blocked.arithmetic}."
    return Reading(cases=(), ruled_out=blocked, note=note)


def _too_small(claim: Claim, gpu: Gpu, cells: Cells) -> Figure | None:
    floor = floor_of(claim, cells)
    if floor is None:
        return None
    share = figure("bool", f"{floor.arithmetic.removesuffix(' / 1e9')} / {claim.num_gpus or 1} / {usable(gpu)}")
    return share if share.value > 1 else None


def _flops(claim: Claim) -> int:
    return _FORWARD + _BACKWARD_FROZEN + (_RECOMPUTE if claim.gradient_checkpointing else 0)


def time_reading(claim: Claim, claims: Sequence[Claim]) -> Reading:
    """Hours, or dollars, for 10 billion tokens at the rate that the same guide prints for the same run."""
    rate, gpu = _rate_of(claim, claims), claim.gpus[0]
    price = _price(gpu) if claim.unit == "USD" else None
    times_price = "" if price is None else f" * {price.usd_per_gpu_hour:g}"
    flops = f"{_flops(claim)} * {num_params(stand_ins(claim)[0]):_}"
    hours = "{tokens} / {rate:g} / 3600"
    told = hours.format(tokens=TOKENS, rate=rate) + times_price
    meant = hours.format(tokens=TOKENS_THAT_FIT, rate=rate) + times_price
    floor = figure(claim.unit, f"{TOKENS} * {flops} / {gpu.bf16_dense_tflops:g}e12 / 3600{times_price}")
    at_rate = f"{told} = {figure(claim.unit, told).value:,.0f} {claim.unit} at the guide's own rate"
    at_rate += f" and ${price.usd_per_gpu_hour:g}/h ({price.provider})" if price else ""
    return Reading(
        cases=(Case({"tokens": "10 billion tokens"}, figure(claim.unit, told)),),
        floor=floor,
        floor_is=f"10 billion tokens take {at_rate}, and at the card's peak rate",
        others=lambda: [Case({"tokens": "10 million tokens"}, figure(claim.unit, meant))],
        note="Tokens ÷ rate (× price): three zeros too few; the times are those of 10 million tokens.",
    )


def _rate_of(claim: Claim, claims: Sequence[Claim]) -> float:
    key = (claim.source, claim.params_b, claim.method, claim.gpus, claim.num_gpus, claim.batch_size)
    for other in claims:
        if other.quantity == "throughput" and other.low is not None and key == (
            other.source, other.params_b, other.method, other.gpus, other.num_gpus, other.batch_size
        ):  # fmt: skip
            return other.low
    raise AssertionError(f"{claim.id} has no rate to multiply with")


def _price(gpu: Gpu) -> catalog.Price:
    return min(
        (price for price in catalog.list_prices(gpu.short_name) if price.terms == "on-demand"),
        key=lambda price: price.usd_per_gpu_hour,
    )


def speed_ratio_reading(claim: Claim) -> Reading:
    """One GPU's speed over another's: bounded by its peak rate and its bandwidth."""
    new, old = _compared(claim)
    compute = figure("x", f"{new.bf16_dense_tflops:g} / {old.bf16_dense_tflops:g}")
    bandwidth = figure("x", f"{new.bandwidth_gb_s:g} / {old.bandwidth_gb_s:g}")
    note = (
        f"A rate, to be timed; {new.short_name} over {old.short_name} is {compute.value:.2f} in bf16 FLOP/s and "
        f"{bandwidth.value:.2f} in bandwidth."
    )
    return Reading(cases=(), ceiling=max(compute, bandwidth, key=lambda one: one.value), note=note)


def _compared(claim: Claim) -> tuple[Gpu, Gpu]:
    old = "A100-80GB" if "against A100" in claim.statement else "H100-SXM"
    new = claim.gpus[0]
    return (catalog.find_gpu("H100-SXM") if new.short_name.startswith("H100") else new), catalog.find_gpu(old)


def cost_ratio_reading(claim: Claim) -> Reading:
    """The cost of the same work on a B200 over that on an H100: the ratio of prices over that of peak rates."""
    new, old = claim.gpus[0], catalog.find_gpu("H100-SXM")
    before = {(price.provider, price.terms): price for price in catalog.list_prices(old.short_name)}
    faster = f"({new.bf16_dense_tflops:g} / {old.bf16_dense_tflops:g})"
    ratios = {
        price.provider: f"({price.usd_per_gpu_hour:g} / {other.usd_per_gpu_hour:g}) / {faster}"
        for price in catalog.list_prices(new.short_name)
        if (other := before.get((price.provider, price.terms))) is not None
    }
    work = {"recomputing on both": "", "recomputing on the H100s alone": " * 6 / 8"}
    return Reading(
        cases=tuple(
            Case({"provider": name, "work": words}, figure("x", f"{text}{saved}"))
            for words, saved in work.items()
            for name, text in ratios.items()
        ),
        note="Prices per hour over peak bf16 rates, and what the larger card may spare in recomputing (8 to 6 FLOPs).",
    )


def extra_time_reading(claim: Claim) -> Reading:
    """Time that checkpointing or quantisation adds, or that a compiler saves: to be timed."""
    note = "Time, not memory: to be timed."
    if claim.gradient_checkpointing:
        full, frozen = figure("x", "8 / 6 - 1"), figure("x", "6 / 4 - 1")
        note += f" By FLOPs one more forward is 8 / 6 - 1 = {full.value:.0%} (full) or 6 / 4 - 1 = {frozen.value:.0%}"
        note += " (LoRA, whose frozen weights need no gradients)."
    return Reading(cases=(), note=note)


def host_reading(claim: Claim) -> Reading:
    """Host memory per GPU memory, both by the states they hold: nothing offloaded, or the optimizer on the host."""
    cases = (
        Case({"offload": "nothing offloaded, one 16-bit copy while loading"}, figure("GB/GB", "2 / 16")),
        Case({"offload": "optimizer and fp32 master weights on the host"}, figure("GB/GB", "12 / (2 + 2)")),
        Case({"offload": "optimizer, master weights and gradients on the host"}, figure("GB/GB", "(12 + 2) / 2")),
    )
    note = "Arithmetic by states (16 B/param): the host holds what is offloaded, and a copy of the weights to load."
    return Reading(cases=cases, note=note)


def zero_stages_reading(claim: Claim) -> Reading:
    """What each stage of ZeRO divides, on 8 ranks at 2 + 2 + 12 B/param; a definition, with no figure to miss."""
    stages = {"ZeRO-1": "2 + 2 + 12 / 8", "ZeRO-2": "2 + (2 + 12) / 8", "ZeRO-3": "(2 + 2 + 12) / 8"}
    assert RECIPES[2].states == 16
    cases = tuple(Case({"stage": name}, figure("B/param", text)) for name, text in stages.items())
    return Reading(cases=cases, note="By definition (Rajbhandari et al. 2020): per rank of 8, 5.5, 3.75 and 2 B/param.")


def fp8_reading(claim: Claim) -> Reading:
    """Bytes per parameter with fp8 over those with 16 bit: stored in it, or only computed in it."""
    cases = (
        Case({"use of fp8": "frozen weights stored in fp8"}, figure("ratio", "1 / 2", low=0.5, high=0.51)),
        Case({"use of fp8": "products in fp8, states as before (an 8-bit copy and its transpose)"},
             figure("ratio", "(16 + 1 + 1) / 16")),
    )  # fmt: skip
    return Reading(cases=cases, note="fp8 products add 8-bit copies beside 16- and 32-bit states; fp8 storage halves.")


def not_memory_reading(claim: Claim) -> Reading:
    """Shares of time."""
    return Reading(cases=(), note="A share of time, not memory: to be timed on the interconnect.")
