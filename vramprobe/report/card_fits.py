"""Emulated records of several cards → what fits where: each model of the catalog on each card.

In: the records by card, and the cards. Out: a Document. What was run on an emulated card goes before what a recipe at
hand predicts, which has a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.choices import Method
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.recommend.settings import without_bf16
from vramprobe.records.record import RunRecord
from vramprobe.report.by_size import details_in_words, params_in_words
from vramprobe.report.columns import IN_GIB
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.predict.prediction import Prediction


#: The cell whose verdicts and largest sizes are tabled: a length that most recipes of one row were recorded around.
SEQ_LEN, BATCH_SIZE = 4096, 1
#: What stands where not even one fits.
NO = "no"
_MARK = "≈ "
#: The columns of fits.csv.
_SIZES = (
    *("predicted_allocated_bytes", "predicted_allocated_high_bytes"),
    *("predicted_reserved_bytes", "predicted_reserved_high_bytes"),
)
_DATA = ("model", "num_params", "method", "card", "verdict", "basis", *_SIZES)
#: Short name of a card → fingerprint → the attempt that counts.
ByCard = Mapping[str, Mapping[str, RunRecord]]


def standard_cell(model: str, method: Method, gpu: Gpu, **sizes: int) -> CellSpec:
    """Return the cell of the tables as it runs on ``gpu``: bf16, else fp16 with trained weights in fp32."""
    words: dict[str, Any] = {"method": method, "gradient_checkpointing": True, "batch_size": BATCH_SIZE}
    if gpu.bf16_dense_tflops is None:
        words |= without_bf16(words)
    words |= {"seq_len": SEQ_LEN} | sizes
    return resolve(model=model, device="cuda", **words)


def fits(ran: ByCard, cards: Sequence[Gpu], where: dict[str, Any]) -> Document:
    """fits: a table per method, a row per model that was run or has a recipe that ships, a column per card."""
    import pandas as pd

    rows = [
        row
        for entry in catalog.list_models()
        for method in get_args(Method)
        for row in _verdicts(entry.name, method, cards, ran)
    ]
    without = [entry.name for entry in catalog.list_models() if entry.name not in {row["model"] for row in rows}]
    frame = pd.DataFrame(rows).convert_dtypes().sort_values(["num_params", "model"], kind="stable")
    columns = [
        Column("model", "model"),
        Column("num_params", "parameters", text=params_in_words, is_number=True),
        Column("allocated_bytes", f"{_MARK.strip()} allocated, GiB", text=IN_GIB.text, is_number=True),
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
            "tight, where only the value does, or cached blocks have to go back; no. By a recipe that ships: a step "
            "that was recorded on an emulated GPU, through the allocator. A dash: none was recorded around this shape "
            "for such a card. Allocated is what tensors take at the highest moment on the largest card."
        ],
        remarks=[f"No row, as no recipe ships: {', '.join(without)}."] if without else [],
        tables=tables,
        data=Table(title="What fits where", columns=[Column(name) for name in _DATA], rows=rows_of(frame)),
        **where,
    )


def _by_card(found: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per model, small ones first, with each card's verdict; allocated as predicted on the largest card."""
    cells = ["num_params", "model"]
    wide = found.pivot(index=cells, columns="card", values="shown")
    wide["allocated_bytes"] = found.groupby(cells).predicted_allocated_bytes.last()  # the last that is known
    return rows_of(wide.reset_index())


def _verdicts(name: str, method: Method, cards: Sequence[Gpu], ran: ByCard) -> list[dict[str, Any]]:
    """A row per card on which the cell was run or is predicted; none where the model has fewer positions."""
    from vramprobe.predict.expected import predict_at_hand
    from vramprobe.predict.verdict import verdict

    known: dict[tuple[str, int], Prediction | None] = {}  # cards with the same workspaces differ in their size alone

    def predicted(spec: CellSpec, gpu: Gpu) -> Prediction | None:
        key = spec.fingerprint, gpu.blas_workspace_bytes
        if key not in known:
            known[key] = None
            with suppress(VramprobeError):
                known[key] = predict_at_hand(spec, gpu)
        found = known[key]
        # Whether it runs by giving cached blocks back is a question of the card's own size.
        return found and (predict_at_hand(spec, gpu) if verdict(found, gpu).verdict == "does not fit" else found)

    rows = []
    for gpu in cards:
        try:
            spec = standard_cell(name, method, gpu)
        except SpecError:
            continue
        values: dict[str, Any] = {}
        if (found := predicted(spec, gpu)) is not None:
            said = verdict(found, gpu).verdict.replace("does not fit", NO)
            allocated, reserved = found.peak_allocated_bytes, found.reserved_bytes
            sizes = (allocated.value, allocated.high, reserved and reserved.value, reserved and reserved.high)
            values = dict(zip(_SIZES, sizes, strict=True))
            values |= {"verdict": said, "basis": "predicted", "shown": f"{_MARK}{said}"}
        record = ran.get(gpu.short_name, {}).get(spec.fingerprint)
        if record is not None and record.outcome.kind in ("ok", "oom"):
            said = "fits" if record.outcome.kind == "ok" else NO
            values |= {"verdict": said, "basis": "emulated", "shown": said}
        if values:
            cell = {"model": name, "num_params": spec.num_params, "method": method, "card": gpu.short_name}
            rows.append(dict.fromkeys(_SIZES) | cell | values)
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
