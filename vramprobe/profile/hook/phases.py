"""Track the phase of a process, step by step: marks in, one line for each phase and card out.

In: marks (:meth:`Phases.mark`, from marks.py), the counters. Out: the journal's ``phase`` and ``step`` lines, and on an
emulated card ``moved``, what NCCL was asked for. A phase's name is settled when it ends: what led to a backward was a
forward, whoever announced it or not.
"""

import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import torch

_NOT_TRAINING = ("evaluation", "generation")


class Phases:
    """The phases of one process, from its first CUDA call on. ``steps`` counts the optimizer's whole steps."""

    def __init__(self, journal, counters, used_bytes, moved=None, used_peak=None):
        self._journal, self._counters, self._used_bytes = journal, counters, used_bytes
        self._used_peak = used_peak  # Driver.take_device_peak_bytes: the card's highest use since the last call
        self._count_moved, self._moved = moved, {}  # Driver.moved, and what it said last
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self.steps = 0  # whole ones
        self.backwards = 0  # of all micro-steps
        self.num_phases = Counter()  # that have ended, by name
        self.started = False  # whether a forward has begun
        self.name, self._start_ns = "load", time.time_ns()
        self._micro_step = 0
        self._stepped = False  # the optimizer has stepped since the last step began
        self.is_stepping = False  # within an optimizer's step whose closure has been called: what it calls is the same
        self._step_peaks = []  # one by whole step: the highest allocated bytes, and those that stood at its end
        self._highest = {}
        self.retries = {}
        self._writes, self._counts = True, True
        self.is_outside = False  # training has ended, and no forward of another one has begun
        self._follows_backward = False  # since the last one ended nothing else has begun
        self._has_ended = False  # training has, but for a batch that was fetched before its end
        self._scope = None  # the phase that all marks belong to now
        self._scope_is_of_step = False
        self.has_stepped = lambda: False  # a program without an optimizer: its weights are updated (own_steps.py)
        self.on_mark = []  # called as a phase is to begin
        self.on_left = []  # called with the name of a scope that has been left
        self.on_close = []  # called with the name and the step of a phase that has ended
        self.on_step = []  # called with the number of a step that is whole, before the next begins

    def mark(self, name):
        """The phase ``name`` begins here."""
        if threading.get_ident() != self._thread:  # a loader's or a logger's thread trains nothing
            return
        for act in self.on_mark:
            act()
        if self._scope is not None:
            return
        with self._lock:
            previous = self.name
            if previous == "serving" and name in ("evaluation", "other"):
                return  # an engine's own forwards
            if not self.started and name in ("zero_grad", "other", "optimizer_step"):
                return  # as of a Trainer that clears gradients before the first forward: still loading
            if name == "backward" and previous in ("other", "zero_grad") and self.started and self._has_led_to_it():
                previous = "forward"  # of a module that nobody watched
            previous = self._own_step_or(previous)
            begins_step = self._stepped and not self.is_stepping and name in ("forward", "backward", "serving")
            if begins_step and previous == "forward":
                self._end_step()
                begins_step = False
            elif previous == name and not begins_step:
                return
            self._close(previous)
            if begins_step:
                self._end_step()
            self.name, self.started = name, True
            is_of_training = name in ("forward", "backward")
            self.is_outside = not is_of_training and (self.is_outside or (self._has_ended and name in _NOT_TRAINING))
            self._follows_backward = name == "backward" or (name == "other" and self._follows_backward)
            if name == "backward":
                self._micro_step += 1
                self.backwards += 1

    @contextmanager
    def scope(self, name, *, is_of_step=False):
        """All that happens within is one phase: of the run, or of the step that is under way or begins with it, as
        the rollout of a reinforcement learning step does; the outermost names it."""
        if self._scope is not None or threading.get_ident() != self._thread:
            yield
            return
        for act in self.on_mark:
            act()
        with self._lock:
            outer = self.name
            self._close(outer)
            if is_of_step and self._stepped:
                self._end_step()
            self.name = self._scope = name
            self._scope_is_of_step = is_of_step
        try:
            yield
        finally:
            with self._lock:
                self._close(name)
                self.name, self._scope = outer, None
            for act in self.on_left:
                act(name)

    @property
    def step(self):
        """The step under way, 1-based; None outside the steps."""
        is_within = self.started and not self.is_outside and (self._scope is None or self._scope_is_of_step)
        return self.steps + 1 if is_within and self.name != "load" else None

    def stepped(self):
        """An optimizer's step has come to its end, in a phase of its own or, fused, within the backward; one before the
        first forward, or within a phase of the run, trains nothing: a resume makes the optimizer's state so."""
        if self.started and (self._scope is None or self._scope_is_of_step):
            self._stepped = True

    def close(self):
        """The program ends: its last phase, and its last step if it is whole."""
        with self._lock:
            self._close(self._own_step_or(self.name))
            if self._stepped:
                self._end_step()

    def _own_step_or(self, name):
        """The phase that ends: what followed a backward was the program's own step, or, where nobody saw a forward
        begin, that and a forward."""
        if name not in ("other", "forward") or self._stepped or self.is_outside or not self.has_stepped():
            return name
        self.stepped()
        return "optimizer_step" if name == "other" else name

    def close_so_far(self):
        """The phase that is under way is written as it stands, and goes on as one more of its name."""
        with self._lock:
            self._close(self.name)

    def write_no_more(self):
        """Steps are counted as before, and nothing of them is written."""
        self._writes = False

    def training_ended(self):
        """End the training: later phases belong to no step."""
        if self.started and self._scope is None:
            with self._lock:
                self._close(self.name)
                self.name, self.is_outside, self._has_ended = "other", True, True

    def count_no_more(self):
        """The step under way stays the last: what follows is written and counts as no step."""
        self._counts = False

    def repeats(self):
        """Return True if the last two whole steps were byte-identical: peak, and what they left."""
        return len(self._step_peaks) > 1 and self._step_peaks[-1] == self._step_peaks[-2]

    def grows(self):
        """Return True if each of the last three whole steps left more allocated than the one before, on some card."""
        ends = [{device: end for device, (_, end) in one.items()} for one in self._step_peaks[-4:]]
        return len(ends) == 4 and any(
            all(one.get(device, 0) < other.get(device, 0) for one, other in pairwise(ends)) for device in ends[0]
        )

    def _has_led_to_it(self):
        """Return True if the phase before a backward was its forward, not the pause between two parts of one backward,
        as a pipeline takes it: those keep nothing.
        """
        ends = {device: end for device, (_, end) in self._highest.items()}
        return not self._follows_backward or any(torch.cuda.memory_allocated(one) > ends[one] for one in ends)

    def _close(self, name):
        now_ns = time.time_ns()
        self.num_phases[name] += 1
        step = self.step if name != "load" else None
        micro_step = self._micro_step + (name == "forward") if name in ("forward", "backward") else None
        for device in self._counters.cards() if self._writes else ():
            found = self._counters.take(device)
            self.retries[device] = (found.pop("num_alloc_retries"), found.pop("num_ooms"))
            self._journal.write(
                "phase",
                name=name,
                device=device,
                step=step,
                micro_step=micro_step,
                start_ns=self._start_ns,
                end_ns=now_ns,
                device_used_bytes=self._used_bytes(device),
                device_peak_bytes=None if self._used_peak is None else self._used_peak(device),
                **found,
            )
            if self._scope is not None and not self._scope_is_of_step:
                continue
            highest, _ = self._highest.get(device, (0, 0))
            self._highest[device] = (max(highest, found["allocated_peak_bytes"]), found["allocated_end_bytes"])
        if self._writes and self._count_moved is not None:
            self._write_moved(name, step)
        for act in self.on_close if self._writes else ():
            act(name, step)
        self._start_ns = now_ns

    def _write_moved(self, name, step):
        now = self._count_moved()
        since = []
        for kind, (calls, num_bytes) in sorted(now.items()):
            calls_before, bytes_before = self._moved.get(kind, (0, 0))
            if calls > calls_before:
                since.append([*kind, calls - calls_before, num_bytes - bytes_before])
        if since:
            self._journal.write("moved", phase=name, step=step, counts=since)
        self._moved = now

    def _end_step(self):
        self._stepped, self._micro_step = False, 0
        if not self._counts:
            return
        self.steps += 1
        self._step_peaks.append(dict(self._highest))
        self._highest.clear()
        if self._writes:
            self._journal.write("step", step=self.steps)
        for act in self.on_step:
            act(self.steps)


def used_bytes(device):
    """Bytes that all processes use of the card, as the driver reports them."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free
