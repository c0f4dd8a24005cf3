"""Print a step of reinforcement learning: the bytes on the GPU in each of its stages, by owner.

In: a ProfileRecord. Out: a table on the terminal (rich) for each process that trains, and which stage is the fullest.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.cli.display_run_phases import rank_name
from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord, RolloutStage

#: Heading → the causes that it adds up.
_COLUMNS = {
    "weights": ("weights",),
    "engine weights": ("engine_weights",),
    "KV cache": ("kv_cache",),
    "training state": ("gradients", "optimizer_state"),
    "activations": ("batch", "saved_activations", "temporaries"),
    "other": ("other",),
}


def print_rollout(console: Console, record: ProfileRecord) -> None:
    """Print the process with the fullest stage, and the others in a line; nothing where there is none."""
    found = [one for one in record.ranks if one.rollout]
    if not found:
        return
    fullest = max(found, key=lambda one: _fullest(one.rollout).device_bytes or 0)
    _print_stages(console, fullest.rollout, f", {rank_name(fullest)}" if len(found) > 1 else "")
    for one in found:
        if one is not fullest:
            top = _fullest(one.rollout)
            console.print(
                f"{rank_name(one)}: fullest stage {escape(top.name)}, {format_bytes(top.live.total_bytes)} live"
            )


def _fullest(stages: Sequence[RolloutStage]) -> RolloutStage:
    return max(stages, key=lambda one: (one.device_bytes or 0, one.live.total_bytes))


def _print_stages(console: Console, stages: Sequence[RolloutStage], of: str) -> None:
    from vramprobe.report.definition import Column, Table
    from vramprobe.report.formats.terminal import show

    columns = [
        Column("name", "stage", lambda one: one.name),
        Column("device_bytes", "device", lambda one: one.device_bytes, _gib, is_number=True),
    ]
    for heading, causes in _COLUMNS.items():
        size = _added(causes)
        if any(map(size, stages)):
            columns.append(Column(heading, heading, size, _gib, is_number=True))
    if any(one.asleep_bytes for one in stages):
        columns.append(Column("asleep_bytes", "asleep", lambda one: one.asleep_bytes, _gib, is_number=True))
    console.print(f"\na step with its rollout, GiB at the fullest moment of each stage{of}:")
    show([Table(title="rollout", columns=columns, rows=stages)], [], console)
    top = _fullest(stages)
    console.print(f"fullest stage: {escape(top.name)}, {format_bytes(top.live.total_bytes)} live")


def _added(causes: tuple[str, ...]) -> Callable[[RolloutStage], int]:
    return lambda stage: sum(getattr(stage.live, f"{cause}_bytes") for cause in causes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
