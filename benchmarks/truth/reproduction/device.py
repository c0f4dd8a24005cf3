"""The device tier: what nvidia-smi saw of a published run beyond the memory that its repetition reserves.

In: reproduce.csv's rows of which nvidia-smi is published. Out: one constant for each set of libraries and number of
ranks, learnt from every other configuration, and how far reserved memory plus that constant is from what was published
of the others. nvidia-smi's figure is the mean over the cards of peak less what was there before: a context and, on
several ranks, NCCL's buffers. ``reserved`` is the mean over the ranks; where a full card made the allocator give blocks
back, what is reserved when a step has ended.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.tables import as_table
from vramprobe.units import MIB

Row = dict[str, Any]


class Constant(NamedTuple):
    """Bytes that one set of libraries on one number of ranks takes beside reserved memory, and what they rest on."""

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
    lines = [
        {
            "stack": one.stack,
            "GPUs": one.num_gpus,
            "beside reserved memory, MiB": f"{one.beside_bytes / MIB:,.0f}",
            "learnt from": one.num_learnt,
            "all configurations, MiB": f"{one.least_bytes / MIB:,.0f} to {one.most_bytes / MIB:,.0f}",
        }
        | _off(one.errors)
        for one in found
    ]
    whole = {"stack": "**all**", "learnt from": sum(one.num_learnt for one in found)}
    if errors := [error for one in found for error in one.errors]:
        lines.append(dict.fromkeys(lines[0], "") | whole | _off(errors))
    return as_table(lines, "lrrrrrrrr")


def _off(shares: Sequence[float]) -> dict[str, object]:
    """Count the others, and say how far they are off."""
    errors = [100 * share for share in shares]
    names = ("the others: number", "mean error, %", "most under, %", "most over, %")
    if not errors:
        return dict(zip(names, (0, "", "", ""), strict=True))
    sizes = (statistics.mean(map(abs, errors)), min(0.0, *errors), max(0.0, *errors))
    return dict(zip(names, (len(errors), *(f"{size:.2f}" for size in sizes)), strict=True))
