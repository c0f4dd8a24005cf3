"""The log of a step under DeepSpeed's ZeRO: the gradients come to a bucket, which is reduced as it is full.

In: the bucket, the trained weights as they are placed in the flat parameters, N. Out: the chunks of request_log.py of
the first rank. What zero_buckets.py adds to the moments of a walk is asked for here in its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from vramprobe.terms.graph import Leaf, Place, Value
from vramprobe.terms.rank_tape import COMPUTING, GATHERING, REDUCING
from vramprobe.terms.request_log import RecordingTape
from vramprobe.terms.tape import Covers
from vramprobe.terms.zero_buckets import Placed, Rules, reduced
from vramprobe.terms.zero_gather import EMBEDDING, HEAD, Coordinator, Piece
from vramprobe.terms.zero_tape import Bucket, BucketTape

_END = ("backward", "end")
_OUTSIDE = {"embedding": EMBEDDING, "loss": HEAD}


class BucketLog(BucketTape, RecordingTape):
    """ZeRO-1's and ZeRO-2's."""

    def __init__(
        self, covers: Covers, bucket: Bucket, rules: Rules, weights: Sequence[Placed], num_gpus: int, micro_steps: int
    ) -> None:
        super().__init__(covers, bucket)
        self.holds_whole_gradients = False
        self._rules, self._weights, self._num_gpus = rules, weights, num_gpus
        self._part = -(-weights[-1].past // num_gpus)
        self._by_name = {(one.name, one.layer): one for one in weights}
        self._micro_steps_left = micro_steps
        self._leaf_of: dict[Placed, Leaf] = {}
        self._inside: list[Placed] = []
        self._elements = 0  # of those
        self._kept: Value | None = None  # of this micro-step
        self._averaged: Value | None = None  # of those before

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """The gradients go."""
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
        """What this rank steps with: whole gradients of which it has a part, or that part in fp32."""
        if self._kept is not None or (self._rules.is_compact and self._averaged is not None):
            return
        own = sum(one.numel for one in self._weights if one.first < self._part)
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


class GatheringLog(BucketLog):
    """ZeRO-3's: what a coordinator gathers is asked for as the step comes to a place, on a stream of its own."""

    def gather_with(self, coordinator: Coordinator) -> None:
        """Begin a step in which ``coordinator`` knows what comes."""
        self._coordinator = coordinator
        self._groups = [(key, list(group)) for key, group in groupby(
            enumerate(coordinator.uses), lambda one: (one[1].phase, one[1].layer))]  # fmt: skip
        self._asked_for: dict[object, list[Value]] = {}

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
        """The gradients go, and what is still whole (``reset_step``)."""
        self._asked_for.clear()
        super().zero_grad(leaves)

    def hold(self, key: object, sizes_bytes: Sequence[int]) -> None:
        """Ask for these, under a name."""
        self._asked_for[key] = [self.new(size_bytes, "int8", "gathered_weights") for size_bytes in sizes_bytes]

    def let_go(self, key: object) -> None:
        """Give it back."""
        self._asked_for.pop(key, None)

    def rename(self, key: object, new_key: object) -> None:
        """It stays, under another name."""
        self._asked_for[new_key] = self._asked_for.pop(key)


class LoggedCoordinator(Coordinator):
    """A Coordinator that asks a tape."""

    tape: GatheringLog

    def piece_came(self, piece: Piece) -> None:
        """Under the number of its weight where that is all of it."""
        self.tape.hold(piece.weights[0] if len(piece.weights) == 1 else piece, piece.parts_bytes)

    def piece_went(self, piece: Piece) -> None:
        """All of its weights are copied out."""
        self.tape.let_go(piece)

    def weight_came(self, weight: int, size_bytes: int) -> None:
        """Copied out."""
        self.tape.hold(weight, [size_bytes])

    def weight_went(self, weight: int) -> None:
        """Not used again soon."""
        self.tape.let_go(weight)

    def weight_saved(self, weight: int) -> None:
        """It may be asked for once more before its node is done."""
        self.tape.rename(weight, ("saved", weight))

    def saved_went(self, weight: int) -> None:
        """Its node is done."""
        self.tape.let_go(("saved", weight))
