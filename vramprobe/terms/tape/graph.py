"""What lies on the tape: values on their storages, autograd's nodes between them, leaves, and checkpoints.

In: sizes, dtypes and causes. Out: objects that hold each other as autograd's do. A Value dies when Python drops its
last reference, exactly as a tensor does, so code written like the model's own keeps the same values alive. A node holds
what it saved until its own backward has run. The tape (tape.py) counts and plays. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Protocol

from vramprobe.units import ITEMSIZE_BYTES

if TYPE_CHECKING:

    class Tape(Protocol):
        """What values and checkpoints ask of the tape that they lie on; tape.py's is the one there is."""

        def _free(self, storage: Storage) -> None: ...

        def cause(self, name: str, saved: str | None = None) -> AbstractContextManager[None]: ...

        def checkpointed(self, checkpoint: Checkpoint) -> AbstractContextManager[None]: ...


#: Every cause a moment's bytes may have, in the order they are shown.
CAUSES = (
    "weights",
    "gradients",
    "optimizer_state",
    "batch",
    "saved_activations",
    "checkpoint_store",
    "recomputed_layer",
    "logits",
    "cast_copies",
    "dequantisation",
    "temporaries",
    "optimizer_temporaries",
    "block_remainders",
    "workspaces",
)

#: The cause of a value until something more telling is known about it.
TEMPORARY = "temporaries"

Backward = Callable[[list["Value | None"]], list["Value | None"]]  # gradients of the outputs -> those of the inputs
Finish = Callable[[list["Value | None"]], list["Value | None"]]
Edge = tuple["Node | Leaf", int]  # where a gradient goes, and as that of which output there
Place = tuple[str, str]  # a phase, and where in it


class Storage:
    """One allocation. It is freed when the last Value on it dies."""

    __slots__ = ("at", "cause", "middle_layer_bytes", "num_bytes", "num_values")
    at: tuple[int, int]  # in which chunk it is asked for, as which of its requests: a log of requests says so
    middle_layer_bytes: dict[str, int] | None  # an account says so: that of the middle layer that made it

    def __init__(self, num_bytes: int, cause: str) -> None:
        self.num_bytes, self.cause = num_bytes, cause
        self.num_values = 1  # the one it is made for


class Node:
    """One backward function: where its gradients go, and what it saved."""

    __slots__ = (
        "backward",
        "cause",
        "checkpoint",
        "edges",
        "finish",
        "grads",
        "kept",
        "num_awaited",
        "num_outputs",
        "place",
        "saved",
    )

    def __init__(
        self, edges: list[Edge | None], place: Place, cause: str, num_outputs: int, backward: Backward
    ) -> None:
        self.edges, self.num_outputs, self.backward = edges, num_outputs, backward
        self.finish: Finish | None = None
        self.place, self.cause = place, cause  # of what its backward allocates: as in forward
        self.saved: tuple[Value, ...] = ()
        self.kept: tuple[Value, ...] = ()  # Python attributes of a Function's ctx: they go with the graph itself
        self.checkpoint: Checkpoint | None = None  # where what this node saves is made again
        self.grads: list[Value | None] | None = None  # the gradients of its outputs, as far as they have arrived
        self.num_awaited = 0  # gradients that a backward has still to bring; 0: the root does not depend on it


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
        self.tape, self.storage = tape, storage
        self.numel, self.dtype = numel, dtype
        self.edge: Edge | None = None
        self.contiguous = True  # False: laid out by heads, so that a reshape must copy
        self.is_view = False  # a gradient that is a view holds its base, so the engine cannot add to it in place

    def __del__(self) -> None:
        storage = self.storage
        if storage is not None:
            storage.num_values -= 1
            if not storage.num_values:
                self.tape._free(storage)

    @property
    def node(self) -> Node | None:
        """The node that made it, and that its gradient goes to."""
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

    def __init__(self, tape: Tape, run_again: Callable[[], Value]) -> None:
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
