"""Cards: one process whose layers lie on several, by ``device_map="auto"`` -> the moments of each, by arithmetic.

In: a spec of one GPU's, how many cards, each with room enough. Out: Moments by card, as ``terms`` has them for one.
The walk is that of a single GPU, with each part's work where the part lies (device_map.py), and what accelerate's hooks
copy between cards (hooks.py, ``AlignDevicesHook``): a layer's input, rotary tables, mask and positions, in every layer
that is on another card than they are; the logits, which go to the batch's card with the output; autocast's wrapper then
makes fp32 ones of them. The walk is gone once for each card, with a few of its layers (memory is linear in those
between), and counts what lies there. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture
from vramprobe.choices import DEVICE_MAP
from vramprobe.spec import CellSpec
from vramprobe.terms import BATCH_BYTES_PER_TOKEN, Moment, course_of, optimizer, parameters, remainders
from vramprobe.terms.device_map import CardMap, card_map
from vramprobe.terms.graph import CAUSES, ITEMSIZE_BYTES, Edge, Place, Storage, Value
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.setup import setup_of
from vramprobe.terms.tape import MIDDLE_LAYER, Covers, Peak, Tape, highest
from vramprobe.terms.walk import _END, _START, Walk, plus, walk_layers

#: Places of no layer; ``output`` is the loss's, once autocast has let go of its copies.
_OUTSIDE_LAYERS = ("embedding", "loss", "output", "end")


class Card(NamedTuple):
    """A step on one card, whose batch size and length are left open."""

    walk: Walk
    idle: dict[str, int]  # alive between two steps, but for the batch
    at_step: dict[str, int]
    gradient_remainders: int
    has_batch: bool

    def moments(self, spec: CellSpec) -> list[Moment]:
        """Of the cell's batch size and length, in the order of the step."""
        idle = self.idle | {"batch": BATCH_BYTES_PER_TOKEN * spec.num_tokens if self.has_batch else 0}
        places = self.walk.highest(spec.batch_size, spec.seq_len)
        made = []
        for (phase, label), terms in [*places.items(), (("optimizer_step", "optimizer"), self.at_step)]:
            gradients = terms.get("gradients", 0)
            share = remainders.share_of(self.gradient_remainders, gradients, self.at_step["gradients"])
            counted = idle | terms | {"block_remainders": idle["block_remainders"] + share}
            made.append(Moment(phase, label, {cause: counted[cause] for cause in CAUSES if counted.get(cause)}))
        return made


class Cards(NamedTuple):
    """All of a cell's, and what lies on which."""

    map: CardMap
    cards: tuple[Card, ...]


def cards_of(spec: CellSpec, num_cards: int, has_flash: bool = True) -> Cards:
    """The Cards of a cell, kept for the next one that differs in batch size and length only.

    Raises UnsupportedArchitecture for what there is no arithmetic for, SpecError for what device_map.card_map refuses.
    """
    arch = architecture(spec.architecture)
    _require_known(spec, arch)
    kept = course_of(spec, has_flash).ranks
    if ("device-map", num_cards) not in kept:
        kept["device-map", num_cards] = card_map(spec, arch, num_cards)
    placed: CardMap = kept["device-map", num_cards]
    cards = []
    for card in range(num_cards):
        seen, own = _seen_from(placed, card), min(card, 1)
        alike = (own, seen.layers, seen.embedding, seen.norm, seen.rotary, seen.head)
        if ("device-map", alike) not in kept:
            kept["device-map", alike] = _few_layers(spec, arch, seen, own, has_flash)
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
        (arch.sliding_window is not None and spec.seq_len >= arch.sliding_window,
         f"with seq_len {spec.seq_len}, beyond the sliding window of {arch.sliding_window}"),
    ]  # fmt: skip
    require_none_of(unknown, DEVICE_MAP)


def require_none_of(unknown: Sequence[tuple[bool, str]], sharding: str) -> None:
    """Raises UnsupportedArchitecture for the first that is so, in its words."""
    for is_so, named in unknown:
        if is_so:
            raise UnsupportedArchitecture(
                f"there is no arithmetic for sharding {sharding} {named}; run it, on emulated GPUs say: vramprobe "
                "measure --emulate"
            )


def _seen_from(placed: CardMap, card: int) -> CardMap:
    """What a card knows of the map: the cards before it are one, which is 0, and those after it. Of each that one's
    layers there are the first and the last, since those between leave nothing here; of its own these and one between,
    which stands for all of them."""
    own = min(card, 1)

    def side(other: int) -> int:
        return own if other == card else own + 1 if other > card else 0

    sides = [side(other) for other in placed.layers]
    layers: list[int] = []
    for there in (0, 1, 2):
        layers += [there] * min(sides.count(there), 3 if there == own else 2)
    return CardMap(
        tuple(layers), embedding=side(placed.embedding), norm=side(placed.norm), rotary=side(placed.rotary),
        head=side(placed.head),
    )  # fmt: skip


