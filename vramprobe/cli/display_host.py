"""Print the host's memory: by phase of the run, and whether a machine has enough of it.

In: a HostMemory. Out: a table on the terminal; nothing where it is little and nobody asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile_memory import HostMemory, HostPhase

_WORTH_SHOWING_BYTES = GIB


def print_host(console: Console, host: HostMemory) -> None:
    """CPU tensors and pinned memory of all ranks by phase, and the verdict."""
    if host.peak_bytes < _WORTH_SHOWING_BYTES and host.limit_bytes is None:
        return
    console.print("\nhost memory, CPU tensors and pinned memory of all ranks:")
    for one in host.phases:
        console.print(f"  {one.name:<16}  {format_bytes(one.total_bytes):>12}{_how(one)}")
    if host.mapped_bytes:
        console.print(
            f"  mapped files      {format_bytes(host.mapped_bytes):>12}  not added: page cache, which all ranks share"
        )
    peak = f"{format_bytes(host.peak_bytes)} in {host.peak_phase}"
    if host.limit_bytes is None:
        console.print(f"peak of the host: at least {peak}; Python, libraries and data come on top")
    elif host.fits:
        left = format_bytes(host.limit_bytes - host.peak_bytes)
        console.print(
            f"host of {format_bytes(host.limit_bytes)}: [green]fits[/], {peak}; {left} are left for Python, libraries, "
            "the page cache and data"
        )
    else:
        console.print(f"host of {format_bytes(host.limit_bytes)}: [red]does not fit[/], at least {peak}")


def _how(one: HostPhase) -> str:
    each = f"up to {format_bytes(one.highest_rank_bytes)} on each of {one.num_ranks} ranks" if one.num_ranks > 1 else ""
    pinned = f"{format_bytes(one.pinned_bytes)} pinned" if one.pinned_bytes else ""
    said = ", ".join(filter(None, [each, pinned]))
    return f"  {said}" if said else ""
