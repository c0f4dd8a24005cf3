"""CUDA graphs with a backward in them: a replay runs no Python, and is the backward of its step.

In: torch.cuda.CUDAGraph, whose captures and replays are watched. Out: marks of the phase that a replay is. A graph of
an inference engine, or of a forward alone, is left to those who mark its forward.
"""

import weakref

import torch
from vramprobe_values.imports import instead_of


class Graphs:
    """The graphs of one process. ``replayed(run)``: is to call ``run``, as the backward that it is."""

    def __init__(self, phases, replayed):
        self._phases, self._replayed = phases, replayed
        self._begun = weakref.WeakKeyDictionary()  # graph → backwards before its capture
        self._of_training = weakref.WeakSet()
        for name, act in (
            ("capture_begin", self._capture_begin),
            ("capture_end", self._capture_end),
            ("replay", self._replay),
        ):
            instead_of(torch.cuda.CUDAGraph, name)(act)

    def _capture_begin(self, begin, graph, *args, **kwargs):
        self._begun[graph] = self._phases.backwards
        return begin(graph, *args, **kwargs)

    def _capture_end(self, end, graph):
        if self._phases.backwards > self._begun.get(graph, self._phases.backwards):
            self._of_training.add(graph)
        return end(graph)

    def _replay(self, replay, graph):
        if graph in self._of_training:
            return self._replayed(lambda: replay(graph))
        return replay(graph)
