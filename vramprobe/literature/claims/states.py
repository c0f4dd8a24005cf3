"""Readings of claims about parts: weights, gradients, optimizer state, adapters, activations, and ratios of peaks.

In: a claim and the cells. Out: its Reading. What is said of parameters is scaled from the stand-in model to the claim's
own number of them, so that 6.74 billion do not count as an error of "7B".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vramprobe.catalog import Claim
from vramprobe.literature.claims.conditions import (
    ANY_SIZE,
    LENGTHS,
    Recipe,
    cell_options,
    recipes_of,
    stand_ins,
    usual,
)
from vramprobe.literature.claims.figures import Cells, Figure, Options, Source, figure
from vramprobe.literature.claims.judge import Case, Reading
from vramprobe.literature.claims.memory import num_params
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD

#: Either peak of a ratio is predicted within -5 and +10 %; what they share cancels, and this much of the ratio may not.
RATIO_SPREAD = 0.03
_LENGTH = LENGTHS[0]


def nf4_reading(claim: Claim) -> Reading:
    """Bytes of a quantised element with its absmax, one per block of 64."""
    cases = (
        Case({"quantisation": "double quantisation"}, figure("B/param", "0.5 + 1 / 64 + 4 / (64 * 256)")),
        Case({"quantisation": "one quantisation"}, figure("B/param", "0.5 + 4 / 64")),
    )
    note = "Each block of 64 has a scale: 1 B (and 4 B per 256 scales) with double quantisation, 4 B without."
    return Reading(cases=cases, note=f"{note} Embeddings, head and norms stay in 16 or 32 bit on top.")


def full_states_reading(claim: Claim, cells: Cells, part: str, stated: str | None) -> Reading:
    """A part of the states of full fine-tuning, by recipe; ``part`` is weights, gradients, moments, optimizer…"""
    model = stand_ins(claim)[0]
    cases = tuple(
        Case({"recipe": recipe.name}, _per_param(claim, cells, recipe, model, part))
        for recipe in recipes_of(claim, stated)
    )
    return Reading(cases=cases, note=_NOTES[part], others=lambda: _eight_bit(claim, cells, model, part))


_NOTES = {
    "weights": "By the dtype the weights are trained in.",
    "gradients": "A gradient has its weight's dtype, 2 or 4 B; some engines add up in fp32.",
    "moments": "AdamW's state follows the weights' dtype in torch; bitsandbytes and master-weight engines keep fp32.",
    "master": "A copy of the weights in fp32.",
    "optimizer": "Two moments of 2 or 4 B, and 4 B more where fp32 master weights are kept.",
    "states": "Weights, gradients, moments and master weights, 8 to 18 B/param by recipe.",
    "multiple": "Gradients and optimizer state over 16-bit weights: 2 + 4 to 4 + 12 B over 2 B, by recipe.",
}


def _per_param(claim: Claim, cells: Cells, recipe: Recipe, model: str, part: str) -> Figure:
    options = cell_options(model, "full", 1, _LENGTH, True) | recipe.options
    text, sources = _part(cells, options, recipe, part, num_params(model))
    return _scaled(claim, text, sources, model)


def _part(cells: Cells, options: Options, recipe: Recipe, part: str, count: int) -> tuple[str, list[Source]]:
    """Bytes of one part as an expression. All gradients are alive at the step of an optimizer with temporaries."""
    weights, moments = cells.term(options, "weights"), cells.term(options, "optimizer_state")
    gradients = cells.term({**options, "optim": "adamw_torch"}, "gradients")
    wider = recipe.extra - recipe.master  # fp32 gradients beside the 16-bit ones' place
    gradients_text = f"{gradients} + {wider} * {count:_}" if wider else f"{gradients}"
    optimizer_text = f"{moments} + {recipe.master} * {count:_}" if recipe.master else f"{moments}"
    match part:
        case "weights":
            return f"{weights}", [weights]
        case "gradients":
            return gradients_text, [gradients]
        case "moments":
            return f"{moments}", [moments]
        case "master":
            return f"4 * {count:_}", []
        case "optimizer":
            return optimizer_text, [moments]
        case "states":
            return f"{weights} + {gradients_text} + {optimizer_text}", [weights, gradients, moments]
    assert part == "multiple", part
    return f"({gradients_text} + {optimizer_text}) / (2 * {count:_})", [gradients, moments]


def _scaled(claim: Claim, text: str, sources: list[Source], model: str) -> Figure:
    count = num_params(model)
    match claim.unit:
        case "B/param":
            return figure("B/param", f"({text}) / {count:_}", sources, engine="formula")
        case "GB":
            return figure("GB", f"({text}) / {count:_} * {claim.params_b:g}e9 / 1e9", sources, engine="formula")
    return figure(claim.unit, text, sources, engine="formula")


def _eight_bit(claim: Claim, cells: Cells, model: str, part: str) -> list[Case]:
    options = cell_options(model, "full", 1, _LENGTH, True) | {"recipe": "all-bf16", "optim": "adamw_bnb_8bit"}
    recipe = Recipe(name="8-bit AdamW", options={}, weights=2, gradients=2, moments=2)
    text, sources = _part(cells, options, recipe, part, num_params(model))
    found = [Case({"recipe": "8-bit AdamW"}, _scaled(claim, text, sources, model))]
    if part == "multiple":
        found.append(Case({"recipe": "fp32 moments alone, no gradients"}, figure(claim.unit, "8 / 2")))
    return found


def quantised_weights_reading(claim: Claim, cells: Cells) -> Reading:
    """The frozen base of QLoRA as loaded and prepared, without its adapters."""
    cases = []
    for preparation in ("peft", "none", "trl"):
        model = stand_ins(claim)[0]
        options = _adapted(claim, model) | {"kbit_prep": preparation}
        weights, count = cells.term(options, "weights"), cells.lora_params(options)
        width = 2 if preparation == "trl" else 4
        text = f"({weights} - {width} * {count:_}) / {num_params(model):_} * {claim.params_b:g}e9 / 1e9"
        cases.append(
            Case({"k-bit preparation": f"preparation {preparation}"}, figure("GB", text, [weights], engine="formula"))
        )
    note = "NF4 takes 0.516 B per quantised weight; embeddings, head and norms stay in 16 bit, or 32 by preparation."
    return Reading(cases=tuple(cases), note=note)


def adapters_reading(claim: Claim, cells: Cells, bytes_per_param: tuple[int, ...]) -> Reading:
    """Adapters, their gradients or their state, by the adapters' dtype and targets."""
    model, cases = stand_ins(claim)[0], []
    for targets, name in (("all-linear", "all linear layers"), ("q_v", "q and v")):
        count = cells.lora_params(_adapted(claim, model) | {"lora_targets": targets})
        for width, dtype in zip(bytes_per_param, ("fp32", "bf16"), strict=True):
            cases.append(
                Case(
                    {"targets": f"adapters on {name}", "dtype": dtype},
                    figure("GB", f"{width} * {count:_} / 1e9", engine="formula"),
                )
            )
    note = f"Rank {claim.lora_r} on {model}: rank × (in + out) of each adapted layer; fp32 by peft's default."
    return Reading(cases=tuple(cases), note=note)


