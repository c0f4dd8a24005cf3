"""The count of one optimizer step: rows by operator and shapes, launches that nobody claims, collectives.

In: the watch over values and the phases of watch.py. Out: one ``count`` line, in which ``order`` has the row, the time
(µs) and the stream of each call. On between the ends of two steps, the first step never (the optimizer makes its state
in it). The counters are the process's: operators of two threads at once share their launches in whatever order they
end.
"""

import sys
import time

import torch

from . import kernels
from .lines import Lines
from .operators import plain_row, row_of, signature

_COUNTED_STEP = 2
_SUMS = ("flops", "read", "written", "launches")
_COPIES = ("host_to_device", "device_to_host")
_APPLY = getattr(torch.autograd.Function.apply, "__func__", None)  # C, without a frame, from torch 2.14 on
_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def _in_a_functions_forward():
    """Return True if the innermost ``autograd.Function`` that runs is in its forward, where gradients are off."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        if _is_a_functions_forward(frame):
            return True
        frame = frame.f_back
    return False


def _is_a_functions_forward(frame):
    if _APPLY is not None:
        return frame.f_code is _APPLY.__code__
    is_named = frame.f_code.co_name == "forward"
    return is_named and isinstance(next(iter(frame.f_locals.values()), None), torch.autograd.function.FunctionCtx)


class StepCount:
    """Counts step 2 of one process. ``write(kind, **fields)`` takes the line."""

    def __init__(self, values, phases, write):
        self._mode, self._driver, self._phases, self._write = values.mode, values.mode.driver, phases, write
        self._launches = values.mode.driver.launches
        self._rows, self._unclaimed, self._lines = {}, {}, None
        self._claimed = self._depth = self._at = self._start = 0
        self._moved, self._order = {}, []
        self._products = 0  # calls
        self.is_on = False
        kernels.count_into(self)
        phases.on_step.append(self._step_ended)

    def _step_ended(self, step):
        if step == _COUNTED_STEP - 1:
            self._lines = Lines()
            self._moved = self._driver.moved()
            self._at = self._start = self._launches()
            self._mode.observer, self.is_on = self.operator, True
        elif self.is_on:
            self._mode.observer, self.is_on = None, False
            self._note_unclaimed("the step's end")
            self._write("count", **self._found(step))

    def operator(self, run, func, args, kwargs):
        """Run one operator, and note what it did."""
        begun = self.begin(signature(func)[0])
        out, products = None, self._products
        try:
            out = run(*args, **kwargs)
        finally:
            num_launches = self.end(begun)
        try:
            row = row_of(func, args, kwargs, out, num_launches, has_product=self._products > products)
        except Exception as error:  # an operator of a kind that nobody thought of: its launches stay known
            said = f"not read: {type(error).__name__}: {error}"
            row = plain_row(func._schema.name, said, num_launches) if num_launches else None
        if row is not None:
            self.note(row)
        return out

    @property
    def is_within(self):
        """Return True if an operator runs now, whose launches are its own."""
        return self._depth > 0

    def begin(self, name):
        """Before what may launch; -> what ``end`` needs."""
        if self._depth == 0:
            self._note_unclaimed(name)
        self._depth += 1
        return self._launches(), self._claimed

    def end(self, begun):
        """After it; -> its own launches, without those that were claimed within."""
        before, claimed = begun
        now = self._launches()
        own = now - before - (self._claimed - claimed)
        self._claimed += own
        self._depth -= 1
        if self._depth == 0:
            self._at = now
        return own

    def leave(self, name, launches):
        """Launches whose operations are not known are nobody's, and named."""
        self._claimed -= launches
        self._add_unclaimed(name, launches)

    def note(self, row):
        """Add one call to the rows."""
        phase = self.phase()
        self._products += row["what"] == "product"
        row["line"] = self._lines.here(phase == "backward")
        stream = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())[0]  # without an object around it
        if stream and row["what"] in _COPIES:
            row["is_beside"] = True
        key = (phase, row["what"], row["name"], row["shapes"], row["line"], row.get("is_beside"))
        known = self._rows.get(key)
        at = len(self._rows) if known is None else known["at"]
        self._order.append((at, time.time_ns() // 1000, stream))
        if known is None:
            self._rows[key] = {"phase": phase, "calls": 1, "at": at, **row}
            return
        known["calls"] += 1
        for one in _SUMS:
            known[one] += row[one]

    def phase(self):
        """``recompute`` is a forward that a checkpoint repeats within backward: gradients are on there."""
        if self._phases.name == "optimizer_step":
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if torch.is_grad_enabled() or _in_a_functions_forward() else "backward"
        return "forward"

    def _note_unclaimed(self, before):
        now = self._launches()
        if now > self._at:
            self._add_unclaimed(f"before {before}", now - self._at)
        self._at = now

    def _add_unclaimed(self, where, launches):
        key = f"{self.phase()}, {where}"
        self._unclaimed[key] = self._unclaimed.get(key, 0) + launches

    def _found(self, step):
        moved = []
        for kind, (calls, num_bytes) in sorted(self._driver.moved().items()):
            calls_before, bytes_before = self._moved.get(kind, (0, 0))
            if calls > calls_before:
                moved.append([*kind, calls - calls_before, num_bytes - bytes_before])
        return {
            "step": step,
            "num_launches": self._launches() - self._start,
            "num_claimed": self._claimed,
            "unclaimed": self._unclaimed,
            "moved": moved,
            "rows": [{name: value for name, value in row.items() if name != "at"} for row in self._rows.values()],
            "order": self._order,
        }
