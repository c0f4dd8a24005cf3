"""Print the batches of a run's own data: peaks by quantile, the largest batch, what fits.

In: a ProfileRecord. Out: lines on the terminal, of several ranks those of the one whose largest batch needs the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramprobe.cli.display_fragmentation import fragmentation_lines
from vramprobe.cli.display_run_phases import rank_name
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from vramprobe.records.data_batches import DataBatches, DataLimit
    from vramprobe.records.profile import ProfileRecord, RankProfile

_MAX_ROWS = 4  # indices that a line names


def print_batches(console: Console, record: ProfileRecord) -> None:
    """Nothing where all batches have one shape: the steps have shown it."""
    ranks = [one for one in record.ranks if one.batches is not None and one.batches.num_shapes > 1]
    if not ranks:
        return
    rank = max(ranks, key=_most_bytes)
    found, of = rank.batches, ""
    assert found is not None
    if len(record.ranks) > 1:
        of = f" on {rank_name(rank)}, whose largest batch needs the most of {len(record.ranks)} ranks"
    seen = "" if found.is_complete else f", {found.num_seen:,} of which were read within the time limit"
    console.print(
        f"\nthe run's own data{of}: {found.num_rows:,} rows, {found.num_batches:,} batches an epoch{seen}; "
        f"{found.num_shapes:,} shapes, {found.num_run} of them run",
        soft_wrap=True,
    )
    if found.peaks:
        console.print(f"  {'batch':<6}{'number':>9}{'rows':>6}{'length':>8}{'allocated':>13}{'reserved':>13}")
    for one in found.peaks:
        reserved = "" if one.reserved_bytes is None else format_bytes(one.reserved_bytes)
        sizes = f"{one.num_rows:>6}{one.width:>8,}{format_bytes(one.allocated_bytes):>13}{reserved:>13}"
        said = "predicted; its step ran out of memory" if one.source == "out of memory" else one.source
        console.print(f"  {one.name:<6}{one.batch:>9,}{sizes}  {said}", soft_wrap=True)
    if found.peaks and (rows := found.peaks[-1].rows):
        more = found.peaks[-1].num_rows - _MAX_ROWS
        said = ", ".join(map(str, rows[:_MAX_ROWS])) + (f" and {more} more" if more > 0 else "")
        console.print(f"  the largest batch has the rows {said}, the longest first")
    if found.held_out:
        worst = max(found.held_out, key=lambda one: abs(one.error))
        console.print(
            f"  predicted from the other shapes, {len(found.held_out)} held-out ones are off by at most "
            f"{100 * abs(worst.error):.2f} %",
            soft_wrap=True,
        )
    _print_verdict(console, found)
    for line in fragmentation_lines(found.creep) if found.creep is not None else ():
        console.print(f"  {line}", soft_wrap=True)


def _most_bytes(rank: RankProfile) -> int:
    peaks = rank.batches.peaks if rank.batches is not None else []
    return peaks[-1].allocated_bytes if peaks else 0


def _print_verdict(console: Console, found: DataBatches) -> None:
    if found.fits is None:
        return
    usable = format_bytes(found.usable_bytes or 0)
    if found.fits:
        console.print(f"  the largest batch [green]fits[/] in {usable}", soft_wrap=True)
    else:
        console.print(f"  the largest batch [red]does not fit[/] in {usable}", soft_wrap=True)
    if found.max_length is not None:
        console.print(f"  max length that fits (predicted): {_limit(found.max_length)}", soft_wrap=True)
    if found.max_batch_size is not None:
        console.print(
            f"  batch size that fits at the largest batch's length (predicted): {_limit(found.max_batch_size)}",
            soft_wrap=True,
        )


def _limit(limit: DataLimit) -> str:
    if limit.value is None:
        return "none"
    if limit.rows_cut_share is None or limit.tokens_cut_share is None:
        return f"at least {limit.value:,}"
    cut = f"{100 * limit.rows_cut_share:.2g} % of the rows and {100 * limit.tokens_cut_share:.2g} % of the tokens"
    return f"at least {limit.value:,}, which cuts {cut}"
