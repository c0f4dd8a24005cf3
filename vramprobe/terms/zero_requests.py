"""Requests of one rank under DeepSpeed's ZeRO: what it asks of its allocator, in its order.

In: a spec with its ranks, what its card decides, an allocator. Out: the allocator's own counts, as requests.py has them
of a single card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from vramprobe.spec import CellSpec
from vramprobe.terms import families
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.loading import Allocator
from vramprobe.terms.micro_steps import StepLog
from vramprobe.terms.modules import Model
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_load import add_batch, add_buffers, standing
from vramprobe.terms.rank_parts import computed_tensors, share_of, stored_tensors
from vramprobe.terms.request_log import Chunk, RecordingTape
from vramprobe.terms.requests import Given, Run, in_order
from vramprobe.terms.scratch import Chip
from vramprobe.terms.setup import setup_of
from vramprobe.terms.tape import Tape
from vramprobe.terms.walk import one_of_each_kind
from vramprobe.terms.zero_buckets import placed
from vramprobe.terms.zero_gather import PERSISTENT_ELEMENTS
from vramprobe.terms.zero_log import BucketLog, GatheringLog, LoggedCoordinator
from vramprobe.terms.zero_ranks import (
    BUCKET_ELEMENTS,
    NORM_BYTES,
    SUB_GROUP_ELEMENTS,
    bucket_rules,
    divided_dtype,
    divided_tensors,
    gathered_tensors,
    stage3_rules,
)


class ZeroRun(Run):
    """What the stages have in common: this rank's part of what is trained, in fp32 and in one piece."""

    _part: int  # elements
    _width_bytes: int  # of one, as the step computes with it
    _master: Tensor

    def _make_master(self, from_bytes: int) -> None:
        """With the state's first gradient; of 16 bits from another copy, of which an element has so many bytes."""
        is_raised = self._width_bytes == 2
        if is_raised:
            self.allocator.allocate("source", self._part * from_bytes)
        self.allocator.allocate("master", self._part * 4)
        if is_raised:
            self.allocator.free("source")
        self.allocator.allocate("first gradient", self._part * 4)
        self.allocator.free("first gradient")

    def _trained_tensors(self) -> list[tuple[str, Tensor]]:
        return [("master", self._master)]

    def _step_chunks(self, num_micro_steps: int) -> list[Chunk]:
        """Of all layers, as a bucket is full wherever it is, and what is gathered ahead ends wherever it does."""
        return self._chunks(range(self.arch.num_layers), num_micro_steps)


