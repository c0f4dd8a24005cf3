"""When DeepSpeed's bucket is full, what reducing it allocates, and what one rank keeps of it.

In: a BucketWalk, the trained tensors, N. Out: the highest moment of each place. Never imports torch. The rules are
DeepSpeed 0.19's, deepspeed/runtime/zero/stage_1_and_2.py and, for ZeRO-3, stage3.py:

* The bucket is reduced as soon as the next gradient does not fit in it, and when backward has ended
  (``reduce_ipg_grads``); ZeRO-1 fills it only then, in the order of the weights (``reduce_gradients``).
* Its content is split where one rank's shard ends and the next one's begins (``average_tensor``). Several pieces are
  joined to a new tensor, one piece is used as it is (``flatten_dense_tensors``), and what is sent in another dtype is
  copied (``allreduce_bucket``).
* ZeRO-3 joins all that is in the bucket, so that each rank's pieces are together, unless it is one gradient that
  divides evenly (runtime/comm/coalesced_collectives.py, ``reduce_scatter_coalesced``).
* The rank keeps whole gradients of every weight of which it has any element: they are copied to a buffer for all of
  them, which the first reduction makes (``copy_grads_in_partition``). Accumulated in fp32 beside 16-bit weights, the
  buffer is the rank's shard alone, made before (``_build_compact_grad_partition_buffer``). ZeRO-3's is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.sharding.zero.tape import BucketWalk, OpenPeak, Visit
from vramprobe.terms.tape.graph import Place
from vramprobe.terms.tape.sizes import monomials

_AT_END = -1
#: The layers of ZeRO-3's modules outside the layers.
EMBEDDING, HEAD = -1, -2


class Placed(NamedTuple):
    """One weight of one layer, elements [first, past) of the flat parameters of all ranks."""

    name: str
    layer: int
    first: int
    past: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.past - self.first


class Reduction(NamedTuple):
    """One reduction of the bucket."""

    before: int  # the gradient before whose arrival it happens; _AT_END: after all of them
    joined_bytes: int  # allocated for it
    gone_bytes: int  # freed since backward ended
    has_own: bool  # whether this rank keeps any of it


class Rules(NamedTuple):
    """Bytes of a gradient's element, and how a stage reduces."""

    in_bucket: int
    sent: int
    kept: int  # as this rank steps with it
    held: int  # as ZeRO-1 holds it until backward ends
    is_compact: bool  # whether only the rank's shard is kept, in fp32, allocated before the first reduction
    stage: int
    bucket_elements: int


def placed(trained: Sequence[Tensor]) -> list[Placed]:
    """The flat parameters: the embedding, each layer, then what follows the layers."""
    outside = [tensor for tensor in trained if not tensor.per_layer]
    front = [tensor for tensor in outside if tensor.role == "embedding"]
    behind = [tensor for tensor in outside if tensor.role != "embedding"]
    layers = [tensor for tensor in trained if tensor.per_layer]
    depth = max([tensor.num_copies for tensor in layers], default=0)
    found: list[Placed] = []
    past = 0
    for layer, group in [(0, front), *[(layer, layers) for layer in range(depth)], (0, behind)]:
        for tensor in group:
            found.append(Placed(tensor.name, layer, past, past + tensor.numel))
            past += tensor.numel
    return found


