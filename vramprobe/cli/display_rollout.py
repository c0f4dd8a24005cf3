"""What the command line shows of a step of reinforcement learning: who holds what on the GPU in each of its stages.

In: RolloutStages. Out: a table on the terminal (rich), and which stage is the fullest. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile import RolloutStage

#: Heading → the causes that it adds up.
_COLUMNS = {
    "weights": ("weights",),
    "engine weights": ("engine_weights",),
    "KV cache": ("kv_cache",),
    "training state": ("gradients", "optimizer_state"),
    "activations": ("batch", "saved_activations", "temporaries"),
    "other": ("other",),
}


def print_rollout(console: Console, stages: Sequence[RolloutStage]) -> None:
    """A row for each stage, in order; nothing where there is none."""
    if not stages:
        return
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
    console.print("\na step with its rollout, GiB at the fullest moment of each stage:")
    show([Table(title="rollout", columns=columns, rows=stages)], [], console)
    top = max(stages, key=lambda one: (one.device_bytes or 0, one.live.total_bytes))
    console.print(f"fullest stage: {escape(top.name)}, {format_bytes(top.live.total_bytes)} live")


def _added(causes: tuple[str, ...]) -> Callable[[RolloutStage], int]:
    return lambda stage: sum(getattr(stage.live, f"{cause}_bytes") for cause in causes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
