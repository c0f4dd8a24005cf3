"""Steps under other values, once the run knows enough: do they ask for the same memory?

In: a Watch whose card is emulated. Out: one ``verification`` line. Nothing else of these steps is written: they are not
the run's.
"""

import sys
from contextlib import ExitStack

import torch


class StepVerification:
    """``begin`` at the beginning of a step, then ``step_ended`` at each one's end until it says that it is done."""

    def __init__(self, watch, values):
        from vramprobe_values import verification_policies

        self._watch, self._values, self._within = watch, values, None
        self._left = verification_policies(values.policy)
        self._contents, self._sequences = [], []

    def is_under_way(self):
        """Return True if a step runs under other values now."""
        return self._within is not None

    def begin(self):
        """The next step is the first of them."""
        self._watch.profiled()
        self._enter()

    def step_ended(self):
        """-> whether that was the last; else the next one begins."""
        torch.cuda.synchronize()
        self._sequences.append(self._events(torch.cuda.current_device()))
        self._leave()
        if self._left:
            self._enter()
            return False
        from vramprobe_values import allocations

        self._watch.line("verification", **allocations.verdict(self._contents, self._sequences))
        return True

    def end(self):
        """The program ends in such a step: by an error that the values led to, or because it had no more steps."""
        if not self.is_under_way():
            return
        self._leave()
        error, is_first = getattr(sys, "last_value", None), not self._sequences
        if error is None or is_first:
            self._watch.line("warning", message=f"not verified: it ended {len(self._left) + 1} steps too early")
        else:
            said = f"with {self._contents[-1]} it ended by {type(error).__name__}: {error}"
            self._watch.line(
                "verification", contents=self._contents, num_events=len(self._sequences[0]), same=False, parted_at=said
            )

    def _enter(self):
        from vramprobe_values import allocations

        policy = self._left.pop(0)
        self._contents.append(policy.contents)
        self._within = ExitStack()
        self._within.enter_context(self._values.under(policy))
        self._events = self._within.enter_context(allocations.recorded())

    def _leave(self):
        self._within.close()
        self._within = None
