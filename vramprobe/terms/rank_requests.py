"""Requests of one rank of several: what it asks of its allocator, and on which stream.

In: a spec with its ranks, what its card decides, an allocator. Out: the allocator's own counts, as requests.py has them
of a single card.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.choices import FSDP1, FSDP2
from vramprobe.spec import CellSpec
from vramprobe.terms import families
from vramprobe.terms.flat_ranks import FlatPart, flat_parts, flat_setup
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.loading import Allocator, load
from vramprobe.terms.modules import Model
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_load import add_batch, add_buffers, standing
from vramprobe.terms.rank_log import DividedLog, FlatLog, RankLog, ReplicaLog
from vramprobe.terms.rank_parts import (
    Share,
    computed_tensors,
    prepared_tensors,
    quantised_parts,
    share_of,
    stored_tensors,
)
from vramprobe.terms.rank_tape import Units, rank_units
from vramprobe.terms.ranks import fsdp_units, unit_parts
from vramprobe.terms.request_log import RecordingTape
from vramprobe.terms.requests import Given, Run, in_order
from vramprobe.terms.scratch import Chip
from vramprobe.terms.setup import Setup, setup_of
from vramprobe.terms.tape import Tape
from vramprobe.terms.zero_requests import BucketRun, GatheringRun
from vramprobe.units import MIB

#: What FSDP1 and DDP send at once (``PARAM_BROADCAST_BUCKET_SIZE``, ``broadcast_bucket_size``), and DDP's buckets once
#: it knows the order of gradients (``bucket_cap_mb``, ``_DEFAULT_FIRST_BUCKET_BYTES``).
_BROADCAST_BYTES = 250 * MIB
_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 * MIB, MIB


class RankRun(Run, ABC):
    """What all kinds of FSDP have in common."""

    def __init__(
        self, spec: CellSpec, allocator: Allocator, *, has_flash: bool, workspace_bytes: int, chip: Chip | None = None
    ) -> None:
        super().__init__(spec, allocator, has_flash=has_flash, workspace_bytes=workspace_bytes, chip=chip)
        self._num_sharing = spec.shard_size or spec.num_gpus  # the model
        self._stored = prepared_tensors(spec, is_flat=spec.sharding in FSDP1)
        setup = self._setup_of(computed_tensors(spec, self._stored), has_flash)
        self._setup = replace(setup, sizes=Given(spec.batch_size, spec.seq_len))
        model = Model(Tape(), self._setup, range(self.arch.num_layers))
        self._tensors = list(in_order(model, self._stored))
        self._loaded = {name: tensor.dtype for name, tensor in in_order(model, stored_tensors(spec))}

    @abstractmethod
    def _setup_of(self, computed: Sequence[Tensor], has_flash: bool) -> Setup:
        """Of the step, whose weights are these."""

    @abstractmethod
    def _log_of(self, kinds: Sequence[str], num_micro_steps: int) -> RankLog:
        """The tape of a step; ``kinds``: of each layer, by which name its place goes."""

    @abstractmethod
    def _divide(self) -> None:
        """Each weight whole, then this rank's share of it."""

    def load(self) -> None:
        """On the host, then each weight whole and its share; quantised ones stand on the card before."""
        spec, allocator = self.spec, self.allocator
        if spec.quant != "none":
            load(spec, self.arch, self._tensors, allocator)
        self._divide()
        if spec.quant == "none":
            add_buffers(spec, self.arch, allocator)
            add_batch(spec, allocator)

    def _whole(self, name: str, tensor: Tensor) -> Hashable:
        """The weight on the card, by the name that it was asked for under."""
        if self.spec.quant == "none":
            self.allocator.allocate(("whole", name), self._loaded_bytes(name, tensor))
            return "whole", name
        return standing(self.spec, self.allocator, name)

    def _loaded_bytes(self, name: str, tensor: Tensor) -> int:
        """Before anything is raised; of a quantised weight without its state."""
        if tensor.quantised:
            return quantised_parts(self.spec, tensor)[0]
        return tensor.numel * ITEMSIZE_BYTES[self._loaded[name]]

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> RecordingTape:
        return self._log_of([families.layer_place(self.arch, layer) for layer in layers], num_micro_steps)


class FsdpRun(RankRun):
    """A rank under FSDP2."""

    def _setup_of(self, computed: Sequence[Tensor], has_flash: bool) -> Setup:
        return setup_of(self.spec, self.arch, computed, has_flash)

    def _log_of(self, kinds: Sequence[str], num_micro_steps: int) -> RankLog:
        spec = self.spec
        units = fsdp_units(
            spec, self._num_sharing, reshards=spec.sharding != "fsdp-shard-grad-op", apart=True,
            is_replicated=spec.shard_size is not None,
        )  # fmt: skip
        units = units._replace(micro_steps=num_micro_steps)
        return DividedLog(self._setup.sizes.covers, units, kinds, unit_parts(spec, self._num_sharing))

    def _loaded_bytes(self, name: str, tensor: Tensor) -> int:
        return tensor.num_bytes

    def _divide(self) -> None:
        for name, tensor in by_module(self._tensors):
            whole = self._whole(name, tensor)
            self.allocator.allocate(("share", name), self._share(tensor).weights)
            self.allocator.free(whole)

    def _share(self, tensor: Tensor) -> Share:
        return share_of(self.spec, tensor, self._num_sharing, by_rows=True)

    def _trained_tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, self._share(tensor).as_state) for name, tensor in self._tensors if tensor.trained]


