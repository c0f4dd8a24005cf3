"""A tape on which one rank gathers and reduces as ``fully_shard`` does: FSDP2's collectives over the same walk.

In: the units that are gathered at once, with their bytes. Out: the Walk of one rank, whose causes count in addition
``gathered_weights`` and ``gradient_buckets``, and whose gradients are shards once they are reduced. Of several
micro-steps only the last one reduces (``no_sync``): until then gradients stay whole, in the dtype of the computation.
No torch here.

The order of events is that of torch 2.13, torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py: ``unshard``,
``wait_for_unshard``, ``pre_backward``, ``post_backward``; _fsdp_collectives.py: ``foreach_all_gather``,
``foreach_reduce``), and tests/predict/test_sharded_ranks.py holds it against the real thing.
Not counted: NCCL's own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from vramprobe.terms.families import layer_place
from vramprobe.terms.graph import CAUSES, Edge, Leaf, Place, Value
from vramprobe.terms.setup import Setup
from vramprobe.terms.sizes import OpenSizes
from vramprobe.terms.tape import Covers, Tape, highest
from vramprobe.terms.walk import Walk, one_of_each_kind, walk_layers

#: Causes that only a rank of several has.
RANK_CAUSES = ("gathered_weights", "gradient_buckets")
#: CUDA streams, each with blocks of its own in the caching allocator: the step's, and those of the collectives.
COMPUTING, SENDING, GATHERING, REDUCING = 0, 1, 2, 3
_ROOT = "root"
_END = ("backward", "end")


class Unit(NamedTuple):
    """Bytes of what is gathered by one collective; padded, so that every rank's share is as large."""

    gathered: int = 0  # weights, whole, in the dtype they are gathered in
    cast: int = 0  # this rank's share of those that are cast before they are sent, or come from the host
    reduced: int = 0  # gradients, whole, in the dtype they are reduced in
    reduced_share: int = 0  # this rank's share of them
    shard: int = 0  # the same in the dtype of the stored weights, as the optimizer gets it
    moved: int = 0  # this rank's share of those that FSDP1 copies from the host as they are stored: kept while gathered


class Units(NamedTuple):
    """The units of a model by where its forward first uses them; a root's stay gathered until backward has ended."""

    layer: Unit
    root: Unit
    embedding: Unit = Unit()  # null: in the root
    tail: Unit = Unit()  # the last norm and the head, kept from forward to backward
    apart: bool = False  # whether the head's own hook starts the backward's gathering, and not the loss's
    reshards: bool = True  # False: a layer stays gathered from its forward to its backward
    is_replicated: bool = False  # whether what is reduced is then added up among several groups
    on_host: bool = False  # whether a rank's share of weights and gradients lies in host memory
    micro_steps: int = 1  # that are walked: the first, one of those between and the last, as far as there are


def rank_walk(setup: Setup, units: Units) -> Walk:
    """The Walk of one rank."""
    shares: list[int] = []
    layer, root, embedding, tail = (
        _opened(setup.sizes, unit, shares) for unit in (units.layer, units.root, units.embedding, units.tail)
    )
    opened = units._replace(layer=layer, root=root, embedding=embedding, tail=tail)
    walk = _open_walk(setup, opened, len(shares))

    def closed(count: int) -> int:
        return walk.sizes.closed(count, shares)

    peaks = {
        place: highest([(closed(total), {cause: closed(count) for cause, count in by_cause.items()})
                        for total, by_cause in found], setup.sizes.covers)
        for place, found in walk.peaks.items()
    }  # fmt: skip
    return Walk(setup.sizes, closed(walk.saved), peaks)


def _opened(sizes: OpenSizes, unit: Unit, shares: list[int]) -> Unit:
    """The unit with stand-ins for a rank's shares, which go to ``shares``: they alone depend on how many ranks there
    are, where all is divided without a rest, so that one walk answers for any number.
    """
    found = []
    for share in (unit.cast, unit.reduced_share, unit.shard):
        if share:
            found.append(sizes.other(len(shares)))
            shares.append(share)
        else:
            found.append(0)
    cast, reduced_share, shard = found
    if unit.shard == unit.reduced_share:
        shard = reduced_share
    return unit._replace(cast=cast, reduced_share=reduced_share, shard=shard)


@lru_cache(maxsize=2048)
def _open_walk(setup: Setup, units: Units, num_shares: int) -> Walk:
    """The Walk whose shares are left open."""
    sizes = setup.sizes.with_others(num_shares)
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(replace(setup, sizes=sizes), layers, RankTape(sizes.covers, units, places), units.micro_steps)


