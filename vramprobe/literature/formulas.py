"""Formulas: every way in which people estimate the memory of a fine-tuning run, each a row with its source.

In: a CellSpec, as Facts (its dimensions, how many parameters there are of which kind), and data/formula*.csv. Out:
bytes by cause whose sum is the formula's figure, or why it has nothing to say. How well each does on measured cells is
calibrate.py's. Stays this side of the torch line.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from vramprobe.architecture import Architecture, architecture
from vramprobe.architecture.expressions import ExpressionError, expression
from vramprobe.bounds.tensors import TRAINED_COPY, tensors
from vramprobe.catalog.shipped import csv_rows
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.records.record import ModelFacts
from vramprobe.spec import CellSpec

#: Causes of memory that a formula can count or leave out.
MISSABLE = (
    "weights", "gradients", "optimizer_state", "batch", "saved_activations", "checkpoint_store", "recomputed_layer",
    "logits", "cast_copies", "dequantisation", "temporaries", "optimizer_temporaries", "block_remainders", "workspaces",
    "context",
)  # fmt: skip
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

#: Where families write these widths; without any, 4 × the hidden size.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_MLP = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
#: Names that are themselves an expression.
_NAMES = {row["name"]: row["expression"] for row in csv_rows("formula_names.csv")}


@dataclass(frozen=True)
class Facts:
    """A cell as formulas see it: by name, a row of formula_names.csv, a number of the model, or a field of the cell.

    ``numbers`` are those of :func:`facts_of`; widths are elements, and tied parameters count once.
    """

    spec: CellSpec
    numbers: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name in an expression. Raises KeyError for an unknown name."""
        if name in _NAMES:
            return expression(_NAMES[name]).value(self.__getitem__)
        if name in self.numbers:
            return self.numbers[name]
        if name in CellSpec.model_fields:
            return getattr(self.spec, name)
        raise KeyError(name)


def facts_of(spec: CellSpec, seen: ModelFacts | None = None) -> Facts:
    """Return the Facts of a cell; what was ``seen`` on its model goes before what is counted.

    Raises UnsupportedArchitecture for a model whose parameters are not counted here, SpecError for adapters that peft
    cannot make.
    """
    arch, optimizer, config = architecture(spec.architecture), OPTIMIZERS[spec.optim], spec.architecture
    by_module, by_role = Counter[str](), Counter[str]()
    for parameter in arch.parameters:
        by_module[parameter.name.rpartition(".")[0]] += parameter.numel
        by_role[parameter.role] += parameter.numel * arch.num_copies(parameter)
    hidden = _first(config, _HIDDEN)
    counted = arch.num_params if spec.method == "full" else num_adapter_params(spec, arch)
    numbers = {
        "num_params": arch.num_params,
        "num_trained": counted if seen is None else seen.num_trainable_params,
        "num_linear_params": by_role["linear"],
        "num_quantised": 0 if spec.quant == "none" or arch.own_linears else by_role["linear"],
        "num_head_params": by_role["head"],  # of an output head of its own; 0 where it is tied
        "num_output_params": arch.parameters[0].numel if arch.tied else by_role["head"],
        "largest_module_params": max(by_module.values()),
        "num_layers": arch.num_layers,
        "num_tokens": spec.num_tokens,  # of a micro-batch
        "hidden": hidden,
        "mlp": _first(config, _MLP) or 4 * (hidden or 0),
        "num_heads": arch.num_heads,
        "num_kv_heads": arch.num_kv_heads,
        "head_size": arch.head_size,
        "vocab": arch.vocab_size,
        "activation": str(config.get("activation_function", config.get("hidden_act", ""))),
        "is_gated": any(p.module in ("gate_proj", "gate_up_proj") for p in arch.parameters),  # three linear layers
        "norms_have_bias": any(p.role == "norm" and p.name.endswith(".bias") for p in arch.parameters),  # LayerNorm
        "optimizer_class": optimizer.made_by,
        "optimizer_bits": optimizer.state,
    }
    return Facts(spec, numbers)


def num_adapter_params(spec: CellSpec, arch: Architecture) -> int:
    """Count the parameters of the adapters that peft adds."""
    made = [one for one in tensors(spec, arch) if one.role == "adapter" and not one.name.endswith(TRAINED_COPY)]
    return sum(one.numel * one.num_copies for one in made)


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if config.get(key) is not None), None)


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
                return expression(line).value(lambda name: found[name] if name in found else facts[name])
            except (TypeError, ValueError, ZeroDivisionError, ExpressionError) as error:
                raise ExpressionError(f"formulas.csv, formula {self.name!r}, {line!r}: {error}") from error

        if self.refuses and (reason := value(self.refuses)):
            return reason
        for name, line in _assignments(self.terms):
            found[name] = value(line)
        constants = {name: value(line) for name, line in _assignments(self.constants)}
        return FormulaEstimate(
            {name: round(found[name]) for name in self.counts if found[name]},
            {name: number for name, number in constants.items() if number is not None},
        )


def _assignments(text: str) -> list[tuple[str, str]]:
    pairs = (part.partition(" = ") for part in text.split("; ") if part)
    return [(name.strip(), line) for name, _, line in pairs]


FORMULAS = tuple(Formula(**row) for row in csv_rows("formulas.csv"))
