"""Padding: a data set's lengths at one micro-batch -> the longest padded batch, and the tokens that a step computes.

In: lengths in tokens, the micro-batch, the truncation, the sampler. Out: a PaddedData. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vramprobe.lengths.batches import Sampler, make_batches


@dataclass(frozen=True)
class PaddedData:
    """One epoch of a data set in batches."""

    num_rows: int
    num_tokens: int  # after truncation
    num_padded_tokens: int  # what is computed
    longest: int  # tokens by row of the longest batch, after padding
    num_truncated: int

    @property
    def padding_share(self) -> float:
        """Share of padding among the tokens that are computed."""
        return 1 - self.num_tokens / self.num_padded_tokens

    def padded(self, num_tokens: int) -> int:
        """The tokens that are computed for so many of the data's."""
        return round(num_tokens * self.num_padded_tokens / self.num_tokens)


def padded_data(
    lengths: Sequence[int],
    *,
    batch_size: int,
    max_length: int,
    sampler: Sampler = "random",
    pad_to_multiple_of: int = 1,
) -> PaddedData:
    """Raises what :func:`make_batches` raises."""
    batches = make_batches(
        lengths, batch_size=batch_size, max_length=max_length, sampler=sampler, pad_to_multiple_of=pad_to_multiple_of
    )
    return PaddedData(
        num_rows=len(lengths),
        num_tokens=sum(one.num_tokens for one in batches),
        num_padded_tokens=sum(one.shape.num_tokens for one in batches),
        longest=max(one.shape.seq_len for one in batches),
        num_truncated=sum(length > max_length for length in lengths),
    )
