"""A rank's tensors: as they are stored, as a sharding's step computes with them, and what one rank has of them.

In: a CellSpec with its ranks, its Architecture. Out: RankTensors. Bytes of states alone; what a step holds beside them
is recorded.
"""

from collections.abc import Callable, Sequence

from vramprobe.architecture import Architecture
from vramprobe.bounds.states import allocated_state_bytes
from vramprobe.bounds.tensors import Tensor, buffers_bytes, quantised_bytes, tensors, weights_bytes
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.units import ITEMSIZE_BYTES


def plain_bytes(some: Sequence[Tensor]) -> int:
    """Return the bytes of all copies as plain elements."""
    return sum(one.num_bytes * one.num_copies for one in some)


class RankTensors:
    """A model's tensors as they are stored, as the step computes with them, and what this rank steps of them."""

    def __init__(self, spec: CellSpec, arch: Architecture, num: int) -> None:
        self.spec, self.num, rules = spec, num, rules_of(spec.sharding)
        self.copies_out, self.keeps = rules.module == "fsdp2", rules.num_gathers == 1
        is_third, self.stored = rules.module == "zero3", tensors(spec, arch)
        dtype = spec.autocast if spec.autocast != "none" else "fp32" if is_third else None
        made_later = is_third and spec.quant == "none"  # adapters, of which ZeRO's init knows nothing
        self.computed = tuple(
            one
            if dtype is None or one.quantised or (made_later and one.role == "adapter")
            else one._replace(dtype=dtype)
            for one in self.stored
        )
        raises = spec.autocast != "none" and (spec.quant in ("none", "int8") or rules.module == "fsdp1")
        fsdp = [one._replace(dtype="fp32") if raises and one.trained else one for one in self.stored]
        self.trained = [one for one in self.computed if one.trained]
        self.width = ITEMSIZE_BYTES[dtype if is_third and dtype else self.trained[0].dtype]  # of a gradient's element
        elements = sum(one.numel * one.num_copies for one in self.trained)
        self.elements, self.part = elements, -(-elements // num)
        if rules.uses_deepspeed:  # which steps a flat fp32 copy
            fsdp = list(self.computed)
            self.stepped = [self.trained[0]._replace(dtype="fp32", role="linear", shape=(self.part,), num_copies=1)]
        else:
            cut = 1 if rules.module == "ddp" else num
            self.stepped = [o._replace(shape=(-(-o.shape[0] // cut), *o.shape[1:])) for o in fsdp if o.trained]
        self.buffers = buffers_bytes(arch, spec.dtype)
        self.shares = sum(self._share_bytes(one) * one.num_copies for one in fsdp)
        self.layers = sum(self._gathered_bytes(one) * one.num_copies for one in self.computed if one.per_layer)
        self.layer = self._unit(lambda one: one.per_layer)
        self.embedding = self._unit(lambda one: not one.per_layer and one.role == "embedding")
        self.tail = self._unit(lambda one: not one.per_layer and one.role != "embedding")
        self.is_tied = not any(one.role == "head" for one in self.computed)
        self.state = allocated_state_bytes(spec, self.stepped)

    def whole_weights(self, whole: Sequence[Tensor]) -> int:
        """Return the bytes of these weights and the buffers, undivided."""
        return weights_bytes(whole, self.spec.quant) + self.buffers

    def _unit(self, is_in: Callable[[Tensor], bool]) -> tuple[int, int]:
        """Bytes of one copy of these weights as they are gathered, and of their gradients."""
        own = [one for one in self.computed if is_in(one)]
        return sum(map(self._gathered_bytes, own)), sum(one.num_bytes for one in own if one.trained)

    def _gathered_bytes(self, one: Tensor) -> int:
        packed = one.numel if self.spec.quant == "int8" else -(-one.numel // 2)
        return packed if one.quantised else one.num_bytes

    def _share_bytes(self, one: Tensor) -> int:
        whole = self._gathered_bytes(one)
        scales = quantised_bytes(one, self.spec.quant) - whole if one.quantised else 0
        return -(-whole // self.num) + scales
