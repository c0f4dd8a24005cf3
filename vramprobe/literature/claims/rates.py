"""Readings of claims that are no matter of a peak: times, costs and rates, host memory, ZeRO's stages, fp8.

In: a claim, all claims (a time needs the rate that the same guide prints) and the cells. Out: its Reading. Rates are
estimates (speed/), times are tokens ÷ the guide's rate, costs are times × the shipped price, written out; nothing here
is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vramprobe import catalog
from vramprobe.catalog import Claim, Gpu
from vramprobe.choices import Sharding
from vramprobe.literature.claims.conditions import ANY_SIZE, LENGTHS, RECIPES, cell_options, stand_ins
from vramprobe.literature.claims.figures import Cells, Figure, figure
from vramprobe.literature.claims.judge import Case, Reading
from vramprobe.literature.claims.memory import floor_of, num_params, usable
from vramprobe.literature.published_speed import observations
from vramprobe.predict.predict import predict
from vramprobe.predict.verdict import verdict
from vramprobe.speed.elementwise import Fusion
from vramprobe.speed.rates import shipped_speed
from vramprobe.speed.step import estimate, estimate_work
from vramprobe.speed.work import work_of

#: Floating-point operations per parameter and token: forward 2, backward through frozen weights 2, forward again 2.
_FORWARD, _BACKWARD_FROZEN, _RECOMPUTE = 2, 2, 2
#: The guide says 10 B tokens for every time it prints; this is what its rates give in these times.
TOKENS, TOKENS_THAT_FIT = "10e9", "10e6"
_HOURS = 3600


#: A ratio of two of our estimates may be so far off, as a share of time: what they have in common cancels. Published
#: pairs of one table each are within it: checkpointing adds 27 % to full fine-tuning of a 3B (torchtune) and 44 % to
#: LoRA of a 7B (ms-swift), published_speed.csv.
EXTRA_SPREAD = 0.05
#: The same of two cards, each of which its own published steps place within some percent
#: (benchmarks/speed/speed_model.md).
CARD_SPREAD = 0.1
#: The cards on which what is said of all is tried.
_ANY_CARD = ("A100-80GB-SXM", "H100-SXM", "RTX-4090")
#: Without a compiler, and with one.
_FUSIONS: tuple[Fusion, Fusion] = ("none", "all")
#: Cards that are joined by PCIe alone.
_PCIE_CARDS = ("A100-80GB-PCIe", "RTX-4090", "L40S")


def throughput_reading(claim: Claim, cells: Cells) -> Reading:
    """Tokens per second, estimated where the run fits; the card's peak rate and its size rule some out."""
    gpu = claim.gpus[0]
    flops = f"({_flops(claim)} * {num_params(stand_ins(claim)[0]):_})"
    ceiling = figure("tokens/s", f"{claim.num_gpus or 1} * {gpu.bf16_dense_tflops:g}e12 / {flops}")
    blocked = _too_small(claim, gpu, cells)
    if blocked is None:
        note = f"Estimated, not timed; {gpu.short_name}'s peak rate would allow {ceiling.value:,.0f} tokens/s."
        return Reading(cases=tuple(_estimated_rates(claim, cells)), ceiling=ceiling, note=note)
    note = f"There is no such run: its weights alone take {blocked.value:.0%} of the card: {blocked.arithmetic}."
    return Reading(cases=(), ruled_out=blocked, note=note)


def _estimated_rates(claim: Claim, cells: Cells) -> Iterator[Case]:
    """Under each usual set of conditions under which the run is not too large for its card."""
    gpu, count = claim.gpus[0], claim.num_gpus or 1
    for length in claim.seq_lens or LENGTHS:
        for checkpointing in (True, False) if claim.gradient_checkpointing is None else (claim.gradient_checkpointing,):
            options = cell_options(
                stand_ins(claim)[0], claim.method or "lora", claim.batch_size or 1, length, checkpointing
            )
            spec = cells.spec(options)
            if verdict(predict(spec, gpu=gpu), gpu).verdict == "does not fit":
                continue
            made = estimate(spec, gpu, num_gpus=count, sharding="ddp")
            words = {
                "sequence length": f"{length:,} tokens",
                "checkpointing": f"checkpointing {'on' if checkpointing else 'off'}",
            }
            rate = made.tokens_per_second
            text = f"{count} * {spec.num_tokens} / {made.seconds:.4g}"
            yield Case(words, figure("tokens/s", text, engine="estimate", low=rate.low, high=rate.high))


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
        if (
            other.quantity == "throughput"
            and other.low is not None
            and key == (other.source, other.params_b, other.method, other.gpus, other.num_gpus, other.batch_size)
        ):
            return other.low
    raise AssertionError(f"{claim.id} has no rate to multiply with")


