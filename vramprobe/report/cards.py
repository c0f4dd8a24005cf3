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
from vramprobe.errors import VramprobeError
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.columns import Unit, size_in_words, yes_no
from vramprobe.report.definition import UNKNOWN, Column, Document, Table
from vramprobe.spec import CellSpec, Method, resolve
from vramprobe.units import GIB

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel
    from vramprobe.predict.prediction import Prediction

#: The cell whose verdicts and largest sizes are tabled: what most guides assume.
SEQ_LEN, BATCH_SIZE = 2048, 1
#: Models whose largest batch and length are tabled: those that people ask about, small to large.
LARGEST_OF = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "gemma-3-4b", "mistral-7b-v0.3",
    "llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3-14b", "gpt-oss-20b", "mistral-small-24b", "gemma-3-27b",
    "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-72b",
)  # fmt: skip
_MARK = "≈ "
_NO = "no"
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
    cards = _cards(records)
    where = {"origin": origin, "command": command}
    found = [_memory(records, cards, where)]
    if model is not None:
        found += [_fits(records, cards, model, where), _largest(cards, model, where)]
    return [document.of("emulated") for document in found]


def _names(records: Iterable[RunRecord]) -> set[str]:
    return {record.environment.device_name for record in records}


def _cards(records: Sequence[RunRecord]) -> list[Gpu]:
    """The cards, small ones first."""
    found = {gpu.short_name: gpu for name in _names(records) if (gpu := catalog.gpu_seen(name)) is not None}
    return sorted(found.values(), key=lambda gpu: (gpu.total_bytes or 0, gpu.short_name))


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(records: Sequence[RunRecord], cards: Sequence[Gpu], where: dict[str, Any]) -> Document:
    rows = _rows(records)
    tables = [
        Table(
            title=method, columns=[*_cell_columns(), *_reserved_columns(cards, group)], rows=group,
            note="Columns of cards: reserved, GiB.",
        )
        for method in get_args(Method)
        if (group := [row for row in rows if row.spec.method == method])
    ]  # fmt: skip
    return Document(
        name="memory", title="Memory by model, method, length and card",
        about=[
            "What a cell took on each emulated card: allocated by tensors at the highest moment of the training steps, "
            "and reserved by the caching allocator, which is what a card must have beside the CUDA context. A dash: "
            "that cell was not run on that card. Allocated differs by card through cuBLAS's workspaces and attention's "
            "kernels; the largest of them is shown, the CSV has all.",
        ],
        tables=tables, data=Table(title="Memory by card", columns=_memory_data(), rows=list(_attempts(rows))), **where,
    )  # fmt: skip


def _rows(records: Sequence[RunRecord]) -> list[_Row]:
    """A row per cell, small models first; of each card the attempt that counts."""
    rows: dict[str, _Row] = {}
    for card, found in _by_card(records).items():
        for fingerprint, record in found.items():
            rows.setdefault(fingerprint, _Row(record=record)).by_card[card] = record
    return sorted(rows.values(), key=_order)


def _by_card(records: Sequence[RunRecord]) -> dict[str, dict[str, RunRecord]]:
    """Short name of a card → fingerprint → the attempt that counts."""
    found = {}
    for name in sorted(_names(records)):
        gpu = catalog.gpu_seen(name)
        own = [record for record in records if record.environment.device_name == name]
        found[gpu.short_name if gpu else name] = store.latest_by_fingerprint(own)
    return found


def _order(row: _Row) -> tuple:
    facts = next((record.facts for record in row.by_card.values() if record.facts), None)
    spec = row.spec
    return (facts.num_params if facts else float("inf"), spec.model_label, spec.quant, spec.num_tokens, spec.seq_len,
            spec.cell_id, row.record.fingerprint)  # fmt: skip


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
        Column("setting", None, lambda one: details_in_words(one[0].spec)),
        Column("instrument", None, lambda one: one[2].instrument),
        Column("outcome", None, lambda one: one[2].outcome.kind),
        *map(of_peak, ("allocated_bytes", "reserved_bytes", "device_bytes")),
        Column("cell_id", None, lambda one: one[0].spec.cell_id),
        Column("fingerprint", None, lambda one: one[2].fingerprint),
    ]


# -- what fits where ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A model under one method: the verdict on each card by its short name, and what it is of."""

    model: str
    method: str
    num_params: int
    verdicts: dict[str, str]  # fits, tight, no; with a mark where nothing was run
    predictions: dict[str, Prediction]

    @property
    def needed(self) -> Prediction | None:
        """That of the largest card."""
        return next(reversed(self.predictions.values()), None)


