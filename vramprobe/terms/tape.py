"""A tape of values that knows only sizes: what autograd keeps alive, when it lets go, and the highest moment between.

In: calls that look like a model's own code (``add``, ``linear``, ``silu`` …) over Values with a width and a dtype.
Out: live bytes by cause, and for each place of the step the highest moment within it. Never imports torch.

A Value dies when Python drops its last reference, exactly as a tensor does, so code written like the model's own keeps
the same values alive. The rules of saving and releasing are autograd's (``derivatives.yaml``, ``engine.cpp``):
a node holds what it saved until its own backward has run; a gradient that nobody else holds is accumulated in place.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int8": 1, "bool": 1, "int32": 4}

#: The cause of a value until something more telling is known about it.
TEMPORARY = "temporaries"

Backward = Callable[[list["Value | None"], tuple["Value", ...]], Sequence["Value | None"]]


class Storage:
    """One allocation. It is freed when the last Value on it dies."""

    __slots__ = ("cause", "num_bytes", "num_values")

    def __init__(self, num_bytes: int, cause: str) -> None:
        self.num_bytes, self.cause, self.num_values = num_bytes, cause, 0


class Node:
    """One backward function: the nodes its gradients go to, and what it saved."""

    __slots__ = (
        "backward", "cause", "checkpoint", "edges", "kept", "leaf", "num_outputs", "place", "saved", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: int, edges: list[tuple[Node, int] | None], place: str, num_outputs: int = 1) -> None:
        self.sequence, self.edges, self.place, self.num_outputs = sequence, edges, place, num_outputs
        self.cause = TEMPORARY  # of what its backward allocates: as in forward
        self.saved: tuple[Value, ...] = ()
        self.kept: tuple[Value, ...] = ()  # Python attributes of a Function's ctx: they go with the graph itself
        self.backward: Backward | None = None
        self.leaf: Value | None = None  # set where a gradient ends, at a trained parameter
        self.checkpoint: Checkpoint | None = None  # where what this node saves is made again


class Value:
    """A tensor's size, dtype, storage and place in the graph; views share the storage."""

    __slots__ = ("contiguous", "dtype", "gradient", "index", "is_view", "node", "numel", "storage", "tape")

    def __init__(self, tape: Tape, numel: int, dtype: str, storage: Storage | None) -> None:
        self.tape, self.numel, self.dtype, self.storage = tape, numel, dtype, storage
        self.node: Node | None = None
        self.index = 0
        self.gradient: Value | None = None
        self.contiguous = True  # False: laid out by heads, so that a reshape must copy
        self.is_view = False  # a gradient that is a view holds its base, so the engine cannot add to it in place
        if storage is not None:
            storage.num_values += 1

    def __del__(self) -> None:
        storage = self.storage
        if storage is not None:
            storage.num_values -= 1
            if storage.num_values == 0:
                self.tape._count(storage.cause, -storage.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of this value's own elements in bytes."""
        return self.numel * ITEMSIZE_BYTES[self.dtype]

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self.node is not None


class Recomputed(Exception):
    """Raised inside a recomputation once everything that its layer saves is there (torch's early stop)."""


class Checkpoint:
    """A stretch of forward whose saved values are dropped and made again when backward first asks for one.

    As torch.utils.checkpoint without re-entry does it: the graph of the first run stays, without what it saved; the
    second run fills it in.
    """

    def __init__(self, tape: Tape, run_again: Callable[[], object]) -> None:
        self.tape, self.run_again = tape, run_again
        self.nodes: list[Node] = []
        self.again: list[Node] | None = None  # null in the first run

    def add(self, node: Node) -> None:
        """A node that saves something was recorded. Raises Recomputed when it is the last one of the second run."""
        if self.again is None:
            node.saved, node.checkpoint = (), self
            self.nodes.append(node)
            return
        self.again.append(node)
        if len(self.again) == len(self.nodes):
            raise Recomputed

    def fill(self) -> None:
        """Run the stretch again, unless that was done, and hand what it saves to the nodes of the first run."""
        if self.again is not None:
            return
        self.again = []
        with self.tape.checkpointed(self), self.tape.cause(TEMPORARY, saved="recomputed_layer"), suppress(Recomputed):
            self.run_again()
        for node, made_again in zip(self.nodes, self.again, strict=True):
            node.saved, made_again.saved = made_again.saved, ()
        self.nodes, self.again = [], []


class Tape:
    """Live bytes by cause and the highest moment of each place; also the autograd engine."""

    def __init__(self) -> None:
        self.live_bytes: Counter[str] = Counter()
        self.total_bytes = 0
        self.place: tuple[str, str] = ("forward", "start")
        self.peaks: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}
        self._checkpoint: Checkpoint | None = None
        self._cause = TEMPORARY
        self._saved_cause = "saved_activations"
        self._sequence = 0
        self._required: list[Value] = []

    # -- allocation -------------------------------------------------------------------------------------------------

    def _count(self, cause: str, num_bytes: int) -> None:
        self.live_bytes[cause] += num_bytes
        self.total_bytes += num_bytes
        if num_bytes > 0:
            seen = self.peaks.get(self.place)
            if seen is None or self.total_bytes > seen[0]:
                self.peaks[self.place] = (self.total_bytes, dict(self.live_bytes))

    def at(self, phase: str, place: str) -> None:
        """From here on, moments belong to this place of this phase."""
        self.place = (phase, place)

    @contextmanager
    def cause(self, name: str, saved: str | None = None) -> Iterator[None]:
        """Inside, new values have this cause, and ``saved`` (if given) once a backward function holds them."""
        before = self._cause, self._saved_cause
        self._cause, self._saved_cause = name, saved or self._saved_cause
        try:
            yield
        finally:
            self._cause, self._saved_cause = before

    @contextmanager
    def checkpointed(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Inside, what nodes save belongs to this checkpoint."""
        before, self._checkpoint = self._checkpoint, checkpoint
        try:
            yield
        finally:
            self._checkpoint = before

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        """Allocate ``numel`` elements."""
        storage = Storage(numel * ITEMSIZE_BYTES[dtype], cause or self._cause)
        value = Value(self, numel, dtype, storage)
        self._count(storage.cause, storage.num_bytes)
        return value

    def new_like(self, value: Value, dtype: str | None = None) -> Value:
        """Allocate as many elements as ``value`` has, in its layout."""
        made = self.new(value.numel, dtype or value.dtype)
        made.contiguous = value.contiguous
        return made

    def view(self, value: Value, numel: int | None = None) -> Value:
        """Another value on the same storage, outside the graph."""
        made = Value(self, value.numel if numel is None else numel, value.dtype, value.storage)
        made.contiguous = value.contiguous
        return made

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A value that was there before the step (a weight): its bytes are not counted here."""
        value = Value(self, numel, dtype, None)
        if trained:
            self._make_leaf(value)
        return value

    def _make_leaf(self, value: Value) -> None:
        value.node = Node(2**62, [], self.place[1])  # the engine accumulates into leaves before anything else
        value.node.leaf = value

    # -- the graph --------------------------------------------------------------------------------------------------

    def record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        saved: Sequence[Value],
        backward: Backward,
        *,
        kept: Sequence[Value] = (),
        recomputable: bool = True,
    ) -> Node | None:
        """Make ``outputs`` the result of one node. ``backward(grads, saved)`` returns one gradient per input.

        What is saved goes after the node's backward, and is dropped under a checkpoint unless it is not
        ``recomputable``; what is ``kept`` stays as long as the graph. The node is returned, null where no input needs a
        gradient.
        """
        if not any(value.needs_grad for value in inputs):
            return None
        self._sequence += 1
        edges = [(value.node, value.index) if value.node is not None else None for value in inputs]
        node = Node(self._sequence, edges, self.place[1], max(1, len(outputs)))
        node.backward, node.cause = backward, self._cause
        for index, output in enumerate(outputs):
            output.node, output.index = node, index
        node.kept = tuple(self._held(value) for value in kept)
        dropped = self._checkpoint is not None and recomputable
        if not (dropped and self._checkpoint.again is None):
            node.saved = tuple(self._held(value) for value in saved)
        if dropped and saved:
            self._checkpoint.add(node)
        return node

    def _held(self, value: Value) -> Value:
        self.keep(value, self._saved_cause)
        return self.view(value)

    def keep(self, value: Value, cause: str) -> None:
        """Give a temporary the cause it is kept for."""
        if value.storage is not None and value.storage.cause == TEMPORARY:
            self._recause(value, cause)

    def require_grad(self, value: Value) -> None:
        """``value.requires_grad_()`` on a result outside the graph: its gradient is made and dropped."""
        assert value.node is None
        self._make_leaf(value)
        self._required.append(value)

    def forget_required(self) -> None:
        """The graph is gone, and with it the values that were made to need a gradient."""
        for value in self._required:
            value.node = value.gradient = None
        self._required.clear()

    def backward(self, root: Node, gradient: Value) -> None:
        """Run every node behind ``root``; leaves keep their gradients. Consumes the graph."""
        waiting = _dependencies(root)
        buffers: dict[Node, list[Value | None]] = {root: [gradient]}
        ready = [(-root.sequence, id(root), root)]
        del gradient
        while ready:
            node = heapq.heappop(ready)[2]
            grads = buffers.pop(node)
            if node.leaf is not None:
                self._accumulate_leaf(node.leaf, grads)
                continue
            self.place = ("backward", node.place)
            if node.checkpoint is not None:
                node.checkpoint.fill()
            before, self._cause = self._cause, node.cause
            made = list(node.backward(grads, node.saved))
            self._cause = before
            grads.clear()
            node.saved, node.checkpoint = (), None
            for position, edge in enumerate(node.edges):
                if edge is None:
                    made[position] = None
                    continue
                target, index = edge
                slots = buffers.setdefault(target, [None] * target.num_outputs)
                new, made[position] = made[position], None
                if new is not None:
                    slots[index] = self._sum(slots[index], new, target.leaf is not None)
                del new, slots
                waiting[target] -= 1
                if waiting[target] == 0:
                    heapq.heappush(ready, (-target.sequence, id(target), target))

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        if to_leaf:
            self._recause(new, "gradients")
        if old is None:
            return new
        if old.storage.num_values == 1 and not old.is_view:
            return old  # engine's InputBuffer adds in place to a gradient that nobody else holds
        total = self.new_like(old)
        if to_leaf:
            self._recause(total, "gradients")
        return total

    def _accumulate_leaf(self, leaf: Value, grads: list[Value | None]) -> None:
        grad = grads.pop()
        if grad is None or leaf.gradient is not None:
            return  # a second micro-step adds in place
        if grad.storage.num_values > 1:
            grad = self.new_like(grad)
            self._recause(grad, "gradients")
        leaf.gradient = grad

    def _recause(self, value: Value, cause: str) -> None:
        storage = value.storage
        if storage is not None and storage.cause != cause:
            self._count(storage.cause, -storage.num_bytes)
            storage.cause = cause
            self._count(cause, storage.num_bytes)


def _dependencies(root: Node) -> Counter[Node]:
    """How many gradients each node waits for."""
    waiting: Counter[Node] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            waiting[edge[0]] += 1
            if edge[0] not in seen:
                seen.add(edge[0])
                stack.append(edge[0])
    return waiting
