"""Answer: a cell and the batches of its data -> the worst batch, the peak by quantile, what fits, what a cut costs.

In: a cell's words, lengths in tokens, a GPU or none. Out: a frozen LengthsAnswer; every byte is predicted, as
``predict`` does. Never imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vramprobe.errors import VramprobeError
from vramprobe.lengths.batches import Batch, Sampler, Shape, make_batches
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predict
from vramprobe.predict.what_fits import max_batch_size, max_seq_len
from vramprobe.recipe.recipe import NotOneBranch

_NO_MAX_LENGTH = (
    "what a step requests changes from length to length, and each would be recorded by itself: vramprobe predict "
    "--max-seq-len looks for the longest that fits, in minutes"
)
_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class LengthsPeak:
    """One batch of the epoch and its predicted peak."""

    name: str  # median, p90, p99 or worst
    batch: int  # counted from 0
    rows: tuple[int, ...]
    num_rows: int
    seq_len: int
    allocated_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True)
class Limit:
    """The largest value that fits the GPU, and what it cuts; ``value`` null: none fits, and why."""

    value: int | None
    rows_cut_share: float = 0.0  # rows that are truncated
    tokens_cut_share: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class LengthsAnswer:
    """Lengths, batches and peaks of one epoch."""

    num_rows: int
    num_tokens: int  # before truncation
    longest: int
    longest_row: int
    num_truncated: int
    sampler: str
    seed: int
    num_batches: int
    padding_share: float
    peaks: list[LengthsPeak]
    worst: Prediction
    worst_shape: Shape
    notes: list[str]
    max_length: Limit | None
    max_batch_size: Limit | None


def answer(
    lengths: Sequence[int],
    *,
    sampler: Sampler = "random",
    seed: int = 0,
    pad_to_multiple_of: int = 1,
    gpu: str | None = None,
    **cell: Any,
) -> tuple[LengthsAnswer, list[Batch]]:
    """Predict the effect of the data's lengths on ``cell``, whose seq_len is the truncation. ``cell``: predict's words.

    Raises what predict raises.
    """
    batch_size, seq_len = cell["batch_size"], cell["seq_len"]
    batches = make_batches(
        lengths,
        batch_size=batch_size,
        max_length=seq_len,
        sampler=sampler,
        seed=seed,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    predicted = cache(lambda shape: predict(gpu=gpu, **cell | words_of(shape)))
    ranked = sorted(range(len(batches)), key=lambda number: batches[number].shape.num_tokens)
    worst = _worst(batches, predicted)
    chosen = {name: ranked[min(int(share * len(ranked)), len(ranked) - 1)] for name, share in _QUANTILES.items()}
    peaks = [_peak(name, number, batches[number], predicted) for name, number in (chosen | {"worst": worst}).items()]
    padded = sum(batch.shape.num_tokens for batch in batches)
    total = sum(lengths)
    longest_row = max(range(len(lengths)), key=lengths.__getitem__)
    longest, limit, notes = None, None, _notes(padded > sum(batch.num_tokens for batch in batches), sampler, cell)
    if gpu is not None:
        given = {"gpu": gpu, **cell | words_of(batches[worst].shape)}
        try:
            longest = _limit(max_seq_len, given | {"patient": False}, "seq_len", lengths, pad_to_multiple_of)
        except NotOneBranch:
            notes.append(_NO_MAX_LENGTH)
        limit = _limit(max_batch_size, given, "batch_size", ())
    found = LengthsAnswer(
        num_rows=len(lengths),
        num_tokens=total,
        longest=lengths[longest_row],
        longest_row=longest_row,
        num_truncated=sum(length > seq_len for length in lengths),
        sampler=sampler,
        seed=seed,
        num_batches=len(batches),
        padding_share=1 - sum(batch.num_tokens for batch in batches) / padded,
        peaks=peaks,
        worst=predicted(batches[worst].shape),
        worst_shape=batches[worst].shape,
        notes=notes,
        max_length=longest,
        max_batch_size=limit,
    )
    return found, batches


def _notes(is_padded: bool, sampler: str, cell: dict[str, Any]) -> list[str]:
    found = []
    if is_padded and cell.get("attn", "sdpa") != "flash_attention_2":
        found.append("padding counts as tokens; the attention mask of a padded batch is not counted")
    if sampler in ("random", "group_by_length"):
        found.append("the order is Python's for this seed, not torch's: a run has batches like these, not these")
    if sampler == "packing":
        found.append("a packed batch is counted as full attention over each pack, masks between its rows not counted")
    return found


def words_of(shape: Shape) -> dict[str, Any]:
    """The cell's words for a batch of this shape."""
    return {"batch_size": shape.num_rows, "seq_len": shape.seq_len}


def _worst(batches: Sequence[Batch], predicted: Callable[[Shape], Prediction]) -> int:
    """The first batch with the highest peak: memory never falls with the length, so only the longest batch of each
    number of rows is predicted."""
    longest: dict[int, int] = {}
    for number, batch in enumerate(batches):
        rows = batch.shape.num_rows
        if rows not in longest or batches[longest[rows]].shape.seq_len < batch.shape.seq_len:
            longest[rows] = number
    return max(longest.values(), key=lambda number: predicted(batches[number].shape).peak_allocated_bytes.value)


def _peak(name: str, number: int, batch: Batch, predicted: Callable[[Shape], Prediction]) -> LengthsPeak:
    found = predicted(batch.shape)
    reserved = found.reserved_bytes.value if found.reserved_bytes else None
    allocated = found.peak_allocated_bytes.value
    return LengthsPeak(name, number, batch.rows, batch.shape.num_rows, batch.shape.seq_len, allocated, reserved)


def _limit(
    question: Callable[..., Any], cell: dict[str, Any], left_open: str, lengths: Sequence[int], multiple_of: int = 1
) -> Limit:
    """The largest multiple that fits; one that is tight is not taken, as a run needs a margin. Raises NotOneBranch."""
    try:
        found = question(**{name: value for name, value in cell.items() if name != left_open})
    except NotOneBranch:
        raise
    except VramprobeError as error:
        return Limit(None, why=str(error))
    if found.fits is None:
        return Limit(None, why=f"none fits {cell['gpu']} with a margin")
    value = int(found.fits.value) // multiple_of * multiple_of
    if not value:
        return Limit(None, why=f"not even {multiple_of} tokens fit {cell['gpu']}, to which each batch is padded")
    if not lengths:
        return Limit(value)
    rows = sum(length > value for length in lengths) / len(lengths)
    tokens = sum(max(length - value, 0) for length in lengths) / sum(lengths)
    return Limit(value, rows, tokens)