def standard_cell(model: str, method: Method, gpu: Gpu, **sizes: int) -> CellSpec:
    """What most guides assume, as it runs on ``gpu``: bf16, or on a card without fp16, trained weights then in fp32."""
    words: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, **sizes, "gradient_checkpointing": True}
    if gpu.bf16_dense_tflops is None:
        words |= {"dtype": "fp32" if method == "full" else "fp16", "autocast": "fp16"}
    return resolve(model=model, method=method, device="cuda", **words)


def _fits(
    records: Sequence[RunRecord], cards: Sequence[Gpu], model: MemoryModel, where: dict[str, Any]
) -> Document:  # fmt: skip
    ran = _by_card(records)
    rows = [row for entry in catalog.list_models() for method in get_args(Method)
            if (row := _fit(entry, method, cards, model, ran)) is not None]  # fmt: skip
    rows.sort(key=lambda row: (row.num_params, row.model))
    columns = [
        Column("model", "model", lambda row: row.model),
        Column("num_params", "parameters", lambda row: row.num_params, params_in_words, is_number=True),
        Column("reserved", f"{_MARK.strip()} reserved, GiB", lambda row: row.needed, _reserved_text, is_number=True),
        *(Column(gpu.short_name, gpu.short_name, partial(_verdict_on, card=gpu.short_name)) for gpu in cards),
    ]
    tables = [
        Table(title=f"{method}: {BATCH_SIZE} × {SEQ_LEN} tokens, checkpointing on", columns=columns,
              rows=[row for row in rows if row.method == method], note=_conditions(method, cards))
        for method in get_args(Method)
    ]  # fmt: skip
    data = [(row, gpu) for row in rows for gpu in cards]
    return Document(
        name="fits", title="What fits where",
        about=[
            f"After {_MARK.strip()} the fit predicts it; without, that cell was run on that emulated card, where it "
            "ended well (fits) or ran out of memory (no). Predicted: fits, where the upper end of the interval leaves "
            "room; tight, where the value does and that does not; no. Reserved is what is predicted for the largest "
            f"card. A dash ({UNKNOWN}): the fit refuses to vouch for it.",
        ],
        tables=tables, data=Table(title="What fits where", columns=_fits_data(), rows=data), **where,
    )  # fmt: skip


def _fit(
    entry: catalog.ModelEntry, method: Method, cards: Sequence[Gpu], model: MemoryModel,
    ran: dict[str, dict[str, RunRecord]],
) -> _Fit | None:  # fmt: skip
    """None where there is no arithmetic for the model."""
    from vramprobe.architecture import UnsupportedArchitecture, architecture
    from vramprobe.predict.prediction import predict, verdict

    try:
        num_params = architecture(entry.config).num_params
    except UnsupportedArchitecture:
        return None
    predicted: dict[tuple, Prediction | None] = {}
    verdicts, predictions = {}, {}
    for gpu in cards:
        spec = standard_cell(entry.name, method, gpu)
        key = (spec.dtype, spec.autocast, gpu.has_flash, gpu.prefers_cudnn, gpu.blas_workspace_bytes)
        if key not in predicted:  # the same on all cards with these kernels
            try:
                predicted[key] = predict(spec, model, gpu=gpu, replays=True)
            except VramprobeError:
                predicted[key] = None
        record = ran.get(gpu.short_name, {}).get(spec.fingerprint)
        if (found := predicted[key]) is not None:
            predictions[gpu.short_name] = found
            verdicts[gpu.short_name] = _MARK + verdict(found, gpu).verdict.replace("does not fit", _NO)
        if record is not None and record.outcome.kind in ("ok", "oom"):
            verdicts[gpu.short_name] = "fits" if record.outcome.kind == "ok" else _NO
    return _Fit(
        model=entry.name, method=method, num_params=num_params, verdicts=verdicts, predictions=predictions
    )  # fmt: skip


def _verdict_on(row: _Fit, card: str) -> str | None:
    return row.verdicts.get(card)


def _reserved_text(prediction: Prediction) -> str:
    return UNKNOWN if prediction.reserved_bytes is None else _GIB.text(prediction.reserved_bytes.value)


