"""A fit and emulated records of several cards → what fits where: each model of the catalog on each card.

In: the records by card, the cards and the fit for CUDA. Out: a Document. What was run on an emulated card goes before
what is predicted, which has a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError
from vramprobe.recommend.settings import without_bf16
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.columns import ByteUnit
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.spec import CellSpec, Method, resolve
from vramprobe.units import GIB

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.model.card_fit import CardFit
    from vramprobe.predict.prediction import Prediction

#: The cell whose verdicts and largest sizes are tabled: what most guides assume.
SEQ_LEN, BATCH_SIZE = 2048, 1
#: What stands where not even one fits.
NO = "no"
_MARK = "≈ "
_GIB = ByteUnit("GiB", GIB, 2)
#: The columns of fits.csv.
_DATA = (
    *("model", "num_params", "method", "card", "verdict", "basis"),
    *("predicted_allocated_bytes", "predicted_allocated_high_bytes"),
    *("predicted_reserved_bytes", "predicted_reserved_high_bytes"),
)
#: Short name of a card → fingerprint → the attempt that counts.
ByCard = Mapping[str, Mapping[str, RunRecord]]


def standard_cell(model: str, method: Method, gpu: Gpu, **sizes: int) -> CellSpec:
    """Return the cell that most guides assume, as it runs on ``gpu``: bf16, else fp16 with trained weights in fp32."""
    words: dict[str, Any] = {"method": method, "gradient_checkpointing": True}
    if gpu.bf16_dense_tflops is None:
        words |= without_bf16(words)
    return resolve(model=model, device="cuda", **({"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN} | sizes), **words)


def fits(ran: ByCard, cards: Sequence[Gpu], model: CardFit, where: dict[str, Any]) -> Document:
    """fits: a table per method, a row per model that the arithmetic knows, a column per card."""
    import pandas as pd

    rows = [
        row
        for entry in catalog.list_models()
        for method in get_args(Method)
        for row in _verdicts(entry, method, cards, model, ran)
    ]
    frame = pd.DataFrame(rows).convert_dtypes().sort_values(["num_params", "model"], kind="stable")
    columns = [
        Column("model", "model"),
        Column("num_params", "parameters", text=params_in_words, is_number=True),
        Column("allocated_bytes", f"{_MARK.strip()} allocated, GiB", text=_GIB.text, is_number=True),
        *(Column(gpu.short_name, gpu.short_name) for gpu in cards),
    ]
    tables = [
        Table(
            title=f"{method}: {BATCH_SIZE} × {SEQ_LEN} tokens, checkpointing on",
            columns=columns,
            rows=_by_card(frame[frame.method == method]),
            note=conditions(method, cards),
        )
        for method in get_args(Method)
    ]
    return Document(
        name="fits",
        title="What fits where",
        about=[
            f"After {_MARK.strip()} it is predicted; without, that cell was run on that emulated card, where it ended "
            "well (fits) or ran out of memory (no). Predicted: fits, where the upper end of the interval leaves room; "
            "tight, where only the value does, or cached blocks have to go back; no. By arithmetic where that is "
            "plain, else by the fit to emulated runs, which replays the allocator. Allocated is what tensors take at "
            "the highest moment on the largest card. Models that the arithmetic does not know, or that have fewer "
            "learned positions, have no row.",
        ],
        tables=tables,
        data=Table(title="What fits where", columns=[Column(name) for name in _DATA], rows=rows_of(frame)),
        **where,
    )


def _by_card(found: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per model, small ones first, with each card's verdict; allocated as predicted on the largest card."""
    cells = ["num_params", "model"]
    wide = found.pivot(index=cells, columns="card", values="shown")
    wide["allocated_bytes"] = found.groupby(cells).predicted_allocated_bytes.last()
    return rows_of(wide.reset_index())


def _verdicts(
    entry: catalog.ModelEntry, method: Method, cards: Sequence[Gpu], model: CardFit, ran: ByCard
) -> list[dict[str, Any]]:
    """A row per card; none without arithmetic for the cell, or where the model has fewer positions than it tokens."""
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.bounds.tensors import tensors
    from vramprobe.kernels.chip import chip_like
    from vramprobe.predict.predict import predict
    from vramprobe.predict.verdict import verdict
    from vramprobe.rules.arithmetic import counted_architecture

    try:
        specs = [standard_cell(entry.name, method, gpu) for gpu in cards]
        tensors(specs[0], arch := counted_architecture(specs[0]))
    except (UnsupportedArchitecture, SpecError):
        return []
    replayed: dict[tuple, Prediction] = {}
    rows = []
    for gpu, spec in zip(cards, specs, strict=True):
        found = predict(spec, gpu=gpu)
        judged = verdict(found, gpu)
        is_plain = judged.verdict == "fits" or found.peak_allocated_bytes.value > judged.usable_bytes
        if not is_plain:  # only the fit, which replays the allocator, knows
            sizes = (gpu.total_bytes, gpu.cuda_total_bytes, gpu.context_bytes)
            key = (spec.fingerprint, chip_like(gpu), gpu.blas_workspace_bytes, gpu.num_sms, *sizes)
            if key not in replayed:
                replayed[key] = predict(spec, model, gpu=gpu, replays=True, retries=True)
            found = replayed[key]
        said, basis = verdict(found, gpu).verdict.replace("does not fit", NO), "predicted"
        record = ran.get(gpu.short_name, {}).get(spec.fingerprint)
        if record is not None and record.outcome.kind in ("ok", "oom"):
            said, basis = "fits" if record.outcome.kind == "ok" else NO, "emulated"
        allocated, reserved = found.peak_allocated_bytes, found.reserved_bytes
        values = (
            *(entry.name, arch.num_params, method, gpu.short_name, said, basis),
            *(allocated.value, allocated.high),
            *(reserved and reserved.value, reserved and reserved.high),
        )
        shown = f"{_MARK}{said}" if basis == "predicted" else said
        rows.append(dict(zip(_DATA, values, strict=True)) | {"shown": shown})
    return rows


def conditions(method: Method, cards: Sequence[Gpu]) -> str:
    """The recipe of every row, and that of the cards without bf16."""
    without = [gpu for gpu in cards if gpu.bf16_dense_tflops is None]
    others = [gpu for gpu in cards if gpu.bf16_dense_tflops is not None]
    said = [
        (f"On {', '.join(gpu.short_name for gpu in some)}: " if without and others else "")
        + f"{details_in_words(standard_cell('llama-3.1-8b', method, some[0]))}."
        for some in (others, without)
        if some
    ]
    return " ".join(said)
