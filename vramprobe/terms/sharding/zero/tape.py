"""Tapes on which one rank's gradients arrive at DeepSpeed's bucket: ZeRO-1 and ZeRO-2 over the same walk.

In: a Setup, the bucket's bytes. Out: a BucketWalk, the same for any number of ranks: the moments of every layer, and
the live bytes as each gradient arrives. Never imports torch. The order of events is DeepSpeed 0.19's,
deepspeed/runtime/zero/stage_1_and_2.py, ``process_gradients``:

* ``setup_buckets`` allocates the whole bucket at the first gradient, however little goes into it.
* ZeRO-1 keeps each gradient until backward has ended, in the dtype that is accumulated in
  (``_fill_param_grad_accum_attribute``); over several micro-steps until the last of them, and the bucket with them.
* ZeRO-2 copies each gradient into the bucket and frees it (``reduce_independent_p_g_buckets_and_remove_grads``), unless
  it is larger than the bucket: then it stays until the next one arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models.modules import Model
from vramprobe.terms.sharding.rank import RANK_CAUSES
from vramprobe.terms.step.walk import Others, one_of_each_kind, play, plus
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import CAUSES, Leaf, Place, Value
from vramprobe.terms.tape.sizes import Digits, OpenSizes
from vramprobe.terms.tape.tape import Covers, Peak, Tape

_END = ("backward", "end")

OpenPeak = tuple[Digits, dict[str, Digits]]


class Bucket(NamedTuple):
    """DeepSpeed's bucket; ``elements``: a larger gradient is not copied into it."""

    elements: int
    num_bytes: int
    is_first_stage: bool
    raised: bool  # whether 16-bit gradients are kept in fp32


class Arrival(NamedTuple):
    """A gradient arrives: of which weight, and what is alive then."""

    name: str
    numel: int
    alive: Peak


class Visit(NamedTuple):
    """A place of the step; ``position``: among the middle layers, or -1."""

    place: Place
    position: int
    layer: int
    first_arrival: int


@lru_cache(maxsize=512)
def bucket_walk(setup: Setup, bucket: Bucket) -> BucketWalk:
    """The walk of any rank."""
    layers = one_of_each_kind(setup.arch)
    tape = BucketTape(setup.sizes.covers, bucket)
    model = Model(tape, setup, layers)
    tape.model = model
    account = Account(tape)
    _, peaks = play(model, account, gradients_stand=bucket.is_first_stage)
    tape.model = None
    others, marks = Others(setup.arch, layers, account.middle_layer_held), account.marks
    arrivals = {
        place: [Arrival(name, numel, marks[mark]) for name, numel, mark in found]
        for place, found in tape.arrivals.items()
    }
    return BucketWalk(
        setup.sizes, peaks, others, arrivals, marks[tape.mark_at_end], setup.arch.num_layers, model.names_in_use()
    )


