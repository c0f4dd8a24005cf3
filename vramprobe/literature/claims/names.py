"""Names: what a row's expressions may name, for one claim under one set of conditions.

In: a row of claim_rules.csv, a claim and the settings of its conditions. Out: Facts: of a setting, of the claim, of a
card, or of a cell (``peak``, or ``after.peak`` of one that the row's column ``cells`` changes).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramprobe import catalog
from vramprobe.catalog import Claim, Gpu
from vramprobe.literature.claims.cells import Cells, Fact
from vramprobe.literature.expressions import ExpressionError
from vramprobe.predict.verdict import NCCL_ALLOWANCE_BYTES, usable_bytes
from vramprobe.speed.rates import shipped_speed

Row = dict[str, str]
#: For what is said of all sizes, and the rank of adapters that a claim leaves open.
ANY_SIZE, LORA_R = "llama-3.1-8b", 16
#: Settings that are options of a cell, in the order of a command; others say how it is run, or are facts themselves.
_OPTIONS = ("recipe", "optim", "quant", "kbit_prep", "lora_r", "lora_targets", "attn")
_FIRST = ("model", "method", "batch_size", "seq_len", "gradient_checkpointing")


@dataclass
class ExpressionNames:
    """Names for a row's expressions: a setting, a fact of the claim, of a card or of a cell (``after.peak``)."""

    claim: Claim
    claims: Sequence[Claim]
    cells: Cells
    row: Row
    sets: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        claim = self.claim
        self.sets = settings(self.row["cell"], claim) | self.sets
        others = [part.strip().partition(" ") for part in self.row["cells"].split(";")]
        self._others = {name: settings(text, claim) for name, _, text in others}
        self._facts: dict[str, Fact] = {}

    def fact(self, name: str) -> Fact:
        if name not in self._facts:
            owner, _, fact = name.rpartition(".")
            self._facts[name] = self._fact(owner, fact)
        return self._facts[name]

    def value(self, name: str) -> Any:
        return self.fact(name).value

    def options(self, owner: str = "") -> dict[str, Any]:
        """The options of a cell, in the order of its command."""
        claim, changes = self.claim, self._changes(owner)
        found = {
            "model": claim.models[0] if claim.models else ANY_SIZE,
            "method": claim.method or "lora",
            "batch_size": claim.batch_size or 1,
            "seq_len": None,
        }
        for several, known in ((self.sets, _FIRST), (self.sets, _OPTIONS), (changes, (*_FIRST, *_OPTIONS))):
            found |= {key: value for key, value in several.items() if key in known}
        return {key: value for key, value in found.items() if value is not False}

    def _changes(self, owner: str) -> dict[str, Any]:
        """Return the settings in which a named cell differs from the row's own."""
        if not owner:
            return {}
        if owner not in self._others:
            raise KeyError(owner)
        own = {key.partition(".")[2]: value for key, value in self.sets.items() if key.startswith(f"{owner}.")}
        return self._others[owner] | own

    def _fact(self, owner: str, name: str) -> Fact:
        changes, claim = self._changes(owner), self.claim
        run = {"num_gpus": claim.num_gpus or 1, "sharding": "ddp"} | self.sets | changes
        if not owner and name in self.more:
            return Fact(self.more[name])
        if name == "card" or (name in run and name not in _FIRST):
            value = self._card(run).short_name if name == "card" else run[name]
            return Fact(value, f"{value:g}" if isinstance(value, float) else str(value), value, value)
        if name in _OF_CARD:
            return _OF_CARD[name](self._card(run), run["num_gpus"])
        if name in _OF_CLAIM:
            return _OF_CLAIM[name](claim, self.claims)
        options = self.options(owner)
        if name == "model":
            return Fact(options["model"])
        return self.cells.fact(name, options, run | {"gpu": self._card(run, any_card=True)})

    def _card(self, run: dict[str, Any], *, any_card: bool = False) -> Gpu | None:
        claim = self.claim
        if "card" in run:
            return catalog.find_gpu(run["card"])
        if not claim.gpus and not any_card:
            raise ExpressionError(f"claim {claim.id} names no GPU")
        return claim.gpus[0] if claim.gpus else None


def settings(text: str, claim: Claim) -> dict[str, Any]:
    """``name=value`` pairs; a name alone is the claim's own value."""
    own = {"lora_r": claim.lora_r or LORA_R, "quant": claim.quant}
    pairs = (pair.partition("=") for pair in text.split())
    return {name: _setting(value) if sign else own[name] for name, sign, value in pairs}


def _setting(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _usable(gpu: Gpu, num_gpus: int) -> Fact:
    """The usable bytes of a card."""
    value = usable_bytes(gpu, device_is_known=False, num_gpus=num_gpus)
    nccl = NCCL_ALLOWANCE_BYTES if num_gpus > 1 else 0
    aside = f"{(gpu.total_bytes or 0) - value - nccl:_}" + (f" - {nccl:_}" if nccl else "")
    return Fact(value, f"({gpu.total_bytes:_} - {aside})", value, value)


def _number(value: float, text: str) -> Fact:
    return Fact(value, text, value, value)


def _rate_of(claim: Claim, claims: Sequence[Claim]) -> Fact:
    """The rate that the same guide prints for the same run."""

    def run(one: Claim) -> tuple[Any, ...]:
        return one.source, one.params_b, one.method, one.gpus, one.num_gpus, one.batch_size

    for other in claims:
        if other.quantity == "throughput" and other.low is not None and run(other) == run(claim):
            return _number(other.low, f"{other.low:g}")
    raise ExpressionError(f"claim {claim.id} has no rate to multiply with")


def _price(claim: Claim) -> catalog.Price:
    prices = (one for one in catalog.list_prices(claim.gpus[0].short_name) if one.terms == "on-demand")
    return min(prices, key=lambda one: one.usd_per_gpu_hour)


def _flops(claim: Claim) -> int:
    """Operations per parameter and token: forward 2, backward through frozen weights 2, forward again 2."""
    return 6 if claim.gradient_checkpointing else 4


_OF_CARD: dict[str, Callable[[Any, int], Fact]] = {
    "usable": lambda gpu, num_gpus: _usable(gpu, 1),
    "usable_of_rank": _usable,
    "peak_rate": lambda gpu, num_gpus: _number(gpu.bf16_dense_tflops * 1e12, f"{gpu.bf16_dense_tflops:g}e12"),
    "tflops": lambda gpu, num_gpus: _number(gpu.bf16_dense_tflops, f"{gpu.bf16_dense_tflops:g}"),
    "bandwidth": lambda gpu, num_gpus: _number(gpu.bandwidth_gb_s, f"{gpu.bandwidth_gb_s:g}"),
}
_OF_CLAIM: dict[str, Callable[[Claim, Sequence[Claim]], Fact]] = {
    "claimed": lambda claim, claims: _number((claim.params_b or 0) * 1e9, f"{claim.params_b:g}e9"),
    "rate": _rate_of,
    "flops": lambda claim, claims: _number(_flops(claim), str(_flops(claim))),
    "price": lambda claim, claims: _number(_price(claim).usd_per_gpu_hour, f"{_price(claim).usd_per_gpu_hour:g}"),
    "provider": lambda claim, claims: Fact(_price(claim).provider),
    # how far an estimate may be off of a card of which no two sources publish a step
    "unseen_factor": lambda claim, claims: Fact(math.exp(shipped_speed().half_widths["card never seen"])),
}