def adapter_file_reading(claim: Claim, cells: Cells) -> Reading:
    """The file of a 7B model's adapters, saved in the dtype they were trained in."""
    cases = []
    for rank in (8, 16, 64):
        for targets, name in (("q_v", "q and v"), ("all-linear", "all linear layers")):
            count = cells.lora_params(_adapted(claim, "llama-2-7b") | {"lora_r": rank, "lora_targets": targets})
            for width, dtype in ((4, "fp32"), (2, "bf16")):
                cases.append(
                    Case(
                        {"rank": f"rank {rank}", "targets": name, "dtype": dtype},
                        figure("GB", f"{width} * {count:_} / 1e9", engine="formula"),
                    )
                )
    return Reading(cases=tuple(cases), note="Rank × (in + out) of each adapted layer, in 4 or 2 B (llama-2-7b).")


def checkpoint_file_reading(claim: Claim, cells: Cells) -> Reading:
    """A checkpoint on disk: the weights in 16 bit, or all that is needed to resume."""
    count = num_params(stand_ins(claim)[0])
    cases = [Case({"file": "weights alone"}, figure("GB", f"2 * {count:_} / 1e9"))]
    cases += [
        Case(
            {"file": f"with optimizer: {recipe.name}"},
            figure("GB", f"({recipe.weights} + {recipe.optimizer}) * {count:_} / 1e9"),
        )
        for recipe in recipes_of(claim)
    ]
    return Reading(cases=tuple(cases), note="Arithmetic: 16-bit weights on disk; more with the optimizer's state.")


