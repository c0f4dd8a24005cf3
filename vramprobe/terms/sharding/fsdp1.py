"""FSDP1: flat parameters, as accelerate asks torch for them (BACKWARD_PRE, original parameters).

In: a spec and its Division. Out: the RankCourse of the rank that holds the most, and its Run. A unit is one flat
parameter: its weights aligned to 16 bytes, the whole padded to a multiple of N; each adapter is its own unit (peft's
policy). The order of events is torch 2.13's, torch/distributed/fsdp. Never imports torch.

* _flat_param.py, ``unshard``: a unit is gathered into its flat parameter, and weights are views of it: nothing is
  copied out. A unit that is cast is copied (``_mp_shard``) until then. A unit that comes from the host uncast stays
  beside it, as the original parameters are views of it (``flat_param_to``).
* _runtime_utils.py, ``_pre_backward_hook``: each unit in backward gathers the next one at once, the loss the last one.
* The gradients of the views wait for each other and are joined to one (autograd's ``split_with_sizes``); then the
  weights are freed, then the gradient is reduced (``_post_backward_hook``).
* Under SHARD_GRAD_OP, gathered weights stay through accumulation, too.
* Each adapter raises its input to its stored dtype before FSDP lowers it again, and so saves a copy of its own.
* Not counted in moments: adapters are gathered one after the other, not with their layer (0.02 to 0.04 % of 135M).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer, parameters
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import Setup, setup_of
from vramprobe.terms.models.families import layer_place
from vramprobe.terms.sharding.ddp import broadcast
from vramprobe.terms.sharding.fsdp import (
    LAYER,
    Unit,
    UnitRun,
    Units,
    UnitTape,
    joined,
    prepared_tensors,
    reshards,
    walked_micro_steps,
)
from vramprobe.terms.sharding.rank import (
    COMPUTING,
    GATHERING,
    REDUCING,
    SENDING,
    Division,
    RankCourse,
    computed_tensors,
    quantised_parts,
    stored_tensors,
)
from vramprobe.terms.step.walk import Walk, one_of_each_kind, walk_layers
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES, Leaf, Value
from vramprobe.terms.tape.tape import Covers

#: Each tensor in a flat parameter begins at a multiple of this (_flat_param.py, ``_get_aligned_numel``).
_ALIGNED_BYTES = 16


def course(spec: CellSpec, division: Division, chip: Chip) -> RankCourse:
    """The step of the rank with the first shard of each flat parameter."""
    arch, parts = architecture(spec.architecture), _flat_parts(spec, division)
    held = sum((part.share_bytes + part.beside_bytes) * part.num_copies for part in parts)
    trained = [part.as_state for part in parts if part.as_state is not None]
    computed = computed_tensors(spec, prepared_tensors(spec, is_flat=True))
    layer, root = (joined([part.unit for part in parts if part.per_layer == yes]) for yes in (True, False))
    on_host = division.offload != "none"
    units = Units(layer, root, reshards=reshards(division), on_host=on_host, micro_steps=walked_micro_steps(spec))
    walk = flat_walk(_flat_setup(spec, computed, chip), units)
    buffers, state = parameters.buffers_bytes(arch, spec.dtype), optimizer.allocated_state_bytes(spec, trained)
    gradients = sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    if on_host:
        return RankCourse(walk, {"weights": buffers}, {}, {}, 0, host=held + state + gradients)
    at_step = {"gradients": gradients, "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}
    return RankCourse(walk, {"weights": buffers + held, "optimizer_state": state}, at_step, {}, 0)


def _flat_setup(spec: CellSpec, computed: tuple[Tensor, ...], chip: Chip) -> Setup:
    """peft reads an adapter's dtype before it is gathered, and FSDP casts its input to the dtype it is gathered in."""
    raised = "fp32" if spec.autocast != "none" and spec.method != "full" else None
    return setup_of(spec, architecture(spec.architecture), computed, chip, raised)


