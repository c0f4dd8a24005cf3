"""Data-parallel replicas: a command's launcher, and the counted step with another number of ranks.

In: a command's words; a run's counts. Out: whether its launcher starts a process for each GPU, and how many by its own
words; a count whose gradients are all-reduced among so many. Only a step that does not divide the model is scaled so:
what FSDP, ZeRO or tensor parallelism hold depends on the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vramprobe.profile.interpreter import value_of
from vramprobe.profile.raw import RawRun
from vramprobe.records.traffic import KINDS
from vramprobe.speed.counted import Count
from vramprobe.speed.raw_count import count_of
from vramprobe.units import MIB

#: A launcher's program or module → (its options for the number of processes of a machine, how many without one; None:
#: one for each GPU).
_LAUNCHERS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "torchrun": (("--nproc-per-node",), 1),
    "torch.distributed.run": (("--nproc-per-node",), 1),
    "torch.distributed.launch": (("--nproc-per-node",), 1),
    "accelerate": (("--num-processes",), None),
    "accelerate.commands.launch": (("--num-processes",), None),
}
#: Counts of samples or a loss are shared as well; what is above this in a step is the model's.
_SMALL_BYTES = MIB


@dataclass(frozen=True)
class ReplicaLauncher:
    """``num_ranks``: by the command's own words or the launcher's default; None: one for each GPU of the machine."""

    name: str
    num_ranks: int | None


def launcher_of(command: Sequence[str]) -> ReplicaLauncher | None:
    """The launcher that starts the command's processes; None for a command that is one process."""
    words = [Path(command[0]).name, *command[1:]] if command else []
    name = words[0] if words else ""
    if name.startswith("python"):
        name = next((after for before, after in pairwise(words) if before == "-m"), "")
    if name not in _LAUNCHERS:
        return None
    options, default = _LAUNCHERS[name]
    value = value_of(words, *options)
    if value is None:
        return ReplicaLauncher(name, default)
    return ReplicaLauncher(name, int(value) if value.isdigit() else None)  # torchrun also takes gpu and auto


def is_replicated(run: RawRun) -> bool:
    """Return True if each rank holds the whole model: nothing large but gradients is shared in a step."""
    for raw in run.ranks:
        for kind, _, _, num_bytes in (raw.count or {}).get("moved", ()):
            if KINDS[kind] not in ("all_reduce", "broadcast") and num_bytes > _SMALL_BYTES:
                return False
        for moved in raw.moved:
            if moved.phase == "forward" and any(
                KINDS[kind] == "all_reduce" and num_bytes > _SMALL_BYTES for kind, _, _, num_bytes in moved.counts
            ):
                return False  # tensor parallelism
    return True


def count_on(content: Mapping[str, Any], num_ranks: int) -> Count:
    """A rank's count among ``num_ranks`` replicas: the same work, the same gradients, another ring."""
    moved = [[kind, num_ranks, calls, size] for kind, _, calls, size in content["moved"]] if num_ranks > 1 else []
    return count_of({**content, "moved": moved})
