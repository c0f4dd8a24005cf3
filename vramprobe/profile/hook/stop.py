"""Decide when a run may stop: after the requested steps, once two of them are byte-identical; one rank of several does
not wait for that, as it would go on alone where another's steps repeat.

In: a Watch, ``steps``, a StepVerification that comes before the end, or None; an AfterSteps and an OwnBatches, or None.
Out: steps on batches that decide (own_batches.py); then the loop ends after one more step and the run goes on to its
end (after_steps.py); or SystemExit(0) at the beginning of the next step, which frameworks let through and launchers
take for a clean end; whoever catches it is ended all the same, a little later.
"""

import contextlib
import os
import sys
import threading

_PATIENCE = 3  # steps that do not repeat are waited for so many times as long
_GRACE_SECONDS = 20.0


class Stop:
    """Counts the whole steps of one process."""

    def __init__(self, watch, steps, verification, after=None, batches=None):
        self._watch, self._steps, self._verification = watch, steps, verification
        self._after, self._batches = after, batches
        if self._steps:
            watch.phases.on_step.append(self._step_ended)
        if after is not None:
            watch.phases.on_step.append(after.step_ended)

    def _step_ended(self, step):
        if self._watch.is_ending:  # its last step is known to be whole only now: nothing is left to stop
            return
        if self._verification is not None and self._verification.is_under_way():
            if self._verification.step_ended():
                self.leave()
            return
        if self._batches is not None and self._batches.is_playing:
            if self._batches.step_ended(step):
                self._go_on()
            return
        may_wait = not self._watch.phases.repeats() and self._watch.place_among_ranks[1] == 1
        if step < self._steps or (may_wait and step < _PATIENCE * self._steps):
            return
        if self._verification is not None:
            self._verification.begin()
        elif self._batches is None or not self._batches.begin(self._watch, step):
            self._go_on()

    def _go_on(self):
        """To what follows the steps, or out."""
        if self._after is not None and self._after.begin():
            self._watch.goes_on()
        elif (
            "ipykernel.kernelapp" in sys.modules
        ):  # to leave a cell is an error, which ends a notebook that is executed
            self._watch.line("warning", message="a notebook's kernel is not stopped: its cells run to their end")
            self._watch.goes_on()
        else:
            self.leave()

    def leave(self):
        """End this process now, as asked for."""
        self._watch.stop()
        leave = threading.Timer(_GRACE_SECONDS, os._exit, (0,))
        leave.daemon = True
        leave.start()
        sys.excepthook = lambda *_: os._exit(0)  # what fails on the way out is this stop's doing
        _say_nothing_more()
        raise SystemExit(0)


def _say_nothing_more():
    """Close stdout and stderr: what a context of the program says of this exit, as Megatron's timers do with its whole
    traceback, says nothing of the program."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush(), sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1), os.dup2(nothing, 2)
        os.close(nothing)
