"""The log of a rank's step under FSDP: what it asks of its allocator, on which stream, layer by layer.

In: the units; of FSDP2's, the bytes of each weight as it is copied out. Out: the chunks of request_log.py. Where
RankTape has one buffer for all weights of a unit, as only their sum counts in a moment, here each is a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vramprobe.terms.flat_tape import FlatTape
from vramprobe.terms.graph import Leaf, Place, Value
from vramprobe.terms.rank_tape import COMPUTING, GATHERING, RankTape, Unit, Units
from vramprobe.terms.request_log import RecordingTape
from vramprobe.terms.tape import Covers

_LAYER = "layer"


class RankLog(RankTape, RecordingTape):
    """A RankTape that writes down what is asked for; each layer is a unit of its own."""

    def __init__(self, covers: Covers, units: Units, kinds: Sequence[str]) -> None:
        """``kinds``: of each layer, by which name its place goes."""
        super().__init__(covers, units, [f"{_LAYER} {number}" for number in range(len(kinds))])
        self._kinds = kinds
        self._num_come = 0

    def at(self, phase: str, place: str) -> None:
        """From here on, moments belong to this place of this phase, a layer's by its number."""
        if place == "embedding":
            self._num_come = 0
        elif place in self._kinds:
            place = f"{_LAYER} {self._num_come}"
            self._num_come += 1
        super().at(phase, place)

    def end_backward(self) -> None:
        """The root's hook runs before autograd returns."""
        self.at("backward", "end")

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """The shards of all gradients go."""
        for name in self._in_order():
            self._shards.pop(name, None)

    def _in_order(self) -> list[str]:
        """The units, as the optimizer has their weights."""
        return ["embedding", *self._names[1:], "root"]

    def _kind_of(self, place: Place) -> Place:
        phase, name = place
        if name.startswith(_LAYER):
            return phase, self._kinds[int(name.removeprefix(_LAYER))]
        return place

    def _bytes(self, num_bytes: int, cause: str, stream: int = COMPUTING) -> Value:
        self.stream = stream
        made = super()._bytes(num_bytes, cause)
        self.stream = COMPUTING
        return made


class DividedLog(RankLog):
    """FSDP2's: weights are copied out one by one."""

    def __init__(self, covers: Covers, units: Units, kinds: Sequence[str], parts: Mapping[str, Sequence[int]]) -> None:
        """``parts``: bytes of each weight of a unit, by the unit's name; of all layers under "layer"."""
        super().__init__(covers, units, kinds)
        self._parts = parts
        self._whole: dict[str, list[Value]] = {}

    def _copy_out(self, name: str) -> None:
        parts = self._parts.get(name, self._parts[_LAYER])
        self._gathered[name] = self.new(0, "int8")
        self._whole[name] = [self._bytes(size_bytes, "gathered_weights") for size_bytes in parts]

    def _free_whole(self, name: str) -> None:
        super()._free_whole(name)
        whole = self._whole.pop(name, [])
        while whole:
            whole.pop(0)


class FlatLog(FlatTape, RankLog):
    """FSDP1's: a unit in one piece, an adapter a unit of its own that is reduced as its gradient comes."""

    def __init__(self, covers: Covers, units: Units, kinds: Sequence[str], adapters: Sequence[Unit]) -> None:
        """``adapters``: of a layer, those in the order in which it uses them; ``units`` are without them."""
        super().__init__(covers, units, kinds)
        self._adapters = adapters
        self._adapter_of: dict[Leaf, str] = {}
        for layer in self._names[1:-1] if adapters else []:
            for number, unit in enumerate(adapters):
                self._by_name[_adapter(layer, number)] = unit

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight: an adapter's, or of the unit that is gathered here."""
        value = super().constant(numel, dtype, trained=trained)
        if trained and self._adapters:
            name = self.place[1]
            adapter = _adapter(name, len(self._leaves[name]) - 1)
            self._leaves[adapter] = [value.node]
            self._adapter_of[value.node] = adapter
        return value

    def _gather(self, name: str) -> None:
        super()._gather(name)
        for number in range(len(self._adapters) if name.startswith(_LAYER) else 0):
            super()._gather(_adapter(name, number))

    def _free_whole(self, name: str) -> None:
        super()._free_whole(name)
        for number in range(len(self._adapters) if name.startswith(_LAYER) else 0):
            super()._free_whole(_adapter(name, number))

    def _accumulate(self, leaf: Leaf) -> None:
        super()._accumulate(leaf)
        if leaf in self._adapter_of:
            self._reduce(self._adapter_of[leaf])

    def _in_order(self) -> list[str]:
        return ["root", *[name for name in self._by_name if name != "root"]]

    def _sum(self, old: Value | None, new: Value, to_leaf: bool) -> Value:
        """Of weights, where they are views of the flat parameter."""
        self.stream = GATHERING if to_leaf else COMPUTING
        made = super()._sum(old, new, to_leaf)
        self.stream = COMPUTING
        return made


class ReplicaLog(RecordingTape):
    """DDP's: the model is whole."""

    raises_outputs = True

    def __init__(self) -> None:
        super().__init__()
        self._weights: set[Leaf] = set()

    def constant(self, numel: int, dtype: str, *, trained: bool = False) -> Value:
        """A weight."""
        value = super().constant(numel, dtype, trained=trained)
        if trained:
            self._weights.add(value.node)
        return value

    def _accumulate(self, leaf: Leaf) -> None:
        super()._accumulate(leaf)
        if leaf in self._weights:
            self.chunks[-1].arrived.append(leaf.gradient.num_bytes)


def _adapter(layer: str, number: int) -> str:
    return f"adapter {number} of {layer}"
