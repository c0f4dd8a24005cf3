"""Formulas: every way in which people estimate the memory of a fine-tuning run, each a row with its source.

In: a CellSpec, as Facts (its dimensions, how many parameters there are of which kind), and data/formula*.csv. Out:
bytes by cause whose sum is the formula's figure, or why it has nothing to say. Ours is not among them (terms); how well
each does on measured cells is calibrate.py's. Stays this side of the torch line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from vramprobe.architecture import architecture
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature.expressions import ExpressionError, expression
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.spec import CellSpec
from vramprobe.terms import CAUSES
from vramprobe.terms.cell.parameters import tensors

#: Causes of memory that a formula can count or leave out: those of our own arithmetic, and the CUDA context.
MISSABLE = (*CAUSES, "context")
#: The key of a table's figure, which is one number for everything.
IN_ALL = "in_all"
#: Terms that are alive at the end of forward for backward's sake.
SAVED = ("saved_activations", "checkpoint_store", "logits")

#: The numbers that formulas are made of, which records can recalibrate, and what each is counted in.
CONSTANTS = {
    "weights": "B per unquantised base parameter",
    "adapter_weights": "B per adapter parameter",
    "quantised_weights": "B per quantised parameter",
    "gradients": "B per trained parameter",
    "optimizer_state": "B per trained parameter, with master weights",
    "layer_activations": "B per token · layer · hidden size",
    "checkpoint_store": "B per token · layer · hidden size",
    "attention_scores": "B per batch · layer · head · length²",
    "logits": "B per token · vocabulary, kept for backward",
    "cast_copies": "B per fp32 parameter of a product under autocast, kept for backward",
}

#: Where families write these widths; without any, the first embedding's width, and 4 × the hidden size.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_MLP = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
#: What formulas name that is itself an expression.
_NAMES = {row["name"]: row["expression"] for row in csv_rows("formula_names.csv")}
_GATED_MODULES = ("gate_proj", "gate_up_proj")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A cell as formulas see it; widths are elements, and tied parameters count once.

    A formula's expressions may name what stands here, the fields of the cell, and the rows of formula_names.csv.
    """

    spec: CellSpec
    num_params: int  # of the base model
    num_trained: int
    num_quantised: int
    num_head_params: int  # of an output head of its own; 0 where it is tied
    num_cast_params: int  # fp32 weights of products that autocast copies to 16 bits, adapters and head with them
    num_cast_head_params: int  # those of the output head, tied or not
    largest_module_params: int
    num_layers: int
    hidden: int
    mlp: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    is_gated: bool  # three linear layers in the MLP, not two
    norms_have_bias: bool  # LayerNorm, not RMSNorm

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.spec.num_tokens

    @property
    def token_layer_widths(self) -> int:
        """s·b·h·L, the unit of the activation formulas."""
        return self.num_tokens * self.hidden * self.num_layers

    @property
    def num_scores(self) -> int:
        """a·s²·b·L: attention scores of all layers."""
        return self.spec.batch_size * self.spec.seq_len**2 * self.num_heads * self.num_layers

    @property
    def is_relu(self) -> bool:
        """Return True if the MLP's activation function keeps nothing but a sign."""
        config = self.spec.architecture
        return "relu" in str(config.get("activation_function", config.get("hidden_act", "")))

    @property
    def optimizer(self) -> Literal["adamw", "adamw-8bit", "sgd", "other"]:
        """The optimizer in the formulas' words; ``sgd`` is without momentum."""
        row = OPTIMIZERS[self.spec.optim]
        if row.made_by.endswith(".AdamW"):
            return "adamw-8bit" if row.state == "8bit" else "adamw"
        return "sgd" if row.name == "sgd" else "other"

    def named(self, name: str) -> Any:
        """Return the value of a name in an expression. Raises KeyError for an unknown name."""
        if name in _NAMES:
            return expression(_NAMES[name]).value(self.named)
        if name in type(self).__dict__ or name in type(self).__dataclass_fields__:
            return getattr(self, name)
        if name in CellSpec.model_fields:
            return getattr(self.spec, name)
        raise KeyError(name)


