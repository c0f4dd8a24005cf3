"""Report the host memory of the ranks, phase by phase, and whether it is enough.

In: the ranks' raw ``host`` lines, which an emulated driver counts. Out: a HostMemory, or None where nobody counted. The
ranks' highest are added up: they load and save at the same time.
"""

from collections.abc import Sequence

from vramprobe.profile.raw import RawHost, RawRank
from vramprobe.records.profile_memory import HostMemory, HostPhase


def host_memory(ranks: Sequence[RawRank], limit_bytes: int | None = None) -> HostMemory | None:
    """By phase of the run, all ranks together; ``limit_bytes``: what the machine has, for the verdict."""
    counted = [rank for rank in ranks if rank.host]
    if not counted:
        return None
    by_rank = [_highest_by_phase(rank.host) for rank in counted]
    phases = [
        HostPhase(
            name=name,
            total_bytes=sum(one.both_bytes for one in found),
            pinned_bytes=sum(one.pinned_bytes for one in found),
            num_ranks=len(found),
            highest_rank_bytes=max(one.both_bytes for one in found),
        )
        for name in dict.fromkeys(name for one in by_rank for name in one)
        for found in [[one[name] for one in by_rank if name in one]]
    ]
    top = max(phases, key=lambda one: one.total_bytes)
    return HostMemory(
        phases=phases,
        peak_bytes=top.total_bytes,
        peak_phase=top.name,
        mapped_bytes=sum({one.path: one.num_bytes for rank in counted for one in rank.mapped}.values()),
        limit_bytes=limit_bytes,
        fits=None if limit_bytes is None else top.total_bytes <= limit_bytes,
    )


def _highest_by_phase(lines: Sequence[RawHost]) -> dict[str, RawHost]:
    """Return for each phase the line with the most bytes; all steps are ``training``."""
    names = {"load": "load", "other": "after_training"}
    found: dict[str, RawHost] = {}
    for one in lines:
        name = "training" if one.step is not None else names.get(one.phase, one.phase)
        if name not in found or one.both_bytes > found[name].both_bytes:
            found[name] = one
    return found
