"""Cards → the largest batch and the largest length that fit each of them, for the models that people ask about.

In: the cards. Out: a Document. All of it is predicted, by recipes that ship; nothing here was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from vramprobe.catalog import Gpu
from vramprobe.choices import Method
from vramprobe.errors import VramprobeError
from vramprobe.report.card_fits import BATCH_SIZE, NO, SEQ_LEN, conditions, standard_cell
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.predict.prediction import Prediction

#: Models whose largest batch and length are tabled: those that people ask about, small to large.
MODELS = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "gemma-3-4b", "mistral-7b-v0.3",
    "llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3-14b", "gpt-oss-20b", "mistral-small-24b", "gemma-3-27b",
    "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-72b",
)  # fmt: skip


def largest(cards: Sequence[Gpu], command: str) -> Document:
    """largest: a table per question and method, a row per model, a column per card; the CSV has a row per number."""
    import pandas as pd

    questions: dict[Literal["batch_size", "seq_len"], str] = {
        "batch_size": f"the largest batch of {SEQ_LEN:,} tokens",
        "seq_len": f"the largest length, batch {BATCH_SIZE}",
    }
    names = ["model", "method", "question", "card", "largest"]
    rows = [
        (model, method, question, gpu.short_name, count)
        for question in questions
        for method in get_args(Method)
        for model in MODELS
        for gpu, count in zip(cards, _counts(question, model, method, cards), strict=True)
        if count is not None
    ]
    frame = pd.DataFrame(rows, columns=names).convert_dtypes()
    columns = [
        Column("model", "model"),
        *(Column(gpu.short_name, gpu.short_name, text=_count_text, is_number=True) for gpu in cards),
    ]
    tables = [
        Table(
            title=f"{method}: {questions[question]}",
            columns=columns,
            note=conditions(method, cards),
            rows=rows_of(_wide(found)),
        )
        for (question, method), found in frame.groupby(["question", "method"], sort=False)
    ]
    return Document(
        name="largest",
        title="The largest batch and length on each card",
        about=[
            "Predicted, neither measured nor emulated: by the recipes that ship, through the allocator, checkpointing "
            "on, the most whose upper end of the interval leaves room for the CUDA context and a margin (fits). Beyond "
            "the 8 rows and 8,192 tokens around which most were recorded this is near; vramprobe predict --max-batch "
            f"and --max-seq-len record the very cell. {NO}: not even 1 fits so. A dash, or no row: no such recipe "
            "ships. A length may be more than a model was trained for."
        ],
        tables=tables,
        data=Table(title="The largest batch and length", columns=[Column(name) for name in names], rows=rows_of(frame)),
        command=command,
    )


def _wide(found: pd.DataFrame) -> pd.DataFrame:
    """A row per model in the order of MODELS, a column per card."""
    wide = found.pivot(index="model", columns="card", values="largest")
    return wide.loc[[name for name in MODELS if name in wide.index]].reset_index()


def _counts(
    question: Literal["batch_size", "seq_len"], name: str, method: Method, cards: Sequence[Gpu]
) -> list[int | None]:
    """The largest count on each card, 0 where not even 1 fits; null without a recipe."""
    from vramprobe.predict.at_hand import replay_shipped_near
    from vramprobe.predict.largest import Judged, largest_shipped
    from vramprobe.predict.recorded import predict_replay
    from vramprobe.predict.verdict import verdict

    known: dict[tuple[str, int], Prediction] = {}  # cards with the same workspaces differ in their size alone

    def judge(spec: CellSpec, gpu: Gpu) -> Judged:
        key = spec.fingerprint, gpu.blas_workspace_bytes
        if key not in known:
            known[key] = predict_replay(replay_shipped_near(spec, gpu=gpu), spec)
        return Judged(known[key], verdict(known[key], gpu))

    def count_on(gpu: Gpu) -> int | None:
        try:
            cell = standard_cell(name, method, gpu)
            found = largest_shipped(question, cell, lambda spec: judge(spec, gpu))
        except VramprobeError:  # not even the least
            return 0
        if found is None:
            return None
        return int(found.fits.value) if found.fits else 0

    return [count_on(gpu) for gpu in cards]


def _count_text(count: int) -> str:
    return f"{count:,}" if count else NO
