"""After its steps a run trains on batches of its own data that decide: the largest, those of some quantiles, others.

In: torch's DataLoader iterators, as the program uses them. Out: a ``batches`` line with the shapes of all batches of an
epoch, and a ``batch`` line for each that is handed out instead of the next one, with the step that trains on it. Needs
one backward a batch, and a data set that can be indexed.
"""

import functools
import json
import os
import time
import weakref

from .batch_shapes import Survey
from .journal import complain

_QUANTILES = (0.5, 0.9, 0.99)
_NUM_SPREAD, _NUM_HELD_OUT = 4, 3
_MAX_MICRO_STEPS = 96  # of all that is played
_LIMIT_SECONDS = 150.0  # then the largest comes next
_MAX_ROWS = 64  # whose indices are told


class OwnBatches:
    """One process's. ``watches`` as in scopes.install."""

    def __init__(self, folder, watches):
        self._folder, self._watches = folder, watches
        self._handed, self._last = {}, None  # batches by data set; the iterator that gave the last one
        self._survey, self._queue, self._fed_set = None, [], None
        self._is_done, self._last_step, self._since = False, None, None

    def install(self, module):
        """``module``: torch.utils.data.dataloader."""
        kind = module._BaseDataLoaderIter
        run = kind.__next__
        own = self

        @functools.wraps(run)
        def __next__(iterator):
            if own._queue and id(iterator._dataset) == own._fed_set:
                return own._next_of_ours()
            batch = run(iterator)
            if own._watches and not own._is_done:
                key = id(iterator._dataset)
                own._handed[key] = own._handed.get(key, 0) + 1
                own._last = weakref.ref(iterator)
            return batch

        kind.__next__ = __next__

    @property
    def is_playing(self):
        """Whether steps on chosen batches are still to come."""
        return self._last_step is not None and not self._is_done

    def begin(self, watch, step):
        """The steps are done, ``step`` of them; -> whether steps on chosen batches follow."""
        if self._is_done or watch.has_other_ranks or self._rows_are_stand_ins():
            self._is_done = True
            return False
        try:
            self._plan(watch, step)
        except Exception as error:  # of a loader that is made otherwise
            self._queue = []
            watch.line("warning", message=f"the data's lengths were not read: {type(error).__name__}: {error}")
            complain(error)
        self._is_done = not self._queue
        return not self._is_done

    def step_ended(self, step):
        """-> whether that was the last of them."""
        self._is_done = not self._queue and step >= self._last_step
        if self._is_done:
            self._survey = None
        return self._is_done

    def _rows_are_stand_ins(self):
        path = os.path.join(self._folder, "replaced")
        if not os.path.exists(path):
            return False
        with open(path, encoding="utf-8") as file:
            return any(json.loads(line).get("kind") == "dataset" for line in file)

    def _plan(self, watch, step):
        iterator = self._last() if self._last is not None else None
        if iterator is None:
            return
        if not hasattr(iterator._dataset, "__getitem__") or not iterator._auto_collation:
            watch.line("warning", message="the data's lengths were not read: its data set is not read by index")
            return
        size, is_even = divmod(watch.phases.backwards, step)  # micro-steps in a step
        stale = self._handed[id(iterator._dataset)] - watch.phases.backwards
        if is_even or size < 1 or not 1 <= stale <= 2 * size + 2:
            watch.line(
                "warning",
                message="the data's lengths were not used: the loop does not train on one batch in each backward",
            )
            return
        self._survey = survey = Survey(iterator)
        table = survey.table()
        if not table:
            return
        chosen = choose(table, max(_MAX_MICRO_STEPS // size, 2)) if len(table) > 1 else []
        watch.line(
            "batches",
            steps=step,
            how=survey.how,
            is_complete=survey.is_complete,
            micro_steps=size,
            shapes=table,
            num_batches=len(survey.batches),
            num_rows=sum(map(len, survey.batches)),
            lengths=_histogram(survey.lengths),
        )
        if not chosen:
            return
        self._begin_to_play(iterator, chosen, size, stale, step)

    def _begin_to_play(self, iterator, chosen, size, stale, step):
        self._fed_set, self._since, self._size = id(iterator._dataset), time.monotonic(), size
        first = step + -(-stale // size)
        fillers = -stale % size  # up to the beginning of a step
        self._queue = [(chosen[0], None)] * fillers
        self._queue += [(one, first + 1 + at) for at, one in enumerate(chosen) for _ in range(size)]
        self._last_step = first + len(chosen)

    def _next_of_ours(self):
        (rows, width, _, number, held_out), step = self._queue.pop(0)
        if step is not None and len(self._queue) % self._size == self._size - 1:  # the first of its step
            if self._queue[self._size - 1 :] and time.monotonic() - self._since > _LIMIT_SECONDS:
                last = self._queue[-1][0]
                self._queue = [(last, step)] * (self._size - 1)
                self._last_step = step
                rows, width, _, number, held_out = last
            indices = self._survey.by_length(number) if not self._queue[self._size - 1 :] else []
            self._watches[-1].line(
                "batch", step=step, batch=number, rows=rows, width=width, held_out=held_out, indices=indices[:_MAX_ROWS]
            )
        return self._survey.collate(self._survey.batches[number])


def choose(table, most):
    """At most ``most`` rows of a Survey's table, each with whether it is held out of the fit, from few tokens to many:
    quantiles by number of batches, the largest and the longest, others evenly between them in tokens."""
    total, quantiles, counted = sum(row[2] for row in table), [], 0
    left = list(_QUANTILES)
    for at, row in enumerate(table):
        counted += row[2]
        while left and counted >= left[0] * total:
            quantiles.append(at)
            left.pop(0)
    longest = max(range(len(table)), key=lambda at: (table[at][1], table[at][0]))
    fitted = list(dict.fromkeys([len(table) - 1, quantiles[0], longest, quantiles[-1], 0, *quantiles]))
    fitted = _with_spread(table, fitted, _NUM_SPREAD)[:most]
    both = _with_spread(table, fitted, min(_NUM_HELD_OUT, most - len(fitted)))
    return [[*table[at], at not in fitted] for at in sorted(both)]


def _with_spread(table, chosen, more):
    """``more`` rows beside the chosen ones, each in the middle of the widest gap in tokens."""
    chosen = list(chosen)
    for _ in range(more):
        ordered = sorted(chosen)
        gaps = [
            (table[right][0] * table[right][1] - table[left][0] * table[left][1], left, right)
            for left, right in zip(ordered, ordered[1:])  # noqa: B905, RUF007
            if right - left > 1
        ]
        if not gaps:
            break
        _, left, right = max(gaps)
        middle = (table[left][0] * table[left][1] + table[right][0] * table[right][1]) / 2
        chosen.append(min(range(left + 1, right), key=lambda at: abs(table[at][0] * table[at][1] - middle)))
    return chosen


def _histogram(lengths):
    if lengths is None:
        return None
    counts = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    return sorted(counts.items())
