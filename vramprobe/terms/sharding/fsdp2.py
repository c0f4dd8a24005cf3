"""FSDP2: torch's ``fully_shard`` on accelerate's units, hybrid sharding included.

In: a spec and its Division. Out: the RankCourse of the rank that holds the most, and its Run. The order of events is
torch 2.13's, torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py: ``unshard``, ``wait_for_unshard``,
``pre_backward``, ``post_backward``; _fsdp_collectives.py: ``foreach_all_gather``, ``foreach_reduce``);
tests/predict/test_sharded_ranks.py compares it with torch. Never imports torch.

* Each tensor is sharded along its first dimension and padded to a multiple of N; so are its gradient and, not padded,
  its optimizer state (_fsdp_param.py, ``_init_sharding_param``).
* Weights are gathered in the dtype of the computation: accelerate passes mixed precision as
  ``MixedPrecisionPolicy(param_dtype, reduce_dtype)``, so fp32 weights are cast as they are gathered, a unit at a time.
  A rank has no ``cast_copies``, and its activations are those of 16-bit weights.
* bitsandbytes' packed weights are sharded, their scales (``QuantState``) are not.
* Hybrid sharding is the same within one group, except that a rank keeps what its group has reduced, and all groups
  all-reduce, until backward has ended (_fsdp_param_group.py, ``_all_reduce_state``): more memory where that is cast to
  the dtype of stored weights.
* Not counted: NCCL's own buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer, parameters
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models.families import layer_place
from vramprobe.terms.sharding import reference
from vramprobe.terms.sharding.fsdp import (
    LAYER,
    ROOT,
    SECOND,
    Unit,
    UnitRun,
    Units,
    UnitTape,
    joined,
    parted,
    prepared_tensors,
    reshards,
    walked_micro_steps,
)
from vramprobe.terms.sharding.rank import (
    REDUCING,
    SENDING,
    Division,
    RankCourse,
    Share,
    computed_tensors,
    quantised_parts,
    share_of,
    stored_tensors,
)
from vramprobe.terms.step.walk import Walk, one_of_each_kind, walk_layers
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES, Edge, Place, Value
from vramprobe.terms.tape.sizes import OpenSizes
from vramprobe.terms.tape.tape import Covers, highest
from vramprobe.trainers import TRAINERS


def course(spec: CellSpec, division: Division, chip: Chip) -> RankCourse:
    """The step of the rank with the first shard of each tensor."""
    arch, stored = architecture(spec.architecture), prepared_tensors(spec)
    shares = [share_of(spec, tensor, division.num_gpus, by_rows=True) for tensor in stored]
    setup = setup_of(spec, arch, computed_tensors(spec, stored), chip)
    walk = unit_walk(setup, units_of(spec, division))
    pairs = list(zip(stored, shares, strict=True))
    trained = [share.as_state for tensor, share in pairs if tensor.trained]
    buffers = parameters.buffers_bytes(arch, spec.dtype)
    weights = sum((share.weights + share.scales) * tensor.num_copies for tensor, share in pairs)
    weights += reference.held_bytes(spec, division)
    state = optimizer.allocated_state_bytes(spec, trained)
    gradients = sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    undivided = sum(
        (quantised_parts(spec, tensor)[0] - share.weights) * tensor.num_copies
        for tensor, share in pairs
        if tensor.quantised
    )
    if division.offload != "none":
        return RankCourse(walk, {"weights": buffers}, {}, {}, undivided, host=weights + state + gradients)
    idle = {"weights": buffers + weights, "optimizer_state": state}
    at_step = {"gradients": gradients, "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}
    return RankCourse(walk, idle, at_step, {}, undivided)


# -- units --------------------------------------------------------------------------------------------------------


def units_of(spec: CellSpec, division: Division) -> Units:
    """Accelerate's units (utils/fsdp_utils.py, ``fsdp2_prepare_model``): each layer, the embedding, the last norm with
    the head. A tied embedding is in one unit with the norm; with ``all_buffers`` all outside the layers is the root's.
    """
    made = _tensor_units(spec, division)
    layer = joined([unit for tensor, unit in made if tensor.per_layer])
    outside = [(tensor, unit) for tensor, unit in made if not tensor.per_layer]
    apart = not division.all_buffers
    units = Units(
        layer,
        joined([unit for _, unit in outside]),
        apart=apart and not spec.fuses_head,  # that reads the head's weight, and the outputs have the tail's hook
        reshards=reshards(division),
        is_replicated=division.is_replicated,
        on_host=division.offload != "none",
        second=reference.unit_of(spec, division),
        micro_steps=walked_micro_steps(spec),
    )
    if not apart or _is_tied([tensor for tensor, _ in outside]):
        return units
    head_alone = spec.method != "full" and not TRAINERS[spec.trainer].scores_rows
    embedding = joined([unit for tensor, unit in outside if tensor.role == "embedding"])
    tail = joined([unit for tensor, unit in outside if tensor.role != "embedding"])
    return units._replace(
        root=Unit(),
        embedding=embedding,
        tail=tail,
        head_alone=head_alone,
        reads_head=head_alone and spec.fuses_head,
    )


def _unit_parts(spec: CellSpec, division: Division) -> dict[str, list[int]]:
    """Bytes of each weight that is copied out of an all-gather, by the name of its unit; a layer's under "layer"."""
    made = _tensor_units(spec, division)
    is_tied = _is_tied([tensor for tensor, _ in made])
    found: dict[str, list[int]] = {"layer": [], ROOT: [], "embedding": [], "loss": []}
    for tensor, unit in made:
        outside = ROOT if is_tied else "embedding" if tensor.role == "embedding" else "loss"
        found["layer" if tensor.per_layer else outside].append(unit.gathered)
    found[SECOND] = reference.parts_of(spec, division)
    return found