def _adapted(claim: Claim, model: str) -> dict:
    method = claim.method if claim.method in ("lora", "qlora") else "lora"
    return cell_options(model, method, 1, _LENGTH, True) | {"lora_r": claim.lora_r or 16}


def activations_reading(claim: Claim, cells: Cells) -> Reading:
    """What the highest moment of forward and backward holds beside the model states: saved activations and logits."""
    low, high = ARITHMETIC_SPREAD["cuda"]
    cases = []
    for one in usual(claim):
        if one.recipe is not None and one.recipe.extra:
            continue  # the same activations as without master weights
        beside = cells.beside_states(one.options)
        cases.append(
            Case(
                one.words,
                figure(
                    "GB",
                    f"{beside} / 1e9",
                    [beside],
                    engine="formula",
                    low=low * beside.value / 1e9,
                    high=high * beside.value / 1e9,
                ),
            )
        )
    note = "Activations, logits and temporaries at their highest: with checkpointing the logits and one layer."
    return Reading(cases=tuple(cases), note=note)


def reduction_reading(claim: Claim, cells: Cells) -> Reading:
    """The share by which one change lowers the peak (or the activations)."""
    note = {
        "bf16": "Both in bf16 halves all; autocast on fp32 weights keeps the states and adds copies.",
        "checkpointing": "It takes away activations alone: their share of the peak is by method and tokens.",
        "quantisation": "It lowers the frozen weights alone; preparation raises embeddings and residuals to fp32.",
        "activations": "It keeps one residual per layer, the logits and one layer recomputed.",
        "states": "The same terms with and without it.",
    }
    kind = _kind_of_reduction(claim)
    of = cells.beside_states if kind == "activations" else lambda options: cells.peak(options).source
    if kind == "states":
        return Reading(cases=tuple(_states_kept(cells)), note=note[kind])
    cases = []
    for words, before, after in _pairs(claim, kind):
        first, second = of(before), of(after)
        text = f"1 - {second} / {first}"
        exact = figure("fraction", text)
        cases.append(
            Case(
                words,
                figure(
                    "fraction",
                    text,
                    [second, first],
                    engine="formula",
                    low=exact.value - RATIO_SPREAD,
                    high=exact.value + RATIO_SPREAD,
                ),
            )
        )
    return Reading(cases=tuple(cases), note=note[kind])


def _kind_of_reduction(claim: Claim) -> str:
    match claim.quantity:
        case "reduction of activations":
            return "activations"
        case "reduction of model states":
            return "states"
    return "checkpointing" if claim.gradient_checkpointing else "quantisation" if claim.quant else "bf16"


def _pairs(claim: Claim, kind: str) -> Iterator[tuple[dict[str, str], Options, Options]]:
    """(conditions, before, after) of a change, on an 8B model."""
    for length in LENGTHS:
        words = {"sequence length": f"{length:,} tokens"}
        if kind in ("checkpointing", "activations"):
            for method, more in _METHODS.items():
                name, kept = more
                before = cell_options(ANY_SIZE, name, 1, length, False) | kept
                yield {"method": method, **words}, before, {**before, "gradient_checkpointing": True}
            continue
        for checkpointing in (True, False):
            on = words | {"checkpointing": f"checkpointing {'on' if checkpointing else 'off'}"}
            if kind == "bf16":
                full = cell_options(ANY_SIZE, "full", 1, length, checkpointing)
                fp32 = full | {"recipe": "fp32"}
                yield {"recipe": "weights in bf16", **on}, fp32, full | {"recipe": "all-bf16"}
                yield {"recipe": "bf16 autocast on fp32 weights", **on}, fp32, full | {"recipe": "mixed"}
                continue
            before = cell_options(ANY_SIZE, "lora", 1, length, checkpointing)
            after = before | {"method": "qlora", "quant": claim.quant}
            for preparation in ("peft", "none"):
                yield (
                    {"k-bit preparation": f"preparation {preparation}", **on},
                    before,
                    after | {"kbit_prep": preparation},
                )


