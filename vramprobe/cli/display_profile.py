"""Print a profile: peaks, causes, lines, verdicts; at most as wide as the terminal.

In: a ProfileRecord. Out: text on the terminal (rich). What was emulated is called so. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.cli.display_batches import print_batches
from vramprobe.cli.display_cards import print_cards
from vramprobe.cli.display_engine import print_answers, print_engine, print_served, print_workers
from vramprobe.cli.display_growth import print_growth
from vramprobe.cli.display_host import print_host
from vramprobe.cli.display_record import print_bars, print_traffic, print_values
from vramprobe.cli.display_rollout import print_rollout
from vramprobe.cli.display_run_phases import print_run_phases, rank_name
from vramprobe.cli.display_step_time import print_step_time
from vramprobe.cli.folded import on_one_line, print_folded, print_lines, print_place
from vramprobe.units import format_bytes, short_seconds, word_for

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord, RankProfile
    from vramprobe.records.profile_memory import BlocksAlike, PlaceBytes, ProfilePeak
    from vramprobe.records.profile_outcomes import ProfileOom, ProfileOutcome

_NUM_PLACES = 10
_RARE = ("batch", "engine_weights", "kv_cache", "master_weights")


def print_profile(record: ProfileRecord) -> None:
    """Print the outcome, the ranks' peaks, live tensors at the highest one and their lines, and the cards' verdicts."""
    console = Console(highlight=False, emoji=False)
    console.print(f"[bold]{escape(on_one_line(record.name))}[/]")
    console.print(_where(record))
    if record.answers:
        print_answers(console, record.answers)
    else:
        _print_outcome(console, record.outcome, max((rank.num_steps for rank in record.ranks), default=0))
    for rank in record.ranks:
        if rank.doing is not None:
            print_folded(console, "", f"  {rank_name(rank)} was last seen in {rank.doing}", 0, 4)
    if record.replaced:
        console.print("\nreplaced by --empty-weights:")
        print_lines(console, [f"{one.kind} of {one.what}: {one.by}" for one in record.replaced])
    if record.engine is not None:
        print_engine(console, record.engine)
        print_workers(console, [rank.engine for rank in record.ranks if rank.engine is not None])
    if record.served is not None:
        print_served(console, record.served)
    shown = record.highest_rank
    if len(record.ranks) > 1:
        _print_ranks(console, record)
    if shown is not None:
        _print_rank(console, record, shown)
    if record.lacks_a_step and record.outcome.kind != "oom":
        _print_no_step(console, record)
    if record.emulation is not None and (record.emulation.num_reads is not None or record.emulation.verification):
        console.print()
        print_values(console, record.emulation)
    if record.host is not None:
        print_host(console, record.host)
    if record.step_time is not None:
        print_step_time(console, record.step_time)
    if record.measured_step_seconds is not None:
        console.print(
            f"\nstep time [bold]{short_seconds(record.measured_step_seconds)}[/] measured (median, wall time)"
        )
    print_cards(console, record.cards)
    for warning in record.warnings:
        console.print(f"[yellow]note[/]: {escape(on_one_line(warning))}")


def _where(record: ProfileRecord) -> str:
    environment, word = record.environment, word_for(record.instrument)
    if not record.ranks and record.instrument == "emulated":
        return f"emulated {escape(environment.device_name or 'GPU')}: no process used it"
    how = f"{escape(environment.device_said)}: real CUDA software on a stub driver" if record.emulation else ""
    versions = f"torch {environment.torch}" if environment.torch else ""
    return ", ".join(filter(None, [how or f"{word} on {escape(environment.device_said)}", versions]))


def _print_outcome(console: Console, outcome: ProfileOutcome, num_steps: int) -> None:
    match outcome.kind:
        case "ok":
            if outcome.stopped:
                console.print(f"stopped after {num_steps} steps (--steps)" if num_steps else "stopped by --steps")
        case "oom":
            _print_oom(console, outcome)
        case "error":
            how = f"killed by signal {outcome.signal}" if outcome.signal else f"exit status {outcome.exit_status}"
            if outcome.exception is None:
                console.print(f"[red]error[/]: the command ended with {how}; its last lines:")
            else:
                who = "" if outcome.rank is None else f"rank {outcome.rank}: "
                at = f", at {outcome.line} {outcome.function}" if outcome.line else ""
                console.print(f"[red]error[/]: the command ended with {how}; the exception that came first:")
                print_lines(console, [f"{who}{outcome.exception}{at}"])
                console.print("its last lines:")
            print_lines(console, outcome.last_lines[-_NUM_PLACES:])
        case "interrupted":
            console.print("[yellow]interrupted[/]: shown is what was seen until then")
        case "lost":
            console.print(f"[yellow]lost[/]: {escape(outcome.known)}")


def _print_oom(console: Console, outcome: ProfileOom) -> None:
    who = "" if outcome.rank is None else f"rank {outcome.rank} "
    when = (outcome.phase or "an unknown phase") + (f" of step {outcome.step}" if outcome.step else "")
    console.print(f"[red]out of memory[/]: {who}in {escape(when)}")
    if outcome.line is not None:
        asked = f"{outcome.line} {outcome.module or outcome.function or ''}".strip()
        print_place(console, format_bytes(outcome.requested_bytes), f"requested by {asked}")
    elif outcome.requested_bytes is not None:
        print_place(console, format_bytes(outcome.requested_bytes), "requested")
    for value, what in (
        (outcome.free_bytes, "free"),
        (outcome.allocated_bytes, "allocated"),
        (outcome.reserved_bytes, "reserved"),
        (outcome.total_bytes, "total memory of the GPU"),
    ):
        if value is not None:
            print_place(console, format_bytes(value), what)
    if outcome.alive is not None:
        console.print(f"\nlive tensors then, {format_bytes(outcome.alive.total_bytes)}:")
        print_bars(console, _known(outcome.alive.parts()))


def _print_ranks(console: Console, record: ProfileRecord) -> None:
    """A line for each group of ranks with the same peak, and the spread."""
    groups: dict[str, list[RankProfile]] = {}
    for rank in record.ranks:
        groups.setdefault(_peak_said(rank), []).append(rank)
    of = "processes" if all(rank.rank is None for rank in record.ranks) else "ranks"
    console.print(f"\n{len(record.ranks)} {of}:")
    shown = list(groups.items())[:_NUM_PLACES]
    for said, ranks in shown:
        highest = ", the highest" if record.highest_rank in ranks and len(groups) > 1 else ""
        print_folded(console, "", f"  {_ranks_said(ranks)}{highest}: {said}", 0, 4)
    if (more := len(groups) - len(shown)) > 0:
        console.print(f"  and {more} more; --json lists all")
    if record.allocated_spread_bytes is not None:
        console.print(f"  spread: {format_bytes(record.allocated_spread_bytes)} between the lowest and the highest")


def _peak_said(rank: RankProfile) -> str:
    peak = rank.peak
    if peak is None:
        return "no phase of it came to an end" if rank.doing else "no memory seen"
    return (
        f"{format_bytes(peak.allocated_bytes)} allocated, {format_bytes(peak.reserved_bytes)} reserved, in {peak.said}"
    )


def _ranks_said(ranks: Sequence[RankProfile]) -> str:
    """``rank 0``, ``ranks 0 to 3, 6``; processes by their number."""
    numbers = [rank.rank for rank in ranks if rank.rank is not None]
    if len(ranks) == 1 or len(numbers) < len(ranks):
        return ", ".join(map(rank_name, ranks))
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"


def _print_rank(console: Console, record: ProfileRecord, rank: RankProfile) -> None:
    peak = rank.peak
    assert peak is not None
    of = f" of {rank_name(rank)}" if len(record.ranks) > 1 else ""
    most = "highest so far" if record.may_grow(rank) else "peak"
    console.print(f"\n{most}{of} [bold]{format_bytes(peak.allocated_bytes)}[/] allocated, in {escape(peak.said)}")
    if record.may_grow(rank):
        _print_steps_that_differ(console, rank)
    device = _device_said(record, peak)
    for value, what in (
        (peak.reserved_bytes, "reserved"),
        (peak.device_bytes, device),
        (rank.fragmentation_bytes, "reserved but unused"),
    ):
        if value is not None:
            console.print(f"     {format_bytes(value)} {what}")
    if rank.num_alloc_retries:
        console.print(f"     {rank.num_alloc_retries} allocation retries: cached blocks were freed to make space")
    if not record.answers:
        console.print(f"{rank.num_steps} {'step' if rank.num_steps == 1 else 'steps'}{escape(rank.repeats_said)}")
    if rank.at_peak is not None and rank.at_peak != getattr(record.outcome, "alive", None):  # that is shown already
        console.print(
            f"\nlive tensors at the peak ({_at(rank.at_peak_of)}), {format_bytes(rank.at_peak.total_bytes)} requested:"
        )
        print_bars(console, _known(rank.at_peak.parts()))
    if rank.phases:
        console.print("\npeak by phase:")
        print_bars(console, {one.name: one.allocated_bytes for one in rank.phases}, shares=False)
    print_run_phases(console, record)
    print_rollout(console, record)
    print_batches(console, record)
    print_growth(console, rank.growth)
    if rank.traffic:
        print_traffic(console, rank_name(rank), rank.traffic)
    if rank.largest:
        console.print("\nlargest blocks at the peak:")
        for one in rank.largest:
            _print_blocks(console, one)
        console.print("\nby module:")
        for one in rank.by_module[:_NUM_PLACES]:
            print_place(console, format_bytes(one.num_bytes), _blocks_said(one))


def _print_no_step(console: Console, record: ProfileRecord) -> None:
    """That there is no answer to what training needs, and what was seen instead."""
    names = list(dict.fromkeys(one.name for rank in record.ranks for one in rank.phases))
    if names:
        seen = f"it was seen in {', '.join(names)}"
    elif any(rank.doing for rank in record.ranks):
        seen = "it was ended in its first phase, whose peak is not known"
    else:
        seen = "it used no GPU"
    console.print(
        f"\n[red]no training step was seen[/]: {seen}. What is shown is not what training needs. A step is a backward "
        "and an update of the weights: by an optimizer of torch.optim, or, in a program without one, by its own code"
    )


def _print_steps_that_differ(console: Console, rank: RankProfile) -> None:
    """The steps seen are not the run's: what they need, and how to find what the run needs."""
    peaks = rank.step_peaks
    assert peaks is not None
    lowest, highest = map(format_bytes, (peaks.lowest_bytes, peaks.highest_bytes))
    console.print(
        f"[yellow]not the run's peak[/]: it is the largest of {rank.num_steps} steps seen, and steps differ (peaks "
        f"from {lowest} to {highest}): {escape(peaks.what or '')}. A later step may need more: run all steps "
        "with --whole, or find the worst batch with vramprobe predict --lengths"
    )