def _is_tied(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.role == "head" for tensor in tensors)


def _tensor_units(spec: CellSpec, division: Division) -> list[tuple[Tensor, Unit]]:
    """Each stored tensor, and one copy of it as a unit, padded."""
    found = []
    stored = prepared_tensors(spec)
    for tensor, computed in zip(stored, computed_tensors(spec, stored), strict=True):
        share = share_of(spec, tensor, division.num_gpus, by_rows=True)
        found.append((tensor, _unit(tensor, computed, share, division)))
    return found


def _unit(stored: Tensor, computed: Tensor, share: Share, division: Division) -> Unit:
    width = 1 if stored.quantised else ITEMSIZE_BYTES[computed.dtype]
    sent = share.elements * width
    is_cast = not stored.quantised and stored.dtype != computed.dtype
    cast = sent if is_cast or division.offload != "none" else 0
    if not stored.trained:
        return Unit(sent * division.num_gpus, cast)
    return Unit(sent * division.num_gpus, cast, sent * division.num_gpus, sent, share.weights)


# -- the tape -----------------------------------------------------------------------------------------------------


def unit_walk(setup: Setup, units: Units) -> Walk:
    """The Walk of one rank."""
    shares: list[int] = []
    layer, root, embedding, tail, second = (
        _opened(setup.sizes, unit, shares)
        for unit in (units.layer, units.root, units.embedding, units.tail, units.second)
    )
    opened = units._replace(layer=layer, root=root, embedding=embedding, tail=tail, second=second)
    walk = _open_walk(setup, opened, len(shares))

    def closed(count: int) -> int:
        return walk.sizes.closed(count, shares)

    peaks = {
        place: highest(
            [(closed(total), {cause: closed(count) for cause, count in by_cause.items()}) for total, by_cause in found],
            setup.sizes.covers,
        )
        for place, found in walk.peaks.items()
    }
    return Walk(setup.sizes, closed(walk.saved), peaks)


