"""A tape of values that knows only sizes: what autograd keeps alive, when it lets go, and the highest moment between.

In: calls that look like a model's own code (``add``, ``linear``, ``silu`` …) over Values with a width and a dtype.
Out: live bytes by cause, and for each place of the step the moments within it that may be the highest: one where all
sizes are known, several where some are left open (sizes.py). What flows on it is in graph.py. Never imports torch.
Long because allocation and autograd are one state: what is freed, and when, is autograd's doing.

The rules of saving and releasing are autograd's (``derivatives.yaml``, ``engine.cpp``): a gradient that nobody else
holds is accumulated in place, and what a node saved goes after its own backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vramprobe.terms.graph import (
    CAUSES,
    ITEMSIZE_BYTES,
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

if TYPE_CHECKING:
    from vramprobe.terms.scratch import AttentionScratch

Peak = tuple[int, dict[str, int]]  # a moment that may be the highest of its place: live bytes, and the same by cause
Covers = Callable[[int, int], bool]  # whether the first size is at least the second, however the open ones turn out

#: The place of all layers but the first and the last; memory is linear in their number. Where they are of several
#: kinds, each has a place that begins so.
MIDDLE_LAYER = "a middle layer"


def highest(peaks: Iterable[Peak], covers: Covers) -> list[Peak]:
    """Those that no other one covers, in their order; of equal ones the first."""
    found: list[Peak] = []
    for peak in peaks:
        if not any(covers(earlier[0], peak[0]) for earlier in found):
            found = [earlier for earlier in found if not covers(peak[0], earlier[0])]
            found.append(peak)
    return found


class Tape:
    """Live bytes by cause and the highest moment of each place; also the autograd engine."""

    causes = CAUSES
    has_scratch = False  # whether what kernels take for a while is asked for
    has_parts = False  # whether a sequence is shared with other ranks, and this one has a part of it (ring.py)
    is_spread = False  # whether parts of the model lie on several cards (cards.py)
    raises_outputs = False  # whether accelerate hands out the logits of autocast in fp32
    holds_whole_gradients = True  # False: one that knows itself what an earlier micro-step leaves

    def __init__(self, covers: Covers = operator.ge) -> None:
        self.live_bytes = dict.fromkeys(self.causes, 0)
        self.total_bytes = 0
        self.device = "cpu"  # of the model on it, which says so
        self.place: Place = ("forward", "start")
        #: By place: what of each middle layer's was alive when the step last came there, by its own place's name and by
        #: cause.
        self.middle_layer_held: dict[Place, dict[str, dict[str, int]]] = {}
        self._middle_layers: dict[str, dict[str, int]] = {}
        self._middle_layer_bytes: dict[str, int] | None = None  # of the middle layer that the step is in
        self.covers = covers
        self._peaks: dict[Place, list[Peak]] = {}
        self._peaks_here: list[Peak] = []
        self._rising = False  # nothing was freed since something was allocated
        self._place_in_backward: Place = ("backward", "start")
        self._checkpoint: Checkpoint | None = None
        self._cause = TEMPORARY
        self._saved_cause = "saved_activations"
        self._nodes: list[Node] = []

    # -- allocation -------------------------------------------------------------------------------------------------

    def take_peaks(self) -> dict[Place, list[Peak]]:
        """What may be the highest moment of each place since the last call, in the order in which the places came."""
        self._look()
        taken, self._peaks, self._peaks_here = self._peaks, {}, []
        return {place: highest(peaks, self.covers) for place, peaks in taken.items()}

    def _look(self) -> None:
        """See how high it is, if it rose: before anything is freed, becomes something else, or another place begins."""
        if not self._rising:
            return
        self._rising = False
        total, peaks = self.total_bytes, self._peaks_here
        if not peaks:
            self._peaks[self.place] = peaks
        elif total <= peaks[-1][0]:
            if self.covers(peaks[-1][0], total):
                return
        elif self.covers(total, peaks[-1][0]):
            peaks.pop()
        peaks.append((total, self.live_bytes.copy()))

    def _free(self, storage: Storage) -> None:
        if self._rising:
            self._look()
        cause, num_bytes = storage.cause, storage.num_bytes
        self.live_bytes[cause] -= num_bytes
        self.total_bytes -= num_bytes
        if storage.middle_layer_bytes is not None:
            storage.middle_layer_bytes[cause] -= num_bytes

    def at(self, phase: str, place: str) -> None:
        """From here on, moments belong to this place of this phase."""
        self._go_to((phase, place))
        self._place_in_backward = ("backward", place)

    def _go_to(self, place: Place) -> None:
        self._look()
        self.place, self._middle_layer_bytes = place, None
        if place[1].startswith(MIDDLE_LAYER):
            self._middle_layer_bytes = self._account_of(place[1])
        self._peaks_here = self._peaks.get(place, [])
        self.middle_layer_held[place] = {name: held.copy() for name, held in self._middle_layers.items()}

    def _account_of(self, middle_layer: str) -> dict[str, int]:
        """What is alive of this middle layer's, by cause."""
        return self._middle_layers.setdefault(middle_layer, dict.fromkeys(self.causes, 0))

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
        cause, num_bytes = cause or self._cause, numel * ITEMSIZE_BYTES[dtype]
        self.live_bytes[cause] += num_bytes
        self.total_bytes += num_bytes
        middle_layer_bytes = self._middle_layer_bytes
        if middle_layer_bytes is not None:
            middle_layer_bytes[cause] += num_bytes
        if num_bytes:
            self._rising = True
        return Value(self, numel, dtype, Storage(num_bytes, cause, middle_layer_bytes))

    def scratch(self, sizes_bytes: Iterable[int]) -> None:
        """What a kernel takes and gives back at once; a negative size gives one back before the others. None of this is
        asked for here, but by the log of requests (request_log.py).
        """

    def scratch_of_sum(self, num_rows: int, width: int, itemsize_bytes: int) -> None:
        """The same of a matrix's sum over its rows; ``itemsize_bytes`` of an element."""

    def scratch_of_attention(
        self, sizes: tuple[int, int, int, int, int], dtype: str, has_bias: bool, has_dropout: bool
    ) -> AttentionScratch | None:
        """The same of fused attention, where it is known; ``sizes``: batch, heads, length, of a head, of its value."""
        return None

    @property
    def leaps(self) -> bool:
        """Whether that part is not in one piece, which transformers makes a mask for."""
        return False

    def shared_attention(self, query: Value, key: Value, value: Value, num_out: int, num_stats: int) -> Value | None:
        """Attention to the whole of a sequence that is shared; null where each rank has its own."""
        return None

    def come_to_part(self, part: int | str) -> None:
        """What follows is done where this part of the model lies: a layer, by its number, or what is outside them."""

    def brought(self, value: Value) -> Value:
        """The value where that is: itself, on a single card."""
        return value

    def multiplied(self) -> None:
        """A product has its result: from the first one on cuBLAS keeps a workspace for the thread (requests.py)."""

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
            if checkpoint is not None and checkpoint.reenters:
                node.checkpoint = checkpoint  # whose backward begins with the second run, whatever comes first
            for edge in edges:
                if edge is not None and isinstance(edge[0], Leaf):
                    edge[0].num_awaited += 1
        if kept and not (first_run and checkpoint is not None and checkpoint.reenters):  # that run has no graph
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
        before, num_bytes = storage.cause, storage.num_bytes
        if cause == before:
            return
        self._look()
        self.live_bytes[before] -= num_bytes
        self.live_bytes[cause] += num_bytes
        if storage.middle_layer_bytes is not None:
            storage.middle_layer_bytes[before] -= num_bytes
            storage.middle_layer_bytes[cause] += num_bytes
        storage.cause, self._rising = cause, num_bytes > 0

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
        for node in reversed(nodes):
            if node.grads is None:
                continue  # the root does not depend on it
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
