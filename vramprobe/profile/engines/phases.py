"""The phases of a process with an inference engine and no training: a server's, or a script's that generates.

In: phases (RawPhase) as the hook named them, in order. Out: the same with an engine's names: ``serving`` once it has
started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

_STARTS = ("engine_load", "engine_profiling", "engine_kv_cache", "engine_warmup")
_TRAINS = {"backward", "weight_sync", "sleep", "wake_up", "log_probs"}


def as_served(phases: Sequence[Any]) -> list[Any]:
    """What lies between two stages of the start belongs to the first of them, and what follows the last is serving."""
    names = [one.name for one in phases]
    if "engine_load" not in names or _TRAINS.intersection(names):
        return list(phases)
    last = max(at for at, name in enumerate(names) if name in _STARTS)
    found, name = [], ""
    for at, one in enumerate(phases):
        name = "serving" if at > last else one.name if one.name in _STARTS else name
        found.append(replace(one, name=name, step=None) if name else one)
    return found