# -- flat parameters ----------------------------------------------------------------------------------------------


class FlatPart(NamedTuple):
    """One flat parameter: the names of its weights, and this rank's shard of it."""

    names: list[str]
    per_layer: bool
    trained: bool
    is_adapter: bool  # of a layer, beside frozen weights
    unit: Unit
    loaded_bytes: int  # this rank's shard, before what is trained is raised to fp32
    share_bytes: int
    share_elements: int
    aligned: int  # elements that each weight begins at a multiple of
    num_copies: int
    beside_bytes: int  # quantization state, which is not sharded
    as_state: Tensor | None  # what the optimizer steps, if it is trained


_Pair = tuple[Tensor, Tensor]  # as stored, as computed with


def _flat_parts(spec: CellSpec, division: Division) -> list[FlatPart]:
    """A layer's flat parameters, then the root's, which has all outside the layers; each adapter is its own unit."""
    stored = prepared_tensors(spec, is_flat=True)
    computed = computed_tensors(spec, stored)
    return [
        _flat_part(spec, group, division)
        for per_layer in (True, False)
        for group in _flat_groups(stored, computed, per_layer=per_layer)
    ]


def _flat_groups(stored: Sequence[Tensor], computed: Sequence[Tensor], *, per_layer: bool) -> list[list[_Pair]]:
    """The tensors of each flat parameter: an adapter's alone, all others of a layer or outside the layers together."""
    pairs = [pair for pair in zip(stored, computed, strict=True) if pair[0].per_layer == per_layer]
    has_frozen = any(not one.trained for one in stored)
    together = [pair for pair in pairs if not (has_frozen and pair[0].trained)]
    return [group for group in (together, *([pair] for pair in pairs if pair not in together)) if group]


