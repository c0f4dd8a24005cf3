"""Which weights ZeRO-3 has gathered at each place of a step, by the modules that use them.

In: the tensors of a step, its layers, whether they are recomputed, N. Out: the most bytes of gathered weights at each
place. Never imports torch. The rules are DeepSpeed 0.19's, deepspeed/runtime/zero/partitioned_param_coordinator.py,
once it has recorded a step:

* A module's weights are gathered when it runs (``fetch_sub_module``), and then those of the next modules, until
  PREFETCHED_ELEMENTS are on their way or LIVE_ELEMENTS are gathered.
* Its weights are freed when it is done (``release_sub_module``), unless they are used again within REUSED_ELEMENTS, or
  the prefetch has already passed their next use.
* Several weights are gathered in one piece, from which each is copied (partition_parameters.py,
  ``AllGatherCoalescedHandle``); the piece stays until the last of them is used.
* A layer is recomputed when the first node of its backward unpacks what it saved; a module's hook runs before that.
  The checkpoint keeps aliases of trained weights (torch/utils/checkpoint.py, ``x.detach()``): one that is released
  before its node is done takes memory until then, even if it is gathered once more. Frozen weights stay until the
  module that was the first is done, then all of them are freed (``update_recompute_parameters``). A 4-bit weight is an
  attribute of its node in forward (bitsandbytes, ``ctx.tensors``), which keeps it as it was gathered then until the
  whole graph is freed after backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.sharding.zero.buckets import EMBEDDING, HEAD
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES

#: DeepSpeed's defaults in elements (deepspeed/runtime/zero/config.py): stage3_prefetch_bucket_size,
#: stage3_max_live_parameters, stage3_max_reuse_distance, and stage3_param_persistence_threshold: smaller tensors are
#: always whole.
PREFETCHED_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 1_000_000_000
REUSED_ELEMENTS = 1_000_000_000
PERSISTENT_ELEMENTS = 100_000

_NEVER = -1


class Use(NamedTuple):
    """A module runs: in which phase, in which layer (EMBEDDING and HEAD outside them); its weights, by number.

    ``again``: of a layer that is recomputed: BEFORE that begins, WITHIN it, or its LAST module.
    """

    phase: str
    layer: int
    weights: list[int]
    again: str = ""


BEFORE, WITHIN, LAST = "before", "within", "last"  # there it ends, with the module that asked


def gathered_bytes(
    tensors: Sequence[Tensor],
    num_layers: int,
    num_gpus: int,
    *,
    computes_again: bool,
    reenters: bool = False,
    is_quantised: bool = False,
) -> dict[str, dict[int, int]]:
    """The most bytes of gathered weights by phase and layer. ``reenters``: layers are recomputed as a whole, before
    their backward. ``is_quantised``: the base weights are in 4 bits."""
    coordinator = Coordinator(
        tensors, num_layers, num_gpus, computes_again=computes_again, reenters=reenters, is_quantised=is_quantised
    )
    uses = coordinator.uses
    found: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
    for step, use in enumerate(uses):
        coordinator.fetch(step)
        of_phase = found[use.phase]
        # The head's own product, and its loss, are higher than the norm before it.
        earlier = 0 if use.layer == HEAD and use.phase == "forward" else of_phase.get(use.layer, 0)
        of_phase[use.layer] = max(earlier, coordinator.whole_bytes)
        coordinator.release(step)
    return found


class _Module(NamedTuple):
    """A module: the numbers of its own weights, and the modules inside, in the order of forward."""

    weights: list[int]
    inside: list[_Module]

    def forward(self) -> list[list[int]]:
        """The weights of each module in the order of forward: a module's own hook, then those inside."""
        found = [self.weights]
        for one in self.inside:
            found += one.forward()
        return found

    def backward(self) -> list[list[int]]:
        """The same in the order of backward: a module's hook is on its output."""
        found = [self.weights]
        for one in reversed(self.inside):
            found += one.backward()
        return found


