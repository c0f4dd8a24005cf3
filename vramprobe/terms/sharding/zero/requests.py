"""ZeRO-1 and ZeRO-2: what one rank requests of its allocator, in order.

In: a spec with its ranks, what its GPU decides, an allocator. Out: the log of a step and the run of the first rank, and
ZeroRun, which ZeRO-3 shares. What buckets.py adds to the moments of a walk is requested here in its turn. Never imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vramprobe.terms.cell import parameters
from vramprobe.terms.cell.loading import load
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.sharding.rank import COMPUTING, REDUCING, computed_tensors, loaded_key, stored_tensors
from vramprobe.terms.sharding.zero.buckets import Placed, Rules, placed, reduced
from vramprobe.terms.sharding.zero.course import NORM_BYTES, bucket_rules, master_tensor, own_weights
from vramprobe.terms.sharding.zero.tape import Bucket, BucketTape
from vramprobe.terms.step.requests import Run
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES, Leaf, Place, Value
from vramprobe.terms.tape.request_log import Chunk
from vramprobe.terms.tape.tape import Covers, Tape

_END = ("backward", "end")


class BucketLog(BucketTape):
    """The log of a step: gradients go into the bucket, which is reduced when it is full."""

    def __init__(
        self, covers: Covers, bucket: Bucket, rules: Rules, weights: Sequence[Placed], num_gpus: int, micro_steps: int
    ) -> None:
        super().__init__(covers, bucket)
        self._rules, self._weights, self._num_gpus = rules, weights, num_gpus
        self._part = -(-weights[-1].past // num_gpus)
        self._by_name = {(one.name, one.layer): one for one in weights}
        self._micro_steps_left = micro_steps
        self._leaf_of: dict[Placed, Leaf] = {}
        self._inside: list[Placed] = []
        self._elements = 0  # of those
        self._kept: Value | None = None  # gradients of this micro-step
        self._averaged: Value | None = None  # gradients of those before

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """Free the gradients."""
        self._averaged = self._kept = self._buffer = None
        super().zero_grad(leaves)

    def end_backward(self) -> None:
        """DeepSpeed's epilogue."""
        self.at(*_END)

    def _put(self, leaf: Leaf) -> None:
        name, layer = self._names[leaf]
        one = self._by_name[name, layer if "{layer}" in name else 0]
        self._leaf_of[one] = leaf
        if self._rules.stage > 1:
            self._fill(one)

    def _fill(self, one: Placed) -> None:
        if self._inside and self._elements + one.numel > self._rules.bucket_elements:
            self._reduce()
        self._inside.append(one)
        self._elements += one.numel

    def _reduce(self) -> None:
        rules = self._rules
        joined, cast, has_own = reduced(self._inside, self._part, self._num_gpus, rules)
        if has_own and rules.is_compact:
            self._make_kept()
        self.stream = REDUCING if rules.stage == 3 else COMPUTING
        pieces = [self.new(joined, "int8")]
        pieces.append(self.new(cast, "int8"))
        del pieces
        self.stream = COMPUTING
        if has_own:
            self._make_kept()
        [one, *_] = self._inside
        if rules.stage == 1 and one.numel > rules.bucket_elements and one.first < self._part:
            self._leaf_of[one].gradient = None
        self._inside, self._elements = [], 0

    def _make_kept(self) -> None:
        """What this rank steps with: whole gradients of which it has any element, or its shard in fp32."""
        if self._kept is not None or (self._rules.is_compact and self._averaged is not None):
            return
        own = sum(one.numel for one in own_weights(self._weights, self._part))
        elements = self._part if self._rules.is_compact else own
        self._kept = self.new(elements * self._rules.kept, "int8", "gradients")

    def _go_to(self, place: Place) -> None:
        if place == _END:
            self._micro_steps_left -= 1
            is_last = self._micro_steps_left == 0
            if self._rules.stage > 1 or is_last:
                self._empty()
            if self._rules.stage > 1 or (is_last and not self._rules.is_compact):
                self._buffer = None
        super()._go_to(place)

    def _empty(self) -> None:
        for one in self._weights if self._rules.stage == 1 else ():
            self._fill(one)
            if one.numel <= self._rules.bucket_elements:
                self._leaf_of[one].gradient = None
        if self._inside:
            self._reduce()
        self._waiting = None
        if self._averaged is None:
            self._averaged = self._kept
        self._kept = None


class ZeroRun(Run):
    """One rank under any stage: its shard of what is trained, in fp32 and in one piece."""

    _part: int  # elements of the shard
    _width_bytes: int  # of an element, as the step computes with it
    _master: Tensor

    def _make_master(self, from_bytes: int) -> None:
        """Request the fp32 shard and the state's first gradient. 16-bit weights are copied from elements of
        ``from_bytes``."""
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
        """Every layer is run: neither buckets nor prefetches align with layers."""
        return self._chunks(range(self.arch.num_layers), num_micro_steps)


class BucketRun(ZeroRun):
    """One rank under ZeRO-1 or ZeRO-2: what it requests of its allocator."""

    def _prepare(self) -> None:
        super()._prepare()
        spec = self.spec
        computed = computed_tensors(spec, stored_tensors(spec))
        self._setup = self._sized(setup_of(spec, self.arch, computed, self._chip))
        trained = [tensor for tensor in computed if tensor.trained]
        self._weights = placed(trained)
        self._part = -(-self._weights[-1].past // spec.num_gpus)
        self._width_bytes = ITEMSIZE_BYTES[trained[0].dtype]
        self._rules, self._bucket = bucket_rules(spec, trained[0], is_first_stage=spec.sharding == "zero1")
        self._master = master_tensor(trained, self._part)

    def load(self) -> None:
        """The model as on a single GPU, cast; what is trained in one piece, and this rank's shard of it in fp32. A
        reference model is brought first, from the host, where it was cast."""
        if self.spec.num_models > 1:
            for name, tensor in self._tensors:
                self.allocator.allocate(("second", name), tensor.numel * ITEMSIZE_BYTES[self._dtype_of(tensor)])
            for number, size_bytes in enumerate(parameters.buffer_parts(self.arch, self.spec.dtype)):
                self.allocator.allocate(("second buffer", number), size_bytes)
        load(self.spec, self.arch, self._tensors, self.allocator, with_reference=False)
        allocator, held = self.allocator, {}
        for name, tensor in self._tensors:
            key = loaded_key(self.spec, allocator, name)
            dtype = self._dtype_of(tensor)
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

    def _dtype_of(self, tensor: Tensor) -> str:
        """That the step computes with."""
        return tensor.dtype if self.spec.autocast == "none" else self.spec.autocast

    def step(self) -> None:
        """DeepSpeed's step: norms, the joined gradient in fp32, then the optimizer with it."""
        self._num_steps += 1
        self._work()
        gradient = self._joined()
        self._end()
        self._optimize()
        if gradient is not None:
            self.allocator.free(gradient)

    def _joined(self) -> str | None:
        """The key of this rank's gradient in one piece, in fp32; null if it was kept so."""
        allocator, own = self.allocator, own_weights(self._weights, self._part)
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

    def _tape(self, layers: Sequence[int], num_micro_steps: int) -> Tape:
        return BucketLog(
            self._setup.sizes.covers, self._bucket, self._rules, self._weights, self.spec.num_gpus, num_micro_steps
        )