class FlatRun(RankRun):
    """A rank under FSDP1."""

    def _setup_of(self, computed: Sequence[Tensor], has_flash: bool) -> Setup:
        return flat_setup(self.spec, computed, has_flash)

    def _log_of(self, kinds: Sequence[str], num_micro_steps: int) -> RankLog:
        spec = self.spec
        parts = flat_parts(spec, self._num_sharing)
        apart = [part.unit for part in parts if part.is_adapter]
        layer, root = (
            rank_units([part.unit for part in parts if part.per_layer == yes and not part.is_adapter])
            for yes in (True, False)
        )
        units = Units(layer, root, reshards=spec.sharding != "fsdp1-shard-grad-op", micro_steps=num_micro_steps)
        return FlatLog(self._setup.sizes.covers, units, kinds, apart)

    def step(self) -> None:
        """The first begins with each flat parameter once, whole, on the step's own stream
        (_flat_param.py, ``init_flat_param_attributes``)."""
        if self._num_steps == 0:
            for _, part in self._root_first():
                sizes = [part.unit.cast, part.unit.gathered]
                if part.unit.cast:
                    sizes.append(part.share_bytes * self._num_sharing)
                for size_bytes in sizes:
                    self.allocator.allocate("passing", size_bytes)
                    self.allocator.free("passing")
            for number, part in self._root_first():
                if part.loaded_bytes != part.share_bytes:  # the parts that were raised; views kept them
                    self.allocator.free(("share", number))
        super().step()

    @cached_property
    def _groups(self) -> list[tuple[FlatPart, list[tuple[str, Tensor]]]]:
        """The flat parameters as they are made: in each layer its adapters' and its own, then what is outside."""
        by_name = dict(self._tensors)
        parts = flat_parts(self.spec, self._num_sharing)
        found = []
        for layer in range(self.arch.num_layers):
            for part in parts:
                if part.per_layer:
                    names = [name.replace("{layer}", str(layer)) for name in part.names]
                    found.append((part, [(name, by_name[name]) for name in names if name in by_name]))
        for part in parts:
            if not part.per_layer:
                found.append((part, [(name, by_name[name]) for name in part.names]))
        return found

    def _divide(self) -> None:
        allocator = self.allocator
        for number, (part, tensors) in enumerate(self._groups):
            wholes = [self._whole(name, tensor) for name, tensor in tensors]
            whole_bytes = part.loaded_bytes * self._num_sharing
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


class ReplicaRun(Run):
    """A rank under DDP."""

    def load(self) -> None:
        """The whole model, sent from rank 0, and DDP's first bucket, for all gradients."""
        super().load()
        weights = [tensor.num_bytes for _, tensor in self._tensors if not tensor.quantised]
        broadcast(self.allocator, weights)
        self.allocator.allocate(("bucket", 0), sum(tensor.num_bytes for _, tensor in self._tensors if tensor.trained))

    def step(self) -> None:
        """The second begins with buckets in the order in which gradients came (reducer.cpp, ``rebuild_buckets``)."""
        if self._num_steps == 1:
            self.allocator.free(("bucket", 0))
            for number, size_bytes in enumerate(self._buckets()):
                self.allocator.allocate(("bucket", number), size_bytes)
        super().step()

    def _buckets(self) -> list[int]:
        found, size_bytes = [], 0
        for one in (one for chunk in self._step_chunks(1) for one in chunk.arrived):
            size_bytes += one
            if size_bytes >= (_BUCKET_BYTES if found else _FIRST_BUCKET_BYTES):
                found.append(size_bytes)
                size_bytes = 0
        return [*found, size_bytes] if size_bytes else found

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> RecordingTape:
        return ReplicaLog()


#: By choices.Sharding.
_KINDS: dict[str, type[Run]] = {
    "ddp": ReplicaRun, **dict.fromkeys(FSDP2, FsdpRun), **dict.fromkeys(FSDP1, FlatRun),
    **dict.fromkeys(("zero1", "zero2"), BucketRun), "zero3": GatheringRun,
}  # fmt: skip


def is_logged(spec: CellSpec) -> bool:
    """Whether what a rank of these asks for is known here; of a single card it always is."""
    return spec.num_gpus == 1 or (spec.sharding in _KINDS and spec.cp_size == 1 and spec.offload == "none")


def run_of(spec: CellSpec, allocator: Allocator, **options: Any) -> Run:
    """The run of a cell, of its first rank where there are several. Raises UnsupportedArchitecture for ranks that are
    not logged."""
    if not is_logged(spec):
        raise UnsupportedArchitecture(f"what a rank under sharding {spec.sharding} asks for is not known in its order")
    kind = Run if spec.num_gpus == 1 else _KINDS[str(spec.sharding)]
    return kind(spec, allocator, **options)


def by_module(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """As the model's own list has them: adapters behind what they adapt."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        found.setdefault(name.split(".lora_")[0].removesuffix(".weight"), []).append((name, tensor))
    return [one for group in found.values() for one in group]


def broadcast(allocator: Allocator, sizes_bytes: Sequence[int]) -> None:
    """From rank 0, several weights at a time, two such pieces under way (torch/csrc/distributed/c10d/comm.cpp,
    ``broadcast_coalesced``); a piece of one weight is the weight itself."""
    pieces: list[list[int]] = [[]]
    for size_bytes in sizes_bytes:
        pieces[-1].append(size_bytes)
        if sum(pieces[-1]) >= _BROADCAST_BYTES:
            pieces.append([])
    under_way: list[int] = []
    for number, piece in enumerate(pieces):
        if len(under_way) == 2:
            allocator.free(("sent", under_way.pop(0)))
        allocator.allocate(("sent", number), sum(piece) if len(piece) > 1 else 0)
        under_way.append(number)
    for number in under_way:
        allocator.free(("sent", number))
