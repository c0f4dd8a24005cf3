"""A fit and emulated records of several cards → what fits where: each model of the catalog on each card.

In: the records by card, the cards and the fit for CUDA. Out: a Document. What was run on an emulated card goes before
what is predicted, which has a mark; what the fit refuses to vouch for is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.recommend.recipes import without_bf16
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.columns import Unit
from vramprobe.report.definition import UNKNOWN, Column, Document, Table
from vramprobe.spec import CellSpec, Method, resolve
from vramprobe.units import GIB

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel
    from vramprobe.predict.prediction import Prediction

#: The cell whose verdicts and largest sizes are tabled: what most guides assume.
SEQ_LEN, BATCH_SIZE = 2048, 1
#: What stands where not even one fits.
NO = "no"
_MARK = "≈ "
_GIB = Unit("GiB", GIB, 2)
#: Short name of a card → fingerprint → the attempt that counts.
ByCard = Mapping[str, Mapping[str, RunRecord]]


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
    words: dict[str, Any] = {"method": method, "gradient_checkpointing": True}
    if gpu.bf16_dense_tflops is None:
        words |= without_bf16(words)
    return resolve(model=model, device="cuda", **({"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN} | sizes), **words)


def fits(ran: ByCard, cards: Sequence[Gpu], model: MemoryModel, where: dict[str, Any]) -> Document:
    """fits: a table per method, a row per model that the arithmetic knows, a column per card."""
    rows = [row for entry in catalog.list_models() for method in get_args(Method)
            if (row := _fit(entry, method, cards, model, ran)) is not None]  # fmt: skip
    rows.sort(key=lambda row: (row.num_params, row.model))
    columns = [
        Column("model", "model", lambda row: row.model),
        Column("num_params", "parameters", lambda row: row.num_params, params_in_words, is_number=True),
        Column("allocated", f"{_MARK.strip()} allocated, GiB", lambda row: row.needed, _allocated_text, is_number=True),
        *(Column(gpu.short_name, gpu.short_name, partial(_verdict_on, card=gpu.short_name)) for gpu in cards),
    ]
    tables = [
        Table(title=f"{method}: {BATCH_SIZE} × {SEQ_LEN} tokens, checkpointing on", columns=columns,
              rows=[row for row in rows if row.method == method], note=conditions(method, cards))
        for method in get_args(Method)
    ]  # fmt: skip
    data = [(row, gpu) for row in rows for gpu in cards]
    return Document(
        name="fits", title="What fits where",
        about=[
            f"After {_MARK.strip()} it is predicted; without, that cell was run on that emulated card, where it ended "
            "well (fits) or ran out of memory (no). Predicted: fits, where the upper end of the interval leaves room; "
            "tight, where only the value does, or cached blocks have to go back; no. By arithmetic where that is "
            "plain, else by the fit to emulated runs, which replays the allocator. Allocated is what tensors take at "
            f"the highest moment on the largest card. A dash ({UNKNOWN}): the fit refuses to vouch for it. Models that "
            "the arithmetic does not know, or that have fewer learned positions, have no row.",
        ],
        tables=tables, data=Table(title="What fits where", columns=_fits_data(), rows=data), **where,
    )  # fmt: skip


def _fit(
    entry: catalog.ModelEntry, method: Method, cards: Sequence[Gpu], model: MemoryModel,
    ran: ByCard,
) -> _Fit | None:  # fmt: skip
    """None where there is no arithmetic for the model, or it has fewer positions than the cell has tokens."""
    from vramprobe.architecture import UnsupportedArchitecture, architecture
    from vramprobe.predict.prediction import predict, verdict

    try:
        num_params = architecture(entry.config).num_params
        specs = [standard_cell(entry.name, method, gpu) for gpu in cards]
    except (UnsupportedArchitecture, SpecError):
        return None
    replayed: dict[tuple, Prediction | None] = {}
    verdicts, predictions = {}, {}
    for gpu, spec in zip(cards, specs, strict=True):
        found: Prediction | None = predict(spec, gpu=gpu)
        judged = verdict(found, gpu)
        is_plain = judged.verdict == "fits" or found.peak_allocated_bytes.value > judged.usable_bytes
        if not is_plain:  # only the fit, which replays the allocator, knows
            key = (spec.fingerprint, gpu.has_flash, gpu.blas_workspace_bytes, gpu.num_sms, gpu.total_bytes)
            if key not in replayed:
                replayed[key] = _replayed(spec, model, gpu)
            found = replayed[key]
        if found is not None:
            predictions[gpu.short_name] = found
            verdicts[gpu.short_name] = _MARK + verdict(found, gpu).verdict.replace("does not fit", NO)
        record = ran.get(gpu.short_name, {}).get(spec.fingerprint)
        if record is not None and record.outcome.kind in ("ok", "oom"):
            verdicts[gpu.short_name] = "fits" if record.outcome.kind == "ok" else NO
    return _Fit(
        model=entry.name, method=method, num_params=num_params, verdicts=verdicts, predictions=predictions
    )  # fmt: skip


def _replayed(spec: CellSpec, model: MemoryModel, gpu: Gpu) -> Prediction | None:
    """What the fit says; null where it refuses."""
    from vramprobe.predict.prediction import predict, with_retries

    try:
        return with_retries(predict(spec, model, gpu=gpu, replays=True), spec, gpu)
    except VramprobeError:
        return None


def _verdict_on(row: _Fit, card: str) -> str | None:
    return row.verdicts.get(card)


def _allocated_text(prediction: Prediction) -> str:
    return _GIB.text(prediction.peak_allocated_bytes.value)


def conditions(method: Method, cards: Sequence[Gpu]) -> str:
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
