"""One module per sharding: how the libraries load, divide and step a cell on several GPUs.

In: a spec with its ranks. Out: the class of its ranks, subclasses of rank.Rank, which each module names ``RANK``;
``device-map`` has none. Loads torch: :func:`rank_class` imports only the module it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from vramprobe.workload.sharding.rank import Rank


def rank_class(spec: CellSpec) -> type[Rank]:
    """The class that runs one of the ranks of ``spec``."""
    name = "context_parallel" if spec.cp_size > 1 else rules_of(spec.sharding).module
    found: type[Rank] = import_module(f"vramprobe.workload.sharding.{name}").RANK
    return found
