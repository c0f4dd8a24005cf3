"""What FSDP1 and FSDP2 share: units of weights, the tape that gathers and reduces them, its log, and the run of a rank.

In: a spec and the bytes of each unit. Out: bases for fsdp1.py and fsdp2.py, which know the order of events. A unit is
what one all-gather and one reduce-scatter move. Of several micro-steps only the last reduces (accelerate's
``no_sync``); until then each rank holds whole gradients in the dtype of the computation. Never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from vramprobe.rules.sharding import rules_of, sharing_ranks
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.loading import load
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models import families
from vramprobe.terms.sharding.rank import (
    COMPUTING,
    RANK_CAUSES,
    Division,
    add_batch,
    add_buffers,
    computed_tensors,
    loaded_key,
    quantised_parts,
    stored_tensors,
)
from vramprobe.terms.step.requests import Run
from vramprobe.terms.tape.graph import CAUSES, ITEMSIZE_BYTES, Leaf, Place, Value
from vramprobe.terms.tape.tape import OF_REFERENCE, Covers, Tape

ROOT = "root"
LAYER = "layer"
#: The unit of a second model, which TRL divides as one (trl/models/utils.py, ``prepare_fsdp``).
SECOND = "second model"
_END = ("backward", "end")


class Unit(NamedTuple):
    """Bytes that one collective moves, padded so that every rank's shard has the same size."""

    gathered: int = 0  # whole weights, in the dtype they are gathered in
    cast: int = 0  # this rank's shard of weights that are cast, or copied from the host, before they are sent
    reduced: int = 0  # whole gradients, in the dtype they are reduced in
    reduced_share: int = 0  # this rank's shard of them
    shard: int = 0  # the same in the dtype of the stored weights, as the optimizer gets it
    moved: int = 0  # this rank's shard of weights that FSDP1 copies from the host uncast: kept while gathered


class Units(NamedTuple):
    """The units of a model, by where its forward first uses them. The root's stay gathered until backward has ended."""

    layer: Unit
    root: Unit
    embedding: Unit = Unit()  # empty: in the root
    tail: Unit = Unit()  # the last norm and the head, kept from forward to backward
    apart: bool = False  # whether the head's own hook starts gathering in backward, and not the loss's
    head_alone: bool = False  # whether the tail is the head alone: peft hides the norm from accelerate
    reads_head: bool = False  # whether that is read past its module, which then gathers nothing: each reader does
    reshards: bool = True  # False: a layer stays gathered from its forward to its backward
    is_replicated: bool = False  # whether several groups all-reduce what each has reduced
    on_host: bool = False  # whether a rank's shards of weights and gradients lie in host memory
    second: Unit = Unit()  # a reference model, gathered whole for its forward; empty: none
    micro_steps: int = 1  # that are walked: the first, one in between and the last, as far as they exist


def parted(name: str) -> tuple[str, str]:
    """What a place's name begins with in a pass without a graph, and the rest, which is all of other names."""
    of, colon, rest = name.rpartition(": ")
    return of + colon, rest


def joined(units: Sequence[Unit]) -> Unit:
    """Several units as one."""
    return Unit(*(sum(sizes) for sizes in zip(*units, strict=True))) if units else Unit()


def reshards(division: Division) -> bool:
    """Whether backward gathers weights again (FULL_SHARD), or keeps what forward gathered (SHARD_GRAD_OP)."""
    return rules_of(division.sharding).num_gathers == 2


def prepared_tensors(spec: CellSpec, *, is_flat: bool = False) -> tuple[Tensor, ...]:
    """The tensors as accelerate shards them: mixed precision raises trained ones to fp32, whatever dtype they were
    loaded in (utils/fsdp_utils.py, ``fsdp2_prepare_model``, except beside 4-bit weights; accelerator.py,
    ``prepare_model``).

    ``is_flat``: under FSDP1.
    """
    stored = stored_tensors(spec)
    if spec.autocast == "none" or (spec.quant not in ("none", "int8") and not is_flat):
        return stored
    return tuple([one._replace(dtype="fp32") if one.trained else one for one in stored])


def walked_micro_steps(spec: CellSpec) -> int:
    """How many micro-steps differ: the first, which finds no gradients, those in between, and the last."""
    return min(spec.grad_accum, 3)


