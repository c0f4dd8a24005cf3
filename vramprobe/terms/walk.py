"""Walk: one steady step of a model on the tape, and how high memory is in each place of it.

In: a Setup. Out: a Walk, which answers for every batch and length. Three layers are walked; the middle one stands for
all others of a deeper model, since memory is linear in their number. Never imports torch or the workload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from vramprobe.terms import families
from vramprobe.terms.modules import Model
from vramprobe.terms.setup import Setup
from vramprobe.terms.sizes import Digits, OpenSizes, monomials
from vramprobe.terms.tape import MIDDLE_LAYER, Peak, Place, Tape

_END = ("backward", "end")

#: What each middle layer that is not walked holds, for each place that is: as much as the walked one does on coming to
#: this other place. In backward, a middle layer may be highest as the uppermost of them or as the lowest.
_OTHERS_HOLD: dict[Place, tuple[Place, ...]] = {
    ("forward", "embedding"): (("forward", "embedding"),),
    ("forward", "first layer"): (("forward", "embedding"),),
    ("forward", MIDDLE_LAYER): (("forward", "loss"),),
    ("forward", "last layer"): (("forward", "loss"),),
    ("forward", "loss"): (("forward", "loss"),),
    ("backward", "loss"): (("backward", "loss"),),
    ("backward", "last layer"): (("backward", "loss"),),
    ("backward", MIDDLE_LAYER): (("backward", "loss"), _END),
    ("backward", "first layer"): (_END,),
    ("backward", "embedding"): (_END,),
}


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
            place: [(digits(total), {cause: digits(count) for cause, count in by_cause.items() if count})
                    for total, by_cause in peaks]
            for place, peaks in self.peaks.items()
        }  # fmt: skip


@lru_cache(maxsize=512)
def walk_of(setup: Setup) -> Walk:
    """The Walk of a model as deep as it is."""
    return walk_layers(setup, min(setup.arch.num_layers, 3))


def walk_layers(setup: Setup, num_layers: int, tape: Tape | None = None) -> Walk:
    """The same by walking so many layers: all that there are, or three. ``tape``: another kind than the plain one.

    Of several micro-steps a later one is walked: gradients are alive throughout, so the first is nowhere higher.
    """
    num_others, sizes = setup.arch.num_layers - num_layers, setup.sizes
    assert num_others == 0 or num_layers == 3
    tape = tape or Tape(sizes.covers)
    model = Model(tape, setup, num_layers)
    if setup.accumulates and tape.holds_whole_gradients:
        families.make_gradients(model)
        tape.take_peaks()  # that was no part of the step
    before = tape.total_bytes
    loss = families.forward(model)
    saved = tape.total_bytes - before
    tape.backward(loss.node, tape.new(1, "fp32"))
    tape.at(*_END)
    peaks, held = tape.take_peaks(), tape.middle_layer_held
    if num_others:
        saved += num_others * (_sum(held["backward", "loss"]) - _sum(held["forward", "embedding"]))
        peaks = {
            place: [_with(peak, num_others, held[other]) for other in _OTHERS_HOLD[place] for peak in found]
            for place, found in peaks.items()
        }
    return Walk(sizes, saved, peaks)


def _with(peak: Peak, num_layers: int, held: dict[str, int]) -> Peak:
    """The peak of a model with so many layers more, each of which holds this."""
    total, by_cause = peak
    more = {cause: by_cause[cause] + num_layers * num_bytes for cause, num_bytes in held.items() if num_bytes}
    return total + num_layers * _sum(held), by_cause | more


def _sum(by_cause: dict[str, int]) -> int:
    return sum(by_cause.values())
