"""Cells → the table that every guide prints: memory by size of the model and by method, under conditions that are said.

In: cells, and a fit if there is one. Out: a Document: a table per batch, length and checkpointing; measured amounts,
and what the fit predicts where nobody measured, marked as that. Never prints what the fit would refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from vramprobe.errors import VramprobeError
from vramprobe.records.record import RunRecord
from vramprobe.report.cells import Cell
from vramprobe.report.columns import Unit, method_in_words, precision_in_words, unit_for
from vramprobe.report.definition import Column, Document, Table
from vramprobe.spec import CellSpec, Method, resolve

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel

#: The sizes that guides print; a fit's table goes on with them behind the measured models, as far as the fit reaches.
LADDER = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-32b", "llama-3.1-70b")
#: Of the spec: the model, how it is observed, and what the table's conditions say. The rest is the method.
_NOT_THE_METHOD = (
    "model",
    "architecture",
    "num_layers",
    "weights",
    "trust_remote_code",
    "batch_size",
    "seq_len",
    "grad_accum",
    "gradient_checkpointing",
    "steps",
    "timing_steps",
    "seed",
    "device",
)
_MARK = "≈ "


class Conditions(NamedTuple):
    """What all cells of one table share."""

    gradient_checkpointing: bool
    batch_size: int
    seq_len: int
    grad_accum: int

    def in_words(self) -> str:
        """For a title."""
        steps = f", {self.grad_accum} accumulated" if self.grad_accum > 1 else ""
        checkpointing = "on" if self.gradient_checkpointing else "off"
        return f"{self.batch_size} × {self.seq_len} tokens{steps}, checkpointing {checkpointing}"


_Way = tuple[Any, ...]  # the values of the method's fields


@dataclass(frozen=True, kw_only=True)
class Amount:
    """One cell's allocated peak; ``low`` to ``high`` is a prediction's interval."""

    conditions: Conditions
    model: str
    num_params: int
    spec: CellSpec
    num_bytes: int
    low_bytes: int | None = None
    high_bytes: int | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it comes from a record."""
        return self.low_bytes is None


@dataclass(frozen=True, kw_only=True)
class _Row:
    model: str
    num_params: int
    amounts: dict[_Way, Amount]


def by_size(cells: Sequence[Cell], model: MemoryModel | None, origin: Sequence[str], command: str) -> Document:
    """by_size: a row per model, a column per method; the CSV has a row per amount."""
    groups: dict[Conditions, list[RunRecord]] = {}
    for cell in cells:
        if cell.measured_bytes is not None:
            groups.setdefault(_conditions(cell.record.spec), []).append(cell.record)
    settings = [_Setting(conditions, records, model) for conditions, records in groups.items()]
    shown = [one for one in settings if one.compares] or settings
    shown.sort(key=lambda one: (-one.num_measured, one.conditions))
    amounts = [amount for one in shown for row in one.rows for amount in row.amounts.values()]
    about = "Peak memory allocated by tensors over the training steps. " + (
        f"A number after {_MARK.strip()} was not measured: the fit predicts it. A dash: neither measured nor predicted."
        if model
        else "Measured; a dash where it was not."
    )
    return Document(
        name="by_size",
        title="Memory by model size and method",
        about=[about],
        tables=[one.table() for one in shown],
        data=Table(title="Memory by model size and method", columns=_DATA_COLUMNS, rows=amounts),
        origin=origin,
        command=command,
    )


class _Setting:
    """The cells of one table: ``ways``, the methods in columns, and ``rows`` of models, small first."""

    def __init__(self, conditions: Conditions, records: Sequence[RunRecord], model: MemoryModel | None) -> None:
        self.conditions = conditions
        by_way: dict[_Way, list[RunRecord]] = {}
        for record in sorted(records, key=lambda record: get_args(Method).index(record.spec.method)):
            by_way.setdefault(_way(record.spec), []).append(record)
        common = {way: found for way, found in by_way.items() if len(_models(found)) > 1}
        self._records_of = common or by_way
        self.num_measured = sum(map(len, self._records_of.values()))
        self.compares = len(common) > 1
        self.rows = self._rows(model)

    def table(self) -> Table:
        """Headings are as short as they can be told apart; the caption says the rest."""
        specs = {way: found[0].spec for way, found in self._records_of.items()}
        headings = _headings(specs)
        unit = unit_for([max(amount.num_bytes for row in self.rows for amount in row.amounts.values())])
        columns = [
            Column("model", "model", lambda row: row.model),
            Column("num_params", "parameters", lambda row: row.num_params, params_in_words, is_number=True),
            *(_column(way, headings[way], unit) for way in specs),
        ]
        details = "; ".join(f"{headings[way]}: {details_in_words(spec)}" for way, spec in specs.items())
        return Table(title=self.conditions.in_words(), columns=columns, rows=self.rows, note=f"{details}.")

    def _rows(self, model: MemoryModel | None) -> list[_Row]:
        named: dict[str, RunRecord] = {}
        for found in self._records_of.values():
            named |= {record.spec.model_label: record for record in found}
        rows = [self._row(record, model) for record in named.values()]
        rows.sort(key=lambda row: (row.num_params, row.model))
        if model is not None:
            rows += [
                row
                for name in LADDER
                if name not in named
                and (row := self._ladder_row(name, model)).amounts
                and row.num_params > max(one.num_params for one in rows)
            ]
        return rows

    def _row(self, one: RunRecord, model: MemoryModel | None) -> _Row:
        """A measured model: its records, and predictions for the methods that it was not measured with."""
        label, num_params = one.spec.model_label, one.facts.num_params if one.facts else 0
        own = {name: getattr(one.spec, name) for name in ("model", "architecture", "num_layers")}
        amounts = {}
        for way, records in self._records_of.items():
            record = next((each for each in records if each.spec.model_label == label), None)
            if record is not None and record.peak is not None:
                amounts[way] = Amount(
                    conditions=self.conditions,
                    model=label,
                    num_params=num_params,
                    spec=record.spec,
                    num_bytes=record.peak.allocated_bytes,
                )
            elif model is not None and (found := self._predicted(records[0].spec.model_copy(update=own), model)):
                amounts[way] = found
        return _Row(model=label, num_params=num_params, amounts=amounts)

    def _ladder_row(self, name: str, model: MemoryModel) -> _Row:
        from vramprobe.architecture import architecture

        amounts, num_params = {}, 0
        for way, records in self._records_of.items():
            words = records[0].spec.model_dump(exclude={"model", "architecture", "num_layers"})
            spec = resolve(model=name, **words)
            num_params = architecture(spec.architecture).num_params
            if found := self._predicted(spec, model):
                amounts[way] = found
        return _Row(model=name, num_params=num_params, amounts=amounts)

    def _predicted(self, spec: CellSpec, model: MemoryModel) -> Amount | None:
        """None where the fit has no arithmetic for it, or would refuse."""
        from vramprobe.architecture import architecture
        from vramprobe.predict.predict import predict

        try:
            peak = predict(spec, model).peak_allocated_bytes
        except VramprobeError:
            return None
        return Amount(
            conditions=self.conditions,
            model=spec.model_label,
            num_params=architecture(spec.architecture).num_params,
            spec=spec,
            num_bytes=peak.value,
            low_bytes=peak.low,
            high_bytes=peak.high,
        )


