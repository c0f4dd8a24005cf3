"""Cells → the table that every guide prints: memory by size of the model and by method, under conditions that are said.

In: cells, and a fit if there is one. Out: a Document: a table per batch, length and checkpointing; measured amounts,
and what recipes at hand predict where nobody measured, marked as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from vramprobe.catalog import gpu_seen
from vramprobe.choices import Method
from vramprobe.errors import VramprobeError
from vramprobe.records.record import RunRecord
from vramprobe.report.cells import Cell
from vramprobe.report.columns import method_in_words, precision_in_words, unit_for
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.model.card_fit import CardFit

#: The sizes that guides print; a GPU's table goes on with them behind the measured models.
LADDER = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-32b", "llama-3.1-70b")
#: Of the spec: the model, how it is observed, and what the table's conditions say. The rest is the method.
_NOT_THE_METHOD = (
    "model", "architecture", "num_layers", "weights", "trust_remote_code", "batch_size", "seq_len", "grad_accum",
    "gradient_checkpointing", "steps", "timing_steps", "seed", "device",
)  # fmt: skip
_MARK = "≈ "


class Conditions(NamedTuple):
    """Conditions that all cells of one table share."""

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


#: The columns of by_size.csv: a row per amount.
_DATA = (
    *("model", "num_params", "method", "method_details", "batch_size", "seq_len", "grad_accum"),
    *("gradient_checkpointing", "is_measured", "peak_allocated_bytes", "low_bytes", "high_bytes", "cell_id"),
)


def by_size(cells: Sequence[Cell], model: CardFit | None, origin: Sequence[str], command: str) -> Document:
    """by_size: a row per model, a column per method; the CSV has a row per amount."""
    groups: dict[Conditions, list[RunRecord]] = {}
    for cell in cells:
        if cell.measured_bytes is not None:
            spec = cell.record.spec
            conditions = Conditions(spec.gradient_checkpointing, spec.batch_size, spec.seq_len, spec.grad_accum)
            groups.setdefault(conditions, []).append(cell.record)
    settings = [_Setting(conditions, records, model) for conditions, records in groups.items()]
    shown = [one for one in settings if one.compares] or settings
    shown.sort(key=lambda one: (-one.num_measured, one.conditions))
    amounts = [row for one in shown for row in rows_of(one.amounts)]
    about = "Peak memory allocated by tensors over the training steps. " + (
        f"A number after {_MARK.strip()} was not measured: it is predicted by a recipe at hand. A dash: neither."
        if any(not row["is_measured"] for row in amounts)
        else "Measured; a dash where it was not."
    )
    return Document(
        name="by_size",
        title="Memory by model size and method",
        about=[about],
        tables=[one.table() for one in shown],
        data=Table(title="Memory by model size and method", columns=[Column(name) for name in _DATA], rows=amounts),
        origin=origin,
        command=command,
    )


class _Setting:
    """The cells of one table: ``amounts`` has a row per model, small ones first, and method."""

    def __init__(self, conditions: Conditions, records: Sequence[RunRecord], model: CardFit | None) -> None:
        self.conditions = conditions
        by_way: dict[_Way, list[RunRecord]] = {}
        for record in sorted(records, key=lambda record: get_args(Method).index(record.spec.method)):
            by_way.setdefault(_way(record.spec), []).append(record)
        common = {way: found for way, found in by_way.items() if len({one.spec.model_label for one in found}) > 1}
        self._records_of = common or by_way
        self.num_measured = sum(map(len, self._records_of.values()))
        self.compares = len(common) > 1
        self._specs = {way: found[0].spec for way, found in self._records_of.items()}
        self._headings = _headings(self._specs)
        self._gpu = gpu_seen(records[0].environment.device_name)
        self.amounts = self._amounts(model)

    def table(self) -> Table:
        """Headings are as short as they can be told apart; the caption says the rest."""
        found, headings = self.amounts, self._headings.values()
        unit = unit_for([found.peak_allocated_bytes.max()])
        texts = [
            f"{'' if is_measured else _MARK}{unit.text(size)}"
            for is_measured, size in zip(found.is_measured, found.peak_allocated_bytes, strict=True)
        ]
        rows = found.assign(text=texts).pivot(index=["num_params", "model"], columns="heading", values="text")
        columns = [
            Column("model", "model"),
            Column("num_params", "parameters", text=params_in_words, is_number=True),
            *(Column(heading, f"{heading}, {unit.name}", is_number=True) for heading in headings),
        ]
        details = "; ".join(f"{self._headings[way]}: {details_in_words(spec)}" for way, spec in self._specs.items())
        rows = rows_of(rows.reset_index())
        return Table(title=self.conditions.in_words(), columns=columns, rows=rows, note=f"{details}.")

    def _amounts(self, model: CardFit | None) -> pd.DataFrame:
        """Return a row for each measured model, then for each larger one of the ladder."""
        import pandas as pd

        named: dict[str, RunRecord] = {}
        for found in self._records_of.values():
            named |= {record.spec.model_label: record for record in found}
        rows = [row for record in named.values() for row in self._measured(record, model)]
        largest = max(row["num_params"] for row in rows)
        ladder = [row for name in LADDER if name not in named for row in self._predicted_of(name, model)]
        rows += [row for row in ladder if row["num_params"] > largest]
        frame = pd.DataFrame(rows).convert_dtypes()
        return frame.sort_values(["num_params", "model"], kind="stable")

    def _measured(self, one: RunRecord, model: CardFit | None) -> Iterator[dict[str, Any]]:
        """A measured model: its records, and predictions for the methods that it was not measured with."""
        label, num_params = one.spec.model_label, one.facts.num_params if one.facts else 0
        own = {name: getattr(one.spec, name) for name in ("model", "architecture", "num_layers")}
        for way, records in self._records_of.items():
            record = next((each for each in records if each.spec.model_label == label), None)
            if record is not None and record.peak is not None:
                yield self._amount(way, record.spec, num_params, record.peak.allocated_bytes)
            else:
                yield from self._predicted(way, records[0].spec.model_copy(update=own), num_params, model)

    def _predicted_of(self, name: str, model: CardFit | None) -> Iterator[dict[str, Any]]:
        """A model of the ladder."""
        for way, one in self._specs.items():
            spec = resolve(model=name, **one.model_dump(exclude={"model", "architecture", "num_layers"}))
            yield from self._predicted(way, spec, spec.num_params, model)

    def _predicted(self, way: _Way, spec: CellSpec, num_params: int, model: CardFit | None) -> Iterator[dict[str, Any]]:
        """Nothing where no recipe of it is at hand."""
        from vramprobe.predict.expected import predict_at_hand

        try:
            peak = predict_at_hand(spec, self._gpu, model).peak_allocated_bytes
        except VramprobeError:
            return
        yield self._amount(way, spec, num_params, peak.value, peak.low, peak.high)

    def _amount(
        self, way: _Way, spec: CellSpec, num_params: int, size: int, low: int | None = None, high: int | None = None
    ) -> dict[str, Any]:
        """One cell's allocated peak; of a prediction, from ``low`` to ``high``."""
        return self.conditions._asdict() | {
            "model": spec.model_label,
            "num_params": num_params,
            "method": spec.method,
            "method_details": details_in_words(spec),
            "is_measured": low is None,
            "peak_allocated_bytes": size,
            "low_bytes": low,
            "high_bytes": high,
            "cell_id": spec.cell_id,
            "heading": self._headings[way],
        }


def params_in_words(count: int) -> str:
    """``119K``, ``162M``, ``1.24B``: three digits, and the next letter where they would be four."""
    size, letter = next(
        ((size, letter) for size, letter in ((1e9, "B"), (1e6, "M")) if count >= 0.9995 * size), (1e3, "K")
    )
    return f"{count / size:.3g}{letter}"


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
    parts += [spec.other_head] if spec.other_head else []
    parts += [f"allocator {spec.alloc_conf}"] if spec.alloc_conf else []
    parts += [f"on {spec.limit_vram}"] if spec.limit_vram else []
    return ", ".join(parts)


def _way(spec: CellSpec) -> _Way:
    return tuple(getattr(spec, name) for name in CellSpec.model_fields if name not in _NOT_THE_METHOD)
