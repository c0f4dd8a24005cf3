"""Walk: one steady step of a model on the tape, and how high memory is in each place of it.

In: a Setup. Out: a Walk, which answers for every batch and length. The first layer, the last and one of each kind in
between are walked, which stands for all of its kind, since memory is linear in their number. Never imports torch or the
workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from vramprobe.architecture import Architecture
from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models import families
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.account import Account
from vramprobe.terms.tape.graph import Place
from vramprobe.terms.tape.lifetimes import undisturbed
from vramprobe.terms.tape.sizes import Digits, OpenSizes, monomials
from vramprobe.terms.tape.tape import Peak, Tape, highest

_START, _END = ("forward", "embedding"), ("backward", "end")

#: What each middle layer that is not walked holds, for each place that is none of theirs: as much as the walked one of
#: its kind does on coming to this other place.
_OTHERS_HOLD: dict[Place, Place] = {
    ("forward", "embedding"): _START,
    ("forward", "first layer"): _START,
    ("forward", "last layer"): ("forward", "loss"),
    ("forward", "loss"): ("forward", "loss"),
    ("backward", "loss"): ("backward", "loss"),
    ("backward", "last layer"): ("backward", "loss"),
    ("backward", "first layer"): _END,
    ("backward", "embedding"): _END,
    _END: _END,
}
#: For the places of middle layers: on coming where the layers below hold what they hold then, and those above.
_BELOW = {"forward": ("forward", "loss"), "backward": ("backward", "loss")}
_ABOVE = {"forward": _START, "backward": _END}


@dataclass(frozen=True)
class Walk:
    """What was counted, in open sizes: bytes saved for backward, and what may be the highest moment of each place."""

    sizes: OpenSizes
    saved: int
    peaks: dict[Place, list[Peak]]

    def saved_bytes(self, batch_size: int, seq_len: int) -> int:
        """What autograd keeps from forward for backward."""
        return self.sizes.resolved(self.saved, monomials(batch_size, seq_len))

    def highest(self, batch_size: int, seq_len: int) -> dict[Place, dict[str, int]]:
        """The highest moment of each place, in the order of the step: bytes by cause."""
        _, b, s, bs, ss, bss = monomials(batch_size, seq_len)

        def resolved(size: Digits) -> int:  # in full, since this is where predicting and fitting spend their time
            return size[0] + size[1] * b + size[2] * s + size[3] * bs + size[4] * ss + size[5] * bss

        found = {}
        for place, peaks in self.open_peaks.items():
            _, by_cause = max(peaks, key=lambda peak: resolved(peak[0])) if len(peaks) > 1 else peaks[0]
            found[place] = {cause: resolved(size) for cause, size in by_cause.items()}
        return found

    @cached_property
    def open_peaks(self) -> dict[Place, list[tuple[Digits, dict[str, Digits]]]]:
        """What may be the highest moment of each place: bytes in all and by cause, for every batch and length."""
        digits = self.sizes.digits
        return {
            place: [
                (digits(total), {cause: digits(count) for cause, count in by_cause.items() if count})
                for total, by_cause in peaks
            ]
            for place, peaks in self.peaks.items()
        }


@lru_cache(maxsize=512)
def walk_of(setup: Setup) -> Walk:
    """The Walk of a model as deep as it is."""
    return walk_layers(setup, one_of_each_kind(setup.arch))


def one_of_each_kind(arch: Architecture) -> list[int]:
    """The first layer of each place: all of a shallow model."""
    found: dict[str, int] = {}
    for layer in range(arch.num_layers):
        found.setdefault(families.layer_place(arch, layer), layer)
    return sorted(found.values())


def walk_layers(
    setup: Setup,
    layers: Sequence[int],
    tape: Tape | None = None,
    num_micro_steps: int | None = None,
    account: Account | None = None,
) -> Walk:
    """The same by walking these layers: all that there are, or one of each kind. ``tape``: another than the plain one;
    ``account``: its own, where more of it is to be seen.

    Of several micro-steps a later one is walked: gradients stand throughout, so the first is nowhere higher. With
    ``num_micro_steps`` the first so many are walked: each place has what may be highest of any of them.
    """
    tape = tape or Tape(setup.sizes.covers)
    account = account or Account(tape)
    model = Model(tape, setup, layers)
    peaks: dict[Place, list[Peak]] = {}
    saved = 0
    for _ in range(num_micro_steps or 1):
        saved, found = micro_step(model, account, gradients_stand=num_micro_steps is None)
        peaks = {place: highest([*peaks.get(place, []), *more], tape.covers) for place, more in found.items()}
    return Walk(setup.sizes, saved, peaks)


def micro_step(model: Model, account: Account, *, gradients_stand: bool = True) -> tuple[int, dict[Place, list[Peak]]]:
    """Bytes saved for backward, and what may be the highest moment of each place, of as many layers as there are.

    ``gradients_stand``: those of an earlier micro-step, if the cell has several.
    """
    arch, layers, covers = model.arch, model.layers, model.tape.covers
    saved, peaks = play(model, account, gradients_stand=gradients_stand)
    if len(layers) == arch.num_layers:
        return saved, peaks
    others = Others(arch, layers, account.middle_layer_held)
    saved += sum(total for total, _ in others.more(_BELOW["backward"])) - sum(total for total, _ in others.more(_START))
    return saved, {
        place: highest([plus(peak, more) for more in others.around(place) for peak in found], covers)
        for place, found in peaks.items()
    }


@undisturbed
def play(model: Model, account: Account, *, gradients_stand: bool = True) -> tuple[int, dict[Place, list[Peak]]]:
    """Play a step of the model on its tape; returns the same of these layers alone. Raises OutlivedStep."""
    tape = model.tape
    if model.setup.accumulates and gradients_stand:
        families.make_gradients(model)
        account.read()  # that was no part of the step
    before = tape.mark()
    loss = families.forward(model)
    after = tape.mark()
    tape.backward(loss.node, tape.new(1, "fp32"))
    tape.at(*_END)
    del loss
    model.end_of_step()
    peaks = account.read()
    account.require_ended()
    return account.marks[after][0] - account.marks[before][0], peaks


class Others:
    """The middle layers that are not walked, and what they hold while the step is elsewhere."""

    def __init__(self, arch: Architecture, walked: Sequence[int], held: dict[Place, dict[str, dict[str, int]]]) -> None:
        #: The place's name of each middle layer, from the lowest.
        self.names = [families.layer_place(arch, layer) for layer in range(1, arch.num_layers - 1)]
        self.walked = [layer - 1 for layer in walked[1:-1]]
        self.held = {
            place: {name: (_sum(by_cause), by_cause) for name, by_cause in names.items()}
            for place, names in held.items()
        }

    def more(self, place: Place) -> list[Peak]:
        """What those hold that are not walked, on coming to this place."""
        counts = Counter(self.names)
        counts.subtract(self.names[position] for position in self.walked)
        return self._times(counts, place)

    def around(self, place: Place) -> list[list[Peak]]:
        """The same while the step is at this place: where it is a middle layer's, for each that may be highest."""
        phase, name = place
        if name not in self.names:
            return [self.more(_OTHERS_HOLD[place])]
        return [self.around_layer(phase, position) for position in self._candidates(phase, name)]

    def around_layer(self, phase: str, position: int) -> list[Peak]:
        """The same while the step is in the middle layer at this position, from the lowest."""
        walked = self.walked[[self.names[other] for other in self.walked].index(self.names[position])]
        return [
            *self._times(self._counts(position, walked, above=False), _BELOW[phase]),
            *self._times(self._counts(position, walked, above=True), _ABOVE[phase]),
        ]

    def _counts(self, position: int, walked: int, *, above: bool) -> Counter[str]:
        """By name, the layers on this side of a position, less those that are walked on this side of its stand-in."""
        names = self.names
        counts = Counter(names[position + 1 :] if above else names[:position])
        counts.subtract(names[other] for other in self.walked if (other > walked if above else other < walked))
        return counts

    def _candidates(self, phase: str, name: str) -> list[int]:
        """Where a layer of this name may be highest. Going forward that is the last one. In backward memory is linear
        over whole periods of the pattern, so it is one of the first period or of the last.
        """
        positions = [position for position, other in enumerate(self.names) if other == name]
        if phase == "forward":
            return positions[-1:]
        size = len(self.names)
        period = next(shift for shift in range(1, size + 1) if _repeats(self.names, shift))
        return [position for position in positions if min(position - positions[0], size - 1 - position) < period]

    def _times(self, counts: Counter[str], place: Place) -> list[Peak]:
        held = self.held.get(place, {})
        return [
            (number * held[name][0], {cause: number * size for cause, size in held[name][1].items() if size})
            for name, number in counts.items()
            if number and name in held
        ]


def _repeats(names: list[str], shift: int) -> bool:
    """Whether the pattern begins again after so many layers, but for the lowest ones, whose names are their own."""
    start = next((i for i, name in enumerate(names) if not name.endswith("near the first")), 0)
    return names[start : len(names) - shift] == names[start + shift :]


def plus(peak: Peak, more: list[Peak]) -> Peak:
    """The peak with what other layers hold beside it."""
    total, by_cause = peak[0], peak[1].copy()
    for other_total, other in more:
        total += other_total
        for cause, num_bytes in other.items():
            by_cause[cause] += num_bytes
    return total, by_cause


def _sum(by_cause: dict[str, int]) -> int:
    return sum(by_cause.values())
