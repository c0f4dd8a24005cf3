"""The log of a step: what it asks of its allocator, in order, with the middle layers' part written out from a few.

In: a tape that writes down each allocation and free in the chunk of its place. Out: events for an allocator: a size in
bytes asks for as much under the next number, ``~number`` gives that back, 0 is cuBLAS's workspace. Layers in the middle
of a model ask for the same, one after the other, so that ``unrolled`` repeats what SAMPLED of them asked for; where
those differ from each other, or are named in another way than layer by layer, it says so and all layers have to be run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from vramprobe.terms.graph import ITEMSIZE_BYTES, Leaf, Place, Storage, Value
from vramprobe.terms.scratch import Asked, AttentionScratch
from vramprobe.terms.tape import MIDDLE_LAYER, Covers, Tape

#: Middle layers that are run. The outer two of each end stay as they are, the second stands for all between.
SAMPLED = 4
_END = SAMPLED // 2
_TEMPLATE = _END - 1
WORKSPACE = "workspace"
#: A request on another stream than the first has that one's number so many bytes up.
STREAM = 1 << 48

if TYPE_CHECKING:
    from vramprobe.terms.modules import Model

Region = tuple[Literal["forward", "backward"], int]  # of which micro-step
Freed = tuple[int, int]  # what is given back: in which chunk it was asked for, as which of its requests
Token = int | str | Freed  # bytes asked for, WORKSPACE, or what is given back


class Chunk:
    """What is asked for at one place."""

    __slots__ = ("arrived", "goes_on", "micro_step", "num_requests", "place", "tokens")

    def __init__(
        self, place: Place, tokens: list[Token] | None = None, num_requests: int = 0, micro_step: int = 0
    ) -> None:
        self.place, self.tokens, self.num_requests, self.micro_step = place, tokens or [], num_requests, micro_step
        self.arrived: list[int] = []  # bytes of the gradients that come here, where somebody asks (rank_log.py)
        self.goes_on = False  # no tokens, but what the two chunks before it ask for, a step of the same width on

    def with_tokens(self, tokens: list[Token] | None) -> Chunk:
        """One like this, in which something else is asked for or given back; null: which goes on."""
        made = Chunk(self.place, tokens, self.num_requests, self.micro_step)
        made.arrived, made.goes_on = self.arrived, tokens is None
        return made


class _Request(Storage):
    __slots__ = ("at",)
    at: Freed


class RecordingTape(Tape):
    """A Tape that writes down what is asked for, and keeps no account of its own."""

    def __init__(self, covers: Covers = operator.ge) -> None:
        super().__init__(covers)
        self.asked: Asked | None = None  # the chip whose kernels take what is taken for a while; null: not known
        self.stream = 0
        self.model: Model | None = None  # on it, while its step is played
        self.micro_step = 0
        self.chunks = [Chunk(self.place)]
        self.thread = "forward"  # autograd's backward runs on one of its own
        self._has_workspace: set[str] = set()

    def ask_for(self, asked: Asked | None) -> None:
        """Ask for what this chip's kernels take for a while, too."""
        self.asked, self.has_scratch = asked, asked is not None

    def new(self, numel: int, dtype: str, cause: str | None = None) -> Value:
        """Allocate ``numel`` elements."""
        storage = _Request(numel * ITEMSIZE_BYTES[dtype], cause or self._cause, None)
        if storage.num_bytes:
            chunk = self.chunks[-1]
            storage.at = (len(self.chunks) - 1, chunk.num_requests)
            chunk.num_requests += 1
            chunk.tokens.append(storage.num_bytes + self.stream * STREAM)
        return Value(self, numel, dtype, storage)

    def scratch(self, sizes_bytes: Iterable[int]) -> None:
        """Asked for, and given back at once."""
        if self.asked is None:
            return
        taken: list[Value] = []
        for size_bytes in sizes_bytes:
            if size_bytes > 0:
                taken.append(self.new(size_bytes, "int8"))
            else:
                del taken[next(at for at, one in enumerate(taken) if one.numel == -size_bytes)]

    def scratch_of_sum(self, num_rows: int, width: int, itemsize_bytes: int) -> None:
        if self.asked is not None:
            self.scratch(self.asked.sum_of_rows(num_rows, width, itemsize_bytes))

    def scratch_of_attention(
        self, sizes: tuple[int, int, int, int, int], dtype: str, has_bias: bool, has_dropout: bool
    ) -> AttentionScratch | None:
        if self.asked is None:
            return None
        return self.asked.attention(sizes, dtype, has_bias, has_dropout)

    def multiplied(self) -> None:
        """cuBLAS's workspace, for a thread that has none."""
        if self.thread not in self._has_workspace:
            self._has_workspace.add(self.thread)
            self.chunks[-1].tokens.append(WORKSPACE)

    def come_to(self, place: Place) -> None:
        """What follows is asked for at another place."""
        self.place = place
        self.chunks.append(Chunk(self._kind_of(place), micro_step=self.micro_step))

    def end_backward(self) -> None:
        """Autograd has returned."""

    def zero_grad(self, leaves: Iterable[Leaf]) -> None:
        """The gradients go."""
        for leaf in leaves:
            leaf.gradient = None

    def _kind_of(self, place: Place) -> Place:
        """Under which name: all middle layers have one."""
        return place

    def _free(self, storage: _Request) -> None:
        if storage.num_bytes:
            self.chunks[-1].tokens.append(storage.at)

    def _recause(self, storage: Storage, cause: str) -> None:
        storage.cause = cause

    def _go_to(self, place: Place) -> None:
        self.come_to(place)