@dataclass(frozen=True)
class FormulaEstimate:
    """``terms``: bytes by cause, whose sum is the estimate. ``constants``: the numbers it is made of (CONSTANTS)."""

    terms: dict[str, int]
    constants: dict[str, float] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The formula's figure."""
        return sum(self.terms.values())

    @property
    def allocated_bytes(self) -> int:
        """The figure without the CUDA context, which is no tensor: what compares with allocated memory."""
        return self.total_bytes - self.terms.get("context", 0)

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that the formula says are kept for backward; null where it has no such term."""
        found = [size for cause, size in self.terms.items() if cause in SAVED]
        return sum(found) if found else None


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A row of formulas.csv: one way in which people estimate the memory of a run on one GPU.

    ``terms`` and ``constants`` are ``name = expression; …``. What is neither a cause nor ``in_all`` is a name for the
    expressions after it; a term of 0 and a constant of None are left away. ``refuses`` gives a text that says why the
    formula has nothing to say about a cell, or an empty one.
    """

    name: str
    source: str  # repository and file, or paper and equation
    says: str
    recipe: str  # the training that it is right for, if any
    predicts: Literal["peak", "saved"]  # what it claims to be: the whole peak, or only what is saved for backward
    refuses: str
    terms: str
    constants: str

    @cached_property
    def counts(self) -> tuple[str, ...]:
        """The causes that it counts."""
        return tuple(name for name, _ in _assignments(self.terms) if name in (*MISSABLE, IN_ALL))

    @property
    def missing(self) -> tuple[str, ...]:
        """The causes it leaves out; none for a table's figure, which is meant to be everything."""
        return () if IN_ALL in self.counts else tuple(cause for cause in MISSABLE if cause not in self.counts)

    def apply(self, facts: Facts) -> FormulaEstimate | str:
        """Return the estimate of a cell, or why there is none. Raises ExpressionError for a wrong row."""
        found: dict[str, Any] = {}

        def value(line: str) -> Any:
            try:
                return expression(line).value(lambda name: found[name] if name in found else facts.named(name))
            except (TypeError, ValueError, ZeroDivisionError, ExpressionError) as error:
                raise ExpressionError(f"formulas.csv, formula {self.name!r}, {line!r}: {error}") from error

        if self.refuses and (reason := value(self.refuses)):
            return reason
        for name, line in _assignments(self.terms):
            found[name] = value(line)
        terms = {name: round(found[name]) for name in self.counts if found[name]}
        constants = {name: value(line) for name, line in _assignments(self.constants)}
        return FormulaEstimate(terms, {name: number for name, number in constants.items() if number is not None})


def _assignments(text: str) -> list[tuple[str, str]]:
    pairs = (part.partition(" = ") for part in text.split("; ") if part)
    return [(name.strip(), line) for name, _, line in pairs]


FORMULAS = tuple(Formula(**row) for row in csv_rows("formulas.csv"))


def facts_of(spec: CellSpec) -> Facts:
    """The Facts of a cell. Raises UnsupportedArchitecture for a model that is not counted by arithmetic here."""
    arch = architecture(spec.architecture)
    prepared = tensors(spec, arch)
    modules: Counter[str] = Counter()
    for parameter in arch.parameters:
        modules[parameter.name.rpartition(".")[0]] += parameter.numel
    hidden = _first(spec.architecture, _HIDDEN)
    casts = [
        tensor for tensor in prepared if tensor.dtype == "fp32" and not tensor.quantised and spec.autocast != "none"
    ]
    # The first embedding is the head's where they are tied.
    head = [t for t in casts if t.role == "head" or (arch.tied and t.name == arch.parameters[0].name)]
    inner = [tensor for tensor in casts if tensor.role in ("linear", "adapter")]
    assert hidden is not None, "architecture() has read the width"
    return Facts(
        spec=spec,
        num_params=arch.num_params,
        num_trained=sum(tensor.numel * tensor.num_copies for tensor in prepared if tensor.trained),
        num_quantised=sum(tensor.numel * tensor.num_copies for tensor in prepared if tensor.quantised),
        num_head_params=sum(p.numel for p in arch.parameters if p.role == "head"),
        num_cast_params=sum(tensor.numel * tensor.num_copies for tensor in [*inner, *head]),
        num_cast_head_params=sum(tensor.numel for tensor in head),
        largest_module_params=max(modules.values()),
        num_layers=arch.num_layers,
        hidden=hidden,
        mlp=_first(spec.architecture, _MLP) or 4 * hidden,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_size=arch.head_size,
        vocab=arch.vocab_size,
        is_gated=any(p.module in _GATED_MODULES for p in arch.parameters),
        norms_have_bias=any(p.role == "norm" and p.name.endswith(".bias") for p in arch.parameters),
    )


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if config.get(key) is not None), None)
