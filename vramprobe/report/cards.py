"""Emulated records of several cards → three pages: memory by card, what fits where, the largest batch and length.

In: emulated records of more than one card, and the fit for CUDA. Out: Documents. What was run on an emulated card is
shown as that; what the fit predicts has a mark, and what it refuses to vouch for is a dash. Never measures or fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.card_fits import ByCard, fits
from vramprobe.report.card_largest import largest
from vramprobe.report.columns import Unit, size_in_words, yes_no
from vramprobe.report.definition import Column, Document, Table
from vramprobe.spec import CellSpec, Method, resolve
from vramprobe.units import GIB

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel

_GIB = Unit("GiB", GIB, 2)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One cell, and its record on each card by the card's short name; ``record`` is any of them."""

    record: RunRecord
    by_card: dict[str, RunRecord] = field(default_factory=dict)

    @property
    def spec(self) -> CellSpec:
        return self.record.spec


def are_of_several_cards(records: Sequence[RunRecord]) -> bool:
    """Whether these records are of emulated cards of more than one kind, which no page of one card can show."""
    return all(record.instrument == "emulated" for record in records) and len(_names(records)) > 1


def card_documents(
    records: Sequence[RunRecord], model: MemoryModel | None, origin: Sequence[str], command: str
) -> list[Document]:
    """memory; with a ``model`` fits and largest, too."""
    cards, by_card = _cards(records), _by_card(records)
    where = {"origin": origin, "command": command}
    found = [_memory(by_card, cards, where)]
    if model is None:
        return [document.of("emulated") for document in found]
    found.append(fits(by_card, cards, model, where))
    return [*(document.of("emulated") for document in found), largest(cards, command)]


def _names(records: Iterable[RunRecord]) -> set[str]:
    return {record.environment.device_name for record in records}


def _cards(records: Sequence[RunRecord]) -> list[Gpu]:
    """The cards, small ones first."""
    found = {gpu.short_name: gpu for name in _names(records) if (gpu := catalog.gpu_seen(name)) is not None}
    return sorted(found.values(), key=lambda gpu: (gpu.total_bytes or 0, gpu.short_name))


def _memory(by_card: ByCard, cards: Sequence[Gpu], where: dict[str, Any]) -> Document:
    rows = _rows(by_card)
    shown = [row for row in rows if _is_usual(row.spec)]
    tables = [
        Table(
            title=method, columns=[*_cell_columns(), *_reserved_columns(cards, group)], rows=group,
            note="Columns of cards: reserved, GiB.",
        )
        for method in get_args(Method)
        if (group := [row for row in shown if row.spec.method == method])
    ]  # fmt: skip
    others = len(rows) - len(shown)
    return Document(
        name="memory", title="Memory by model, method, length and card",
        about=[
            "What a cell took on each emulated card: allocated by tensors at the highest moment of the training steps, "
            "and reserved by the caching allocator, which is what a card must have beside the CUDA context. A dash: "
            "that cell was not run on that card. Allocated differs by card through cuBLAS's workspaces and attention's "
            "kernels; the largest of them is shown, the CSV has all.",
        ],
        remarks=[f"{others} cells of other recipes (optimizers, quantisations) are in memory.csv."] if others else [],
        tables=tables, data=Table(title="Memory by card", columns=_memory_data(), rows=list(_attempts(rows))), **where,
    )  # fmt: skip


#: What a recipe may change; where all are the defaults, it is the one that most take, in any precision.
_RECIPE = (
    "optim", "quant", "kbit_prep", "lora_r", "lora_targets", "lora_dtype", "lora_dropout", "dora", "attn",
    "grad_accum", "padding", "torch_compile", "fused_linear_cross_entropy", "alloc_conf", "limit_vram",
)  # fmt: skip


