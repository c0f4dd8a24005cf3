"""A tape of values that knows only sizes: what autograd keeps alive, when it lets go, and the highest moment between.

In: calls that look like a model's own code (``add``, ``linear``, ``silu`` …) over Values with a width and a dtype.
Out: live bytes by cause, and for each place of the step the highest moment within it. Never imports torch.

A Value dies when Python drops its last reference, exactly as a tensor does, so code written like the model's own keeps
the same values alive. The rules of saving and releasing are autograd's (``derivatives.yaml``, ``engine.cpp``):
a node holds what it saved until its own backward has run; a gradient that nobody else holds is accumulated in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import NamedTuple

ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int8": 1, "bool": 1, "int32": 4}

#: The cause of a value until something more telling is known about it.
TEMPORARY = "temporaries"

Backward = Callable[[list["Value | None"], tuple["Value", ...]], list["Value | None"]]
Place = tuple[str, str]  # phase, and where in it
Edge = tuple["Node | Leaf", int]  # where a gradient goes, and as which of the outputs there


class Peak(NamedTuple):
    """The highest moment of a place: live bytes, and what they were by cause."""

    total_bytes: int
    by_cause: dict[str, int]


class Storage:
    """One allocation. It is freed when the last Value on it dies."""

    __slots__ = ("cause", "num_bytes", "num_values")

    def __init__(self, num_bytes: int, cause: str) -> None:
        self.num_bytes, self.cause, self.num_values = num_bytes, cause, 0


class Node:
    """One backward function: where its gradients go, and what it saved."""

    __slots__ = (
        "backward", "cause", "checkpoint", "edges", "grads", "kept", "num_outputs", "place", "saved", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: int, edges: list[Edge | None], place: Place, cause: str, num_outputs: int) -> None:
        self.sequence, self.edges, self.num_outputs = sequence, edges, num_outputs
        self.place, self.cause = place, cause  # of what its backward allocates: as in forward
        self.saved: tuple[Value, ...] = ()
        self.kept: tuple[Value, ...] = ()  # Python attributes of a Function's ctx: they go with the graph itself
        self.backward: Backward | None = None
        self.checkpoint: Checkpoint | None = None  # where what this node saves is made again
        self.grads: list[Value | None] | None = None  # the gradients of its outputs, as far as they have arrived


class Leaf:
    """Where a gradient ends: at a trained parameter."""

    __slots__ = ("gradient", "grads", "num_awaited")
    num_outputs = 1

    def __init__(self) -> None:
        self.gradient: Value | None = None
        self.grads: list[Value | None] | None = None
        self.num_awaited = 0  # gradients that a backward has still to bring


class Value:
    """A tensor's size, dtype, storage and place in the graph; views share the storage."""

    __slots__ = ("contiguous", "dtype", "edge", "is_view", "numel", "storage", "tape")

    def __init__(self, tape: Tape, numel: int, dtype: str, storage: Storage | None) -> None:
        self.tape, self.numel, self.dtype, self.storage = tape, numel, dtype, storage
        self.edge: Edge | None = None
        self.contiguous = True  # False: laid out by heads, so that a reshape must copy
        self.is_view = False  # a gradient that is a view holds its base, so the engine cannot add to it in place
        if storage is not None:
            storage.num_values += 1

    def __del__(self) -> None:
        storage = self.storage
        if storage is not None:
            storage.num_values -= 1
            if storage.num_values == 0:
                self.tape._free(storage)

    @property
    def node(self) -> Node | None:
        """The node that made it."""
        return self.edge[0] if self.edge is not None else None

    @property
    def num_bytes(self) -> int:
        """Size of this value's own elements in bytes."""
        return self.numel * ITEMSIZE_BYTES[self.dtype]

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self.edge is not None


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
        self.place: Place = ("forward", "start")
        self._peaks: dict[Place, Peak] = {}
        self._rising = False  # something was allocated since the last time anything was freed
        self._place_in_backward: Place = ("backward", "start")
        self._checkpoint: Checkpoint | None = None
        self._cause = TEMPORARY
        self._saved_cause = "saved_activations"
        self._sequence = 0
        self._required: list[Value] = []

    # -- allocation -------------------------------------------------------------------------------------------------

    @property
    def peaks(self) -> dict[Place, Peak]:
        """The highest moment of each place, in the order in which something was first allocated there."""
        self._settle()
        return self._peaks

    def _settle(self) -> None:
        """Look at how high it is: before anything is freed, and before another place begins."""
        if self._rising:
            self._rising = False
            seen = self._peaks.get(self.place)
            if seen is None or self.total_bytes > seen.total_bytes:
                self._peaks[self.place] = Peak(self.total_bytes, dict(self.live_bytes))

    def _allocate(self, storage: Storage) -> None:
        self.live_bytes[storage.cause] += storage.num_bytes
        self.total_bytes += storage.num_bytes
        if storage.num_bytes > 0:
            self._rising = True

    def _free(self, storage: Storage) -> None:
        if self._rising:
            self._settle()
        self.live_bytes[storage.cause] -= storage.num_bytes
        self.total_bytes -= storage.num_bytes

    def at(self, phase: str, place: str) -> None:
        """From here on, moments belong to this place of this phase."""
        self._go_to((phase, place))
        self._place_in_backward = ("backward", place)

    def _go_to(self, place: Place) -> None:
        self._settle()
        self.place = place

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

    def new(self, numel: int, dtype: str) -> Value:
        """Allocate ``numel`` elements."""
        storage = Storage(numel * ITEMSIZE_BYTES[dtype], self._cause)
        self._allocate(storage)
        return Value(self, numel, dtype, storage)

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
            value.edge = (Leaf(), 0)
        return value

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
    ) -> Edge | None:
        """Make ``outputs`` the result of one node. ``backward(grads, saved)`` returns one gradient per input.

        What is saved goes after the node's backward, and is dropped under a checkpoint unless it is not
        ``recomputable``; what is ``kept`` stays as long as the graph. Returned is the edge of a single output that is
        made only later; null where no input needs a gradient.
        """
        edges = [value.edge for value in inputs]
        if not any(edges):
            return None
        self._sequence += 1
        node = Node(self._sequence, edges, self._place_in_backward, self._cause, len(outputs) or 1)
        node.backward = backward
        for index, output in enumerate(outputs):
            output.edge = (node, index)
        if kept:
            node.kept = self._held(kept)
        if saved:
            if self._checkpoint is None or not recomputable:
                node.saved = self._held(saved)
            else:
                if self._checkpoint.again is not None:
                    node.saved = self._held(saved)
                self._checkpoint.add(node)
        return (node, 0)

    def _held(self, values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            self.keep(value, self._saved_cause)
        return tuple([self.view(value) for value in values])

    def keep(self, value: Value, cause: str) -> None:
        """Give a temporary the cause it is kept for."""
        if value.storage is not None and value.storage.cause == TEMPORARY:
            self._recause(value.storage, cause)

    def _recause(self, storage: Storage, cause: str) -> None:
        if storage.cause != cause:
            self._free(storage)
            storage.cause = cause
            self._allocate(storage)

    def require_grad(self, value: Value) -> None:
        """``value.requires_grad_()`` on a result outside the graph: its gradient is made and dropped."""
        assert value.edge is None
        value.edge = (Leaf(), 0)
        self._required.append(value)

    def forget_required(self) -> None:
        """The graph is gone, and with it the values that were made to need a gradient."""
        for value in self._required:
            value.edge = None
        self._required.clear()

    def backward(self, root: Node, gradient: Value) -> None:
        """Run every node behind ``root``, the latest first; leaves keep their gradients. Consumes the graph."""
        root.grads = [gradient]
        del gradient
        for node in _nodes_behind(root):
            if node.place is not self.place:
                self._go_to(node.place)
            if node.checkpoint is not None:
                node.checkpoint.fill()
            before, self._cause = self._cause, node.cause
            made = node.backward(node.grads, node.saved)
            self._cause = before
            node.grads = node.checkpoint = None
            node.saved = ()
            self._hand_on(made, node.edges)

    def _hand_on(self, made: list[Value | None], edges: list[Edge | None]) -> None:
        """Add each gradient to what has arrived where it goes; then the leaves that have all of theirs take them."""
        complete = []
        for position, edge in enumerate(edges):
            new, made[position] = made[position], None
            if edge is None or new is None:
                continue
            target, index = edge
            grads = target.grads
            if grads is None:
                grads = target.grads = [None] * target.num_outputs
            to_leaf = isinstance(target, Leaf)
            grads[index] = self._sum(grads[index], new, to_leaf)
            if to_leaf:
                target.num_awaited -= 1
                if target.num_awaited == 0:
                    complete.append(target)
            del new
        for leaf in complete:
            self._accumulate(leaf)

    def _accumulate(self, leaf: Leaf) -> None:
        [grad], leaf.grads = leaf.grads, None
        if leaf.gradient is not None:
            return  # a second micro-step adds in place
        if grad.storage.num_values > 1:
            grad = self.new_like(grad)
            self._recause(grad.storage, "gradients")
        leaf.gradient = grad

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        if to_leaf:
            self._recause(new.storage, "gradients")
        if old is None:
            return new
        if old.storage.num_values == 1 and not old.is_view:
            return old  # engine's InputBuffer adds in place to a gradient that nobody else holds
        total = self.new_like(old)
        if to_leaf:
            self._recause(total.storage, "gradients")
        return total


def _nodes_behind(root: Node) -> list[Node]:
    """The nodes that a gradient of ``root`` comes to, the latest first; each leaf learns how many to await."""
    seen, stack = {root}, [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if isinstance(target, Leaf):
                target.num_awaited += 1
            elif target not in seen:
                seen.add(target)
                stack.append(target)
    return sorted(seen, key=attrgetter("sequence"), reverse=True)
