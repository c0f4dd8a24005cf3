"""Conditions: what a claim leaves open, filled in with what people usually do, as cells.

In: a claim. Out: the usual sets of conditions and the options of their cells: which models a size stands for, which
recipes, lengths, checkpointing, preparations. One place, the same for every claim; a column of the claim closes what it
states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vramprobe.catalog import Claim

#: Which models of the catalog a size stands for, the most usual first.
STAND_INS: dict[float, tuple[str, ...]] = {
    7: ("llama-2-7b", "mistral-7b-v0.3", "qwen2.5-7b"),
    13: ("llama-2-13b",),
    14: ("qwen2.5-14b", "qwen3-14b"),
    30: ("qwen3-30b-a3b",),
    32: ("qwen2.5-32b", "qwen3-32b"),
    34: ("codellama-34b",),
    70: ("llama-3.1-70b", "llama-2-70b"),
}
#: Words of a statement that name a model, or add one to those of the size.
_NAMED = {"Llama 2 70B": ("llama-2-70b",), "Llama 3 70B": ("llama-3-70b",)}
_ADDED = {"7B/8B": ("llama-3.1-8b",), "70B/72B": ("qwen2.5-72b",)}
#: For what is said of all sizes.
ANY_SIZE = "llama-3.1-8b"

#: Tokens per sequence of usual fine-tuning data, the most usual first, where a claim names none.
LENGTHS = (2048, 512, 4096)
#: Sequences of a micro-batch where a claim names no number: one is the least, and what guides that print it assume.
BATCH_SIZE = 1
LORA_R = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe of full fine-tuning with AdamW: bytes per parameter by cause, and the cell nearest to it.

    ``extra`` is what the recipe holds beyond its cell: fp32 master weights and gradients belong to an engine
    (DeepSpeed, Megatron) and are no cell of ours.
    """

    name: str
    options: dict[str, Any]
    weights: int
    gradients: int
    moments: int
    master: int = 0
    extra: int = 0

    @property
    def optimizer(self) -> int:
        """Moments and master weights, as guides count them."""
        return self.moments + self.master

    @property
    def states(self) -> int:
        """All model states."""
        return self.weights + self.gradients + self.optimizer


_BF16, _BNB = {"recipe": "all-bf16"}, {"recipe": "all-bf16", "optim": "adamw_bnb_32bit"}
RECIPES = (
    Recipe(name="all in bf16", options=_BF16, weights=2, gradients=2, moments=4),
    Recipe(name="bf16, fp32 moments", options=_BNB, weights=2, gradients=2, moments=8),
    Recipe(
        name="bf16, fp32 moments and master weights", options=_BNB, weights=2, gradients=2, moments=8, master=4, extra=4
    ),
    Recipe(
        name="bf16, fp32 moments, master weights and gradients",
        options=_BNB,
        weights=2,
        gradients=4,
        moments=8,
        master=4,
        extra=6,
    ),
    Recipe(name="fp32 weights under bf16 autocast", options={"recipe": "mixed"}, weights=4, gradients=4, moments=8),
)
#: Recipes that a claim states, in its column or in words: text → those that are meant.
STATED_RECIPES: dict[str, tuple[Recipe, ...]] = {
    "2+2+8 B/param": tuple(recipe for recipe in RECIPES if recipe.states == 12),
    "16-bit weights": tuple(recipe for recipe in RECIPES if recipe.weights == 2),
    "fp32 moments": tuple(recipe for recipe in RECIPES if recipe.moments == 8),
    "master weights": tuple(recipe for recipe in RECIPES if recipe.master),
}
#: Less usual ones, tried where no usual one gives the claim's figure.
OTHER_FULL = {
    "8-bit AdamW": {"recipe": "all-bf16", "optim": "adamw_bnb_8bit"},
    "Adafactor": {"recipe": "all-bf16", "optim": "adafactor"},
    "SGD without momentum": {"recipe": "all-bf16", "optim": "sgd"},
}
_INT8 = {"method": "qlora", "quant": "int8", "kbit_prep": "none"}
OTHER_ADAPTED: dict[str, dict[str, dict[str, Any]]] = {
    "lora": {
        "": {},
        "q and v only": {"lora_targets": "q_v"},
        "an 8-bit base": _INT8,
        "a 4-bit base": {"method": "qlora", "kbit_prep": "none"},
    },
    "qlora": {
        "": {},
        "q and v only": {"lora_targets": "q_v"},
        "bf16 adapters": {"kbit_prep": "trl"},
        "one quantisation": {"quant": "nf4-single"},
    },
}
OTHER_LENGTHS = (2048, 512, 4096, 256, 8192)
OTHER_BATCHES = (1, 4)


