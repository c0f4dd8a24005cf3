"""Micro-steps: the log of a step over many of them, of which those between are as the one before.

In: the chunks of a step of LOGGED micro-steps, or of all there are. Out: a StepLog, whose parts a run plays in turn.
The first of them makes the gradients, the second finds them; a rank's last may reduce them.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.terms.tape.request_log import Chunk, NotAlike, events

#: Micro-steps that are run where there are more: the first two, two that have to be alike, and the last.
LOGGED = 5

Part = tuple[list[int], int]  # events, and the number of the first request among them


class StepLog:
    """What a step asks for: events, in which requests are numbered through."""

    def __init__(self, chunks: Sequence[Chunk], num_micro_steps: int) -> None:
        """The last chunk is what follows the optimizer. Raises NotAlike where micro-steps are left out, and differ."""
        *work, self._end = events(chunks)
        self.parts: list[list[int]] = []  # of each micro-step
        self.firsts = [0]  # the number of the first request of each, and of the end
        for chunk, found in zip(chunks, work, strict=False):
            if chunk.micro_step == len(self.parts):
                self.parts.append([])
                self.firsts.append(self.firsts[-1])
            self.parts[-1] += found
            self.firsts[-1] += sum(event > 0 for event in found)
        self.num_left_out = num_micro_steps - len(self.parts)
        if self.num_left_out:
            self._require_alike()

    def repeated(self, num_more: int) -> Part:
        """The first, second … of those that are left out."""
        return self._moved(self.parts[-2], num_more), self.firsts[-3] + num_more * self._num_requests

    def last(self, num_more: int) -> Part:
        """The last, after so many of those that are left out."""
        return self._moved(self.parts[-1], num_more), self.firsts[-2] + num_more * self._num_requests

    def end(self, num_more: int) -> Part:
        """What follows the optimizer, after so many of those that are left out."""
        return self._moved(self._end, num_more), self.firsts[-1] + num_more * self._num_requests

    @property
    def num_requests(self) -> int:
        """Of a whole step, and a number more."""
        return self.firsts[-1] + self.num_left_out * self._num_requests + 1

    @property
    def _num_requests(self) -> int:
        """Of one that is left out."""
        return self.firsts[-2] - self.firsts[-3] if self.num_left_out else 0

    def _require_alike(self) -> None:
        """The last of those between asks for what the one before it asked for, and gives back its own, or what that one
        left, as that did; what follows knows of those between but the last.
        """
        former, again = self.parts[-3], self.parts[-2]
        on = [event - self._num_requests if event < 0 else event for event in former]
        if len(self.parts) != LOGGED or again != on or any(0 > event > ~self.firsts[2] for event in again):
            raise NotAlike
        for event in (*self.parts[-1], *self._end):
            if event < 0 and self.firsts[2] <= ~event < self.firsts[3]:
                raise NotAlike

    def _moved(self, part: list[int], num_more: int) -> list[int]:
        """Where the requests since those between stand so many micro-steps on."""
        if not num_more:
            return part
        by, since = num_more * self._num_requests, self.firsts[2]
        return [event - by if event < 0 and ~event >= since else event for event in part]
