"""Batches: lengths by row -> the batches of one epoch, padded to the longest row of each.

In: lengths in tokens, the batch size, the sampler's name and seed. Out: Batches with the rows' indices. The random
order is Python's for the seed, not torch's: the distribution is that of a run, the order is not.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

from vramprobe.errors import SpecError

#: random: RandomSampler; group_by_length: transformers' LengthGroupedSampler; packing: best-fit decreasing, as TRL's.
Sampler = Literal["random", "sequential", "group_by_length", "packing"]
#: transformers.trainer_pt_utils.get_length_grouped_indices: batches sorted together, at most.
_MEGA_BATCHES = 50


class Shape(NamedTuple):
    """Shape of a batch, on which memory depends."""

    num_rows: int
    seq_len: int  # after padding

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.seq_len


class Batch(NamedTuple):
    """One micro-batch."""

    shape: Shape
    rows: tuple[int, ...]  # indices in the data set, the longest first; of packed rows, of the longest part of each
    num_tokens: int  # without padding


def make_batches(
    lengths: Sequence[int],
    *,
    batch_size: int,
    max_length: int,
    sampler: Sampler = "random",
    seed: int = 0,
    pad_to_multiple_of: int = 1,
) -> list[Batch]:
    """The batches of one epoch, rows truncated to ``max_length``, the last batch with what is left.

    Raises SpecError for an unknown sampler.
    """
    for name, value in (("batch_size", batch_size), ("pad_to_multiple_of", pad_to_multiple_of)):
        if value < 1:
            raise SpecError(f"{name}: {value} given; must be at least 1")
    taken = [min(length, max_length) for length in lengths]
    if sampler == "packing":
        packs = _packed(taken, max_length)
        random.Random(seed).shuffle(packs)
        taken, names = [size for size, _ in packs], [row for _, row in packs]
        order = list(range(len(packs)))
    else:
        names = list(range(len(taken)))
        order = _order(taken, batch_size, sampler, seed)
    found = []
    for start in range(0, len(order), batch_size):
        rows = sorted(order[start : start + batch_size], key=lambda row: -taken[row])
        longest, num_tokens = taken[rows[0]], sum(taken[row] for row in rows)
        seq_len = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
        found.append(Batch(Shape(len(rows), seq_len), tuple(names[row] for row in rows), num_tokens))
    return found


def _order(lengths: Sequence[int], batch_size: int, sampler: Sampler, seed: int) -> list[int]:
    order = list(range(len(lengths)))
    if sampler == "sequential":
        return order
    random.Random(seed).shuffle(order)
    if sampler == "random":
        return order
    if sampler != "group_by_length":
        raise SpecError(f"sampler: {sampler!r} given; allowed: random, sequential, group_by_length, packing")
    size = max(min(len(order) // (batch_size * 4), _MEGA_BATCHES), 1) * batch_size
    parts = [sorted(order[at : at + size], key=lambda row: -lengths[row]) for at in range(0, len(order), size)]
    longest = max(range(len(parts)), key=lambda part: lengths[parts[part][0]])
    parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]  # the longest batch first: it shows an OOM at once
    return [row for part in parts for row in part]


def _packed(lengths: Sequence[int], max_length: int) -> list[tuple[int, int]]:
    """Each pack's (tokens, longest row): rows, longest first, go into the fullest pack with space for them."""
    sizes: list[int] = []
    first: list[int] = []
    free: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        at = bisect_left(free, (lengths[row], -1))
        if at == len(free):
            sizes.append(0)
            first.append(row)
            pack = len(sizes) - 1
        else:
            _, pack = free.pop(at)
        sizes[pack] += lengths[row]
        if sizes[pack] < max_length:
            insort(free, (max_length - sizes[pack], pack))
    return list(zip(sizes, first, strict=True))