@dataclass(frozen=True)
class Conditions:
    """One set of conditions in words, and the options of its cell; ``recipe`` is one of full fine-tuning."""

    words: dict[str, str]
    options: dict[str, Any]
    recipe: Recipe | None = field(default=None)


def stand_ins(claim: Claim) -> tuple[str, ...]:
    """The models that the claim's size stands for."""
    if claim.params_b is None:
        return (ANY_SIZE,)
    for words, models in _NAMED.items():
        if words in claim.statement:
            return models
    added = [model for words, models in _ADDED.items() if words in claim.statement for model in models]
    return (*STAND_INS[claim.params_b], *added)


def recipes_of(claim: Claim, stated: str | None = None) -> tuple[Recipe, ...]:
    """The recipes that a claim on full fine-tuning may mean."""
    stated = claim.recipe or stated
    return STATED_RECIPES.get(stated, RECIPES) if stated else RECIPES


def usual(
    claim: Claim,
    *,
    method: str | None = None,
    models: tuple[str, ...] | None = None,
    recipes: tuple[Recipe, ...] | None = None,
    checkpointing: tuple[bool, ...] = (True, False),
) -> Iterator[Conditions]:
    """Every usual set of conditions that the claim leaves open, the most usual first."""
    method = method or claim.method or "lora"
    if claim.gradient_checkpointing is not None:
        checkpointing = (claim.gradient_checkpointing,)
    lengths = claim.seq_lens or LENGTHS
    variants: list[tuple[dict[str, str], dict[str, Any], Recipe | None]]
    if method == "full":
        variants = [({"recipe": one.name}, one.options, one) for one in recipes or recipes_of(claim)]
    else:
        rank = {"lora_r": claim.lora_r or LORA_R}
        preparations = ("peft", "none", "trl") if method == "qlora" and claim.quant != "int8" else ("",)
        variants = [
            (
                {"k-bit preparation": f"preparation {prep}"} if prep else {},
                rank | ({"kbit_prep": prep} if prep else {}),
                None,
            )
            for prep in preparations
        ]
    for (words, more, recipe), checkpoint, length, model in itertools.product(
        variants, checkpointing, lengths, models or stand_ins(claim)
    ):
        yield Conditions(
            {
                "model": model,
                **words,
                "checkpointing": f"checkpointing {'on' if checkpoint else 'off'}",
                "sequence length": f"{length:,} tokens",
            },
            cell_options(model, method, claim.batch_size or BATCH_SIZE, length, checkpoint) | more,
            recipe,
        )


def others(claim: Claim) -> Iterator[Conditions]:
    """Less usual conditions: other optimizers, bases, targets, lengths and batches."""
    lengths = claim.seq_lens or OTHER_LENGTHS
    batches = (claim.batch_size,) if claim.batch_size else OTHER_BATCHES
    checkpointing = (True, False) if claim.gradient_checkpointing is None else (claim.gradient_checkpointing,)
    method = claim.method or "lora"
    rank = {} if method == "full" else {"lora_r": claim.lora_r or LORA_R}
    variants = OTHER_FULL if method == "full" else OTHER_ADAPTED[method]
    for (name, more), checkpoint, batch, length, model in itertools.product(
        variants.items(), checkpointing, batches, lengths, stand_ins(claim)
    ):
        options = cell_options(model, method, batch, length, checkpoint) | rank | more
        words = {
            "model": model,
            "variant": name,
            "checkpointing": f"checkpointing {'on' if checkpoint else 'off'}",
            "batch": f"batch {batch}",
            "sequence length": f"{length:,} tokens",
        }
        yield Conditions({key: text for key, text in words.items() if text}, options)


def cell_options(model: str, method: str, batch_size: int, seq_len: int, checkpointing: bool) -> dict[str, Any]:
    """The options that every cell has."""
    options = {"model": model, "method": method, "batch_size": batch_size, "seq_len": seq_len}
    return options | ({"gradient_checkpointing": True} if checkpointing else {})