def reduced(inside: Sequence[Placed], part: int, num_gpus: int, rules: Rules) -> tuple[int, int, bool]:
    """What reducing a bucket allocates: bytes that are joined and bytes that are cast; whether the first rank keeps any
    of it. ``part``: elements of a rank's shard."""
    elements = sum([one.numel for one in inside])
    own = [one for one in inside if one.first < part]
    ranks = {one.first // part for one in inside} | {(one.past - 1) // part for one in inside}
    is_joined = len(ranks) > 1 or (rules.is_compact and len(own) > 1)
    if rules.stage == 3:
        is_joined = len(inside) > 1 or elements % num_gpus > 0
    joined = elements * rules.in_bucket if is_joined else 0
    cast = elements * rules.sent if rules.sent != rules.in_bucket else 0
    return joined, cast, len(own) > 0


@dataclass(frozen=True)
class BucketRank:
    """The first of N ranks, in place of a Walk."""

    walk: BucketWalk
    weights: list[Placed]
    num_gpus: int
    rules: Rules
    earlier_bytes: int = 0  # what an earlier micro-step has left
    gathered: dict[str, dict[int, int]] | None = None  # ZeRO-3's weights, by phase and layer (zero3/gather.py)

    @cached_property
    def part(self) -> int:
        """Elements of one rank's shard."""
        return -(-self.weights[-1].past // self.num_gpus)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the gradients that this rank steps with."""
        if self.rules.is_compact:
            return 0 if self.earlier_bytes else self.part * self.rules.kept
        return self.rules.kept * sum([one.numel for one in self.weights if one.first < self.part])

    @cached_property
    def left_bytes(self) -> int:
        """Other ranks' gradients that are larger than the bucket, which ZeRO-1 frees with no bucket."""
        rules = self.rules
        too_large = [one.numel for one in self.weights if one.numel > rules.bucket_elements and one.first >= self.part]
        return rules.held * sum(too_large)

    @cached_property
    def reductions(self) -> list[Reduction]:
        """Every reduction, in order."""
        if self.rules.stage == 1:
            return self._filled([(_AT_END, one) for one in self.weights])
        by_name = {(one.name, one.layer): one for one in self.weights}
        coming = [(visit.layer if "{layer}" in arrival.name else 0, arrival) for visit, arrival in self.walk.arrived]
        return self._filled([(index, by_name[arrival.name, layer]) for index, (layer, arrival) in enumerate(coming)])

    def _filled(self, coming: Sequence[tuple[int, Placed]]) -> list[Reduction]:
        rules, found = self.rules, []
        inside: list[Placed] = []
        elements = gone = 0
        for index, one in coming:
            if elements + one.numel > rules.bucket_elements and inside:
                found.append(self._reduction(index, inside, gone))
                gone += self._released(inside)
                inside, elements = [], 0
            inside.append(one)
            elements += one.numel
            gone += rules.held * one.numel if rules.stage == 1 and one.numel <= rules.bucket_elements else 0
        return [*found, self._reduction(_AT_END, inside, gone)]

    def _released(self, inside: Sequence[Placed]) -> int:
        """A gradient too large for the bucket is freed once this rank has its copy; ZeRO-1 keeps another rank's."""
        [one, *_] = inside
        is_let_go = self.rules.stage == 1 and one.numel > self.rules.bucket_elements and one.first < self.part
        return self.rules.held * one.numel if is_let_go else 0

    def _reduction(self, index: int, inside: Sequence[Placed], gone: int) -> Reduction:
        joined, cast, has_own = reduced(inside, self.part, self.num_gpus, self.rules)
        return Reduction(index, joined + cast, gone, has_own)

    def highest(self, batch_size: int, seq_len: int) -> dict[Place, dict[str, int]]:
        """The highest moment of each place, in the order of the step: bytes by cause."""
        sizes = monomials(batch_size, seq_len)
        _, b, s, bs, ss, bss = sizes
        best: dict[Place, tuple[int, OpenPeak, dict[str, int]]] = {}
        for place, peak, more in self._candidates:
            size = peak[0]
            total = size[0] + size[1] * b + size[2] * s + size[3] * bs + size[4] * ss + size[5] * bss
            total += sum(more.values())
            if place not in best or total > best[place][0]:
                best[place] = (total, peak, more)
        found = {}
        for place, (_, peak, more) in best.items():
            by_cause = {
                cause: sum([count * one for count, one in zip(size, sizes, strict=True)])
                for cause, size in peak[1].items()
            }
            found[place] = by_cause | {cause: by_cause.get(cause, 0) + size for cause, size in more.items()}
        return found

    @cached_property
    def _candidates(self) -> list[tuple[Place, OpenPeak, dict[str, int]]]:
        """The candidates for the highest moment of each place, and what reducing adds to them."""
        walk, reductions, earlier = self.walk, self.reductions, self.earlier_bytes
        first_own = next((number for number, one in enumerate(reductions) if one.has_own), len(reductions))
        made_at = reductions[first_own].before if first_own < len(reductions) else _AT_END
        found: list[tuple[Place, OpenPeak, dict[str, int]]] = []
        for visit, peak in walk.forward:
            found.append((visit.place, peak, {"gradients": earlier, "gathered_weights": self._gathered_bytes(visit)}))
        for visit, peak in walk.backward:
            is_made = made_at != _AT_END and made_at < visit.first_arrival
            found.append(
                (
                    visit.place,
                    peak,
                    {
                        "gradients": earlier + (self.kept_bytes if is_made else 0),
                        "gathered_weights": self._gathered_bytes(visit),
                    },
                )
            )
        for number, one in enumerate(reductions):
            at_end = one.before == _AT_END
            visit = walk.visits[-1] if at_end else walk.arrived[one.before][0]
            place, whole = visit.place, {"gathered_weights": self._gathered_bytes(visit)}
            alive = walk.alive_at_end if at_end else walk.alive_at(one.before)
            was_made = number > first_own or (number == first_own and self.rules.is_compact)
            is_made = number >= first_own
            held = earlier - one.gone_bytes
            before = held + (self.kept_bytes if was_made else 0)
            found.append((place, alive, whole | {"gradients": before, "gradient_buckets": one.joined_bytes}))
            found.append((place, alive, whole | {"gradients": held + (self.kept_bytes if is_made else 0)}))
        return found

    def _gathered_bytes(self, visit: Visit) -> int:
        """The gathered weights while the step is there."""
        if self.gathered is None:
            return 0
        phase, name = visit.place
        layer = {"embedding": EMBEDDING, "loss": HEAD}.get(name, visit.layer)
        return self.gathered[phase].get(layer, 0)
