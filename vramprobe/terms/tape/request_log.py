"""The log of a step: what it asks of its allocator, in order, with the middle layers' part written out from a few.

In: the log of a step as a tape has it, by place. Out: events for an allocator: a size in
bytes asks for as much under the next number, ``~number`` gives that back, 0 is cuBLAS's workspace. Layers in the middle
of a model ask for the same, one after the other, so that ``unrolled`` repeats what SAMPLED of them asked for; where
those differ from each other, or are named in another way than layer by layer, it says so and all layers have to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from vramprobe.terms.tape.graph import Place
from vramprobe.terms.tape.lifetimes import OutlivedStep
from vramprobe.terms.tape.tape import MIDDLE_LAYER, WORKSPACE, PlaceLog

#: Middle layers that are run. The outer two of each end stay as they are, the second stands for all between.
SAMPLED = 4
_END = SAMPLED // 2
_TEMPLATE = _END - 1

Region = tuple[str, int]  # forward, backward, or what a pass without a graph is called; of which micro-step
Freed = tuple[int, int]  # what is given back: in which chunk it was asked for, as which of its requests
Token = int | str | Freed  # bytes asked for, WORKSPACE, or what is given back


class Chunk:
    """What is asked for at one place."""

    __slots__ = ("arrived", "goes_on", "micro_step", "num_requests", "place", "tokens")

    def __init__(
        self, place: Place, tokens: list[Token] | None = None, num_requests: int = 0, micro_step: int = 0
    ) -> None:
        self.place, self.tokens, self.num_requests, self.micro_step = place, tokens or [], num_requests, micro_step
        self.goes_on = False  # no tokens, but what the two chunks before it ask for, a step of the same width on

    def with_tokens(self, tokens: list[Token] | None) -> Chunk:
        """One like this, in which something else is asked for or given back; null: which goes on."""
        made = Chunk(self.place, tokens, self.num_requests, self.micro_step)
        made.goes_on = tokens is None
        return made


def chunks_of(log: Sequence[PlaceLog]) -> list[Chunk]:
    """The chunks of a whole step's log, in which all that is asked for is given back. Raises OutlivedStep."""
    found: list[Chunk] = []
    num_alive = 0
    for number, one in enumerate(log):
        chunk = Chunk(one.place, micro_step=one.micro_step)
        for storage, before, after in one.entries:
            if storage is None:
                if after == WORKSPACE:
                    chunk.tokens.append(WORKSPACE)
            elif before is None:
                storage.at = (number, chunk.num_requests)
                chunk.num_requests += 1
                chunk.tokens.append(storage.num_bytes)
                num_alive += 1
            elif after is None:
                chunk.tokens.append(storage.at)
                num_alive -= 1
        found.append(chunk)
    if num_alive:
        raise OutlivedStep(f"{num_alive} requests outlived the step")
    return found


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
            token
            if isinstance(token, int | str)
            else (of_layer(token.region, layer + token.offset), token.number)
            if isinstance(token, _Inner)
            else (moved(token[0]), token[1])
            for token in inner[region, source]
        ]
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
    return num_layers - 1 - layer if region[0] == "backward" else layer


def _starts(chunks: Sequence[Chunk]) -> dict[Region, int]:
    """Of each region of middle layers its first chunk; they follow each other."""
    found: dict[Region, list[int]] = {}
    for index, chunk in enumerate(chunks):
        phase, name = chunk.place
        of, _, layer = name.rpartition(": ")
        if layer == MIDDLE_LAYER:
            found.setdefault((of or phase, chunk.micro_step), []).append(index)
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
            found.append(
                [
                    token if isinstance(token, int) else 0 if token == WORKSPACE else ~(firsts[token[0]] + token[1])
                    for token in chunk.tokens
                ]
            )
    return found
