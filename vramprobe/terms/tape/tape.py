"""A tape of values that knows only sizes: what a step allocates and frees, in order, as autograd keeps it alive.

In: calls that look like a model's own code (``add``, ``linear``, ``silu`` …) over Values with a width and a dtype.
Out: the log of the step: by place, each allocation and free with its cause. Both accounts of a step are read from it:
moments (account.py) and an allocator's requests (request_log.py). What flows on it is in graph.py. Never imports torch.
Long because allocation and autograd are one state: what is freed, and when, is autograd's doing.

The rules of saving and releasing are autograd's (``derivatives.yaml``, ``engine.cpp``): a gradient that nobody else
holds is accumulated in place, and what a node saved goes after its own backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from vramprobe.terms.tape.graph import (
    CAUSES,
    TEMPORARY,
    Backward,
    Checkpoint,
    Edge,
    Finish,
    Leaf,
    Node,
    Place,
    Storage,
    Value,
)
from vramprobe.terms.tape.lifetimes import OutlivedStep
from vramprobe.units import ITEMSIZE_BYTES

if TYPE_CHECKING:
    from vramprobe.kernels.attention import Workspaces
    from vramprobe.terms.tape.scratch import Asked

Peak = tuple[int, dict[str, int]]  # a moment that may be the highest of its place: live bytes, and the same by cause
Covers = Callable[[int, int], bool]  # whether the first size is at least the second, however the open ones turn out

#: The place of all layers but the first and the last; memory is linear in their number. Where they are of several
#: kinds, each has a place that begins so.
MIDDLE_LAYER = "a middle layer"
#: Two entries without a storage: cuBLAS takes its workspace; an account is to see what is alive.
WORKSPACE, MARK = "workspace", "mark"
#: A storage, the cause that it had (null: it is allocated) and the cause that it has (null: it is freed).
Entry = tuple[Storage | None, str | None, str | None]


def highest(peaks: Iterable[Peak], covers: Covers) -> list[Peak]:
    """Those that no other one covers, in their order; of equal ones the first."""
    found: list[Peak] = []
    for peak in peaks:
        if not any(covers(earlier[0], peak[0]) for earlier in found):
            found = [earlier for earlier in found if not covers(peak[0], earlier[0])]
            found.append(peak)
    return found


class PlaceLog:
    """What a step allocates and frees at one place, in order."""

    __slots__ = ("arrived", "entries", "micro_step", "place")

    def __init__(self, place: Place, micro_step: int) -> None:
        self.place, self.micro_step = place, micro_step
        self.entries: list[Entry] = []


class Tape:
    """The log of a step, and the autograd engine that plays it. A rank of several casts otherwise."""

    causes = CAUSES
    casts_weights = False  # whether mixed precision is that of the weights, and the outputs stay in 16 bits
    raises_outputs = False  # whether accelerate hands out the logits of autocast in fp32

    keeps_outputs = False  # whether the loop keeps what a forward returns until the next one has returned

    def __init__(self, covers: Covers = operator.ge) -> None:
        """``covers``: how sizes compare, for an account."""
        self.covers = covers
        self.device = "cpu"  # of the model on it, which says so
        self.model: Any = None  # null, or the Model on it, while its step is played, where a tape asks for its names
        self.kept: list[Value] = []  # what the loop keeps of the last forward
        self.asked: Asked | None = None  # the chip whose kernels' scratch is written, too; null: it is left out
        self.place: Place = ("forward", "start")
        self.micro_step = 0
        self.thread = "forward"  # autograd's backward runs on one of its own
        self.log: list[PlaceLog] = []
        self._begin_log()
        self._has_workspace: set[str] = set()
        self._num_marks = 0
        self._place_in_backward: Place = ("backward", "start")
        self._checkpoint: Checkpoint | None = None
        self._cause = TEMPORARY
        self._saved_cause = "saved_activations"
        self._nodes: list[Node] = []
        self._thread = get_ident()
        self._ended_elsewhere = False  # whether another thread held a value's last reference

    # -- the log ----------------------------------------------------------------------------------------------------

    def _begin_log(self) -> None:
        self.log.append(PlaceLog(self.place, self.micro_step))
        self._entries = self.log[-1].entries

    def take_log(self) -> list[PlaceLog]:
        """The log since the last call; what follows at the same place is the beginning of the next one."""
        taken, self.log = self.log, []
        self._begin_log()
        return taken

    def mark(self) -> int:
        """Have an account see what is alive here; the number of its mark."""
        self._entries.append((None, None, MARK))
        self._num_marks += 1
        return self._num_marks - 1

    def _free(self, storage: Storage) -> None:
        if get_ident() != self._thread:
            self._ended_elsewhere = True
        if storage.num_bytes:
            self._entries.append((storage, storage.cause, None))

    def require_own_thread(self) -> None:
        """Check that no value ended in another thread. Raises OutlivedStep."""
        if self._ended_elsewhere:
            raise OutlivedStep("a value ended in another thread")

    def at(self, phase: str, place: str) -> None:
        """From here on, what is written belongs to this place of this phase."""
        self._go_to((phase, place))
        self._place_in_backward = ("backward", place)

    def come_to(self, place: Place) -> None:
        """The same, of what is no part of forward or backward."""
        self.place = place
        self._begin_log()

    def _go_to(self, place: Place) -> None:
        self.come_to(place)

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """The gradients go."""
        for leaf in leaves:
            leaf.gradient = None

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

    # -- allocation -------------------------------------------------------------------------------------------------

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        """Allocate ``numel`` elements."""
        storage = Storage(numel * ITEMSIZE_BYTES[dtype], cause or self._cause)
        if storage.num_bytes:
            self._entries.append((storage, None, storage.cause))
        return Value(self, numel, dtype, storage)

    def scratch(self, sizes_bytes: Iterable[int]) -> None:
        """What a kernel takes and gives back at once, where that is asked; a negative size gives one back before the
        others.
        """
        if self.asked is None:
            return
        taken: list[Value] = []
        for size_bytes in sizes_bytes:
            if size_bytes > 0:
                taken.append(self.new(size_bytes, "int8"))
            else:
                del taken[next(at for at, one in enumerate(taken) if one.numel == -size_bytes)]

    def scratch_of_sum(self, num_rows: int, width: int, itemsize_bytes: int) -> None:
        """The same of a matrix's sum over its rows; ``itemsize_bytes`` of an element."""
        if self.asked is not None:
            self.scratch(self.asked.sum_of_rows(num_rows, width, itemsize_bytes))

    def scratch_of_attention(
        self, sizes: tuple[int, int, int, int, int], dtype: str, has_mask: bool, dropout: float
    ) -> Workspaces | None:
        """The same of fused attention; null: not asked. ``sizes``: batch, heads, length, of a head, of its value."""
        if self.asked is None:
            return None
        return self.asked.attention(sizes, dtype, has_mask, dropout)

    def multiplied(self) -> None:
        """A product has its result: from the first one on cuBLAS keeps a workspace for the thread."""
        if self.thread not in self._has_workspace:
            self._has_workspace.add(self.thread)
            self._entries.append((None, None, WORKSPACE))

    def new_like(self, value: Value, dtype: str | None = None) -> Value:
        """Allocate as many elements as ``value`` has, in its layout."""
        made = self.new(value.numel, dtype or value.dtype)
        made.contiguous = value.contiguous
        return made

    def view(self, value: Value, numel: int | None = None) -> Value:
        """Another value on the same storage, outside the graph."""
        storage = value.storage
        if storage is not None:
            storage.num_values += 1
        made = Value(self, value.numel if numel is None else numel, value.dtype, storage)
        made.contiguous = value.contiguous
        return made

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A value that was there before the step (a weight): its bytes are not counted here."""
        value = Value(self, numel, dtype, None)
        if trained:
            self.require_grad(value)
        return value

    # -- the graph --------------------------------------------------------------------------------------------------

    @property
    def drops_what_is_saved(self) -> bool:
        """Whether a checkpoint's first run is under way, which saves nothing."""
        return self._checkpoint is not None and self._checkpoint.again is None

    def record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        saved: Sequence[Value],
        backward: Backward,
        *,
        kept: Sequence[Value] = (),
        recomputable: bool = True,
        finish: Finish | None = None,
    ) -> Edge | None:
        """Make ``outputs`` the result of one node. ``backward(grads)`` returns one gradient per input, and ``finish``
        fits them to the inputs' sizes and dtypes (engine.cpp, ``validate_outputs``).

        What is saved goes after the node's backward, and is dropped under a checkpoint unless it is not
        ``recomputable``; what is ``kept`` stays as long as the graph. Returned is the edge of a single output that is
        made only later; null where no input needs a gradient.
        """
        edges = [value.edge for value in inputs]
        if not any(edges):
            return None
        node = Node(edges, self._place_in_backward, self._cause, len(outputs) or 1, backward)
        node.finish = finish
        for index, output in enumerate(outputs):
            output.edge = (node, index)
        checkpoint = self._checkpoint
        first_run = checkpoint is None or checkpoint.again is None
        if first_run:  # of a second run, what it saves is all that is used
            self._nodes.append(node)
        if kept:
            node.kept = self._held(kept)
        if saved:
            dropped = checkpoint is not None and recomputable
            if not (dropped and first_run):
                node.saved = self._held(saved)
            if dropped:
                checkpoint.add(node)
        return node, 0

    def _held(self, values: Sequence[Value]) -> tuple[Value, ...]:
        for value in values:
            self.keep(value, self._saved_cause)
        return tuple([self.view(value) for value in values])

    def keep(self, value: Value, cause: str) -> None:
        """Give a temporary the cause it is kept for."""
        if value.storage is not None and value.storage.cause == TEMPORARY:
            self._recause(value.storage, cause)

    def _recause(self, storage: Storage, cause: str) -> None:
        if cause != storage.cause:
            if storage.num_bytes:
                self._entries.append((storage, storage.cause, cause))
            storage.cause = cause

    def make_gradient(self, leaf: Value) -> None:
        """Allocate the gradient of a trained constant, as an earlier backward left it."""
        leaf.node.gradient = self.new(leaf.numel, leaf.dtype, "gradients")

    def require_grad(self, value: Value) -> None:
        """``value.requires_grad_()`` on what no backward function made: a gradient ends here."""
        assert value.edge is None
        value.edge = (Leaf(), 0)

    def backward(self, root: Node, gradient: Value) -> None:
        """Play the tape back from ``root``, the latest node first; leaves keep their gradients."""
        root.grads = [gradient]
        del gradient
        nodes, self._nodes = self._nodes, []
        root.num_awaited = 1
        for node in reversed(nodes):  # engine.cpp, ``compute_dependencies``: of what the root depends on
            if node.num_awaited:
                for edge in node.edges:
                    if edge is not None:
                        edge[0].num_awaited += 1
        for node in reversed(nodes):
            if not node.num_awaited:
                continue
            if node.place is not self.place:
                self._go_to(node.place)
            if node.checkpoint is not None:
                node.checkpoint.fill()
            before, self._cause = self._cause, node.cause
            made = node.backward(node.grads)
            if node.checkpoint is not None:
                node.saved = ()  # what a hook unpacks goes with the function's own variables
            if node.finish is not None:
                made = node.finish(made)
            self._cause = before
            node.grads = node.checkpoint = None
            node.saved = ()
            self._hand_on(made, node.edges)

    def _hand_on(self, made: list[Value | None], edges: list[Edge | None]) -> None:
        """Add each gradient to what has arrived where it goes; then the leaves that have all of theirs take them."""
        complete = []
        for position, edge in enumerate(edges):
            new, made[position] = made[position], None
            if edge is None:
                continue
            target, index = edge
            if target.grads is None:
                target.grads = [None] * target.num_outputs
            to_leaf = isinstance(target, Leaf)
            target.grads[index] = self._sum(target.grads[index], new, to_leaf)
            del new
            if to_leaf:
                target.num_awaited -= 1
                if target.num_awaited == 0:
                    complete.append(target)
        for leaf in complete:
            self._accumulate(leaf)

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

    def _accumulate(self, leaf: Leaf) -> None:
        [grad], leaf.grads = leaf.grads, None
        if leaf.gradient is not None:
            return  # a later micro-step adds in place
        if grad.storage.num_values > 1:
            grad = self.new_like(grad)
            self._recause(grad.storage, "gradients")
        leaf.gradient = grad
