"""The shapes of all batches that a DataLoader's own sampler makes, without training: by the rows' lengths where the
data set has them in a column and the collator's shape follows from them, else by collating for as long as a limit
allows.

In: an iterator of torch's DataLoader. Out: a Survey. Shape: (rows, tokens by row after padding). Stdlib, and pyarrow
where the data set is one of Hugging Face's.
"""

import random
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import islice

LIMIT_SECONDS = 60.0  # for the sampler, and as much again for collating
_MAX_BATCHES = 5_000_000
_CHUNK_ROWS = 50_000
_NUM_SAMPLES = 16  # batches that are collated to see which rule their shapes follow
_MAX_ROWS_COLLATED = 256  # one by one
_PROGRESS_SECONDS = 5.0
_LENGTH_COLUMNS = ("input_ids", "prompt_input_ids", "length")


class Survey:
    """``batches``: the rows of each, in the sampler's order. ``shapes``: of each batch, as far as they were seen.

    ``how``: lengths or collated. ``lengths``: of each row, or None.
    """

    def __init__(self, iterator):
        self._iterator = iterator
        self.is_complete = True
        with _randomness_kept():
            self.batches = self._sampled(iter(iterator._index_sampler))
            self.lengths = row_lengths(iterator._dataset)
            self.shapes = self._by_lengths() if self.lengths else None
            self.how = "lengths" if self.shapes else "collated"
            if not self.shapes:
                self.shapes = self._collated()

    def collate(self, rows):
        """The batch of these rows, as the loader makes it."""
        from torch.utils.data._utils.fetch import _MapDatasetFetcher
        from torch.utils.data._utils.pin_memory import pin_memory

        own = self._iterator
        fetcher = _MapDatasetFetcher(own._dataset, own._auto_collation, own._collate_fn, own._drop_last)
        batch = fetcher.fetch(rows)
        return pin_memory(batch, own._pin_memory_device) if own._pin_memory else batch

    def by_length(self, number):
        """The rows of a batch, the longest first; collated one by one where their lengths are not known."""
        rows = self.batches[number]
        if self.lengths:
            return sorted(rows, key=lambda row: -self.lengths[row])
        shapes = {row: shape_of(self.collate([row])) or (0, 0) for row in rows[:_MAX_ROWS_COLLATED]}
        return sorted(shapes, key=lambda row: -shapes[row][0] * shapes[row][1])

    def _sampled(self, sampler):
        found, progress = [], _Progress("batches sampled")
        for number, rows in enumerate(islice(sampler, _MAX_BATCHES)):
            found.append(rows)
            if number % 1000 == 0 and progress.is_late(number):
                break
        self.is_complete = len(found) < _MAX_BATCHES and next(sampler, None) is None
        return found

    def _by_lengths(self):
        """Shapes by a rule that a sample of collated batches follows; None where no rule does."""
        at = sorted(range(len(self.batches)), key=lambda one: self._longest(one) * len(self.batches[one]))
        step = max(len(at) // _NUM_SAMPLES, 1)
        sample = list(dict.fromkeys([*at[::step], at[-1]]))
        seen = {number: shape_of(self.collate(self.batches[number])) for number in sample}
        if None in seen.values():
            return None
        for rule in _rules(list(seen.values())):
            found = {number: rule(self._lengths_in(number)) for number in sample}
            if found == seen:
                return [rule(self._lengths_in(number)) for number in range(len(self.batches))]
        return None

    def _lengths_in(self, number):
        return [self.lengths[row] for row in self.batches[number]]

    def _longest(self, number):
        return max(self._lengths_in(number), default=0)

    def _collated(self):
        found, progress = [], _Progress("batches collated")
        for number, rows in enumerate(self.batches):
            shape = shape_of(self.collate(rows))
            if shape is None:
                return []
            found.append(shape)
            if progress.is_late(number):
                self.is_complete = False
                break
        return found

    def order(self, table, most):
        """The first batches' shapes in the sampler's order, as positions in that table."""
        at = {tuple(row[:2]): position for position, row in enumerate(table)}
        return [at[tuple(shape)] for shape in self.shapes[:most]]

    def table(self):
        """[rows, width, number of batches, the first of them] by shape, from few tokens to many."""
        counts, first = Counter(self.shapes), {}
        for number, shape in enumerate(self.shapes):
            first.setdefault(shape, number)
        return sorted(
            ([*shape, count, first[shape]] for shape, count in counts.items()), key=lambda one: (one[0] * one[1], one)
        )


def shape_of(batch):
    """(rows, tokens by row) of a collated batch: of its input_ids, of each such key added up, else of its largest
    tensor; None without tensors."""
    import torch

    named = dict(batch) if hasattr(batch, "keys") else {}
    ids = [one for name, one in named.items() if str(name).endswith("input_ids") and isinstance(one, torch.Tensor)]
    if ids and all(one.dim() == 2 for one in ids):
        return max(len(one) for one in ids), sum(one.shape[1] for one in ids)
    tensors = [one for one in tensors_in(list(named.values()) if named else batch) if one.dim() > 0 and len(one)]
    if not tensors:
        return None
    largest = max(tensors, key=lambda one: one.numel())
    return len(largest), largest.numel() // len(largest)


def tensors_in(value):
    """The tensors of a batch, however deep in its lists and mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "keys"):
        for name in value.keys():  # noqa: SIM118  (a BatchEncoding iterates over its keys, a UserDict may not)
            yield from tensors_in(value[name])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _rules(seen):
    """Functions from the lengths of a batch's rows to its shape, the plainest first."""
    widths = sorted({width for _, width in seen})
    multiples = [1] + [size for size in (128, 64, 32, 16, 8) if all(width % size == 0 for width in widths)]
    for multiple in multiples:
        yield lambda lengths, to=multiple: (len(lengths), _up(max(lengths), to))
        yield lambda lengths, to=multiple: (1, _up(sum(lengths), to))  # flattened, without padding
        yield lambda lengths, to=multiple: (len(lengths), min(_up(max(lengths), to), widths[-1]))  # truncated
    if len(widths) == 1:
        yield lambda lengths: (len(lengths), widths[0])


def _up(length, multiple):
    return -(-length // multiple) * multiple


def row_lengths(dataset, most=None):
    """Tokens of each row, of the first ``most`` at least, by a column of a Hugging Face data set; None without one."""
    if not (hasattr(dataset, "column_names") and hasattr(dataset, "with_format")):
        return None
    name = next((one for one in _LENGTH_COLUMNS if one in dataset.column_names), None)
    if name is None:
        return None
    import pyarrow.compute

    plain, found, progress = dataset.select_columns([name]).with_format("arrow"), [], _Progress("rows read")
    for start in range(0, min(len(dataset), most or len(dataset)), _CHUNK_ROWS):
        values = plain[start : start + _CHUNK_ROWS][name]
        found += (values if name == "length" else pyarrow.compute.list_value_length(values)).to_pylist()
        if progress.is_late(len(found)):
            return None
    return found


class _Progress:
    """A line on stderr every few seconds; ``is_late``: whether the limit has passed."""

    def __init__(self, what):
        self._what, self._since = what, time.monotonic()
        self._said = self._since

    def is_late(self, number):
        now = time.monotonic()
        if now - self._said > _PROGRESS_SECONDS:
            self._said = now
            with suppress(OSError, ValueError):  # it may have closed its stderr
                sys.stderr.write(f"vramprobe: the data's lengths: {number:,} {self._what}\n")
        return now - self._since > LIMIT_SECONDS


@contextmanager
def _randomness_kept():
    """Restore the states of random generators afterwards, as if sampling and collating had not run."""
    import torch

    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before)
