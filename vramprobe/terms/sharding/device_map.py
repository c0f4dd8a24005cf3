"""device_map="auto": one process whose layers lie on several GPUs.

In: a spec of one GPU's, the number of GPUs, each with enough free memory. Out: Moments by GPU, as ``terms`` has them.
The walk is a single GPU's, with each part's work on the part's GPU (placement.py). accelerate's hooks copy between
GPUs (hooks.py, ``AlignDevicesHook``) a layer's input, rotary tables, mask and positions, in every layer that is on
another GPU than they are; and the logits, which go to the batch's GPU with the output, where autocast's wrapper then
makes fp32 ones of them. The step is walked once per GPU with a few of its layers, as memory is linear in those in
between. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture
from vramprobe.choices import DEVICE_MAP
from vramprobe.kernels.chip import A100, Chip
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, batch_bytes, course_of
from vramprobe.terms.cell import optimizer, parameters, remainders
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.sharding.placement import CardMap, card_map
from vramprobe.terms.step.walk import _END, _START, Walk, plus, walk_layers
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import CAUSES, ITEMSIZE_BYTES, Edge, Place, Storage, Value
from vramprobe.terms.tape.tape import MIDDLE_LAYER, Covers, Peak, Tape, highest

#: Places outside the layers; ``output`` is the loss's, once autocast has freed its copies.
_OUTSIDE_LAYERS = ("embedding", "loss", "output", "end")


class Card(NamedTuple):
    """A step on one GPU, for any batch size and length; bytes by cause."""

    walk: Walk
    idle: dict[str, int]  # alive between two steps, without the batch
    at_step: dict[str, int]
    gradient_remainders: int
    has_batch: bool

    def moments(self, spec: CellSpec) -> list[Moment]:
        """The moments at the cell's batch size and length, in the order of the step."""
        idle = self.idle | {"batch": batch_bytes(spec) if self.has_batch else 0}
        places = self.walk.highest(spec.batch_size, spec.seq_len)
        made = []
        for (phase, label), terms in [*places.items(), (("optimizer_step", "optimizer"), self.at_step)]:
            gradients = terms.get("gradients", 0)
            share = remainders.share_of(self.gradient_remainders, gradients, self.at_step["gradients"])
            counted = idle | terms | {"block_remainders": idle["block_remainders"] + share}
            made.append(Moment(phase, label, {cause: counted[cause] for cause in CAUSES if counted.get(cause)}))
        return made


class Cards(NamedTuple):
    """The steps on all GPUs, and what lies on which."""

    map: CardMap
    cards: tuple[Card, ...]


def cards_of(spec: CellSpec, num_cards: int, chip: Chip = A100) -> Cards:
    """The Cards of a cell, kept for the next one that differs only in batch size and length.

    Raises UnsupportedArchitecture for what there is no arithmetic for, SpecError for what placement.card_map refuses.
    """
    arch = architecture(spec.architecture)
    _require_known(spec, arch)
    kept = course_of(spec, chip).ranks
    if ("device-map", num_cards) not in kept:
        kept["device-map", num_cards] = card_map(spec, arch, num_cards)
    placed: CardMap = kept["device-map", num_cards]
    cards = []
    for card in range(num_cards):
        seen, own = _seen_from(placed, card), min(card, 1)
        alike = (own, seen.layers, seen.embedding, seen.norm, seen.rotary, seen.head)
        if ("device-map", alike) not in kept:
            kept["device-map", alike] = _few_layers(spec, arch, seen, own, chip)
        few, num_layers = kept["device-map", alike], placed.layers.count(card)
        if ("device-map", alike, num_layers) not in kept:
            walk = few.stretched(num_layers - seen.layers.count(own))
            kept["device-map", alike, num_layers] = _card(spec, arch, seen, own, num_layers, walk)
        cards.append(kept["device-map", alike, num_layers])
    return Cards(placed, tuple(cards))


def _require_known(spec: CellSpec, arch: Architecture) -> None:
    unknown = [
        (arch.habits.rotary_positions > 0 or arch.habits.reenters, "with a release of transformers before 5"),
        (spec.fused_linear_cross_entropy, "with a fused loss"),
        (spec.attn != "sdpa", f"with attn {spec.attn}"),
        (
            arch.sliding_window is not None and spec.seq_len >= arch.sliding_window,
            f"with seq_len {spec.seq_len}, beyond the sliding window of {arch.sliding_window}",
        ),
    ]
    require_none_of(unknown, DEVICE_MAP)


def require_none_of(unknown: Sequence[tuple[bool, str]], sharding: str) -> None:
    """Raises UnsupportedArchitecture, in its words, for the first condition that holds."""
    for is_so, named in unknown:
        if is_so:
            raise UnsupportedArchitecture(
                f"there is no arithmetic for sharding {sharding} {named}; run it, on emulated GPUs say: vramprobe "
                "measure --emulate"
            )


def _seen_from(placed: CardMap, card: int) -> CardMap:
    """The map as one GPU sees it: all GPUs before it are one, number 0, and all after it are one. Of their layers it
    has the first and the last, as those in between leave nothing here; of its own layers these and one in between,
    which represents all of them."""
    own = min(card, 1)

    def side(other: int) -> int:
        return own if other == card else own + 1 if other > card else 0

    sides = [side(other) for other in placed.layers]
    layers: list[int] = []
    for there in (0, 1, 2):
        layers += [there] * min(sides.count(there), 3 if there == own else 2)
    return CardMap(
        tuple(layers),
        embedding=side(placed.embedding),
        norm=side(placed.norm),
        rotary=side(placed.rotary),
        head=side(placed.head),
    )