def params_in_words(count: int) -> str:
    """``119K``, ``162M``, ``1.24B``: three digits, and the next letter where they would be four."""
    size, letter = next(
        ((size, letter) for size, letter in ((1e9, "B"), (1e6, "M")) if count >= 0.9995 * size), (1e3, "K")
    )
    return f"{count / size:.3g}{letter}"


def _column(way: _Way, heading: str, unit: Unit) -> Column:
    def text(amount: Amount) -> str:
        return f"{'' if amount.is_measured else _MARK}{unit.text(amount.num_bytes)}"

    return Column(heading, f"{heading}, {unit.name}", lambda row: row.amounts.get(way), text, is_number=True)


def _headings(specs: dict[_Way, CellSpec]) -> dict[_Way, str]:
    """The method; where several columns share it, more of what sets them apart."""
    texts = [
        lambda spec: spec.method,
        lambda spec: f"{spec.method} {precision_in_words(spec)}",
        lambda spec: f"{spec.method} {precision_in_words(spec)} {spec.optim}",
        lambda spec: f"{method_in_words(spec)} {precision_in_words(spec)} {spec.optim}",
    ]
    found = {}
    for number, (way, spec) in enumerate(specs.items(), start=1):
        others = [other for other in specs.values() if other is not spec]
        short = next((text(spec) for text in texts if all(text(spec) != text(other) for other in others)), None)
        found[way] = short or f"{spec.method} ({number})"
    return found


def details_in_words(spec: CellSpec) -> str:
    """All that decides the method's memory, so that two columns with one heading differ here."""
    rest = method_in_words(spec).partition(" ")[2]
    parts = [*([rest] if rest else []), precision_in_words(spec), spec.optim]
    parts += [f"dropout {spec.lora_dropout:g}"] if spec.lora_dropout else []
    parts += [f"attention {spec.attn}"] if spec.attn != "sdpa" else []
    parts += ["padded"] if spec.padding else []
    parts += ["compiled"] if spec.torch_compile else []
    parts += ["fused loss"] if spec.fused_linear_cross_entropy else []
    parts += [f"allocator {spec.alloc_conf}"] if spec.alloc_conf else []
    parts += [f"on {spec.limit_vram}"] if spec.limit_vram else []
    return ", ".join(parts)


def _conditions(spec: CellSpec) -> Conditions:
    return Conditions(spec.gradient_checkpointing, spec.batch_size, spec.seq_len, spec.grad_accum)


def _way(spec: CellSpec) -> _Way:
    return tuple(getattr(spec, name) for name in CellSpec.model_fields if name not in _NOT_THE_METHOD)


def _models(records: Sequence[RunRecord]) -> set[str]:
    return {record.spec.model_label for record in records}


_DATA_COLUMNS = [
    Column("model", None, lambda amount: amount.model),
    Column("num_params", None, lambda amount: amount.num_params),
    Column("method", None, lambda amount: amount.spec.method),
    Column("method_details", None, lambda amount: details_in_words(amount.spec)),
    *(
        Column(name, None, lambda amount, name=name: getattr(amount.conditions, name))
        for name in ("batch_size", "seq_len", "grad_accum", "gradient_checkpointing")
    ),
    Column("is_measured", None, lambda amount: amount.is_measured),
    Column("peak_allocated_bytes", None, lambda amount: amount.num_bytes),
    Column("low_bytes", None, lambda amount: amount.low_bytes),
    Column("high_bytes", None, lambda amount: amount.high_bytes),
    Column("cell_id", None, lambda amount: amount.spec.cell_id),
]
