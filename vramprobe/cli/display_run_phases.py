"""Print the phases of a run: load, the steps as one, evaluation, save and the like, by rank.

In: a ProfileRecord. Out: a table on the terminal, nothing where there is nothing but loading and steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord, RankProfile
    from vramprobe.records.profile_memory import PhaseHighest


def print_run_phases(console: Console, record: ProfileRecord) -> None:
    """A row for each phase of the run, the steps as one, of the rank that has the most in it; and which one is the peak
    of all."""
    phases, ranks = _highest_of_all_ranks(record)
    if not phases:
        return
    console.print("\nphases of the run:     allocated      reserved")
    for one in phases:
        reserved = "-" if one.reserved_bytes is None else format_bytes(one.reserved_bytes)
        console.print(f"  {one.name:<16}  {format_bytes(one.allocated_bytes):>12}  {reserved:>12}{ranks[one.name]}")
    # what ran out in a phase stays alive after it, held by the error: the phase is named
    top = max(phases, key=lambda one: (one.allocated_bytes, one.name != "after_training"))
    training = next((one for one in phases if one.name in ("training", "serving")), None)
    second = max((one for one in phases if one is not top), key=lambda one: one.allocated_bytes, default=None)
    than = second if top is training else training
    more = (
        f", {format_bytes(top.allocated_bytes - than.allocated_bytes)} above {than.name}'s "
        f"{format_bytes(than.allocated_bytes)}"
        if than is not None
        else ""
    )
    console.print(f"peak of the run: {top.name}, {format_bytes(top.allocated_bytes)}{more}")


def rank_name(rank: RankProfile) -> str:
    """``rank 3``, or the process where it has none."""
    return f"process {rank.pid}" if rank.rank is None else f"rank {rank.rank}"


def _highest_of_all_ranks(record: ProfileRecord) -> tuple[list[PhaseHighest], dict[str, str]]:
    """Each phase of the rank that has the most in it; and by phase which one that is, where another has less."""
    by_name: dict[str, list[tuple[PhaseHighest, RankProfile]]] = {}
    for rank in record.ranks:
        for one in rank.run_phases:
            by_name.setdefault(one.name, []).append((one, rank))
    phases, ranks = [], {}
    for name, found in by_name.items():
        highest, rank = max(found, key=lambda pair: pair[0].allocated_bytes)
        lowest, other = min(found, key=lambda pair: pair[0].allocated_bytes)
        phases.append(highest)
        ranks[name] = ""
        if len(found) < len(record.ranks):
            ranks[name] = (
                f"  {rank_name(rank)}; {len(record.ranks) - len(found)} of {len(record.ranks)} had no such phase"
            )
        elif lowest.allocated_bytes < highest.allocated_bytes:
            ranks[name] = f"  {rank_name(rank)}; {rank_name(other)} {format_bytes(lowest.allocated_bytes)}"
    return phases, ranks