def _price(gpu: Gpu) -> catalog.Price:
    return min(
        (price for price in catalog.list_prices(gpu.short_name) if price.terms == "on-demand"),
        key=lambda price: price.usd_per_gpu_hour,
    )


def speed_ratio_reading(claim: Claim, cells: Cells) -> Reading:
    """One GPU's speed over another's: bounded by its peak rate and its bandwidth; estimated where published steps of
    both were at hand."""
    new, old = _compared(claim)
    compute = figure("x", f"{new.bf16_dense_tflops:g} / {old.bf16_dense_tflops:g}")
    bandwidth = figure("x", f"{new.bandwidth_gb_s:g} / {old.bandwidth_gb_s:g}")
    seen = {new.short_name, old.short_name} <= {one.gpu.short_name for *_, one in observations()}
    cases = tuple(_ratios(cells, new, old))
    values = [case.figure.value for case in cases]
    said = (
        "Estimated, not timed"
        if seen
        else (
            f"Not judged: no published step of a {new.short_name} was at hand, and by data sheets {min(values):.2g} to "
            f"{max(values):.2g}, which may be off by a factor of {unseen_factor():.2g}"
        )
    )
    note = f"{said}; {new.short_name} over {old.short_name} is {compute.value:.2f} in bf16 FLOP/s and "
    note += f"{bandwidth.value:.2f} in bandwidth."
    ceiling = max(compute, bandwidth, key=lambda one: one.value)
    return Reading(cases=cases if seen else (), ceiling=ceiling, note=note)


def _ratios(cells: Cells, new: Gpu, old: Gpu) -> Iterator[Case]:
    """The same step on both."""
    for method in ("full", "lora", "qlora"):
        for length in LENGTHS:
            spec = cells.spec(cell_options(ANY_SIZE, method, 4, length, True))
            text = f"{estimate(spec, old).seconds:.4g} / {estimate(spec, new).seconds:.4g}"
            value = figure("x", text).value
            yield Case(
                {"method": method, "sequence length": f"{length:,} tokens"},
                figure("x", text, engine="estimate", low=value * (1 - CARD_SPREAD), high=value * (1 + CARD_SPREAD)),
            )


def _compared(claim: Claim) -> tuple[Gpu, Gpu]:
    old = "A100-80GB" if "against A100" in claim.statement else "H100-SXM"
    new = claim.gpus[0]
    return (catalog.find_gpu("H100-SXM") if new.short_name.startswith("H100") else new), catalog.find_gpu(old)


