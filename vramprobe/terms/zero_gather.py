"""Which weights are whole, and when: DeepSpeed's ZeRO-3 over the modules of a step, one rank's.

In: the tensors of a step, its layers, whether they are computed again, N. Out: the most bytes of gathered weights at
each place. No torch here. The rules are DeepSpeed 0.19's, deepspeed/runtime/zero/partitioned_param_coordinator.py, once
it has recorded a step:

* A module's weights are gathered when it comes (``fetch_sub_module``), and after it those of the next modules, until
  PREFETCHED_ELEMENTS are on their way or LIVE_ELEMENTS are whole.
* Its weights go when it is done (``release_sub_module``), but for those that are used again within REUSED_ELEMENTS, or
  whose next use the look ahead has passed already.
* Several weights come in one piece, of which each is copied (partition_parameters.py, ``AllGatherCoalescedHandle``);
  that piece stays until the last of them has been asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor

#: DeepSpeed's defaults in elements: stage3_prefetch_bucket_size, stage3_max_live_parameters, stage3_max_reuse_distance;
#: and what is smaller is always whole (stage3_param_persistence_threshold; deepspeed/runtime/zero/config.py).
PREFETCHED_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 1_000_000_000
REUSED_ELEMENTS = 1_000_000_000
PERSISTENT_ELEMENTS = 100_000

_NEVER = -1


class Use(NamedTuple):
    """A module comes: in which phase, in which layer (EMBEDDING and HEAD outside them); its weights, by number."""

    phase: str
    layer: int
    weights: list[int]


EMBEDDING, HEAD = -1, -2


def gathered_bytes(
    tensors: Sequence[Tensor], num_layers: int, num_gpus: int, *, computes_again: bool
) -> dict[str, dict[int, int]]:
    """The most that is whole by phase and layer."""
    weights = _Weights(tensors, num_layers)
    uses = weights.uses(computes_again=computes_again)
    coordinator = _Coordinator(weights.sizes, weights.widths, uses, num_gpus)
    found: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
    for step, use in enumerate(uses):
        coordinator.fetch(step)
        of_phase = found[use.phase]
        # The head's own product, and its loss, are higher than the norm before it.
        earlier = 0 if use.layer == HEAD and use.phase == "forward" else of_phase.get(use.layer, 0)
        of_phase[use.layer] = max(earlier, coordinator.whole_bytes)
        coordinator.release(step)
    return found


class _Weights:
    """Numbers for the weights of every layer, and the modules that use them, in the order of forward."""

    def __init__(self, tensors: Sequence[Tensor], num_layers: int) -> None:
        self.sizes: list[int] = []
        self.widths: list[int] = []
        outside = [tensor for tensor in tensors if not tensor.per_layer]
        self._front = self._modules([tensor for tensor in outside if tensor.role == "embedding"])
        of_layers = [tensor for tensor in tensors if tensor.per_layer]
        self._layers = [self._modules(of_layers) for _ in range(num_layers)]
        self._behind = self._modules([tensor for tensor in outside if tensor.role != "embedding"])
        if not any(tensor.name.startswith("lm_head.") for tensor in outside):  # the embedding again
            self._behind.append(self._front[0])

    def _modules(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """One module after the other; an adapter's two follow what they adapt."""
        by_module: dict[str, list[int]] = {}
        names = [tensor.name.removesuffix(".weight").removesuffix(".bias") for tensor in tensors]
        bases = [name for name in names if ".lora_" not in name]
        for base in dict.fromkeys(bases):
            for name, tensor in zip(names, tensors, strict=True):
                if name == base or name.startswith(f"{base}.lora_"):
                    by_module.setdefault(name, []).append(len(self.sizes))
                    self.sizes.append(tensor.numel)
                    self.widths.append(ITEMSIZE_BYTES[tensor.dtype])
        return list(by_module.values())

    def uses(self, *, computes_again: bool) -> list[Use]:
        """The modules of a step as they come."""
        found = [Use("forward", EMBEDDING, module) for module in self._front]
        for layer, modules in enumerate(self._layers):
            found += [Use("forward", layer, module) for module in modules]
        found += [Use("forward", HEAD, module) for module in self._behind]
        found += [Use("backward", HEAD, module) for module in reversed(self._behind)]
        for layer in range(len(self._layers) - 1, -1, -1):
            modules = self._layers[layer]
            found += [Use("backward", layer, module) for module in (modules if computes_again else [])]
            found += [Use("backward", layer, module) for module in reversed(modules)]
        return [*found, *[Use("backward", EMBEDDING, module) for module in self._front]]