@dataclass(frozen=True)
class BucketWalk:
    """The moments of all layers, from one walked layer of each kind, for every batch size and length."""

    sizes: OpenSizes
    peaks: dict[Place, list[Peak]]
    others: Others
    arrivals: dict[Place, list[Arrival]]
    at_end: Peak  # when backward has ended, before anything is reduced
    num_layers: int
    names: list[str]  # of weights, in the order in which forward uses them

    @cached_property
    def visits(self) -> list[Visit]:
        """The places of backward in their order, the middle layers one after the other."""
        found: list[Visit] = []
        arrived = 0
        for name, position, layer in self._way():
            place = ("backward", name)
            found.append(Visit(place, position, layer, arrived))
            arrived += len(self.arrivals.get(place, []))
        return found

    def _way(self) -> list[tuple[str, int, int]]:
        names, last = self.others.names, self.num_layers - 1
        way = [("loss", -1, 0), ("last layer", -1, last)]
        way += [(names[position], position, position + 1) for position in range(len(names) - 1, -1, -1)]
        return [*way, ("first layer", -1, 0), ("embedding", -1, 0)]

    @cached_property
    def arrived(self) -> list[tuple[Visit, Arrival]]:
        """Every gradient of every layer, in the order of arrival."""
        return [(visit, arrival) for visit in self.visits for arrival in self.arrivals.get(visit.place, [])]

    @cached_property
    def forward(self) -> list[tuple[Visit, OpenPeak]]:
        """The candidates for the highest moment of each place of forward; of a kind of middle layer, the last one's."""
        layers = {name: layer for name, _, layer in reversed(self._way())}
        return [
            (Visit(place, -1, layers.get(place[1], 0), 0), self._open(plus(peak, more)))
            for place, found in self.peaks.items()
            if place[0] == "forward"
            for more in self.others.around(place)
            for peak in found
        ]

    @cached_property
    def backward(self) -> list[tuple[Visit, OpenPeak]]:
        """The same of backward, layer by layer."""
        return [
            (visit, self._open(plus(peak, self._around(visit))))
            for visit in self.visits
            for peak in self.peaks.get(visit.place, [])
        ]

    def alive_at(self, index: int) -> OpenPeak:
        """What is alive as this gradient arrives, itself included."""
        visit, arrival = self.arrived[index]
        return self._open(plus(arrival.alive, self._around(visit)))

    @cached_property
    def alive_at_end(self) -> OpenPeak:
        """What is alive when backward has ended, the bucket and ZeRO-1's gradients included."""
        return self._open(plus(self.at_end, self.others.more(_END)))

    def _around(self, visit: Visit) -> list[Peak]:
        if visit.position < 0:
            return self.others.around(visit.place)[0]
        return self.others.around_layer("backward", visit.position)

    def _open(self, peak: Peak) -> OpenPeak:
        digits = self.sizes.digits
        return digits(peak[0]), {cause: digits(size) for cause, size in peak[1].items() if size}


class BucketTape(Tape):
    """A Tape that notes each gradient as it arrives."""

    casts_weights = True
    causes = (*CAUSES, *RANK_CAUSES)

    def __init__(self, covers: Covers, bucket: Bucket) -> None:
        super().__init__(covers)
        self.arrivals: dict[Place, list[tuple[str, int, int]]] = {}  # name, elements, the mark of what is alive then
        self.mark_at_end = 0
        self._bucket = bucket
        self._buffer: Value | None = None
        self._waiting: Value | None = None  # a gradient that is larger than the bucket
        self._names: dict[Leaf, tuple[str, int]] = {}  # of a weight, and the layer

    def _accumulate(self, leaf: Leaf) -> None:
        if not self._names:
            assert self.model is not None
            self._names = {leaf: (name, layer) for leaf, name, layer in self.model.leaf_names()}
        if leaf not in self._names:  # the layers' input, where peft asks for its gradient
            super()._accumulate(leaf)
            return
        self._make_buffer()
        is_first = leaf.gradient is None
        before = None if is_first else leaf.grads[0]
        super()._accumulate(leaf)
        numel = leaf.gradient.numel
        if self._bucket.raised and not is_first:
            before = self.new(numel, "fp32", "gradients")
        elif self._bucket.raised:
            leaf.gradient = self.new(numel, "fp32", "gradients")
        del before
        self.arrivals.setdefault(self.place, []).append((self._names[leaf][0], numel, self.mark()))
        self._put(leaf)
        if not self._bucket.is_first_stage:
            self._waiting = leaf.gradient if numel > self._bucket.elements else None
            leaf.gradient = None

    def _put(self, leaf: Leaf) -> None:
        """Its gradient goes into the bucket; only a log of requests needs this."""

    def make_gradient(self, leaf: Value) -> None:
        """Allocate what an earlier micro-step left."""
        self._make_buffer()
        leaf.node.gradient = self.new(leaf.numel, "fp32" if self._bucket.raised else leaf.dtype, "gradients")

    def _make_buffer(self) -> None:
        if self._buffer is None:
            self._buffer = self.new(self._bucket.num_bytes, "int8", "gradient_buckets")

    def _go_to(self, place: Place) -> None:
        if place == _END:
            self.mark_at_end = self.mark()
            self._waiting = None
        super()._go_to(place)
