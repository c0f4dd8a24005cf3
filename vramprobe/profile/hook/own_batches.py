"""After its steps a run trains on batches of its own data that decide: the largest, those of some quantiles, others.

In: torch's DataLoader iterators, as the program uses them. Out: a ``batches`` line with the shapes of all batches of an
epoch, and a ``batch`` line for each that is handed out instead of the next one, with the step that trains on it. Needs
one backward a batch, and a data set that can be indexed. Of several ranks each asks its own share; all then train on
the batches of the same numbers, as in the epoch: on those that decide on any rank.
"""

import json
import os
import sys
import time
import weakref
from collections import Counter

from vramprobe_values.imports import instead_of

from .agreement import heard, say
from .batch_shapes import Survey, shape_of
from .journal import complain

_QUANTILES = (0.5, 0.9, 0.99)
_NUM_SPREAD, _NUM_HELD_OUT = 4, 3
_MAX_MICRO_STEPS = 96  # of all that is played
_LIMIT_SECONDS = 150.0  # then the largest comes next
_MAX_ROWS = 64  # whose indices are told
_MAX_ORDER = 20_000  # batches whose shapes are told one by one
_MAX_RANKS = 8  # whose own largest batch is trained on, the run's beside


class OwnBatches:
    """One process's. ``watches`` as in scopes.install."""

    def __init__(self, folder, watches):
        self._folder, self._watches = folder, watches
        self._handed, self._last = {}, None  # batches by data set; the iterator that gave the last one
        self._first_at = self._last_at = None  # when it gave a batch
        self._survey, self._queue, self._fed_set = None, [], None
        self._is_done, self._last_step, self._until = False, None, None

    def install(self, module):
        """``module``: torch.utils.data.dataloader."""

        @instead_of(module._BaseDataLoaderIter, "__next__")
        def __next__(run, iterator):
            if self._queue and id(iterator._dataset) == self._fed_set:
                return self._next_of_ours()
            batch = run(iterator)
            return batch if self._is_done else self._was_handed(iterator, batch)

    @property
    def is_playing(self):
        """Return True if steps on chosen batches are still to come."""
        return self._last_step is not None and not self._is_done

    def begin(self, watch, step):
        """The steps are done, ``step`` of them; -> whether steps on chosen batches follow."""
        if not self._is_done:
            try:
                self._plan(watch, step)
            except Exception as error:
                self._queue = []
                complain(error)
            self._is_done = not self._queue
        return not self._is_done

    def leave(self, watch):
        """At the process's end: one that failed says so, or the other ranks would wait for its word."""
        if getattr(sys, "last_value", None) is None or watch.is_of_another_process:
            return
        at, num_ranks = watch.place_among_ranks
        if num_ranks > 1:
            say(self._folder, "batches", at, {"failed": True})

    def step_ended(self, step):
        """-> whether that was the last of them."""
        self._is_done = not self._queue and step >= self._last_step
        if self._is_done:
            self._survey = None
        return self._is_done

    def _was_handed(self, iterator, batch):
        """The batch to hand on."""
        if not self._watches:
            return batch
        key = id(iterator._dataset)
        self._handed[key] = self._handed.get(key, 0) + 1
        self._last, self._last_at = weakref.ref(iterator), time.monotonic()
        self._first_at = self._first_at or self._last_at
        return batch

    def _rows_are_stand_ins(self):
        path = os.path.join(self._folder, "replaced")
        if not os.path.exists(path):
            return False
        with open(path, encoding="utf-8") as file:
            return any(json.loads(line).get("kind") == "dataset" for line in file)

    def _plan(self, watch, step):
        at, num_ranks = watch.place_among_ranks
        try:
            said = self._asked(watch, step)
        except Exception as error:  # of a loader that is made otherwise
            said = {"why": f"{type(error).__name__}: {error}"}
            complain(error)
        all_said = [said] if num_ranks == 1 else heard(self._folder, "batches", at, num_ranks, said)
        why, who = why_not(all_said)
        if why and who in (None, at):
            watch.line("warning", message=f"the data's lengths were not read: {why}")
        if why is not None:
            return
        self._until = time.monotonic() + _LIMIT_SECONDS if num_ranks == 1 else None
        watch.line(
            "batches",
            steps=step,
            how=self._survey.how,
            is_complete=self._survey.is_complete,
            micro_steps=said["size"],
            shapes=said["table"],
            order=self._survey.order(said["table"], _MAX_ORDER),
            num_batches=len(self._survey.batches),
            num_rows=sum(map(len, self._survey.batches)),
            lengths=_histogram(self._survey.lengths),
        )
        if chosen := choose_of_ranks([one["table"] for one in all_said], most_steps(all_said)):
            self._begin_to_play([self._own(*one, said["table"]) for one in chosen], said["size"], said["stale"], step)

    def _asked(self, watch, step):
        """Return the batches that this rank has to train on, or why they are not known; "" where there is nothing to
        ask.
        """
        iterator = self._last() if self._last is not None else None
        if iterator is None or self._rows_are_stand_ins():
            return {"why": ""}
        if not hasattr(iterator._dataset, "__getitem__") or not iterator._auto_collation:
            return {"why": "its data set is not read by index"}
        handed = self._handed[id(iterator._dataset)]
        size, stale = self._pace(watch, step, handed)
        if size < 1 or stale < 1:
            return {"why": "the loop does not train on one batch in each backward"}
        self._fed_set, self._survey = id(iterator._dataset), Survey(iterator)
        table = self._survey.table()
        if not table:
            return {"why": ""}
        seconds = (self._last_at - self._first_at) / max(handed - 1, 1)
        return {"size": size, "stale": stale, "table": table, "seconds": seconds}

    def _pace(self, watch, step, handed):
        """(micro-steps in a step, batches fetched ahead); zeros where each backward has no batch of its own."""
        size, rest = divmod(watch.phases.backwards, step)
        stale = handed - watch.phases.backwards
        return (0, 0) if rest or not 0 <= stale <= 2 * size + 2 else (size, stale)

    def _own(self, number, held_out, table):
        """(shape, own number, held out, whether it is this rank's largest) of a batch by its number in the epoch."""
        survey = self._survey
        number = min(number, len(survey.batches) - 1)  # ranks may have one batch more than others
        known = number < len(survey.shapes)
        shape = survey.shapes[number] if known else shape_of(survey.collate(survey.batches[number]))
        return tuple(shape), number, held_out, tuple(shape) == tuple(table[-1][:2])

    def _begin_to_play(self, chosen, size, stale, step):
        self._size = size
        first = step + -(-stale // size)
        fillers = -stale % size  # up to the beginning of a step
        self._queue = [(chosen[0], None)] * fillers
        self._queue += [(one, first + 1 + at) for at, one in enumerate(chosen) for _ in range(size)]
        self._last_step = first + len(chosen)

    def _next_of_ours(self):
        one, step = self._queue.pop(0)
        if step is not None and len(self._queue) % self._size == self._size - 1:  # the first of its step
            if self._queue[self._size - 1 :] and self._until is not None and time.monotonic() > self._until:
                one = self._queue[-1][0]
                self._queue = [(one, step)] * (self._size - 1)
                self._last_step = step
            (rows, width), number, held_out, is_largest = one
            indices = self._survey.by_length(number)[:_MAX_ROWS] if is_largest else []
            self._watches[-1].line(
                "batch", step=step, batch=number, rows=rows, width=width, held_out=held_out, indices=indices
            )
        return self._survey.collate(self._survey.batches[one[1]])


def why_not(said):
    """(why the ranks do not train on chosen batches, the rank that is to say it); "" for nothing to say, None where
    they do. A rank of None: each."""
    if said is None:
        return "not all ranks came so far in time, or an earlier run of the command did", None
    failed = [at for at, one in enumerate(said) if one.get("failed")]
    if failed:
        alive = [at for at in range(len(said)) if at not in failed]
        return f"rank {failed[0]} of {len(said)} ended with an error", alive[0]
    if all(one.get("why") == "" for one in said):
        return "", None
    reads = [at for at, one in enumerate(said) if one.get("why") != ""]
    if len(reads) < len(said):
        who = "rank " + ", ".join(map(str, reads))
        return f"{who} of {len(said)} ranks reads all batches, as of a data set that is dispatched", reads[0]
    found = next((at for at, one in enumerate(said) if "why" in one), None)
    if found is not None:
        return said[found]["why"], found
    if len({(one["size"], one["stale"]) for one in said}) > 1:
        return "the ranks have not been given as many batches", 0
    return None, None


def most_steps(said):
    """Number of chosen batches that the ranks have time for, at least two."""
    size, seconds = said[0]["size"], max(one["seconds"] for one in said)
    by_time = int(_LIMIT_SECONDS / (seconds * size)) if len(said) > 1 and seconds else _MAX_MICRO_STEPS
    return max(min(_MAX_MICRO_STEPS // size, by_time), 2)


def choose_of_ranks(tables, most):
    """(number in the epoch, held out) of the batches to train on, the one with the most tokens last; none where all
    have one shape. ``tables``: of each rank's Survey."""
    merged, largest = {}, [table[-1][3] for table in tables]
    for table in tables:
        for rows, width, count, number in table:
            known = merged.setdefault((rows, width), [rows, width, 0, number])
            known[2] += count
    if len(merged) < 2:
        return []
    table = sorted(merged.values(), key=lambda one: (one[0] * one[1], one))
    chosen = {}
    for *_, number, held_out in choose(table, most):
        chosen[number] = chosen.get(number, True) and held_out
    chosen |= dict.fromkeys(largest[:_MAX_RANKS], False)
    tokens = [{number: rows * width for rows, width, _, number in own} for own in tables]
    order = sorted(chosen, key=lambda number: max(own.get(number, 0) for own in tokens))
    return [(number, chosen[number]) for number in order]


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
    return None if lengths is None else sorted(Counter(lengths).items())
