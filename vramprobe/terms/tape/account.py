"""Account: live bytes by cause over a step, and the highest moments of each place, read from a tape's log.

In: a tape, again and again. Out: for each place that the step came to since, the moments that may be its highest: one
where all sizes are known, several where some are left open (sizes.py); what the middle layers held as it came there;
what was alive where the tape put a mark. Changes nothing on the tape.
"""

from __future__ import annotations

from vramprobe.terms.tape.graph import Place
from vramprobe.terms.tape.lifetimes import OutlivedStep
from vramprobe.terms.tape.tape import MARK, MIDDLE_LAYER, Peak, PlaceLog, Tape, highest

#: What is alive when a step has ended, of the causes that a tape has; weights and state are not on it.
_OUTLIVE_A_STEP = ("gradients", "gathered_weights", "gradient_buckets")


class Account:
    """Live bytes by cause as far as the log was read, and what was seen on the way."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._covers = tape, tape.covers
        self.live_bytes = dict.fromkeys(tape.causes, 0)
        self.total_bytes = 0
        #: By place: what of each middle layer's was alive when the step last came there, by its own place's name and by
        #: cause.
        self.middle_layer_held: dict[Place, dict[str, dict[str, int]]] = {}
        self.marks: list[Peak] = []  # what was alive at each mark
        self._middle_layers: dict[str, dict[str, int]] = {}
        self._peaks: dict[Place, list[Peak]] = {}

    def read(self) -> dict[Place, list[Peak]]:
        """What may be the highest moment of each place since the last call, in the order in which the places came."""
        log = self._tape.take_log()
        for number, one in enumerate(log):
            middle_layer = None
            if one.place[1].startswith(MIDDLE_LAYER):
                middle_layer = self._middle_layers.setdefault(one.place[1], dict.fromkeys(self.live_bytes, 0))
            if number:  # the first goes on where the last call ended
                self.middle_layer_held[one.place] = {name: held.copy() for name, held in self._middle_layers.items()}
            self._read_place(one, middle_layer)
        peaks, self._peaks = self._peaks, {}
        return {place: highest(found, self._covers) for place, found in peaks.items()}

    def _read_place(self, log: PlaceLog, middle_layer: dict[str, int] | None) -> None:
        """Look how high it is, where it rose, before anything is freed or renamed, and before another place begins."""
        live, total, rising = self.live_bytes, self.total_bytes, False
        for storage, before, after in log.entries:
            if storage is None:
                if after == MARK:
                    self.marks.append((total, live.copy()))
                continue
            num_bytes = storage.num_bytes
            if before is None:
                storage.middle_layer_bytes = middle_layer
                total += num_bytes
                rising = True
            else:
                if rising:
                    self._look(log.place, total)
                    rising = False
                live[before] -= num_bytes
                if storage.middle_layer_bytes is not None:
                    storage.middle_layer_bytes[before] -= num_bytes
            if after is None:
                total -= num_bytes
            else:
                live[after] += num_bytes
                if storage.middle_layer_bytes is not None:
                    storage.middle_layer_bytes[after] += num_bytes
                rising = True
        if rising:
            self._look(log.place, total)
        self.total_bytes = total

    def _look(self, place: Place, total: int) -> None:
        peaks = self._peaks.setdefault(place, [])
        if peaks:
            if total <= peaks[-1][0]:
                if self._covers(peaks[-1][0], total):
                    return
            elif self._covers(total, peaks[-1][0]):
                peaks.pop()
        peaks.append((total, self.live_bytes.copy()))

    def require_ended(self) -> None:
        """Check that a step's values ended with it, but for gradients and what ranks keep. Raises OutlivedStep."""
        alive = [cause for cause, size in self.live_bytes.items() if size and cause not in _OUTLIVE_A_STEP]
        if alive:
            raise OutlivedStep(f"{', '.join(alive)} outlived the step")
        self._tape.require_own_thread()