def _flat_part(spec: CellSpec, group: Sequence[_Pair], division: Division) -> FlatPart:
    num_gpus, on_host = division.num_gpus, division.offload != "none"
    first, computed = group[0]
    stored_bytes, computed_bytes = ITEMSIZE_BYTES[first.dtype], ITEMSIZE_BYTES[computed.dtype]
    aligned = _ALIGNED_BYTES // computed_bytes
    elements = 0
    for stored, _ in group:
        numel = stored.numel
        if stored.quantised:
            computed_bytes = stored_bytes = ITEMSIZE_BYTES[spec.dtype]
            numel = -(-quantised_parts(spec, stored)[0] // stored_bytes)
        elements += -(-numel // aligned) * aligned
    share = -(-elements // num_gpus)
    sent, shard = share * computed_bytes, share * stored_bytes
    is_cast = stored_bytes != computed_bytes
    unit = Unit(sent * num_gpus, sent if is_cast else 0, moved=0 if is_cast or not on_host else sent)
    loaded = shard
    if first.trained and not first.quantised:
        loaded = share * ITEMSIZE_BYTES[next(one.dtype for one in stored_tensors(spec) if one.name == first.name)]
    copies = first.num_copies if first.per_layer else 1
    as_state = None
    if first.trained:
        unit = unit._replace(reduced=sent * num_gpus, reduced_share=sent, shard=shard)
        as_state = first._replace(shape=(shard // ITEMSIZE_BYTES[first.dtype],), num_copies=copies)
    beside = sum(quantised_parts(spec, one)[1] for one, _ in group if one.quantised)
    return FlatPart(
        names=[stored.name for stored, _ in group],
        per_layer=first.per_layer,
        trained=first.trained,
        unit=unit,
        is_adapter=first.role == "adapter" and first.per_layer,
        loaded_bytes=loaded,
        share_bytes=shard,
        share_elements=share,
        aligned=aligned,
        num_copies=copies,
        beside_bytes=beside,
        as_state=as_state,
    )


# -- the tape -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2048)
def flat_walk(setup: Setup, units: Units) -> Walk:
    """The Walk of one rank."""
    layers = one_of_each_kind(setup.arch)
    places = [layer_place(setup.arch, layer) for layer in layers]
    return walk_layers(setup, layers, Fsdp1Tape(setup.sizes.covers, units, places), units.micro_steps)


class Fsdp1Tape(UnitTape):
    """A UnitTape whose units are flat parameters; an adapter is one, too, reduced as its gradient arrives."""

    raises_outputs = True

    def __init__(self, covers: Covers, units: Units, kinds: Sequence[str], adapters: Sequence[Unit] = ()) -> None:
        """``adapters``: a layer's, in the order in which it uses them; ``units`` are without them. None: they are part
        of their layer's unit, as far as moments count them.
        """
        super().__init__(covers, units, kinds)
        self._whole: dict[str, Value] = {}  # flat gradients of the micro-steps before
        self._adapters = adapters
        self._adapter_of: dict[Leaf, str] = {}
        for layer in self._names[1:-1]:
            for adapter, unit in zip(self._adapters_of(layer), adapters, strict=True):
                self._by_name[adapter] = unit

    def _adapters_of(self, name: str) -> list[str]:
        """The units of a layer's adapters."""
        return [_adapter(name, number) for number in range(len(self._adapters)) if name.startswith(LAYER)]

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight: an adapter's, or of the unit that is gathered here."""
        value = super().constant(numel, dtype, trained=trained)
        if trained and self._adapters:
            name = self.place[1]
            adapter = _adapter(name, len(self._leaves[name]) - 1)
            self._leaves[adapter] = [value.node]
            self._adapter_of[value.node] = adapter
        return value

    def _accumulate(self, leaf: Leaf) -> None:
        super()._accumulate(leaf)
        if leaf in self._adapter_of:
            self._reduce(self._adapter_of[leaf])

    def _free_whole(self, name: str) -> None:
        for one in (name, *self._adapters_of(name)):
            super()._free_whole(one)

    def _enter(self, phase: str, name: str) -> None:
        if phase == "forward":
            if name == "embedding":
                self._gather("root")
            self._gather(name)
        elif name in self._names:
            self._gather(name)
            self._gather(self._names[max(self._names.index(name) - 1, 0)])

    def _gather(self, name: str) -> None:
        """Into the flat parameter, from a copy in the dtype that is sent; a layer's, then its adapters'."""
        for one in (name, *self._adapters_of(name)):
            unit = self._by_name[one]
            if one not in self._gathered and unit.gathered:
                copied = self._bytes(unit.cast, "gathered_weights", SENDING)
                self._gathered[one] = [self._bytes(unit.gathered + unit.moved, "gathered_weights", GATHERING)]
                del copied

    def _reduce(self, name: str) -> None:
        """Join the unit's gradients, free its weights, and keep this rank's shard; before the last micro-step, all."""
        unit = self._by_name[name]
        if not unit.reduced:
            self._reshard(name)
            return
        # On that stream, as what it is joined from was split there.
        flat = self._bytes(unit.reduced, "gradient_buckets", GATHERING)
        self._reshard(name)
        for leaf in self._leaves[name]:
            leaf.gradient = None
        if not self._reduces:
            if name not in self._whole:
                self._recause(flat.storage, "gradients")
                self._whole[name] = flat
            return
        whole = self._whole.pop(name, flat)  # to which these are added in place
        shard = self._bytes(unit.reduced_share, "gradients", REDUCING)
        if unit.shard != unit.reduced_share:  # cast to the stored weights' dtype
            shard = self._bytes(unit.shard, "gradients", REDUCING)
        self._keep_shard(name, shard)
        del shard
        del whole
        del flat

    def _reshard(self, name: str) -> None:
        """Free the gathered weights, which stay between micro-steps where they stay from forward to backward."""
        if self._reduces or self._units.reshards:
            self._free_whole(name)

    def _in_order(self) -> list[str]:
        return ["root", *[name for name in self._by_name if name != "root"]]

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        """Of weights, where they are views of the flat parameter."""
        self.stream = GATHERING if to_leaf else COMPUTING
        made = super()._sum(old, new, to_leaf)
        self.stream = COMPUTING
        return made


def _adapter(layer: str, number: int) -> str:
    return f"adapter {number} of {layer}"


# -- requests -----------------------------------------------------------------------------------------------------


class Fsdp1Run(UnitRun):
    """One rank under FSDP1: what it requests of its allocator."""

    def _setup_of(self, computed: tuple[Tensor, ...]) -> Setup:
        return _flat_setup(self.spec, computed, self._chip)

    def _tape_of(self, kinds: Sequence[str], num_micro_steps: int) -> UnitTape:
        parts = self._parts
        apart = [part.unit for part in parts if part.is_adapter]
        layer, root = (
            joined([part.unit for part in parts if part.per_layer == yes and not part.is_adapter])
            for yes in (True, False)
        )
        units = Units(layer, root, reshards=reshards(self._division), micro_steps=num_micro_steps)
        return Fsdp1Tape(self._setup.sizes.covers, units, kinds, apart)

    def step(self) -> None:
        """The first step begins with each flat parameter once, whole, on the step's own stream
        (_flat_param.py, ``init_flat_param_attributes``)."""
        if self._num_steps == 0:
            for _, part in self._root_first():
                sizes = [part.unit.cast, part.unit.gathered]
                if part.unit.cast:
                    sizes.append(part.share_bytes * self._division.num_gpus)
                for size_bytes in sizes:
                    self.allocator.allocate("passing", size_bytes)
                    self.allocator.free("passing")
            for number, part in self._root_first():
                if part.loaded_bytes != part.share_bytes:  # the shards that were raised; views kept them
                    self.allocator.free(("share", number))
        super().step()

    @cached_property
    def _parts(self) -> list[FlatPart]:
        return _flat_parts(self.spec, self._division)

    @cached_property
    def _groups(self) -> list[tuple[FlatPart, list[tuple[str, Tensor]]]]:
        """The flat parameters as they are made: in each layer its adapters' and its own, then what is outside."""
        by_name = dict(self._tensors)
        found = []
        for layer in range(self.arch.num_layers):
            for part in self._parts:
                if part.per_layer:
                    names = [name.replace("{layer}", str(layer)) for name in part.names]
                    found.append((part, [(name, by_name[name]) for name in names if name in by_name]))
        for part in self._parts:
            if not part.per_layer:
                found.append((part, [(name, by_name[name]) for name in part.names]))
        return found

    def _divide(self) -> None:
        allocator = self.allocator
        for number, (part, tensors) in enumerate(self._groups):
            wholes = [self._whole(name, tensor) for name, tensor in tensors]
            whole_bytes = part.loaded_bytes * self._division.num_gpus
            broadcast(allocator, [self._loaded_bytes(name, tensor) for name, tensor in tensors])
            allocator.allocate("flat", whole_bytes)
            allocator.allocate(("share", number), part.loaded_bytes)
            allocator.free("flat")
            for whole in wholes:
                allocator.free(whole)
        for number, part in self._root_first():
            if part.loaded_bytes != part.share_bytes:
                allocator.allocate(("raised", number), part.share_bytes)

    def _root_first(self) -> list[tuple[int, FlatPart]]:
        groups = [(number, part) for number, (part, _) in enumerate(self._groups)]
        return [*(one for one in groups if not one[1].per_layer), *(one for one in groups if one[1].per_layer)]

    def _trained_tensors(self) -> list[tuple[str, Tensor]]:
        found = []
        for part, tensors in self._groups:
            if not part.trained:
                continue
            left = part.share_elements
            for name, tensor in tensors:
                if left > 0:
                    found.append((name, tensor._replace(shape=(min(tensor.numel, left),))))
                left -= -(-tensor.numel // part.aligned) * part.aligned
        return found
