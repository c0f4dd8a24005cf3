"""Cards → the largest batch and the largest length that fit each of them, for the models that people ask about.

In: the cards. Out: a Document. All of it is predicted, by arithmetic alone; nothing here was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.report.card_fits import BATCH_SIZE, NO, SEQ_LEN, conditions, standard_cell
from vramprobe.report.definition import Column, Document, Table
from vramprobe.spec import CellSpec, Method

#: Models whose largest batch and length are tabled: those that people ask about, small to large.
MODELS = (
    "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b", "qwen3-4b", "gemma-3-4b", "mistral-7b-v0.3",
    "llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "qwen3-14b", "gpt-oss-20b", "mistral-small-24b", "gemma-3-27b",
    "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-72b",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Most:
    """A model under one method: the largest batch or length that fits on each card by its short name; 0: none."""

    model: str
    method: str
    question: str
    counts: dict[str, int]


def largest(cards: Sequence[Gpu], command: str) -> Document:
    """largest: a table per question and method, a row per model, a column per card."""
    questions = {
        "batch_size": f"the largest batch of {SEQ_LEN:,} tokens", "seq_len": f"the largest length, batch {BATCH_SIZE}"
    }  # fmt: skip
    rows = [
        _Most(model=name, method=method, question=question,
              counts={gpu.short_name: _count(question, name, method, gpu) for gpu in cards})
        for question in questions for method in get_args(Method) for name in MODELS
    ]  # fmt: skip
    columns = [
        Column("model", "model", lambda row: row.model),
        *(Column(gpu.short_name, gpu.short_name, partial(_count_on, card=gpu.short_name), _count_text, is_number=True)
          for gpu in cards),
    ]  # fmt: skip
    tables = [
        Table(title=f"{method}: {words}", columns=columns, note=conditions(method, cards),
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
            "Predicted, neither measured nor emulated: by arithmetic alone, checkpointing on, the most whose upper end "
            "of the interval leaves room for the CUDA context and a margin (fits). vramprobe predict --max-batch and "
            "--max-seq-len replay the allocator for one cell, and may say less or more: what it keeps in reserve is "
            f"not counted here. {NO}: not even 1 fits so. A length may be more than a model was trained for.",
        ],
        tables=tables,
        data=Table(title="The largest batch and length", columns=data, rows=pairs),
        command=command,
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
    return f"{count:,}" if count else NO