class NotAlike(Exception):
    """The sampled layers do not tell what those between them ask for."""


class _Inner(NamedTuple):
    """What is given back of a middle layer: from which of its regions, how many layers on, as which request."""

    region: Region
    offset: int
    number: int


def unrolled(chunks: Sequence[Chunk], num_middle: int) -> list[Chunk]:
    """The chunks of a step with ``num_middle`` middle layers, at least SAMPLED, from those of one with SAMPLED.

    Raises NotAlike.
    """
    starts = _starts(chunks)
    more = num_middle - SAMPLED
    owners: dict[int, tuple[Region, int]] = {}
    for region, start in starts.items():
        for layer in range(SAMPLED):
            owners[start + _turn(region, layer, SAMPLED)] = (region, layer)

    def moved(index: int) -> int:
        """Where a chunk has come to that is outside the middle layers, or their first."""
        return index + more * sum(start < index for start in starts.values())

    bases = {region: moved(start) for region, start in starts.items()}

    def of_layer(region: Region, layer: int) -> int:
        """Which chunk is a middle layer's."""
        return bases[region] + _turn(region, layer, num_middle)

    def relative(index: int, own: int) -> list[Token | _Inner]:
        found: list[Token | _Inner] = []
        for token in chunks[index].tokens:
            owner = owners.get(token[0]) if isinstance(token, tuple) else None
            found.append(token if owner is None else _Inner(owner[0], owner[1] - own, token[1]))
        return found

    places = {owner: index for index, owner in owners.items()}
    inner = {owner: relative(index, owner[1]) for owner, index in places.items()}
    _require_alike(inner, list(starts))

    def layer_chunk(region: Region, layer: int, num_before: int) -> Chunk:
        """``num_before``: as many like the template came before."""
        source = _source(layer, num_middle)
        old = chunks[places[region, source]]
        if source == _TEMPLATE and num_before > 1:
            return old.with_tokens(None)
        tokens: list[Token] = [
            token if isinstance(token, int | str)
            else (of_layer(token.region, layer + token.offset), token.number) if isinstance(token, _Inner)
            else (moved(token[0]), token[1])
            for token in inner[region, source]
        ]  # fmt: skip
        return old.with_tokens(tokens)

    def outer_chunk(index: int) -> Chunk:
        tokens: list[Token] = []
        for region, group in groupby(relative(index, 0), lambda token: getattr(token, "region", None)):
            if region is None:
                tokens += [(moved(one[0]), one[1]) if isinstance(one, tuple) else one for one in group]
            else:
                tokens += [(of_layer(region, layer), number) for layer, number in _spread(list(group), num_middle)]
        return chunks[index].with_tokens(tokens)

    made: dict[int, Chunk] = {}
    for index in range(len(chunks)):
        if index not in owners:
            made[moved(index)] = outer_chunk(index)
    for region in starts:
        num_alike = 0
        for turn in range(num_middle):
            layer = _turn(region, turn, num_middle)
            made[of_layer(region, layer)] = layer_chunk(region, layer, num_alike)
            num_alike += _source(layer, num_middle) == _TEMPLATE
    return [made[index] for index in range(len(made))]