def cost_ratio_reading(claim: Claim) -> Reading:
    """The cost of the same work on a B200 over that on an H100: the ratio of prices over that of peak rates."""
    new, old = claim.gpus[0], catalog.find_gpu("H100-SXM")
    before = {(price.provider, price.terms, price.num_gpus): price for price in catalog.list_prices(old.short_name)}
    faster = f"({new.bf16_dense_tflops:g} / {old.bf16_dense_tflops:g})"
    ratios = {
        price.provider: f"({price.usd_per_gpu_hour:g} / {other.usd_per_gpu_hour:g}) / {faster}"
        for price in catalog.list_prices(new.short_name)
        if price.terms != "spot" and (other := before.get((price.provider, price.terms, price.num_gpus))) is not None
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


def extra_time_reading(claim: Claim, cells: Cells) -> Reading:
    """Time that checkpointing or 4-bit weights add, or that a compiler spares, estimated; not of 8-bit weights."""
    if claim.gradient_checkpointing:
        full, frozen = figure("x", "8 / 6 - 1"), figure("x", "6 / 4 - 1")
        note = f"By FLOPs alone one more forward is 8 / 6 - 1 = {full.value:.0%} (full) or 6 / 4 - 1 = "
        note += f"{frozen.value:.0%} (LoRA, whose frozen weights need no gradients); estimated, not timed."
        pairs = [(name, (name, False), (name, True)) for name in ("full", "lora", "qlora")]
        return Reading(cases=tuple(_extra(cells, pairs)), note=note)
    if claim.quant == "nf4":
        note = "Dequantising takes a time of its own, however many tokens; estimated by it, not timed."
        pairs = [(f"checkpointing {'on' if on else 'off'}", ("lora", on), ("qlora", on)) for on in (True, False)]
        return Reading(cases=tuple(_extra(cells, pairs)), note=note)
    if claim.quantity == "speedup":
        note = "Norms, rotations, activations and the loss in few kernels instead of many; estimated, not timed. Of "
        note += "one published pair (torchtune, Llama 3.2 3B, full, an A100) it is 1.27, and estimated 1.22."
        return Reading(cases=tuple(_compiled(cells)), note=note)
    note = "Not judged: LLM.int8() multiplies in int8 and some columns apart in 16 bit, which is not counted here, and "
    note += "no published step of it was at hand. To be timed."
    return Reading(cases=(), note=note)


def _compiled(cells: Cells) -> Iterator[Case]:
    for method in ("full", "lora"):
        for length in LENGTHS:
            for card in _ANY_CARD:
                spec, gpu = cells.spec(cell_options(ANY_SIZE, method, 4, length, False)), catalog.find_gpu(card)
                eager, fused = (
                    estimate_work(work_of(spec, fused=fusion), 1, gpu, num_gpus=1, sharding="ddp").seconds
                    for fusion in _FUSIONS
                )
                text = f"{eager:.4g} / {fused:.4g}"
                value = figure("x", text).value
                yield Case(
                    {"method": method, "sequence length": f"{length:,} tokens", "card": card},
                    figure("x", text, engine="estimate", low=value * (1 - CARD_SPREAD), high=value * (1 + CARD_SPREAD)),
                )


def _extra(cells: Cells, pairs: Sequence[tuple[str, tuple[str, bool], tuple[str, bool]]]) -> Iterator[Case]:
    """(condition, method and checkpointing before, after) on some cards: the share of time that is added."""
    for words, before, after in pairs:
        for length in LENGTHS:
            for card in _ANY_CARD:
                first, second = (
                    estimate(cells.spec(cell_options(ANY_SIZE, method, 4, length, on)), catalog.find_gpu(card)).seconds
                    for method, on in (before, after)
                )
                text = f"{second:.4g} / {first:.4g} - 1"
                value = figure("fraction", text).value
                yield Case(
                    {"what": words, "sequence length": f"{length:,} tokens", "card": card},
                    figure("fraction", text, engine="estimate", low=value - EXTRA_SPREAD, high=value + EXTRA_SPREAD),
                )


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
        Case(
            {"use of fp8": "products in fp8, states as before (an 8-bit copy and its transpose)"},
            figure("ratio", "(16 + 1 + 1) / 16"),
        ),
    )
    return Reading(cases=cases, note="fp8 products add 8-bit copies beside 16- and 32-bit states; fp8 storage halves.")


#: PCIe depends on the machine: FSDP over it took up to so many times as long as predicted
#: (benchmarks/speed/counted_steps.md, RTX 3090).
_PCIE_FACTOR = 2.6


def link_reading(claim: Claim, cells: Cells) -> Reading:
    """How much of a step waits for PCIe, by the estimates of 8 cards and of one: the all-reduce's share, or under
    ZeRO-3 the share in which the GPU computes.
    """
    waits = claim.quantity == "share of step"
    note = "Estimated, not timed: the step of 8 cards over PCIe beside that of one card with the same batch; what is "
    note += f"sent may take {_PCIE_FACTOR:g} times as long, or as short, as estimated."
    return Reading(cases=tuple(_link_shares(cells, "ddp" if waits else "zero3", waits)), note=note)


def unseen_factor() -> float:
    """How far an estimate may be off of a card of which no two sources publish a step."""
    return math.exp(shipped_speed().half_widths["card never seen"])


def _link_shares(cells: Cells, sharding: Sharding, waits: bool) -> Iterator[Case]:
    for method in ("full", "lora"):
        for length in LENGTHS:
            for card in _PCIE_CARDS:
                spec, gpu = cells.spec(cell_options(ANY_SIZE, method, 1, length, True)), catalog.find_gpu(card)
                one, many = (estimate(spec, gpu, num_gpus=n, sharding=sharding).seconds for n in (1, 8))
                text = f"1 - {one:.4g} / {many:.4g}" if waits else f"{one:.4g} / {many:.4g}"
                ends = [one / (one + (many - one) * times) for times in (_PCIE_FACTOR, 1 / _PCIE_FACTOR)]
                low, high = sorted(1 - end if waits else end for end in ends)
                yield Case(
                    {"method": method, "sequence length": f"{length:,} tokens", "card": card},
                    figure("fraction", text, engine="estimate", low=low, high=high),
                )
