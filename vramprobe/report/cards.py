"""Emulated records of several cards → three pages: memory by card, what fits where, the largest batch and length.

In: emulated records of more than one card. Out: Documents. What was run on an emulated card is shown as that; what a
recipe that ships predicts has a mark. Never measures or records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.options import OPTIONS
from vramprobe.predict.at_hand import shipped_alone
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.card_fits import ByCard, fits
from vramprobe.report.card_largest import largest
from vramprobe.report.columns import IN_GIB, size_in_words, yes_no
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    import pandas as pd


def are_of_several_cards(records: Sequence[RunRecord]) -> bool:
    """Return True if these records are of emulated cards of more than one kind, which no page of one card can show."""
    return all(record.instrument == "emulated" for record in records) and len(_names(records)) > 1


@shipped_alone()
def card_documents(records: Sequence[RunRecord], origin: Sequence[str], command: str) -> list[Document]:
    """memory, fits and largest, the same on every machine, whatever was recorded there."""
    cards, by_card = _cards(records), _by_card(records)
    where = {"origin": origin, "command": command}
    found = [_memory(by_card, cards, where), fits(by_card, cards, where)]
    return [*(document.of("emulated") for document in found), largest(cards, command)]


def _names(records: Iterable[RunRecord]) -> set[str]:
    return {record.environment.device_name for record in records}


def _cards(records: Sequence[RunRecord]) -> list[Gpu]:
    """The cards, small ones first."""
    found = {gpu.short_name: gpu for name in _names(records) if (gpu := catalog.gpu_seen(name)) is not None}
    return sorted(found.values(), key=lambda gpu: (gpu.total_bytes or 0, gpu.short_name))


def _memory(by_card: ByCard, cards: Sequence[Gpu], where: dict[str, Any]) -> Document:
    frame = _frame(by_card)
    cells = frame.drop_duplicates("fingerprint").set_index("fingerprint")
    shown = cells[[_is_usual(spec) for spec in cells.spec]].assign(
        setting=lambda found: found.spec.map(details_in_words),
        batch_by_length=lambda found: found.spec.map(size_in_words),
        allocated_bytes=frame.groupby("fingerprint").allocated_bytes.max(),
    )
    shown = shown.join(frame.pivot(index="fingerprint", columns="card", values="reserved"))
    tables = []
    for method, group in shown.groupby("method"):
        ran = [gpu.short_name for gpu in cards if gpu.short_name in group and group[gpu.short_name].notna().any()]
        columns = [*_CELL_COLUMNS, *(Column(name, name, is_number=True) for name in ran)]
        tables.append(
            Table(title=str(method), columns=columns, rows=rows_of(group), note="Columns of cards: reserved, GiB.")
        )
    others = len(cells) - len(shown)
    return Document(
        name="memory",
        title="Memory by model, method, length and card",
        about=[
            "What a cell took on each emulated card: allocated by tensors at the highest moment of the training steps, "
            "and reserved by the caching allocator, which is what a card must have beside the CUDA context. A dash: "
            "that cell was not run on that card. Allocated differs by card through cuBLAS's workspaces and attention's "
            "kernels; the largest of them is shown, the CSV has all."
        ],
        remarks=[f"{others} cells of other recipes (optimizers, quantisations) are in memory.csv."] if others else [],
        tables=tables,
        data=Table(title="Memory by card", columns=[Column(name) for name in _DATA], rows=rows_of(frame[_DATA])),
        **where,
    )


#: What a recipe may change; where all are the defaults, it is the one that most take, in any precision.
_RECIPE = [name for name, option in OPTIONS.items() if option.is_recipe]


def _is_usual(spec: CellSpec) -> bool:
    sizes = {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
    usual = resolve(model=spec.model, num_layers=spec.num_layers, method=spec.method, device=spec.device, **sizes)
    return all(getattr(spec, name) == getattr(usual, name) for name in _RECIPE)


def _by_card(records: Sequence[RunRecord]) -> ByCard:
    """Short name of a card → fingerprint → the attempt that counts."""
    found = {}
    for name in sorted(_names(records)):
        gpu = catalog.gpu_seen(name)
        own = [record for record in records if record.environment.device_name == name]
        found[gpu.short_name if gpu else name] = store.latest_by_fingerprint(own)
    return found


def _frame(by_card: ByCard) -> pd.DataFrame:
    """A row per attempt that counts, small models first."""
    import pandas as pd

    rows = [
        {
            "card": card,
            "model": record.spec.model_label,
            "num_params": record.facts and record.facts.num_params,
            **{name: getattr(record.spec, name) for name in _OF_SPEC},
            "instrument": record.instrument,
            "outcome": record.outcome.kind,
            **{name: record.peak and getattr(record.peak, name) for name in _TIERS},
            "cell_id": record.spec.cell_id,
            "fingerprint": record.fingerprint,
            "spec": record.spec,
            "num_tokens": record.spec.num_tokens,
            "reserved": _reserved(record),
        }
        for card, found in by_card.items()
        for record in found.values()
    ]
    frame = pd.DataFrame(rows).convert_dtypes()
    frame["num_params"] = frame.groupby("fingerprint").num_params.transform("first")  # a failure may not know it
    return frame.sort_values(
        ["num_params", "model", "quant", "num_tokens", "seq_len", "cell_id", "fingerprint", "card"]
    )


def _reserved(record: RunRecord) -> str:
    if record.peak is None or record.peak.reserved_bytes is None:
        return "out of memory" if record.outcome.kind == "oom" else record.outcome.kind
    return IN_GIB.text(record.peak.reserved_bytes)


_OF_SPEC = ("method", "quant", "batch_size", "seq_len", "grad_accum", "gradient_checkpointing", "optim")
_TIERS = ("allocated_bytes", "reserved_bytes", "device_bytes")
#: The columns of memory.csv.
_DATA = ["card", "model", "num_params", *_OF_SPEC, "instrument", "outcome", *_TIERS, "cell_id", "fingerprint"]
_CELL_COLUMNS = [
    Column("model", "model"),
    Column("num_params", "parameters", text=params_in_words, is_number=True),
    Column("setting", "setting"),
    Column("batch_by_length", "batch × length", is_number=True),
    Column("gradient_checkpointing", "checkpointing", text=yes_no),
    IN_GIB.amount("allocated_bytes", "allocated"),
]