class RankTape(Tape):
    """A Tape whose weights are gathered on coming to a place and whose gradients are reduced on leaving it."""

    causes = (*CAUSES, *RANK_CAUSES)
    holds_whole_gradients = False

    def __init__(self, covers: Covers, units: Units, layers: Sequence[str]) -> None:
        super().__init__(covers)
        self._units = units
        self._by_name = {
            "embedding": units.embedding, **dict.fromkeys(layers, units.layer), "loss": units.tail, _ROOT: units.root,
        }  # fmt: skip
        self._names = ["embedding", *layers, "loss"]  # in the order of forward
        self._micro_steps_left = units.micro_steps  # this one included
        self._gathered: dict[str, Value] = {}
        self._sent: dict[str, Value] = {}  # all-gathers under way: flat outputs that are still to be copied out
        self._last_sent: Value | None = None  # forward keeps the newest until the next one was sent
        self._reducing: Value | None = None  # the newest reduce-scatter's input, kept until the next one
        self._shards: dict[str, Value] = {}  # by unit
        self._added_up: list[Value] = []  # what groups have reduced and add up: kept until the end of backward
        self._leaves: dict[str, list[Leaf]] = {name: [] for name in self._by_name}
        self._head: Any = None  # the node of the head's product

    # -- forward ----------------------------------------------------------------------------------------------------

    def _go_to(self, place: Place) -> None:
        phase, name = self.place
        if phase == "backward" and name in self._by_name and name != "embedding":
            self._reduce(name)
        elif phase == "forward" and self._units.reshards and name in self._names[:-1]:
            self._free_whole(name)
        if phase != place[0]:
            self._last_sent = None
        if place == _END:
            self._finish()
            self._head = None
            self._micro_steps_left -= 1
        super()._go_to(place)
        self._enter(*place)

    def _enter(self, phase: str, name: str) -> None:
        if phase == "forward":
            if name == "embedding":
                self._gather_in_forward(_ROOT)
            self._gather_in_forward(name)
        elif name == "loss" and not self._units.apart:
            self._send_before("loss")
        elif name in self._names and name != "loss":
            self._gather_in_backward(name)

    def _gather_in_forward(self, name: str) -> None:
        if not self._by_name[name].gathered:
            return
        sent = self._send(name)
        self._copy_out(name)
        self._last_sent = sent  # wait_for_unshard's own variable holds the one before until it has copied out

    def _send(self, name: str) -> Value:
        """An all-gather's flat output; what is cast is copied beside it before it is sent."""
        unit = self._by_name[name]
        copied = self._bytes(unit.cast, "gathered_weights", SENDING)
        sent = self._bytes(unit.gathered, "gathered_weights", SENDING)
        del copied
        return sent

    def _copy_out(self, name: str) -> None:
        self._gathered[name] = self._bytes(self._by_name[name].gathered, "gathered_weights")

    def _free_whole(self, name: str) -> None:
        self._gathered.pop(name, None)

    def _bytes(self, num_bytes: int, cause: str, stream: int = COMPUTING) -> Value:
        """As many; on which stream matters to a log of requests alone (rank_log.py)."""
        return self.new(num_bytes, "int8", cause)

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight: of the unit that is gathered here, or of the root."""
        value = super().constant(numel, dtype, trained=trained)
        if trained:
            name = self.place[1]
            owner = name if self._by_name.get(name, Unit()).gathered else _ROOT
            self._leaves[owner].append(value.node)
        return value

    # -- backward ---------------------------------------------------------------------------------------------------

    def record(self, *arguments: Any, **options: Any) -> Edge | None:
        """As a Tape does; remembers which node is the head's product, whose output has the tail's hook."""
        edge = super().record(*arguments, **options)
        if edge is not None and self._head is None and self._cause == "logits":
            self._head = edge[0]
        return edge

    def _hand_on(self, made: list[Value | None], edges: list[Edge | None]) -> None:
        super()._hand_on(made, edges)
        if self._units.apart and any(edge is not None and edge[0] is self._head for edge in edges):
            self._send_before("loss")

    def _gather_in_backward(self, name: str) -> None:
        """Copy out what was sent ahead, then send the next one ahead."""
        if name not in self._gathered and self._by_name[name].gathered:
            sent = self._sent.pop(name, None) or self._send(name)
            self._copy_out(name)
            del sent
        self._send_before(name)

    def _send_before(self, name: str) -> None:
        index = self._names.index(name) - 1
        before = self._names[max(index, 0)]
        if index >= 0 and self._by_name[before].gathered and before not in self._gathered:
            self._sent[before] = self._send(before)

    @property
    def _reduces(self) -> bool:
        """Whether this is the last micro-step."""
        return self._micro_steps_left == 1

    def _reduce(self, name: str) -> None:
        """Free the unit's weights; in the last micro-step copy its gradients to one buffer and keep a share of them."""
        unit = self._by_name[name]
        self._free_whole(name)
        if not self._reduces:
            return
        self._reducing = None
        if not unit.reduced:
            return
        buffer = self._bytes(unit.reduced, "gradient_buckets")
        for leaf in self._leaves[name]:
            leaf.gradient = None
        is_cast = unit.shard != unit.reduced_share  # to the stored weights' dtype
        kept = is_cast and self._units.is_replicated
        shard = self._bytes(unit.reduced_share, "gradient_buckets" if kept else "gradients", REDUCING)
        if kept:
            self._added_up.append(shard)
        if is_cast:
            shard = self._bytes(unit.shard, "gradients", REDUCING)
        if not self._units.on_host:
            self._shards[name] = shard
        self._reducing = buffer

    def _finish(self) -> None:
        """The end of backward: what has no input that needs a gradient is reduced, and all buffers go."""
        for name in (_ROOT, "embedding"):
            self._reduce(name)
        self._sent.clear()
        self._added_up.clear()
        self._reducing = None


def rank_units(units: Sequence[Unit]) -> Unit:
    """Several units as one."""
    return Unit(*(sum(sizes) for sizes in zip(*units, strict=True))) if units else Unit()
