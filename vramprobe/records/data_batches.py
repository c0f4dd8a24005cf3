"""DataBatches: all batches of a run's own data, their peaks by quantile, and what would fit the card.

In: what profile/data_batches.py found. Out: a frozen part of a rank's profile. Bytes are ints; what is unknown is null.
"""

from typing import Literal

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.phase_memory import Amount


class BatchPeak(FrozenModel):
    """One batch of the epoch and the peak of a step on it."""

    name: str  # p50, p90, p99, max
    batch: Amount  # counted from 0 in the sampler's order
    rows: list[int] = []  # of the largest: indices in the data set, the longest first, at most 64
    num_rows: Amount
    width: Amount  # tokens by row, after padding
    allocated_bytes: Amount
    reserved_bytes: Amount | None = None  # the highest so far, as it is not given back; null where it was not run
    source: Literal["emulated", "predicted", "out of memory"]


class HeldOut(FrozenModel):
    """A batch whose step was run and not used to learn from."""

    num_rows: Amount
    width: Amount
    allocated_bytes: Amount
    predicted_bytes: Amount

    @property
    def error(self) -> float:
        """Predicted over emulated, less 1."""
        return self.predicted_bytes / self.allocated_bytes - 1


class DataLimit(FrozenModel):
    """The largest value that fits the card, predicted, and what it cuts; shares are null where rows are unknown."""

    value: int | None  # null: none fits
    rows_cut_share: float | None = None
    tokens_cut_share: float | None = None


class HeldOutRequests(FrozenModel):
    """A step that was run and not used to learn from: its requests, those that differ from what was foreseen, bytes."""

    num_requests: Amount
    num_different: Amount
    bytes_requested: Amount
    bytes_different: Amount

    @property
    def error(self) -> float:
        """The share of the bytes that differ."""
        return self.bytes_different / max(self.bytes_requested, 1)


class ReservedCourse(FrozenModel):
    """Reserved memory over the run's steps under one allocator setting, predicted; steps are counted from 1."""

    alloc_conf: str
    empty_cache_steps: Amount  # 0: never
    num_steps: int  # that were completed, those that the run itself made among them
    first_reserved_bytes: Amount  # before the first step on batches that were played
    last_reserved_bytes: Amount
    peak_reserved_bytes: Amount
    peak_allocated_bytes: Amount
    num_alloc_retries: Amount
    oom_step: int | None = None


class DataFragmentation(FrozenModel):
    """The run's batches, one after the other, through the caching allocator. ``why_not``: all else is empty."""

    why_not: str | None = None
    first_step: int | None = None  # that is played; those before are the run's own
    num_requests: Amount = 0  # of a step, over all shapes
    num_inexact: Amount = 0  # whose sizes follow no rule by the batch's shape
    inexact_at: list[str] = []  # the lines that make most of them
    held_out: list[HeldOutRequests] = []
    replay_error_bytes: int | None = None  # reserved by the replay of the run's own steps, less what the run reserved
    courses: list[ReservedCourse] = []  # the run's own setting first


class DataBatches(FrozenModel):
    """Batches by their shape: rows × tokens after padding."""

    how: Literal["lengths", "collated"]  # shapes by the rows' lengths, checked on collated batches; or all collated
    is_complete: bool  # all batches of an epoch were seen
    num_rows: Amount
    num_batches: Amount
    num_seen: Amount
    num_shapes: Amount
    num_run: Amount  # steps that were run on chosen batches
    peaks: list[BatchPeak] = []
    held_out: list[HeldOut] = []
    usable_bytes: int | None = None  # of the card, less the context
    fits: bool | None = None  # the largest batch; null where that is not known
    max_length: DataLimit | None = None  # only where it does not fit
    max_batch_size: DataLimit | None = None  # at the largest batch's width
    creep: DataFragmentation | None = None
