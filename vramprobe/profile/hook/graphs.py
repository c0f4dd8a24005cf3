"""CUDA graphs with a backward in them: a replay runs no Python, and is the backward of its step.

In: torch.cuda.CUDAGraph, whose captures and replays are watched. Out: marks of the phase that a replay is. A graph of
an inference engine, or of a forward alone, is left to those who mark its forward.
"""

import functools
import weakref

import torch


class Graphs:
    """The graphs of one process. ``replayed(run)``: is to call ``run``, as the backward that it is."""

    def __init__(self, phases, replayed):
        self._phases, self._replayed = phases, replayed
        self._begun = weakref.WeakKeyDictionary()  # graph → backwards before its capture
        self._of_training = weakref.WeakSet()
        kind = torch.cuda.CUDAGraph
        kind.capture_begin = self._watched_begin(kind.capture_begin)
        kind.capture_end = self._watched_end(kind.capture_end)
        kind.replay = self._watched_replay(kind.replay)

    def _watched_begin(self, begin):
        @functools.wraps(begin)
        def capture_begin(graph, *args, **kwargs):
            self._begun[graph] = self._phases.backwards
            return begin(graph, *args, **kwargs)

        return capture_begin

    def _watched_end(self, end):
        @functools.wraps(end)
        def capture_end(graph):
            if self._phases.backwards > self._begun.get(graph, self._phases.backwards):
                self._of_training.add(graph)
            return end(graph)

        return capture_end

    def _watched_replay(self, replay):
        @functools.wraps(replay)
        def watched(graph):
            if graph in self._of_training:
                return self._replayed(lambda: replay(graph))
            return replay(graph)

        return watched
