"""Traffic: what one rank asked its collectives to move between cards, and what goes over its link for it.

In: calls and bytes counted since a process began, by kind of collective and by how many ranks share it. Out: Moved, by
phase. ``payload_bytes`` are what was asked for: of a call what nccl-tests calls its size (all that an all-gather brings
together, all that a reduce-scatter takes, a tensor's own bytes otherwise). ``link_bytes`` follow from them by the ring:
what NCCL really picks (trees, NVLink's own reductions) is not known to us, and no time follows from either.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.phase_memory import Amount

#: As NCCL and torch.distributed name them, in the order of the driver's numbers (emulate/driver/nccl.h).
CollectiveKind = Literal[
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"
]

#: By the driver's number (emulate/driver/nccl.h).
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
#: (the driver's number of a kind, ranks that share it) → (calls, payload bytes).
Counts = Mapping[tuple[int, int], tuple[int, int]]


class CollectiveTraffic(FrozenModel):
    """Collectives of one kind that a rank issued in one phase of a step."""

    phase: str
    kind: CollectiveKind
    num_ranks: Amount  # that share each of them
    num_calls: Amount
    payload_bytes: Amount  # as given to the calls
    link_bytes: Amount  # that this rank sends over its link, by the ring's formula: predicted


def link_bytes(kind: CollectiveKind, num_ranks: int, payload_bytes: int) -> int:
    """Bytes that one rank sends over its link for a payload, around a ring of ``num_ranks``.

    The factors of NVIDIA's nccl-tests (doc/PERFORMANCE.md, bus bandwidth): 2 (n - 1)/n of an all-reduce, (n - 1)/n of
    an all-gather, a reduce-scatter and an all-to-all, the whole of a broadcast, a reduce and a message. What is
    received in messages is their sender's.
    """
    match kind:
        case "all_reduce":
            return 2 * payload_bytes * (num_ranks - 1) // num_ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return payload_bytes * (num_ranks - 1) // num_ranks
        case "receive":
            return 0
        case _:
            return payload_bytes


def moved_since(before: Counts, now: Counts, phase: str) -> list[CollectiveTraffic]:
    """Return the traffic counted between two readings, as ``phase``'s."""
    found = []
    for (number, num_ranks), (num_calls, payload_bytes) in sorted(now.items()):
        calls_before, bytes_before = before.get((number, num_ranks), (0, 0))
        if num_calls > calls_before:
            counted = (num_calls - calls_before, payload_bytes - bytes_before)
            found.append(_moved(phase, KINDS[number], num_ranks, *counted))
    return found


def added_up(parts: Iterable[CollectiveTraffic]) -> list[CollectiveTraffic]:
    """Parts of one phase, kind and number of ranks as one, in the order in which these come first."""
    sums: dict[tuple[str, CollectiveKind, int], tuple[int, int]] = {}
    for one in parts:
        key = (one.phase, one.kind, one.num_ranks)
        num_calls, payload_bytes = sums.get(key, (0, 0))
        sums[key] = (num_calls + one.num_calls, payload_bytes + one.payload_bytes)
    return [_moved(*key, *counted) for key, counted in sums.items()]


def _moved(phase: str, kind: CollectiveKind, num_ranks: int, num_calls: int, payload_bytes: int) -> CollectiveTraffic:
    return CollectiveTraffic(
        phase=phase,
        kind=kind,
        num_ranks=num_ranks,
        num_calls=num_calls,
        payload_bytes=payload_bytes,
        link_bytes=link_bytes(kind, num_ranks, payload_bytes),
    )
