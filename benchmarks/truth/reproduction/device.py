"""The device tier: what nvidia-smi saw of a published run beyond the memory that its repetition reserves.

In: reproduce.csv's rows of which nvidia-smi is published. Out: one constant for each set of libraries and number of
ranks, learnt from every other configuration, and how far reserved memory plus that constant is from what was published
of the others. nvidia-smi's figure is the mean over the cards of peak less what was there before: a context and, on
several ranks, NCCL's buffers. ``reserved`` is the mean over the ranks; where a full card made the allocator give blocks
back, what is reserved when a step has ended.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from vramprobe.units import MIB

Row = dict[str, Any]


class Constant(NamedTuple):
    """What one set of libraries on one number of ranks takes beside reserved memory, in bytes, and what it rests on."""

    stack: str
    num_gpus: int
    beside_bytes: int  # median of the configurations that it was learnt from
    least_bytes: int  # of all configurations
    most_bytes: int
    num_learnt: int
    errors: tuple[float, ...]  # (reserved + constant) / published − 1 of the configurations that it was not learnt from


def constants(rows: Iterable[Row]) -> list[Constant]:
    """By stack and number of ranks, in that order. Configurations of one kind are ordered by their published size."""
    kinds: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row["nvidia_smi_bytes"] and row["reserved_emulated_bytes"]:
            pair = int(row["nvidia_smi_bytes"]), int(row["reserved_emulated_bytes"])
            kinds[row["stack"], int(row["num_gpus"])].append(pair)
    return [_constant(stack, num_gpus, sorted(pairs)) for (stack, num_gpus), pairs in sorted(kinds.items())]


def _constant(stack: str, num_gpus: int, pairs: list[tuple[int, int]]) -> Constant:
    beside = [device - reserved for device, reserved in pairs]
    learnt = round(statistics.median(beside[::2]))
    errors = tuple((reserved + learnt) / device - 1 for device, reserved in pairs[1::2])
    return Constant(stack, num_gpus, learnt, min(beside), max(beside), len(beside[::2]), errors)


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of Markdown: each constant, and how far off what it was not learnt from is."""
    found = constants(rows)
    errors = [100 * error for one in found for error in one.errors]
    lines = [
        "| stack | GPUs | beside reserved memory, MiB | learnt from | all configurations, MiB | the others: number "
        "| mean error, % | most under, % | most over, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        span = f"{one.least_bytes / MIB:,.0f} to {one.most_bytes / MIB:,.0f}"
        off = _off([100 * error for error in one.errors])
        lines.append(
            f"| {one.stack} | {one.num_gpus} | {one.beside_bytes / MIB:,.0f} | {one.num_learnt} | {span} "
            f"| {len(one.errors)} | {off} |"
        )
    if errors:
        lines.append(f"| **all** |  |  | {sum(one.num_learnt for one in found)} |  | {len(errors)} | {_off(errors)} |")
    return lines


def _off(errors: list[float]) -> str:
    if not errors:
        return " |  | "
    mean = statistics.mean(abs(error) for error in errors)
    return f"{mean:.2f} | {min(0.0, *errors):.2f} | {max(0.0, *errors):.2f}"
