"""ZeRO-3: what one rank requests of its allocator, in order.

In: a spec with its ranks, what its GPU decides, an allocator. Out: the log of a step and the run of a rank. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby

from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.models import families
from vramprobe.terms.models.modules import Model
from vramprobe.terms.sharding.rank import COMPUTING, GATHERING, add_batch, add_buffers, loaded_key, share_of
from vramprobe.terms.sharding.zero.buckets import EMBEDDING, HEAD, placed
from vramprobe.terms.sharding.zero.course import BUCKET_ELEMENTS, NORM_BYTES, master_tensor
from vramprobe.terms.sharding.zero.requests import BucketLog, ZeroRun
from vramprobe.terms.sharding.zero3.course import (
    SUB_GROUP_ELEMENTS,
    divided_dtype,
    divided_tensors,
    gathered_tensors,
    stage3_rules,
)
from vramprobe.terms.sharding.zero3.gather import PERSISTENT_ELEMENTS, Coordinator, Piece
from vramprobe.terms.step.walk import one_of_each_kind
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES, Leaf, Place, Value
from vramprobe.terms.tape.micro_steps import StepLog
from vramprobe.terms.tape.tape import Tape

_END = ("backward", "end")
_OUTSIDE = {"embedding": EMBEDDING, "loss": HEAD}


class GatheringLog(BucketLog):
    """The log of a step: what a coordinator gathers is requested on coming to a place, on a stream of its own."""

    def gather_with(self, coordinator: Coordinator) -> None:
        """Begin a step with this coordinator."""
        self._coordinator = coordinator
        self._groups = [
            (key, list(group))
            for key, group in groupby(enumerate(coordinator.uses), lambda one: (one[1].phase, one[1].layer))
        ]
        self._held_by: dict[object, list[Value]] = {}

    def _go_to(self, place: Place) -> None:
        super()._go_to(place)
        phase, name = place
        if not self._groups or place == _END:
            return
        (of_phase, layer), uses = self._groups[0]
        if of_phase == phase and (layer if layer < 0 else None) == _OUTSIDE.get(name):
            del self._groups[0]
            self.stream = GATHERING
            for step, _ in uses:
                self._coordinator.fetch(step)
                self._coordinator.release(step)
            self.stream = COMPUTING

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """Free the gradients, and what is still gathered (``reset_step``)."""
        self._held_by.clear()
        super().zero_grad(leaves)

    def hold(self, key: object, sizes_bytes: Sequence[int]) -> None:
        """Request these under a key."""
        self._held_by[key] = [self.new(size_bytes, "int8", "gathered_weights") for size_bytes in sizes_bytes]

    def release(self, key: object) -> None:
        """Free what a key has."""
        self._held_by.pop(key, None)

    def rename(self, key: object, new_key: object) -> None:
        """Keep what a key has under another."""
        self._held_by[new_key] = self._held_by.pop(key)


class LoggedCoordinator(Coordinator):
    """A Coordinator that requests of a tape."""

    tape: GatheringLog

    def piece_came(self, piece: Piece) -> None:
        """Under the number of its weight if it has only one."""
        self.tape.hold(piece.weights[0] if len(piece.weights) == 1 else piece, piece.parts_bytes)

    def piece_went(self, piece: Piece) -> None:
        """All of its weights are copied out."""
        self.tape.release(piece)

    def weight_came(self, weight: int, size_bytes: int) -> None:
        """Copied out."""
        self.tape.hold(weight, [size_bytes])

    def weight_went(self, weight: int) -> None:
        """Not used again soon."""
        self.tape.release(weight)

    def weight_saved(self, weight: int) -> None:
        """It may be gathered once more before its node is done."""
        self.tape.rename(weight, ("saved", weight))

    def saved_went(self, weight: int) -> None:
        """Its node is done."""
        self.tape.release(("saved", weight))


class GatheringRun(ZeroRun):
    """One rank under ZeRO-3: what it requests of its allocator."""

    def _prepare(self) -> None:
        super()._prepare()
        spec, computed = self.spec, divided_tensors(self.spec)
        self._setup = self._sized(setup_of(spec, self.arch, computed, self._chip, is_zero3=True))
        self._computed = self._in_order(computed)
        trained = [tensor for tensor in computed if tensor.trained]
        self._weights = placed(trained)
        self._rules, self._bucket = stage3_rules(spec)
        self._width_bytes = ITEMSIZE_BYTES[divided_dtype(spec)]
        shares = [self._share(tensor) for _, tensor in self._computed if tensor.trained]
        self._shares, self._part = shares, sum(shares)
        self._master = master_tensor(trained, self._part)

    def _share(self, tensor: Tensor) -> int:
        """Elements of a rank's shard."""
        return share_of(self.spec, tensor, self.spec.num_gpus, by_rows=False).elements

    def load(self) -> None:
        """Each weight whole, as the model makes it, then this rank's shard of it; then all that the engine makes."""
        spec, allocator = self.spec, self.allocator
        if spec.quant != "none":
            super().load()
        for name, tensor in self._computed:
            self._divide(name, tensor)
        if spec.quant == "none":
            add_buffers(spec, self.arch, allocator)
        for name, tensor in self._computed:
            if tensor.trained:
                allocator.free(("share", name))  # to the host, and back in one piece (zero/utils.py, ``defragment``)
        allocator.empty_cache()
        allocator.allocate("flat", self._part * self._width_bytes)
        self._make_master(4)
        allocator.allocate("bucket", BUCKET_ELEMENTS * self._width_bytes)
        allocator.allocate("gradients", self._part * self._width_bytes)
        for name, tensor in self._computed:
            if tensor.numel < PERSISTENT_ELEMENTS:
                allocator.allocate(("small", name), tensor.num_bytes)
        if spec.quant == "none":
            add_batch(spec, allocator)

    def _divide(self, name: str, tensor: Tensor) -> None:
        allocator, share = self.allocator, share_of(self.spec, tensor, self.spec.num_gpus, by_rows=False)
        if self.spec.quant != "none":
            whole = loaded_key(self.spec, allocator, name)
            allocator.allocate(("share", name), share.weights)
            allocator.free(whole)
            return
        loaded_bytes = tensor.numel * ITEMSIZE_BYTES[self.spec.dtype]
        if loaded_bytes != tensor.num_bytes:
            allocator.allocate("loaded", loaded_bytes)
        allocator.allocate("whole", tensor.num_bytes)
        if loaded_bytes != tensor.num_bytes:
            allocator.free("loaded")
        allocator.allocate(("share", name), share.weights)
        allocator.free("whole")

    def step(self) -> None:
        """DeepSpeed's step: norms, then each group of weights joined, in fp32, and stepped."""
        self._num_steps += 1
        self._work()
        for elements in self._shares:
            self.allocator.allocate("norm", NORM_BYTES * elements)
            self.allocator.free("norm")
        joined = min(self._part, SUB_GROUP_ELEMENTS)
        self.allocator.allocate("joined", joined * self._width_bytes)
        if self._width_bytes == 2:
            self.allocator.allocate("raised", joined * 4)
            self.allocator.free("joined")
        self._optimize()
        self.allocator.free("raised" if self._width_bytes == 2 else "joined")
        self._end()

    @property
    def _log(self) -> StepLog:
        return self._first_log if self._num_steps == 1 else self._later_log

    @cached_property
    def _first_log(self) -> StepLog:
        """The step that DeepSpeed records."""
        self._is_first = True
        return self._step_log()

    @cached_property
    def _later_log(self) -> StepLog:
        self._is_first = False
        return self._step_log()

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> Tape:
        spec = self.spec
        tape = GatheringLog(
            self._setup.sizes.covers, self._bucket, self._rules, self._weights, spec.num_gpus, num_micro_steps
        )
        coordinator = LoggedCoordinator(
            gathered_tensors(spec, self._names),
            self.arch.num_layers,
            spec.num_gpus,
            computes_again=spec.gradient_checkpointing,
            reenters=self.arch.habits.reenters,
            is_quantised=spec.quant != "none",
            is_first=self._is_first,
        )
        coordinator.tape = tape
        tape.gather_with(coordinator)
        return tape

    @cached_property
    def _names(self) -> list[str]:
        """The names of weights in the order in which forward uses them."""
        layers = one_of_each_kind(self.arch)
        model = Model(Tape(), self._setup, layers)
        families.forward(model)
        return model.names_in_use()