class UnitTape(Tape, ABC):
    """A Tape that gathers weights on coming to a place and reduces gradients on leaving it. Each layer is a unit."""

    causes = (*CAUSES, *RANK_CAUSES)

    def __init__(self, covers: Covers, units: Units, kinds: Sequence[str]) -> None:
        """``kinds``: the name of each layer's place, which all layers of a kind share in the log."""
        super().__init__(covers)
        self._units, self._kinds = units, kinds
        layers = [f"{LAYER} {number}" for number in range(len(kinds))]
        self._by_name = {
            "embedding": units.embedding,
            **dict.fromkeys(layers, units.layer),
            "loss": units.tail,
            ROOT: units.root,
            SECOND: units.second,
        }
        self._names = ["embedding", *layers, "loss"]  # in the order of forward
        self._micro_steps_left = units.micro_steps  # this one included
        self._num_come = 0  # layers that this forward came to
        self._gathered: dict[str, list[Value]] = {}
        self._shards: dict[str, Value] = {}  # of gradients, by unit
        self._leaves: dict[str, list[Leaf]] = {name: [] for name in self._by_name}

    @abstractmethod
    def _enter(self, phase: str, name: str) -> None:
        """Gather what this place needs."""

    @abstractmethod
    def _reduce(self, name: str) -> None:
        """Free the unit's weights and reduce its gradients."""

    @property
    def _reduces(self) -> bool:
        """Whether this is the last micro-step."""
        return self._micro_steps_left == 1

    def at(self, phase: str, place: str) -> None:
        """From here on, what is written belongs to this place of this phase; a layer's place has its number."""
        of, name = parted(place)
        if name == "embedding":
            self._num_come = 0
        elif name in self._kinds:
            place = f"{of}{LAYER} {self._num_come}"
            self._num_come += 1
        super().at(phase, place)

    def end_backward(self) -> None:
        """The root's hook runs before autograd returns."""
        self.at(*_END)

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """Free the shards of all gradients."""
        for name in self._in_order():
            self._shards.pop(name, None)

    def _in_order(self) -> list[str]:
        """The units in the optimizer's order."""
        return ["embedding", *self._names[1:], ROOT]

    def _kind_of(self, place: Place) -> Place:
        phase, (of, name) = place[0], parted(place[1])
        if name.startswith(LAYER):
            return phase, of + self._kinds[int(name.removeprefix(LAYER))]
        return place

    def _go_to(self, place: Place) -> None:
        if place == self.place:
            return
        phase, (of, name) = self.place[0], parted(self.place[1])
        if phase == "backward" and name in self._by_name and name != "embedding":
            self._reduce(name)
        elif self._is_second(of):
            if name == "loss":
                self._free_whole(SECOND)
        elif phase == "forward" and self._units.reshards and name in self._names[:-1]:
            self._free_whole(name)
        if place == _END:
            self._finish()
            self._micro_steps_left -= 1
        super()._go_to(place)
        self._enter(*place)

    def _is_second(self, of: str) -> bool:
        """Whether a second model is at work in places that begin so."""
        return of in OF_REFERENCE and self._units.second.gathered > 0

    def _finish(self) -> None:
        """The end of backward: reduce the units whose input needs no gradient."""
        for name in (ROOT, "embedding"):
            self._reduce(name)

    def _free_whole(self, name: str) -> None:
        whole = self._gathered.pop(name, [])
        while whole:
            whole.pop(0)

    def _bytes(self, num_bytes: int, cause: str, stream: int = COMPUTING) -> Value:
        self.stream = stream
        made = self.new(num_bytes, "int8", cause)
        self.stream = COMPUTING
        return made

    def _keep_shard(self, name: str, shard: Value) -> None:
        """Keep a rank's shard of gradients for the optimizer, unless it goes to the host."""
        if not self._units.on_host:
            self._shards[name] = shard

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight: of the unit that is gathered here, or of the root."""
        value = super().constant(numel, dtype, trained=trained)
        if trained:
            name = self.place[1]
            owner = name if self._by_name.get(name, Unit()).gathered else ROOT
            self._leaves[owner].append(value.node)
        return value


class UnitRun(Run, ABC):
    """One rank under FSDP: the model comes from the host, weight by weight, and is sharded on the GPU."""

    def _prepare(self) -> None:
        spec = self.spec
        is_replicated = spec.shard_size is not None
        self._division = Division(str(spec.sharding), sharing_ranks(spec), is_replicated=is_replicated)
        stored = prepared_tensors(spec, is_flat=rules_of(spec.sharding).module == "fsdp1")
        self._setup = self._sized(self._setup_of(computed_tensors(spec, stored)))
        self._tensors = self._in_order(stored)
        self._loaded = {name: tensor.dtype for name, tensor in self._in_order(stored_tensors(spec))}

    @abstractmethod
    def _setup_of(self, computed: tuple[Tensor, ...]) -> Setup:
        """The Setup of a step that computes with these weights."""

    @abstractmethod
    def _tape_of(self, kinds: Sequence[str], num_micro_steps: int) -> UnitTape:
        """The tape of a step; ``kinds``: the name of each layer's place."""

    @abstractmethod
    def _divide(self) -> None:
        """Request each weight whole, then this rank's shard of it."""

    def load(self) -> None:
        """Each weight whole, then its shard; quantized weights are on the GPU before."""
        spec, allocator = self.spec, self.allocator
        if spec.quant != "none":
            load(spec, self.arch, self._tensors, allocator)
        self._divide()
        if spec.quant == "none":
            add_buffers(spec, self.arch, allocator)
            add_batch(spec, allocator)

    def _whole(self, name: str, tensor: Tensor) -> Hashable:
        """The allocator's key of the whole weight on the GPU."""
        if self.spec.quant == "none":
            self.allocator.allocate(("whole", name), self._loaded_bytes(name, tensor))
            return "whole", name
        return loaded_key(self.spec, self.allocator, name)

    def _loaded_bytes(self, name: str, tensor: Tensor) -> int:
        """Bytes before anything is cast; of a quantized weight without its state."""
        if tensor.quantised:
            return quantised_parts(self.spec, tensor)[0]
        return tensor.numel * ITEMSIZE_BYTES[self._loaded[name]]

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> Tape:
        return self._tape_of([families.layer_place(self.arch, layer) for layer in layers], num_micro_steps)
