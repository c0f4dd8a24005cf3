"""Cards → the largest batch and the largest length that fit each of them, for the models that people ask about.

In: the cards. Out: a Document. All of it is predicted, by arithmetic alone; nothing here was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.report.card_fits import BATCH_SIZE, NO, SEQ_LEN, conditions, standard_cell
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.spec import CellSpec, Method

#: Models whose largest batch and length are tabled: those that people ask about, small to large.
MODELS = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "gemma-3-4b", "mistral-7b-v0.3",
    "llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3-14b", "gpt-oss-20b", "mistral-small-24b", "gemma-3-27b",
    "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-72b",
)  # fmt: skip


def largest(cards: Sequence[Gpu], command: str) -> Document:
    """largest: a table per question and method, a row per model, a column per card; the CSV has a row per number."""
    import pandas as pd

    questions = {
        "batch_size": f"the largest batch of {SEQ_LEN:,} tokens",
        "seq_len": f"the largest length, batch {BATCH_SIZE}",
    }
    names = ["model", "method", "question", "card", "largest"]
    rows = [
        (model, method, question, gpu.short_name, _count(question, model, method, gpu))
        for question in questions
        for method in get_args(Method)
        for model in MODELS
        for gpu in cards
    ]
    frame = pd.DataFrame(rows, columns=names)
    columns = [
        Column("model", "model"),
        *(Column(gpu.short_name, gpu.short_name, text=_count_text, is_number=True) for gpu in cards),
    ]
    tables = [
        Table(
            title=f"{method}: {questions[question]}",
            columns=columns,
            note=conditions(method, cards),
            rows=rows_of(found.pivot(index="model", columns="card", values="largest").loc[list(MODELS)].reset_index()),
        )
        for (question, method), found in frame.groupby(["question", "method"], sort=False)
    ]
    return Document(
        name="largest",
        title="The largest batch and length on each card",
        about=[
            "Predicted, neither measured nor emulated: by arithmetic alone, checkpointing on, the most whose upper end "
            "of the interval leaves room for the CUDA context and a margin (fits). vramprobe predict --max-batch and "
            "--max-seq-len replay the allocator for one cell, and may say less or more: what it keeps in reserve is "
            f"not counted here. {NO}: not even 1 fits so. A length may be more than a model was trained for.",
        ],
        tables=tables,
        data=Table(title="The largest batch and length", columns=[Column(name) for name in names], rows=rows_of(frame)),
        command=command,
    )


def _count(question: str, name: str, method: Method, gpu: Gpu) -> int:
    from vramprobe.predict.largest import Judged, largest_count
    from vramprobe.predict.predict import predict
    from vramprobe.predict.verdict import verdict

    def judge(spec: CellSpec) -> Judged:
        prediction = predict(spec, gpu=gpu)
        return Judged(prediction, verdict(prediction, gpu))

    try:
        found = largest_count(question, standard_cell(name, method, gpu), judge)
    except VramprobeError:  # not even 1
        return 0
    return int(found.fits.value) if found.fits else 0


def _count_text(count: int) -> str:
    return f"{count:,}" if count else NO