class _Weights:
    """Numbers for the weights of every layer, and the modules that use them, in the order of forward. Modules without
    weights have hooks, too, which prefetch."""

    def __init__(self, tensors: Sequence[Tensor], num_layers: int, *, is_quantised: bool) -> None:
        self._is_quantised = is_quantised
        self.sizes: list[int] = []
        self.widths: list[int] = []
        self.is_frozen: list[bool] = []
        self.is_4_bit: list[bool] = []
        outside = [tensor for tensor in tensors if not tensor.per_layer]
        has_adapters = any(".lora_" in tensor.name for tensor in tensors)
        self._num_roots = 3 if has_adapters else 1  # the model with a head, within peft's two
        self._front = self._modules([tensor for tensor in outside if tensor.role == "embedding"])
        of_layers = [tensor for tensor in tensors if tensor.per_layer]
        self._layers = [_Module([], self._modules(of_layers)) for _ in range(num_layers)]
        self._behind = self._modules([tensor for tensor in outside if tensor.role != "embedding"])
        if not any(tensor.name.startswith("lm_head.") for tensor in outside):  # the embedding again
            self._behind.append(self._front[0])

    def _modules(self, tensors: Sequence[Tensor]) -> list[_Module]:
        """The modules of these tensors, in order, nested as in the model; an adapter's two follow the base."""
        by_module: dict[str, list[int]] = {}
        names = [tensor.name.removesuffix(".weight").removesuffix(".bias") for tensor in tensors]
        bases = dict.fromkeys(name for name in names if ".lora_" not in name)
        found: list[_Module] = []
        parts: dict[str, _Module] = {}
        for base in bases:
            by_module = {}
            for name, tensor in zip(names, tensors, strict=True):
                if name == base or name.startswith(f"{base}.lora_"):
                    by_module.setdefault(name, []).append(len(self.sizes))
                    self.sizes.append(tensor.numel)
                    self.widths.append(ITEMSIZE_BYTES[tensor.dtype])
                    self.is_frozen.append(not tensor.trained)
                    self.is_4_bit.append(self._is_quantised and tensor.per_layer and tensor.role == "linear")
            own, *adapters = [_Module(weights, []) for weights in by_module.values()]
            # An adapted module reads its first adapter's dtype, which makes that a weight of its own
            # (zero/parameter_offload.py, ``ZeROOrderedDict``).
            read = adapters[0].weights if adapters else []
            made = [_Module(read, [own, _Module([], []), *adapters])] if adapters else [own]
            if base.endswith(".gate_proj"):  # the activation is a module
                made.append(_Module([], []))
            within = base.split("{layer}.")[-1].split(".")[:-1] if "{layer}" in base else []
            if not within:
                found += made
                continue
            part = ".".join(within)
            if part not in parts:
                parts[part] = _Module([], [])
                found.append(parts[part])
            for one in made:
                parts[part].inside.append(one)
        return found

    def uses(self, *, computes_again: bool, reenters: bool) -> list[Use]:
        """The modules of a step as they run."""
        root, nothing = [_Module([], [])] * self._num_roots, _Module([], [])
        *norms, head = self._behind
        found = _uses("forward", EMBEDDING, [*root, nothing, *self._front, nothing])  # the model, rotary embeddings
        for layer, module in enumerate(self._layers):
            found += _uses("forward", layer, [module])
        found += _uses("forward", HEAD, self._behind)
        found += [
            Use("backward", HEAD, weights)
            for one in [*root, head, nothing, *reversed(norms)]
            for weights in one.backward()
        ]
        for layer in range(len(self._layers) - 1, -1, -1):
            found += self._backward(layer, computes_again=computes_again, reenters=reenters)
        return [*found, *_uses("backward", EMBEDDING, self._front)]

    def _backward(self, layer: int, *, computes_again: bool, reenters: bool) -> list[Use]:
        module = self._layers[layer]
        coming = [Use("backward", layer, weights) for weights in module.backward()]
        if not computes_again:
            return coming
        again = _uses("backward", layer, [module])
        if reenters:  # as a whole, before anything else
            return [*again, *coming]
        del again[0]  # the layer's own hook is outside
        while not again[-1].weights:
            again.pop()
        last = again.pop()
        begins = 1
        while last.weights[0] not in coming[begins - 1].weights:
            begins += 1
        return [
            *[use._replace(again=BEFORE) for use in coming[:begins]],
            *[use._replace(again=WITHIN) for use in again],
            last._replace(again=LAST),
            *coming[begins:],
        ]


def _uses(phase: str, layer: int, modules: Sequence[_Module]) -> list[Use]:
    return [Use(phase, layer, weights) for one in modules for weights in one.forward()]


class Piece:
    """What one all-gather brings; ``num_awaited`` of its weights have not been used."""

    def __init__(self, weights: list[int], parts_bytes: list[int]) -> None:
        self.weights, self.parts_bytes, self.num_awaited = weights, parts_bytes, len(weights)
        self.flat_bytes = sum(parts_bytes)
        self.is_there = False


