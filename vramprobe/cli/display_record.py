"""Print a record: peaks, phases, causes, its ranks or cards, and reads of uncomputed values.

In: a RunRecord. Out: text on the terminal. Predictions, fits and lists are display.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.log.meanings import MEANINGS, PLAIN
from vramprobe.units import format_bytes, plural

if TYPE_CHECKING:
    from pathlib import Path

    from vramprobe.records.record import Emulation, RunRecord
    from vramprobe.records.traffic import CollectiveTraffic

_BAR_WIDTH = 36
_MAX_READS = 5  # lines that read what was not computed


def print_record(record: RunRecord) -> None:
    """One measurement: the peak, its phase, and a bar for each cause."""
    console = Console(highlight=False)
    how = f"{record.instrument} instrument, {escape(record.environment.device_name)}"
    if record.instrument == "emulated":
        how = f"emulated {escape(record.environment.device_name)}: real CUDA software on a stub driver"
    console.print(f"[bold]{escape(record.cell_id)}[/]  ({how})", soft_wrap=True)
    if record.outcome.kind != "ok":
        from vramprobe.records.table import describe_outcome

        console.print(f"[red]{record.outcome.kind}[/]: {escape(describe_outcome(record.outcome))}", soft_wrap=True)
    if record.peak is None or record.ledger is None:
        return
    peak, ledger = record.peak, record.ledger
    console.print(f"peak [bold]{format_bytes(peak.allocated_bytes)}[/] allocated, in {peak.phase} of step {peak.step}")
    tiers = {"reserved": peak.reserved_bytes, "device (NVML)": peak.device_bytes, "context": record.context_bytes}
    if record.instrument == "emulated":
        tiers = {"reserved": peak.reserved_bytes, "device, with an assumed context": peak.device_bytes}
    for name, value in tiers.items():
        if value is not None:
            console.print(f"     {format_bytes(value)} {name}")
    if ledger.at_peak is not None:
        console.print(f"\nlive tensors at the peak, {format_bytes(ledger.at_peak.total_bytes)}:")
        parts = {name.removesuffix("_bytes"): size for name, size in ledger.at_peak.parts().items()}
        print_bars(console, parts)
    console.print("\nby phase (last step):")
    last_step = max(phase.step or 0 for phase in record.phases)
    steady = [phase for phase in record.phases if phase.step == last_step]
    print_bars(console, {phase.name: phase.allocated_peak_bytes for phase in steady}, shares=False)
    if record.spec.is_spread:
        _print_cards(console, record)
    elif record.ranks:
        _print_ranks(console, record)
    console.print(f"\nload peak {format_bytes(peak.load_allocated_bytes)}", end="")
    if record.timing and (seconds := record.timing.median_step_seconds) is not None:
        console.print(f", step {seconds:.2f} s untraced", end="")
    console.print()
    if record.emulation is not None:
        print_values(console, record.emulation)


def _print_ranks(console: Console, record: RunRecord) -> None:
    """Each rank's peaks, and its part of the model on the host where it has one there."""
    several = f"{plural(record.spec.num_gpus, 'rank')} under {record.spec.sharding}"
    alone = record.spec.only_rank is not None
    console.print(f"\none of {several} (--only-rank):" if alone else f"\n{several} (the highest is shown above):")
    for rank in record.ranks:
        if rank.peak is None:
            continue
        said = f"{format_bytes(rank.peak.allocated_bytes)} in {rank.peak.phase}, "
        said += f"load {format_bytes(rank.peak.load_allocated_bytes)}"
        said += (
            f", {format_bytes(rank.host_tensors_bytes)} of tensors in host memory" if rank.host_tensors_bytes else ""
        )
        console.print(f"  rank {rank.rank:<4} {said}")
    if record.spec.offload != "none":
        _print_host(console, record)
    busiest = max(record.ranks, key=lambda rank: sum(one.link_bytes for one in rank.traffic or ()))
    if busiest.traffic:
        print_traffic(console, f"rank {busiest.rank}", busiest.traffic)


def _print_host(console: Console, record: RunRecord) -> None:
    """Print the bytes of host tensors of all ranks, and their processes' resident peak."""
    held = sum(rank.host_tensors_bytes or 0 for rank in record.ranks)
    resident = [rank.host_peak_bytes for rank in record.ranks if rank.host_peak_bytes is not None]
    pinned = sum(rank.host_pinned_bytes or 0 for rank in record.ranks)
    said = f", {format_bytes(pinned)} pinned" if pinned else ""
    said += f", {format_bytes(sum(resident))} resident at the peak" if resident else ""
    console.print(f"  host memory of all ranks: {format_bytes(held)} of tensors{said}", soft_wrap=True)