def _device_said(record: ProfileRecord, peak: ProfilePeak) -> str:
    """The device tier, and how many contexts are in it: a launcher that has used CUDA has one beside its rank's."""
    if record.emulation is None:
        return "device"
    graphs = record.emulation.graph_bytes
    if graphs:
        return f"device, with an assumed context and {format_bytes(graphs)} of CUDA graphs' instances"
    context = record.context_bytes
    if context and peak.device_bytes is not None and peak.reserved_bytes is not None:
        num, rest = divmod(peak.device_bytes - peak.reserved_bytes, context)
        if num > 1 and rest == 0:
            return f"device, with the assumed contexts of {num} processes"
    return "device, with an assumed context"


def _at(phase: str | None) -> str:
    """``backward of step 2`` as ``backward, step 2``."""
    return escape((phase or "").replace(" of step ", ", step "))


def _known(parts: dict[str, int]) -> dict[str, int]:
    """Causes without their unit; those that few commands have (a batch, an engine) only where there is one, and those
    of a trainer not where an engine is alone."""
    named = {name.removesuffix("_bytes"): size for name, size in parts.items()}
    is_engine = bool(named.get("engine_weights")) and not named.get("weights")
    return {name: size for name, size in named.items() if size or not (is_engine or name in _RARE)}


def _print_blocks(console: Console, one: BlocksAlike) -> None:
    times = f" × {one.num_blocks}" if one.num_blocks > 1 else ""
    what = one.parameter or one.module or one.function or ""
    amount = f"{format_bytes(one.total_bytes)}"
    each = f" of {format_bytes(one.size_bytes)}{times}" if times else ""
    said = f"{one.cause.replace('_', ' ')}{each}{', ' if what else ''}{what}"
    print_place(console, amount, said)
    print_place(console, "", one.line or "no Python line (autograd's own thread)")


def _blocks_said(one: PlaceBytes) -> str:
    return f"{one.place}, {one.num_blocks} {'block' if one.num_blocks == 1 else 'blocks'}"