class Coordinator:
    """DeepSpeed's PartitionedParameterCoordinator, sizes only."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        num_layers: int,
        num_gpus: int,
        *,
        computes_again: bool,
        reenters: bool = False,
        is_quantised: bool = False,
        is_first: bool = False,
    ) -> None:
        """``is_first``: the first step, which is recorded, prefetches nothing."""
        weights = _Weights(tensors, num_layers, is_quantised=is_quantised)
        sizes, uses = weights.sizes, weights.uses(computes_again=computes_again, reenters=reenters)
        self.whole_bytes = 0
        self.uses = uses
        self._sizes, self._widths, self._num_gpus, self._is_first = sizes, weights.widths, num_gpus, is_first
        self._is_frozen, self._is_4_bit = weights.is_frozen, weights.is_4_bit
        self._is_held = [False] * len(sizes)  # by its node, as it is since forward
        self._frozen: list[int] = []  # came as a layer was computed again
        self._saved_bytes = [0] * len(sizes)  # released, and a node of backward still has them
        self._live_elements = 0
        self._taken_bytes = [0] * len(sizes)  # by each weight that is whole
        self._is_whole = [size < PERSISTENT_ELEMENTS for size in sizes]
        self._coming: dict[int, Piece] = {}
        self._asked_for = [_NEVER] * len(sizes)  # at which use, by the prefetch
        self._order = [(weight, step) for step, use in enumerate(uses) for weight in use.weights]
        self._next = 0
        self._elements = [0]  # that are used before each use
        for use in uses:
            self._elements.append(self._elements[-1] + sum([sizes[one] for one in use.weights]))
        self._used_next: list[dict[int, int]] = [{} for _ in uses]  # of each use's weights, at which use after it
        comes = [_NEVER] * len(sizes)
        for step in range(len(uses) - 1, -1, -1):
            for one in uses[step].weights:
                self._used_next[step][one] = comes[one]
                comes[one] = step

    def piece_came(self, piece: Piece) -> None:
        """A piece is allocated. These events are for a log of requests."""

    def piece_went(self, piece: Piece) -> None:
        """A piece is freed."""

    def weight_came(self, weight: int, size_bytes: int) -> None:
        """A weight is copied out of its piece."""

    def weight_went(self, weight: int) -> None:
        """A weight is freed, with its piece if it was all of it."""

    def weight_saved(self, weight: int) -> None:
        """A weight is released, but its node still has it."""

    def saved_went(self, weight: int) -> None:
        """The node frees it."""

    def fetch(self, step: int) -> None:
        """Gather what the module of this step needs, and prefetch."""
        weights = self.uses[step].weights
        self._gather([one for one in weights if self._is_missing(one)])
        for one in weights:
            if one in self._coming:
                self._take(one)
        if self._is_first:
            return
        num_new = len([one for one in weights if self._asked_for[one] < step])
        for _ in range(num_new):
            if self._next < len(self._order):
                weight, used = self._order[self._next]
                self._next += 1
                self._asked_for[weight] = used
        self._prefetch()

    def _prefetch(self) -> None:
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
        flat: dict[int, int] = {}  # by the width of an element: what has one dtype comes together
        for one in weights:
            width = self._widths[one]
            flat[width] = flat.get(width, 0) + -(-self._sizes[one] // self._num_gpus) * self._num_gpus * width
            self._live_elements += self._sizes[one]
        piece = Piece(weights, list(flat.values()))
        self.whole_bytes += piece.flat_bytes
        self.piece_came(piece)
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
                if not is_one:
                    self.weight_came(one, self._taken_bytes[one])
        piece.num_awaited -= 1
        if piece.num_awaited == 0 and not is_one:
            self.whole_bytes -= piece.flat_bytes
            self.piece_went(piece)

    def release(self, step: int) -> None:
        """Free the weights of this step's module that are not used again soon."""
        use = self.uses[step]
        if use.again == BEFORE:
            return
        if use.phase == "forward":
            for one in use.weights:
                self._is_held[one] = self._is_4_bit[one]
        free = [one for one in use.weights if self._taken_bytes[one] and self._asked_for[one] <= step + 1]
        if use.again:
            self._frozen += [one for one in use.weights if self._is_frozen[one]]
            free = [one for one in free if not self._is_frozen[one]]
        if not self._is_first:
            free = [one for one in free if not self._comes_soon(one, step)]
        if use.again == LAST:
            free += [one for one in self._frozen if self._taken_bytes[one]]
            self._frozen = []
        for one in free:
            self._let_go(one, is_saved=use.again == WITHIN or self._is_held[one])
            self._is_held[one] = False
        if step + 1 == len(self.uses):  # the graph goes
            for one in range(len(self._sizes)):
                self._let_go_of_saved(one)
        elif use.phase == "backward" and not use.again:
            for one in use.weights:
                if not self._is_4_bit[one]:
                    self._let_go_of_saved(one)

    def _comes_soon(self, weight: int, step: int) -> bool:
        """Whether it is used again before as much has been (``__params_to_release``)."""
        later = self._used_next[step][weight]
        return later != _NEVER and self._elements[later] - self._elements[step + 1] < REUSED_ELEMENTS

    def _let_go(self, one: int, *, is_saved: bool) -> None:
        if is_saved:
            self._saved_bytes[one] = self._taken_bytes[one]
            self.weight_saved(one)
        else:
            self.whole_bytes -= self._taken_bytes[one]
            self.weight_went(one)
        self._live_elements -= self._sizes[one]
        self._taken_bytes[one] = 0
        self._is_whole[one] = False

    def _let_go_of_saved(self, one: int) -> None:
        if self._saved_bytes[one]:
            self.whole_bytes -= self._saved_bytes[one]
            self._saved_bytes[one] = 0
            self.saved_went(one)