class _Few(NamedTuple):
    """A step that is walked with few of a GPU's layers."""

    walk: Walk  # in which each layer is a place of its own
    labels: dict[str, str]  # of these
    between: int  # the layer that represents all between the first and the last
    held: dict[Place, dict[str, int]]  # by that one, on coming to a place

    def stretched(self, more: int) -> Walk:
        """The Walk with so many more layers, each of which holds before and after its own turn what that one does."""
        places: dict[Place, list[Peak]] = {}
        for place, peaks in self.walk.peaks.items():
            name = (place[0], self.labels.get(place[1], place[1]))
            beside = [self._times(more, other) for other in self._elsewhere(place)]
            places[name] = [*places.get(name, []), *[plus(peak, held) for held in beside for peak in peaks]]
        covers = self.walk.sizes.covers
        return replace(self.walk, peaks={place: highest(peaks, covers) for place, peaks in places.items()})

    def _elsewhere(self, place: Place) -> list[Place]:
        """The places on coming to which the other layers hold what they hold here. In the layers' own turn the highest
        may be the last in forward, or the last or the first in backward, as memory is linear in between."""
        phase, name = place
        later, earlier = (phase, "loss"), _START if phase == "forward" else _END
        if name in _OUTSIDE_LAYERS:
            return [place if name in ("loss", "output") else earlier]
        number = int(name.removeprefix(MIDDLE_LAYER))
        if number == self.between:
            return [later] if phase == "forward" else [later, earlier]
        return [later] if number > self.between else [earlier]

    def _times(self, more: int, place: Place) -> list[Peak]:
        held = {cause: more * size for cause, size in self.held.get(place, {}).items() if size}
        return [(sum(held.values()), held)]


def _few_layers(spec: CellSpec, arch: Architecture, placed: CardMap, card: int, chip: Chip) -> _Few:
    num_layers = len(placed.layers)
    setup = setup_of(spec, replace(arch, num_layers=num_layers), parameters.tensors(spec, arch), chip)
    tape = CardTape(setup.sizes.covers, placed, card)
    account = Account(tape)
    walk = walk_layers(setup, range(num_layers), tape, account=account)
    own = [layer for layer, its_card in enumerate(placed.layers) if its_card == card]
    between = own[1] if len(own) > 2 else -1
    name = f"{MIDDLE_LAYER}{between}"
    held = {place: layers[name] for place, layers in account.middle_layer_held.items() if name in layers}
    return _Few(walk, tape.labels, between, held)


def _card(spec: CellSpec, arch: Architecture, placed: CardMap, card: int, num_layers: int, walk: Walk) -> Card:
    own = list(_on_card(parameters.tensors(spec, arch), placed, card, num_layers))
    trained = [tensor for tensor in own if tensor.trained]
    buffers = parameters.buffers_bytes(arch, spec.dtype) if placed.rotary == card else 0
    idle = {
        "weights": parameters.weights_bytes(own, spec.quant) + buffers,
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "block_remainders": remainders.of_what_stands(spec, own),
    }
    at_step = {
        "gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
        "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained),
    }
    return Card(walk, idle, at_step, remainders.of_gradients(trained), placed.of("batch") == card)


def _on_card(tensors: Sequence[Tensor], placed: CardMap, card: int, num_layers: int) -> Sequence[Tensor]:
    """The tensors on a GPU, with as many copies of each as lie there."""
    counts = [num_layers if one.per_layer else int(placed.of_tensor(one) == card) for one in tensors]
    return [one._replace(num_copies=count) for one, count in zip(tensors, counts, strict=True) if count]


class _OnCard(Storage):
    __slots__ = ("card",)
    card: int


class CardTape(Tape):
    """A Tape that works on the GPU of each part, and counts one GPU's bytes."""

    raises_outputs = True

    def __init__(self, covers: Covers, placed: CardMap, watched: int) -> None:
        super().__init__(covers)
        self._placed, self._watched, self._card = placed, watched, 0
        self._num_entered = 0
        self.labels = {"output": "loss"}  # of its own places

    def at(self, phase: str, place: str) -> None:
        """As a Tape has it; each layer is its own place, with an account of what it holds."""
        if place not in _OUTSIDE_LAYERS:
            own = f"{MIDDLE_LAYER}{self._num_entered % len(self._placed.layers)}"
            self._num_entered += 1
            self.labels[own] = place
            place = own
        super().at(phase, place)

    def come_to_part(self, part: int | str) -> None:
        self._card = self._placed.of(part)

    def come_to_output(self) -> None:
        self.at("forward", "output")

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        """Allocate ``numel`` elements, which are counted on the GPU that is watched."""
        num_bytes = numel * ITEMSIZE_BYTES[dtype] if self._card == self._watched else 0
        storage = _OnCard(num_bytes, cause or self._cause, self.stream)
        if num_bytes:
            self._entries.append((storage, None, storage.cause))
        storage.card = self._card
        return Value(self, numel, dtype, storage)

    def brought(self, value: Value) -> Value:
        """``value.to(device)``: the value itself if it is there, else a copy; its backward brings the gradient back."""
        there = value.storage.card
        if there == self._card:
            return value
        out = self.new_like(value)

        def backward(grads: list[Value]) -> list[Value | None]:
            self._card = there
            return [self.new_like(grads[0])]

        self.record([value], [out], [], backward)
        return out

    def record(self, *arguments: Any, **options: Any) -> Edge | None:
        """As a Tape does; the node's backward runs on the GPU of its forward."""
        card, backward = self._card, arguments[3]

        def there(grads: list[Value]) -> list[Value | None]:
            self._card = card
            made: list[Value | None] = backward(grads)
            return made

        return super().record(*arguments[:3], there, *arguments[4:], **options)