class BucketRun(ZeroRun):
    """A rank under ZeRO-1 or ZeRO-2."""

    def __init__(
        self, spec: CellSpec, allocator: Allocator, *, has_flash: bool, workspace_bytes: int, chip: Chip | None = None
    ) -> None:
        super().__init__(spec, allocator, has_flash=has_flash, workspace_bytes=workspace_bytes, chip=chip)
        computed = computed_tensors(spec, stored_tensors(spec))
        self._setup = replace(
            setup_of(spec, self.arch, computed, has_flash), sizes=Given(spec.batch_size, spec.seq_len)
        )
        self._trained = [tensor for tensor in computed if tensor.trained]
        self._weights = placed(self._trained)
        self._part = -(-self._weights[-1].past // spec.num_gpus)
        self._width_bytes = ITEMSIZE_BYTES[self._trained[0].dtype]
        self._rules, self._bucket = bucket_rules(spec, self._trained[0], is_first_stage=spec.sharding == "zero1")
        self._master = self._trained[0]._replace(dtype="fp32", role="linear", shape=(self._part,), num_copies=1)

    def load(self) -> None:
        """The model as on a single card, cast; what is trained in one piece, and this rank's part of it in fp32."""
        super().load()
        allocator, held = self.allocator, {}
        for name, tensor in self._tensors:
            key = standing(self.spec, allocator, name)
            dtype = tensor.dtype if self.spec.autocast == "none" else self.spec.autocast
            if not tensor.quantised and dtype != tensor.dtype:
                allocator.allocate(("computed", name), tensor.numel * ITEMSIZE_BYTES[dtype])
                allocator.free(key)
                key = ("computed", name)
            held[name] = key
        allocator.empty_cache()  # stage_1_and_2.py does so, too
        allocator.allocate("flat", self._weights[-1].past * self._width_bytes)
        for name, tensor in self._tensors:
            if tensor.trained:
                allocator.free(held[name])
        self._make_master(2)

    def step(self) -> None:
        """As DeepSpeed's: norms, the joined gradient in fp32, then the optimizer with it."""
        self._num_steps += 1
        self._work()
        gradient = self._joined()
        self._end()
        self._optimize()
        if gradient is not None:
            self.allocator.free(gradient)

    def _joined(self) -> str | None:
        """The name of this rank's gradient in one piece, in fp32; null where what was kept is that."""
        allocator, own = self.allocator, [one for one in self._weights if one.first < self._part]
        for one in own:
            allocator.allocate("norm", NORM_BYTES * (min(one.past, self._part) - one.first))
            allocator.free("norm")
        if self._rules.is_compact:
            return None
        if len(own) > 1:
            allocator.allocate("joined", self._part * self._width_bytes)
        if self._width_bytes == 4:
            return "joined" if len(own) > 1 else None
        allocator.allocate("raised", self._part * 4)
        if len(own) > 1:
            allocator.free("joined")
        return "raised"

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> RecordingTape:
        return BucketLog(
            self._setup.sizes.covers, self._bucket, self._rules, self._weights, self.spec.num_gpus, num_micro_steps
        )


class GatheringRun(ZeroRun):
    """A rank under ZeRO-3."""

    def __init__(
        self, spec: CellSpec, allocator: Allocator, *, has_flash: bool, workspace_bytes: int, chip: Chip | None = None
    ) -> None:
        super().__init__(spec, allocator, has_flash=has_flash, workspace_bytes=workspace_bytes, chip=chip)
        computed = divided_tensors(spec)
        setup = setup_of(spec, self.arch, computed, has_flash, is_zero3=True)
        self._setup = replace(setup, sizes=Given(spec.batch_size, spec.seq_len))
        self._computed = list(in_order(Model(Tape(), self._setup, range(self.arch.num_layers)), computed))
        self._weights = placed([tensor for tensor in computed if tensor.trained])
        self._rules, self._bucket = stage3_rules(spec)
        self._width_bytes = ITEMSIZE_BYTES[divided_dtype(spec)]
        shares = [self._share(tensor) for _, tensor in self._computed if tensor.trained]
        self._shares, self._part = shares, sum(shares)
        master = next(tensor for tensor in computed if tensor.trained)
        self._master = master._replace(dtype="fp32", role="linear", shape=(self._part,), num_copies=1)

    def _share(self, tensor: Tensor) -> int:
        """Elements."""
        return share_of(self.spec, tensor, self.spec.num_gpus, by_rows=False).elements

    def load(self) -> None:
        """Each weight whole, as the model makes it, then this rank's part of it; then all that the engine makes."""
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
            whole = standing(self.spec, allocator, name)
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
        """As DeepSpeed's: norms, then each group of weights joined, in fp32, and stepped."""
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
        """Of the step that DeepSpeed records."""
        self._is_first = True
        return self._step_log()

    @cached_property
    def _later_log(self) -> StepLog:
        self._is_first = False
        return self._step_log()

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> RecordingTape:
        spec = self.spec
        tape = GatheringLog(
            self._setup.sizes.covers, self._bucket, self._rules, self._weights, spec.num_gpus, num_micro_steps
        )
        coordinator = LoggedCoordinator(
            gathered_tensors(spec, self._names), self.arch.num_layers, spec.num_gpus,
            computes_again=spec.gradient_checkpointing, reenters=self.arch.habits.reenters,
            is_quantised=spec.quant != "none", is_first=self._is_first,
        )  # fmt: skip
        coordinator.tape = tape
        tape.gather_with(coordinator)
        return tape

    @cached_property
    def _names(self) -> list[str]:
        """Of weights, as forward asks for them."""
        layers = one_of_each_kind(self.arch)
        model = Model(Tape(), self._setup, layers)
        families.forward(model)
        return model.names_in_use()