class _Piece:
    """What one all-gather brings; ``num_awaited`` of its weights have not been asked for."""

    def __init__(self, weights: list[int], flat_bytes: int) -> None:
        self.weights, self.flat_bytes, self.num_awaited = weights, flat_bytes, len(weights)
        self.is_there = False


class _Coordinator:
    """PartitionedParameterCoordinator, of which nothing but sizes is kept."""

    def __init__(self, sizes: list[int], widths: list[int], uses: list[Use], num_gpus: int) -> None:
        self.whole_bytes = 0
        self._sizes, self._widths, self._uses, self._num_gpus = sizes, widths, uses, num_gpus
        self._live_elements = 0
        self._taken_bytes = [0] * len(sizes)  # by each weight that is whole
        self._is_whole = [size < PERSISTENT_ELEMENTS for size in sizes]
        self._coming: dict[int, _Piece] = {}
        self._asked_for = [_NEVER] * len(sizes)  # at which use, by the look ahead
        self._order = [(weight, step) for step, use in enumerate(uses) for weight in use.weights]
        self._next = 0

    def fetch(self, step: int) -> None:
        """Gather what the module of this step needs, and look ahead."""
        weights = self._uses[step].weights
        self._gather([one for one in weights if self._is_missing(one)])
        for one in weights:
            if one in self._coming:
                self._take(one)
        num_new = len([one for one in weights if self._asked_for[one] < step])
        for _ in range(num_new):
            if self._next < len(self._order):
                weight, used = self._order[self._next]
                self._next += 1
                self._asked_for[weight] = used
        self._look_ahead()

    def _look_ahead(self) -> None:
        most = min(LIVE_ELEMENTS - self._live_elements, PREFETCHED_ELEMENTS)
        ahead: list[int] = []
        elements = 0
        while self._next < len(self._order) and elements < most:
            weight, used = self._order[self._next]
            self._next += 1
            self._asked_for[weight] = max(self._asked_for[weight], used)
            if self._is_missing(weight) and weight not in ahead:
                ahead.append(weight)
                elements += self._sizes[weight]
        self._gather(ahead)

    def _is_missing(self, weight: int) -> bool:
        return not self._is_whole[weight] and weight not in self._coming

    def _gather(self, weights: list[int]) -> None:
        if not weights:
            return
        flat = 0
        for one in weights:
            flat += -(-self._sizes[one] // self._num_gpus) * self._num_gpus * self._widths[one]
            self._live_elements += self._sizes[one]
        piece = _Piece(weights, flat)
        self.whole_bytes += flat
        for one in weights:
            self._coming[one] = piece

    def _take(self, weight: int) -> None:
        piece = self._coming.pop(weight)
        is_one = len(piece.weights) == 1
        if not piece.is_there:
            piece.is_there = True
            for one in piece.weights:
                self._is_whole[one] = True
                self._taken_bytes[one] = piece.flat_bytes if is_one else self._sizes[one] * self._widths[one]
                self.whole_bytes += 0 if is_one else self._taken_bytes[one]
        piece.num_awaited -= 1
        if piece.num_awaited == 0 and not is_one:
            self.whole_bytes -= piece.flat_bytes

    def release(self, step: int) -> None:
        """Let the weights of this step's module go that are not used again soon."""
        free = [one for one in self._uses[step].weights
                if self._taken_bytes[one] and self._asked_for[one] <= step + 1]  # fmt: skip
        elements = 0
        later = step + 1
        while free and later < len(self._uses) and elements < REUSED_ELEMENTS:
            used = self._uses[later].weights
            free = [one for one in free if one not in used]
            elements += sum([self._sizes[one] for one in used])
            later += 1
        for one in free:
            self.whole_bytes -= self._taken_bytes[one]
            self._live_elements -= self._sizes[one]
            self._taken_bytes[one] = 0
            self._is_whole[one] = False