def _is_usual(spec: CellSpec) -> bool:
    sizes = {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
    usual = resolve(model=spec.model, num_layers=spec.num_layers, method=spec.method, device=spec.device, **sizes)
    return all(getattr(spec, name) == getattr(usual, name) for name in _RECIPE)


def _rows(by_card: ByCard) -> list[_Row]:
    """A row per cell, small models first; of each card the attempt that counts."""
    rows: dict[str, _Row] = {}
    for card, found in by_card.items():
        for fingerprint, record in found.items():
            rows.setdefault(fingerprint, _Row(record=record)).by_card[card] = record
    return sorted(rows.values(), key=_order)


def _by_card(records: Sequence[RunRecord]) -> ByCard:
    """Short name of a card → fingerprint → the attempt that counts."""
    found = {}
    for name in sorted(_names(records)):
        gpu = catalog.gpu_seen(name)
        own = [record for record in records if record.environment.device_name == name]
        found[gpu.short_name if gpu else name] = store.latest_by_fingerprint(own)
    return found


def _order(row: _Row) -> tuple:
    spec, num_params = row.spec, _num_params(row)
    size = float("inf") if num_params is None else num_params
    return (size, spec.model_label, spec.quant, spec.num_tokens, spec.seq_len, spec.cell_id, row.record.fingerprint)


def _num_params(row: _Row) -> int | None:
    return next((record.facts.num_params for record in row.by_card.values() if record.facts), None)


def _cell_columns() -> list[Column]:
    def most(row: _Row) -> int | None:
        return max((one.peak.allocated_bytes for one in row.by_card.values() if one.peak is not None), default=None)

    return [
        Column("model", "model", lambda row: row.spec.model_label),
        Column("num_params", "parameters", _num_params, params_in_words, is_number=True),
        Column("setting", "setting", lambda row: details_in_words(row.spec)),
        Column("batch_by_length", "batch × length", lambda row: size_in_words(row.spec), is_number=True),
        Column("gradient_checkpointing", "checkpointing", lambda row: row.spec.gradient_checkpointing, yes_no),
        _GIB.amount("allocated_bytes", "allocated", most),
    ]


def _reserved_columns(cards: Sequence[Gpu], rows: Sequence[_Row]) -> list[Column]:
    """A column for each card that ran one of the rows."""

    def value(row: _Row, card: str) -> RunRecord | None:
        return row.by_card.get(card)

    def text(record: RunRecord) -> str:
        if record.peak is None or record.peak.reserved_bytes is None:
            return "out of memory" if record.outcome.kind == "oom" else record.outcome.kind
        return _GIB.text(record.peak.reserved_bytes)

    names = [gpu.short_name for gpu in cards if any(gpu.short_name in row.by_card for row in rows)]
    return [Column(name, name, partial(value, card=name), text, is_number=True) for name in names]


def _attempts(rows: Sequence[_Row]) -> Iterator[tuple[_Row, str, RunRecord]]:
    for row in rows:
        for card, record in sorted(row.by_card.items()):
            yield row, card, record


def _memory_data() -> list[Column]:
    def of_spec(name: str) -> Column:
        return Column(name, None, lambda one: getattr(one[0].spec, name))

    def of_peak(name: str) -> Column:
        return Column(name, None, lambda one: one[2].peak and getattr(one[2].peak, name))

    return [
        Column("card", None, lambda one: one[1]),
        Column("model", None, lambda one: one[0].spec.model_label),
        Column("num_params", None, lambda one: _num_params(one[0])),
        *map(of_spec, ("method", "quant", "batch_size", "seq_len", "grad_accum", "gradient_checkpointing", "optim")),
        Column("instrument", None, lambda one: one[2].instrument),
        Column("outcome", None, lambda one: one[2].outcome.kind),
        *map(of_peak, ("allocated_bytes", "reserved_bytes", "device_bytes")),
        Column("cell_id", None, lambda one: one[0].spec.cell_id),
        Column("fingerprint", None, lambda one: one[2].fingerprint),
    ]