def _source(layer: int, num_middle: int) -> int:
    """The sampled layer that stands for one of ``num_middle``."""
    if layer < _END:
        return layer
    return layer - (num_middle - SAMPLED) if layer >= num_middle - _END else _TEMPLATE


def _turn(region: Region, layer: int, num_layers: int) -> int:
    """When it is a layer's turn; or, of a turn, which layer's it is."""
    return layer if region[0] == "forward" else num_layers - 1 - layer


def _starts(chunks: Sequence[Chunk]) -> dict[Region, int]:
    """Of each region of middle layers its first chunk; they follow each other."""
    found: dict[Region, list[int]] = {}
    for index, chunk in enumerate(chunks):
        phase, name = chunk.place
        if name == MIDDLE_LAYER:
            found.setdefault((phase, chunk.micro_step), []).append(index)
    if not found or any(one != list(range(one[0], one[0] + SAMPLED)) for one in found.values()):
        raise NotAlike
    return {region: one[0] for region, one in found.items()}


def _require_alike(inner: dict[tuple[Region, int], list[Token | _Inner]], regions: Sequence[Region]) -> None:
    """All but the outermost sampled layers ask for the same, so that they know no layer but the nearest."""
    for region in regions:
        template = inner[region, _TEMPLATE]
        if WORKSPACE in template or any(inner[region, layer] != template for layer in range(1, SAMPLED - 1)):
            raise NotAlike


def _spread(freed: list[_Inner], num_middle: int) -> list[tuple[int, int]]:
    """(layer, number) of what a chunk outside gives back one after the other: of a layer near an end, or of all."""
    runs = [(layer, [one.number for one in group]) for layer, group in groupby(freed, lambda one: one.offset)]
    order, more = [layer for layer, _ in runs], num_middle - SAMPLED
    if order in (list(range(SAMPLED)), list(reversed(range(SAMPLED)))):
        by_layer = dict(runs)
        if any(by_layer[layer] != by_layer[_TEMPLATE] for layer in range(1, SAMPLED - 1)):
            raise NotAlike
        layers = range(num_middle) if order[0] == 0 else reversed(range(num_middle))
        return [(layer, number) for layer in layers for number in by_layer[_source(layer, num_middle)]]
    if any(_TEMPLATE - 1 < layer < SAMPLED - _TEMPLATE for layer in order):
        raise NotAlike
    return [(one.offset if one.offset < _END else one.offset + more, one.number) for one in freed]


def events(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Of each chunk sizes in bytes, ``~number`` of what is given back, 0 for a workspace."""
    firsts, total = [], 0
    for chunk in chunks:
        firsts.append(total)
        total += chunk.num_requests
    found: list[list[int]] = []
    for chunk in chunks:
        if chunk.goes_on:  # numbers of requests grow, or fall, from layer to layer by as many
            found.append([2 * last - former for former, last in zip(found[-2], found[-1], strict=True)])
        else:
            found.append([
                token if isinstance(token, int) else 0 if token == WORKSPACE else ~(firsts[token[0]] + token[1])
                for token in chunk.tokens
            ])  # fmt: skip
    return found