_METHODS = {
    "LoRA": ("lora", {}),
    "QLoRA": ("qlora", {}),
    "full, all in bf16": ("full", {"recipe": "all-bf16"}),
    "full, fp32 weights under bf16 autocast": ("full", {"recipe": "mixed"}),
}


def _states_kept(cells: Cells) -> Iterable[Case]:
    for term, name in (("weights", "weights"), ("optimizer_state", "optimizer state"), ("gradients", "gradients")):
        options = cell_options(ANY_SIZE, "full", 1, 512, False) | {"recipe": "all-bf16", "optim": "adamw_torch"}
        before, after = cells.term(options, term), cells.term({**options, "gradient_checkpointing": True}, term)
        yield Case({"state": name}, figure("fraction", f"1 - {after} / {before}", [after, before], engine="formula"))


def optimizer_ratio_reading(claim: Claim, cells: Cells) -> Reading:
    """The optimizer's bytes of QLoRA over those of LoRA, at one rank."""
    options = cell_options(ANY_SIZE, "lora", 1, _LENGTH, True) | {"lora_r": 16}
    lora, cases = cells.term(options, "optimizer_state"), []
    for preparation in ("peft", "none"):
        changed = {**options, "method": "qlora", "kbit_prep": preparation}
        qlora = cells.term(changed, "optimizer_state")
        cases.append(
            Case(
                {"k-bit preparation": f"preparation {preparation}"},
                figure("ratio", f"{qlora} / {lora}", [qlora, lora], engine="formula"),
            )
        )
    return Reading(cases=tuple(cases), note="The state belongs to the adapters, which are the same (in one dtype).")


def attention_reading(claim: Claim, cells: Cells) -> Reading:
    """How attention's saved activations grow from 4,096 to 8,192 tokens: of a layer's, what grows as the square."""
    kernels = ("eager",) if "eager" in claim.statement else ("eager", "sdpa")
    return Reading(
        cases=tuple(Case({"attention": f"attention {kernel}"}, _growth(claim, cells, kernel)) for kernel in kernels),
        note="Eager attention keeps heads × length² scores; flash and memory-efficient kernels (SDPA) keep vectors.",
    )


def _growth(claim: Claim, cells: Cells, kernel: str) -> Figure:
    lengths = claim.seq_lens or (4096, 8192)
    peaks = {}
    for attn in ("eager", "sdpa"):
        for length in lengths:
            options = cell_options(ANY_SIZE, "full", 1, length, False) | {"recipe": "all-bf16", "attn": attn}
            peaks[attn, length] = cells.term(options, "saved_activations")
    before, after = ((peaks[kernel, length]) for length in lengths)
    if kernel == "eager":  # less all that it keeps besides the scores, which is what SDPA keeps
        first, second = (f"({peaks['eager', length]} - {peaks['sdpa', length]})" for length in lengths)
    else:
        first, second = str(before), str(after)
    ratio = f"{second} / {first}"
    text = ratio if claim.unit == "x" else f"log2({ratio})"
    exact = figure(claim.unit, text).value
    spread = RATIO_SPREAD * exact
    return figure(
        claim.unit,
        text,
        list(peaks.values()) if kernel == "eager" else [after, before],
        engine="formula",
        low=exact - spread,
        high=exact + spread,
    )


def kernels_reading(claim: Claim, cells: Cells) -> Reading:
    """The most that better kernels can save: all of the peak but weights and states."""
    cases = []
    for checkpointing in (True, False):
        for length in (2048, 512, 4096, 8192):
            for method in ("qlora", "lora"):
                options = cell_options(ANY_SIZE, method, 2, length, checkpointing) | {"lora_r": 16}
                peak, weights = cells.peak(options).source, cells.term(options, "weights")
                state = cells.term(options, "optimizer_state")
                text = f"1 - ({weights} + {state}) / {peak}"
                bound = figure("fraction", text).value
                words = {
                    "method": method,
                    "checkpointing": f"checkpointing {'on' if checkpointing else 'off'}",
                    "sequence length": f"{length:,} tokens",
                }
                cases.append(
                    Case(
                        words,
                        figure(
                            "fraction",
                            text,
                            [weights, state, peak],
                            engine="formula",
                            low=0.0,
                            high=bound + RATIO_SPREAD,
                        ),
                    )
                )
    note = "An upper bound, since Unsloth is no engine of ours: kernels save activations and logits, never weights."
    return Reading(cases=tuple(cases), note=note)