def _opened(sizes: OpenSizes, unit: Unit, shares: list[int]) -> Unit:
    """The unit with placeholders for a rank's shards, which are appended to ``shares``. Only they depend on the number
    of ranks where every tensor divides evenly, so that one walk serves any number.
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
    """The Walk with placeholders for shards."""
    sizes = setup.sizes.with_others(num_shares)
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(replace(setup, sizes=sizes), layers, Fsdp2Tape(sizes.covers, units, places), units.micro_steps)


class Fsdp2Tape(UnitTape):
    """A UnitTape that sends the next unit's all-gather ahead and copies each weight out of it."""

    casts_weights = True

    def __init__(
        self, covers: Covers, units: Units, kinds: Sequence[str], parts: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """``parts``: bytes of each weight of a unit, by the unit's name; of all layers under "layer". Null: weights are
        copied out as one, as moments need no more than their sum.
        """
        super().__init__(covers, units, kinds)
        self._parts = parts
        self._sent: dict[str, Value] = {}  # all-gathers under way: flat outputs that are still to be copied out
        self._last_sent: Value | None = None  # forward keeps the newest until the next one was sent
        self._reducing: Value | None = None  # the newest reduce-scatter's input, kept until the next one
        self._added_up: list[Value] = []  # what groups all-reduce: kept until the end of backward
        self._head: Any = None  # the node of the head's product
        self._num_at_head = 0  # gradients that have come to it

    # -- forward ----------------------------------------------------------------------------------------------------

    def _go_to(self, place: Place) -> None:
        of, name = parted(self.place[1])
        if of and name == "loss" and self._units.reads_head:
            self._free_whole(of + name)
        if (self.place[0], of) != (place[0], parted(place[1])[0]):
            self._last_sent = None
        super()._go_to(place)

    def _enter(self, phase: str, name: str) -> None:
        if phase == "forward":
            self._enter_forward(*parted(name))
        elif name == "loss" and not self._units.apart:
            self._send_before("loss")
        elif name in self._names and name != "loss":
            self._gather_in_backward(name)

    def _enter_forward(self, of: str, name: str) -> None:
        if self._is_second(of):
            if name == "embedding":
                self._gather_in_forward(SECOND)
            return
        if name == "embedding":
            self._gather_in_forward(ROOT)
        if name != "loss" or not self._units.head_alone:
            self._gather_in_forward(name)
        elif self._units.reads_head:
            self._read_head(of)

    def come_to_part(self, part: int | str) -> None:
        """A head that is a unit is gathered as it begins."""
        if part == "head" and self._units.head_alone:
            self._gather_in_forward("loss")

    def _read_head(self, of: str) -> None:
        """``full_tensor`` of its weight: what the trained model's graph keeps, each pass without a graph does anew."""
        name = of + "loss"
        if name not in self._gathered:
            self._gathered[name] = [self._bytes(self._by_name["loss"].gathered, "gathered_weights")]

    def _gather_in_forward(self, name: str) -> None:
        if not self._by_name[name].gathered or name in self._gathered:
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
        parts: Sequence[int] = [self._by_name[name].gathered]
        if self._parts is not None:
            parts = self._parts.get(name, self._parts["layer"])
        self._gathered[name] = [self._bytes(size_bytes, "gathered_weights") for size_bytes in parts]

    def come_to_output(self) -> None:
        """The root's forward has returned."""
        self._last_sent = None

    # -- backward ---------------------------------------------------------------------------------------------------

    def record(self, *arguments: Any, **options: Any) -> Edge | None:
        """As a Tape does; remembers the node of the head's product, whose output has the tail's hook."""
        edge = super().record(*arguments, **options)
        if edge is not None and self._head is None and self._cause == "logits":
            self._head = edge[0]
        return edge

    def _hand_on(self, made: list[Value | None], edges: list[Edge | None]) -> None:
        super()._hand_on(made, edges)
        come = sum(edge is not None and edge[0] is self._head for edge in edges)
        self._num_at_head += come
        if self._units.apart and come and self._num_at_head == self._head.num_awaited:
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

    def _reduce(self, name: str) -> None:
        """Free the unit's weights; in the last micro-step copy its gradients to one buffer and keep a shard of them."""
        unit = self._by_name[name]
        self._free_whole(name)
        if not self._reduces:
            return
        self._reducing = None
        if not unit.reduced:
            return
        buffer = self._bytes(unit.reduced, "gradient_buckets")
        # ``foreach_reduce`` has the unit's last gradient in a variable: the head's or embedding's; a layer's is small.
        last = None if name.startswith(LAYER) else self._largest_gradient(name)
        for leaf in self._leaves[name]:
            leaf.gradient = None
        is_cast = unit.shard != unit.reduced_share  # to the stored weights' dtype
        kept = is_cast and self._units.is_replicated
        shard = self._bytes(unit.reduced_share, "gradient_buckets" if kept else "gradients", REDUCING)
        if kept:
            self._added_up.append(shard)
        if is_cast:
            shard = self._bytes(unit.shard, "gradients", REDUCING)
        del last
        self._keep_shard(name, shard)
        self._reducing = buffer

    def _largest_gradient(self, name: str) -> Value | None:
        found: Value | None = None
        for leaf in self._leaves[name]:
            if leaf.gradient is not None and (found is None or leaf.gradient.numel > found.numel):
                found = leaf.gradient
        return found

    def _finish(self) -> None:
        """The end of backward: the last units are reduced, then all buffers go."""
        super()._finish()
        self._sent.clear()
        self._added_up.clear()
        self._reducing = None
        self._head, self._num_at_head = None, 0


# -- requests -----------------------------------------------------------------------------------------------------


class Fsdp2Run(UnitRun):
    """One rank under FSDP2: what it requests of its allocator."""

    def _setup_of(self, computed: tuple[Tensor, ...]) -> Setup:
        return setup_of(self.spec, self.arch, computed, self._chip)

    def _tape_of(self, kinds: Sequence[str], num_micro_steps: int) -> UnitTape:
        units = units_of(self.spec, self._division)._replace(micro_steps=num_micro_steps)
        return Fsdp2Tape(self._setup.sizes.covers, units, kinds, _unit_parts(self.spec, self._division))

    def _loaded_bytes(self, name: str, tensor: Tensor) -> int:
        return tensor.num_bytes

    def _divide(self) -> None:
        if self.spec.num_models > 1:  # brought before the trained one is divided
            reference.bring(self.spec, self._division, self._in_order(stored_tensors(self.spec)), self.allocator)
        for name, tensor in _by_module(self._tensors):
            whole = self._whole(name, tensor)
            self.allocator.allocate(("share", name), self._share(tensor).weights)
            self.allocator.free(whole)

    def _share(self, tensor: Tensor) -> Share:
        return share_of(self.spec, tensor, self._division.num_gpus, by_rows=True)

    def _trained_tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, self._share(tensor).as_state) for name, tensor in self._tensors if tensor.trained]


def _by_module(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """In the order of the model's own list: adapters follow the weight they adapt."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        found.setdefault(name.split(".lora_")[0].removesuffix(".weight"), []).append((name, tensor))
    return [one for group in found.values() for one in group]
