"""The phases of a process with an inference engine: a server's, a script's that generates, a trainer's.

In: phases (RawPhase) as the hook named them, in order. Out: the same with an engine's names. Without training it is
``serving`` once it has started, but where a trainer elsewhere has it sleep, wake up and take new weights; with
training, what it serves is ``generation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

_STARTS = ("engine_load", "engine_profiling", "engine_kv_cache", "engine_warmup")
_OF_A_CYCLE = {"weight_sync", "sleep", "wake_up", "log_probs"}


def as_served(phases: Sequence[Any]) -> list[Any]:
    """Rename a server's phases: between two stages of the start to the first of them, after the last to serving."""
    names = [one.name for one in phases]
    if "backward" in names:
        return [replace(one, name="generation") if one.name == "serving" else one for one in phases]
    cycles, serves = bool(_OF_A_CYCLE.intersection(names)), "serving" in names
    if "engine_load" not in names or (cycles and not serves):
        return list(phases)
    last = max(at for at, name in enumerate(names) if name in _STARTS)
    found, name, cycled = [], "", ""
    for at, one in enumerate(phases):
        if at <= last:
            name = one.name if one.name in _STARTS else name
        elif not cycles:
            name = "serving"
        elif one.name in _OF_A_CYCLE:
            name = cycled = one.name
        elif name != "serving" or cycled == "sleep":  # awake, it serves from the first request on
            name = "serving" if one.name == "serving" and cycled != "sleep" else "other"
        found.append(replace(one, name=name, step=None) if name else one)
    return found
