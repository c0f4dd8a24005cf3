"""Published tables of what models of so many parameters need: LLaMA-Factory's and Unsloth's.

In: Facts. Out: Estimates of one number. Between the sizes of a table a straight line; outside of them it says nothing.
Their GB are taken as 10⁹ bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from vramprobe.literature.formulas.facts import IN_ALL, Estimate, Facts, Formula, estimate

GB = 10**9
#: Billions of parameters, and the rows of the README's table by method and bits; the last figure is its rule in GB.
#: (The table of early 2024 had other figures for full fine-tuning: 160 GB for 7B.)
LLAMA_FACTORY_SIZES = (7, 14, 30, 70)
LLAMA_FACTORY = {
    "full, 32 bits": ((120, 240, 600, 1200), 18),
    "full, pure bf16": ((60, 120, 300, 600), 8),
    "lora": ((16, 32, 64, 160), 2),
    "qlora, 8 bits": ((10, 20, 40, 80), 1),
    "qlora, 4 bits": ((6, 12, 24, 48), 0.5),
}
UNSLOTH_SIZES = (3, 7, 8, 9, 11, 14, 27, 32, 40, 70, 81, 90, 405)
UNSLOTH = {
    "qlora": (3.5, 5, 6, 6.5, 7.5, 8.5, 22, 26, 30, 41, 48, 53, 237),
    "lora": (8, 19, 22, 24, 29, 33, 64, 76, 96, 164, 192, 212, 950),
}


def between(sizes: Sequence[float], figures: Sequence[float], size: float) -> float | None:
    """The figure at ``size`` on straight lines between the table's; null outside of it."""
    if not sizes[0] <= size <= sizes[-1]:
        return None
    right = max(bisect.bisect_left(sizes, size), 1)
    x0, x1, y0, y1 = sizes[right - 1], sizes[right], figures[right - 1], figures[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def llama_factory_row(facts: Facts) -> str:
    """The table's row for a cell: ``pure_bf16`` is LLaMA-Factory's name for weights that stay in bf16."""
    match facts.spec.method, facts.spec.quant:
        case "full", _:
            return "full, pure bf16" if facts.has_16_bit_weights else "full, 32 bits"
        case "lora", _:
            return "lora"
        case _, quant:
            return "qlora, 8 bits" if quant == "int8" else "qlora, 4 bits"


def _llama_factory_rule(facts: Facts) -> Estimate:
    return estimate(in_all=LLAMA_FACTORY[llama_factory_row(facts)][1] * facts.num_params)


def _llama_factory_table(facts: Facts) -> Estimate | str:
    return _of_table(facts, LLAMA_FACTORY_SIZES, LLAMA_FACTORY[llama_factory_row(facts)][0])


def _unsloth(facts: Facts) -> Estimate | str:
    if facts.spec.method == "full" or facts.spec.quant == "int8":
        return "for LoRA in 16 bits and QLoRA in 4"
    return _of_table(facts, UNSLOTH_SIZES, UNSLOTH[facts.spec.method])


def _of_table(facts: Facts, sizes: Sequence[float], figures: Sequence[float]) -> Estimate | str:
    figure = between(sizes, figures, facts.num_params / 10**9)
    if figure is None:
        return f"for {sizes[0]} to {sizes[-1]} billion parameters"
    return estimate(in_all=figure * GB)


TABLES = (
    Formula(
        name="llama-factory-rule",
        apply=_llama_factory_rule,
        counts=(IN_ALL,),
        source="github:hiyouga/LLaMA-Factory README.md@00409ff, Hardware Requirement, column xB (estimated)",
        says="xB parameters: 18x GB full (pure_bf16 8x), 2x LoRA, x QLoRA 8 bits, x/2 4 bits",
        recipe="states of full fine-tuning; for adapters the frozen weights alone",
    ),
    Formula(
        name="llama-factory-table",
        apply=_llama_factory_table,
        counts=(IN_ALL,),
        source="github:hiyouga/LLaMA-Factory README.md@00409ff, Hardware Requirement, 7B to 70B (estimated)",
        says="7B: 120 GB full, 60 pure_bf16, 16 LoRA, 10 QLoRA 8 bits, 6 4 bits",
        recipe="not given: no batch, no length",
    ),
    Formula(
        name="unsloth-table",
        apply=_unsloth,
        counts=(IN_ALL,),
        source="https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements",
        says="7B: 5 GB QLoRA, 19 GB LoRA; the absolute minimum",
        recipe="Unsloth's own kernels, batch 1, no length given",
    ),
)