def _conditions(method: Method, cards: Sequence[Gpu]) -> str:
    """The recipe of every row, and that of the cards without bf16."""
    without = [gpu for gpu in cards if gpu.bf16_dense_tflops is None]
    others = [gpu for gpu in cards if gpu.bf16_dense_tflops is not None]
    said = [
        (f"On {', '.join(gpu.short_name for gpu in some)}: " if without and others else "")
        + f"{details_in_words(standard_cell('llama-3.1-8b', method, some[0]))}."
        for some in (others, without) if some
    ]  # fmt: skip
    return " ".join(said)


def _fits_data() -> list[Column]:
    def of(one: tuple[_Fit, Gpu], name: str, part: str) -> int | None:
        found = one[0].predictions.get(one[1].short_name)
        interval = found and getattr(found, name)
        return interval and getattr(interval, part)

    return [
        Column("model", None, lambda one: one[0].model),
        Column("num_params", None, lambda one: one[0].num_params),
        Column("method", None, lambda one: one[0].method),
        Column("card", None, lambda one: one[1].short_name),
        Column("verdict", None, lambda one: (one[0].verdicts.get(one[1].short_name) or "").removeprefix(_MARK)),
        Column("basis", None, _basis),
        *(
            Column(f"predicted_{tier}{suffix}", None, partial(of, name=name, part=part))
            for tier, name in (("allocated", "peak_allocated_bytes"), ("reserved", "reserved_bytes"))
            for part, suffix in (("value", "_bytes"), ("high", "_high_bytes"))
        ),
    ]


def _basis(one: tuple[_Fit, Gpu]) -> str:
    verdict = one[0].verdicts.get(one[1].short_name)
    return "" if verdict is None else "predicted" if verdict.startswith(_MARK) else "emulated"


# -- the largest batch and length --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Most:
    """A model under one method: the largest batch or length that fits on each card by its short name; 0: none."""

    model: str
    method: str
    question: str
    counts: dict[str, int]


def _largest(cards: Sequence[Gpu], model: MemoryModel, where: dict[str, Any]) -> Document:
    questions = {
        "batch_size": f"the largest batch of {SEQ_LEN:,} tokens", "seq_len": f"the largest length, batch {BATCH_SIZE}"
    }  # fmt: skip
    rows = [
        _Most(model=name, method=method, question=question,
              counts={gpu.short_name: _count(question, name, method, gpu) for gpu in cards})
        for question in questions for method in get_args(Method) for name in LARGEST_OF
    ]  # fmt: skip
    columns = [
        Column("model", "model", lambda row: row.model),
        *(Column(gpu.short_name, gpu.short_name, partial(_count_on, card=gpu.short_name), _count_text, is_number=True)
          for gpu in cards),
    ]  # fmt: skip
    tables = [
        Table(title=f"{method}: {words}", columns=columns, note=_conditions(method, cards),
              rows=[row for row in rows if (row.method, row.question) == (method, question)])
        for question, words in questions.items() for method in get_args(Method)
    ]  # fmt: skip
    data = [
        Column("model", None, lambda one: one[0].model),
        Column("method", None, lambda one: one[0].method),
        Column("question", None, lambda one: one[0].question),
        Column("card", None, lambda one: one[1].short_name),
        Column("largest", None, lambda one: one[0].counts[one[1].short_name]),
    ]
    pairs = [(row, gpu) for row in rows for gpu in cards]
    return Document(
        name="largest", title="The largest batch and length on each card",
        about=[
            "Predicted by arithmetic alone, checkpointing on, and nothing here was run: the most whose upper end of "
            "the interval leaves room for the CUDA context and a margin (fits). vramprobe predict --max-batch and "
            f"--max-seq-len answer for any cell. {_NO}: not even 1 fits so. A length may be more than a model was "
            "trained for.",
        ],
        tables=tables, data=Table(title="The largest batch and length", columns=data, rows=pairs), **where,
    )  # fmt: skip


def _count(question: str, name: str, method: Method, gpu: Gpu) -> int:
    from vramprobe.predict.largest import Judged, largest_count
    from vramprobe.predict.prediction import predict, verdict

    def judge(spec: CellSpec) -> Judged:
        prediction = predict(spec, gpu=gpu)
        return Judged(prediction, verdict(prediction, gpu))

    try:
        found = largest_count(question, standard_cell(name, method, gpu), judge)
    except VramprobeError:  # not even 1
        return 0
    return int(found.fits.value) if found.fits else 0


def _count_on(row: _Most, card: str) -> int:
    return row.counts[card]


def _count_text(count: int) -> str:
    return f"{count:,}" if count else _NO