class _Few(NamedTuple):
    """A step that is walked with few of a card's layers."""

    walk: Walk  # in which each layer is a place of its own
    labels: dict[str, str]  # of these
    between: int  # the layer that stands for all between the first and the last
    held: dict[Place, dict[str, int]]  # by that one, on coming to a place

    def stretched(self, more: int) -> Walk:
        """The Walk of as many layers more, which hold what that one does before and after their own turn."""
        places: dict[Place, list[Peak]] = {}
        for place, peaks in self.walk.peaks.items():
            name = (place[0], self.labels.get(place[1], place[1]))
            beside = [self._times(more, other) for other in self._elsewhere(place)]
            places[name] = [*places.get(name, []), *[plus(peak, held) for held in beside for peak in peaks]]
        covers = self.walk.sizes.covers
        return replace(self.walk, peaks={place: highest(peaks, covers) for place, peaks in places.items()})

    def _elsewhere(self, place: Place) -> list[Place]:
        """The places on coming to which the others hold what they hold here. In its own turn one may be highest that is
        the last in forward, the last or the first in backward, as memory is linear in between."""
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


def _few_layers(spec: CellSpec, arch: Architecture, placed: CardMap, card: int, has_flash: bool) -> _Few:
    num_layers = len(placed.layers)
    setup = setup_of(spec, replace(arch, num_layers=num_layers), parameters.tensors(spec, arch), has_flash)
    tape = CardTape(setup.sizes.covers, placed, card)
    walk = walk_layers(setup, range(num_layers), tape)
    own = [layer for layer, its_card in enumerate(placed.layers) if its_card == card]
    between = own[1] if len(own) > 2 else -1
    account = f"{MIDDLE_LAYER}{between}"
    held = {place: accounts[account] for place, accounts in tape.middle_layer_held.items() if account in accounts}
    return _Few(walk, tape.labels, between, held)


def _card(spec: CellSpec, arch: Architecture, placed: CardMap, card: int, num_layers: int, walk: Walk) -> Card:
    own = list(_on_card(parameters.tensors(spec, arch), placed, card, num_layers))
    trained = [tensor for tensor in own if tensor.trained]
    buffers = parameters.buffers_bytes(arch, spec.dtype) if placed.rotary == card else 0
    idle = {
        "weights": parameters.weights_bytes(own, spec.quant) + buffers,
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "block_remainders": remainders.of_what_stands(spec, own),
    }  # fmt: skip
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    return Card(walk, idle, at_step, remainders.of_gradients(trained), placed.of("batch") == card)


def _on_card(tensors: Sequence[Tensor], placed: CardMap, card: int, num_layers: int) -> Sequence[Tensor]:
    """The same, as many copies of each as lie there."""
    counts = [num_layers if one.per_layer else int(placed.of_tensor(one) == card) for one in tensors]
    return [one._replace(num_copies=count) for one, count in zip(tensors, counts, strict=True) if count]


class _OnCard(Storage):
    __slots__ = ("card",)
    card: int


class CardTape(Tape):
    """A Tape whose work is done on the card of each part, and which counts one card's bytes."""

    is_spread = True
    raises_outputs = True

    def __init__(self, covers: Covers, placed: CardMap, watched: int) -> None:
        super().__init__(covers)
        self._placed, self._watched, self._card = placed, watched, 0
        self._num_entered = 0
        self.labels = {"output": "loss"}  # of its own places

    def at(self, phase: str, place: str) -> None:
        """As a Tape has it; each layer is a place of its own, with an account of what it holds."""
        if place not in _OUTSIDE_LAYERS:
            own = f"{MIDDLE_LAYER}{self._num_entered % len(self._placed.layers)}"
            self._num_entered += 1
            self.labels[own] = place
            place = own
        super().at(phase, place)

    def come_to_part(self, part: int | str) -> None:
        self._card = self._placed.of(part)

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        """Allocate ``numel`` elements, which are counted where this is the card that is watched."""
        cause, num_bytes = cause or self._cause, 0
        if self._card == self._watched:
            num_bytes = numel * ITEMSIZE_BYTES[dtype]
            self.live_bytes[cause] += num_bytes
            self.total_bytes += num_bytes
            if self._middle_layer_bytes is not None:
                self._middle_layer_bytes[cause] += num_bytes
            if num_bytes:
                self._rising = True
        storage = _OnCard(num_bytes, cause, self._middle_layer_bytes)
        storage.card = self._card
        return Value(self, numel, dtype, storage)

    def brought(self, value: Value) -> Value:
        """``value.to(device)``: itself where it is there, else a copy; its backward brings the gradient back."""
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
        """As a Tape does; the node's backward runs on the card of its forward."""
        card, backward = self._card, arguments[3]

        def there(grads: list[Value]) -> list[Value | None]:
            self._card = card
            made: list[Value | None] = backward(grads)
            return made

        return super().record(*arguments[:3], there, *arguments[4:], **options)