def _print_cards(console: Console, record: RunRecord) -> None:
    """Each card's peaks, and which parts of the model lie on it."""
    console.print(f'\none process over {record.spec.num_gpus} cards (device_map="auto"), the highest is shown above:')
    for card in record.ranks:
        if card.peak is not None:
            said = f"{format_bytes(card.peak.allocated_bytes)} in {card.peak.phase}, "
            console.print(f"  card {card.rank:<4} {said}load {format_bytes(card.peak.load_allocated_bytes)}")
        if card.modules is not None:
            console.print(f"            {escape(_in_short(card.modules)) or 'no part of the model'}", soft_wrap=True)


def _in_short(modules: Sequence[str]) -> str:
    """Modules' names, and a run of numbered ones as its first and last: ``model.layers.0 to 15``."""
    runs: list[tuple[str, str, str]] = []  # all but the last word of a name; the first and the last one's last word
    for name in modules:
        stem, _, last = name.rpartition(".")
        before = runs[-1] if runs else ("", "", "")
        if last.isdecimal() and before[0] == stem and before[2].isdecimal() and int(before[2]) + 1 == int(last):
            runs[-1] = (stem, before[1], last)
        else:
            runs.append((stem, last, last))
    named = [(f"{stem}.{first}" if stem else first, first, last) for stem, first, last in runs]
    return ", ".join(name if first == last else f"{name} to {last}" for name, first, last in named)


def print_traffic(console: Console, whose: str, traffic: Sequence[CollectiveTraffic]) -> None:
    """Print the bytes that a rank's collectives move in a step, and those sent over its link."""
    total = format_bytes(sum(one.link_bytes for one in traffic))
    console.print(f"\n{whose} sends {total} per step over its link (ring algorithm):")
    for one in traffic:
        kind = one.kind.replace("_", "-")
        console.print(
            f"  {one.phase:<15}{kind:<15}{one.num_calls:>5} calls {format_bytes(one.payload_bytes):>11}, "
            f"{format_bytes(one.link_bytes):>11} sent",
            soft_wrap=True,
        )


def print_values(console: Console, emulation: Emulation) -> None:
    """Print the reads of values that the emulated card did not compute, and whether other values would allocate
    otherwise.
    """
    if emulation.num_reads:
        steering = [read for read in emulation.reads if read.could_have_steered]
        console.print(
            f"{plural(emulation.num_reads, 'read')} of uncomputed values; "
            f"{_how_many(emulation)} could affect control flow"
            f"{':' if steering else ''}",
            soft_wrap=True,
        )
        for read in steering[:_MAX_READS]:
            where = read.line or read.torch_line or "no Python line"
            said = f"  {escape(where)}  {escape(read.operator)}, {plural(read.num_reads, 'time')}"
            console.print(said, soft_wrap=True)
    else:
        console.print("no uncomputed value reached the host")
    if (verified := emulation.verification) is not None:
        contents = ", ".join(verified.contents)
        if verified.same:
            said = f"the same {verified.num_events} allocations and frees whether uncomputed values are {contents}"
        else:
            said = f"[red]allocations depend on values[/] ({contents}): {escape(verified.parted_at or '')}"
        console.print(f"verified: {said}", soft_wrap=True)


def _how_many(emulation: Emulation) -> str:
    """Format how many of the reads of uncomputed values could affect control flow."""
    num_steering = emulation.num_steering_reads or 0
    if num_steering == emulation.num_reads:
        return "it" if num_steering == 1 else f"all {num_steering}"
    return str(num_steering) if num_steering else "none"


def print_snapshot(record: RunRecord, snapshot: Path | None) -> None:
    """Print the snapshot's path and what opens it, or why there is none."""
    if snapshot is None:
        return
    console = Console(highlight=False)
    why = [warning for warning in record.warnings if warning.startswith("no snapshot:")]
    if record.outcome.kind not in ("ok", "invalid"):
        why.append(f"no snapshot: the cell ended as {record.outcome.kind} before that step")
    for text in why:
        console.print(f"[yellow]note[/]: {escape(text)}", soft_wrap=True)
    if not why:
        console.print(f"snapshot written to {escape(str(snapshot))}; open it at pytorch.org/memory_viz", soft_wrap=True)


def print_bars(console: Console, sizes: dict[str, int], *, shares: bool = True) -> None:
    top = max(sizes.values(), default=0) or 1
    width = max(map(len, sizes), default=0)
    total = sum(sizes.values()) or 1
    for name, size in sizes.items():
        bar = "█" * round(_BAR_WIDTH * size / top)
        share = f"  {size / total:6.1%}" if shares else ""
        console.print(f"  {name:<{width}}  {format_bytes(size):>11}{share}  {bar}")
    needed = [name for name, size in sizes.items() if name in MEANINGS and name not in PLAIN and size >= total / 100]
    if shares and needed:
        console.print(f"[dim]({'; '.join(f'{name}: {MEANINGS[name]}' for name in needed)})[/]")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"[yellow]note[/]: {escape(note)}")
