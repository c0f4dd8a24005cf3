"""Steps of a program without an optimizer of torch.optim, which updates its weights by code of its own.

In: each backward of the program (marks.py). Out: :meth:`OwnSteps.has_stepped`, whether the weights have been updated
since: a leaf of the backward's graph was written to, replaced or has lost its gradient. Micro-steps that accumulate
gradients do none of these.
"""

import gc
import weakref

from torch.optim import Optimizer

_MAX_NODES = 200_000


class OwnSteps:
    """Detector of one process's own optimizer steps. Off for good once there is an optimizer of torch.optim, whose
    steps are counted instead.
    """

    def __init__(self):
        self._seen = []  # of each leaf of the last backward: (a weak reference, its state then)
        self._are_new = False  # the backward that begins has none of their leaves
        self._is_on = None  # not known before a first step is suspected

    def turn_off(self):
        self._is_on, self._seen = False, []

    def leaves(self, outputs, inputs):
        """Weak references to what a backward from ``outputs`` gives gradients to; ``inputs``: to these alone."""
        if self._is_on is False:
            return []
        known = {id(leaf()) for leaf, _ in self._seen}
        self._are_new = bool(known and inputs) and known.isdisjoint(map(id, inputs))
        return [weakref.ref(leaf) for leaf in inputs or _leaves(outputs)]

    def backward_ended(self, leaves):
        """Note how the backward has left its leaves."""
        self._seen, self._are_new = [(leaf, _state(leaf())) for leaf in leaves], False

    def has_stepped(self):
        """Return True if the weights have been updated since the last backward; asked again, False."""
        if not self._are_new and all(_state(leaf()) == state for leaf, state in self._seen):
            return False
        if self._is_on is None:
            self._is_on = not any(issubclass(type(one), Optimizer) for one in gc.get_objects())
        self._seen, self._are_new = [], False
        return self._is_on


def _leaves(outputs):
    nodes = [one.grad_fn for one in outputs if getattr(one, "grad_fn", None) is not None]
    seen, found = set(nodes), []
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _state(leaf):
    if leaf is None:
        return None
    grad = leaf.grad
    return leaf._version, None if grad is None else (id(grad), grad._version)
