"""The allocator's history in one process: from the beginning, or over one step; and the tensors that were held in it.

In: what to trace. Out: one file of flat arrays (history.py). The history costs the host memory and time, and the device
nothing. Where the program keeps a history of its own, ours steps aside and says so.
"""

import time

import torch

from . import history
from .journal import hook_folders

_MAX_EVENTS = 20_000_000


class Trace:
    """``what``: all (from the first CUDA call on), step (one whole step, and who made what is older), none.

    ``warn`` hears why there is none although it was asked for.
    """

    def __init__(self, what, step, warn):
        self._what, self._step, self._warn = what, step, warn
        self._held, self._first_ns, self._last_ns = [], None, None
        self._taken, self._is_ours, self._is_asking = None, True, False
        self._record_in_torch = torch._C._cuda_record_memory_history
        torch._C._cuda_record_memory_history = self._recorded_by_anyone
        if what == "all" or (what == "step" and step == 1):
            self._begin()
        elif what == "step":
            self._record(enabled="state", context="alloc")

    def is_on(self):
        """Return True if events are being kept."""
        return self._first_ns is not None and self._last_ns is None and self._is_ours

    def hold(self, holding):
        """These storages, standing now, have this cause."""
        self._held.append(holding)

    def step_ended(self, step):
        """A whole step is over, and the next begins."""
        if self._what != "step" or not self._is_ours:
            return
        if step == self._step - 1:
            self._begin()
        elif step == self._step:
            self._finish()

    def close(self):
        """Stop tracing."""
        if self.is_on():
            self._finish()

    def write(self, path):
        """The history's file, whole or not at all; none where there is nothing."""
        self.close()
        self._write(self._taken, self._last_ns, path)

    def write_so_far(self, path):
        """Write the history so far, which goes on; nothing of one that is yet to begin."""
        if self.is_on():
            self._write(torch.cuda.memory._snapshot(), time.time_ns(), path)
        else:
            self._write(self._taken, self._last_ns, path)

    def _write(self, taken, last_ns, path):
        if taken is None:
            return
        device = torch.cuda.current_device()
        found = history.compact(taken, device, hidden=hook_folders())
        found |= {"traced": self._what, "first_ns": self._first_ns, "last_ns": last_ns, "held": self._held}
        history.write(found, path)

    def _begin(self):
        self._first_ns = time.time_ns()
        self._record(enabled="all", context="alloc")

    def _finish(self):
        self._last_ns = time.time_ns()
        self._taken = torch.cuda.memory._snapshot()
        self._record(enabled=None)

    def _record(self, **words):
        self._is_asking = True
        try:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MAX_EVENTS, **words)
        finally:
            self._is_asking = False

    def _recorded_by_anyone(self, *args, **kwargs):
        if self._is_ours and not self._is_asking and self._taken is None:
            self._is_ours = False
            if self._what != "none":
                self._warn("the program keeps a memory history of its own: which lines asked for memory is not known")
        return self._record_in_torch(*args, **kwargs)
