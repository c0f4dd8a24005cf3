"""Phases of a run outside its steps (evaluation, save, an engine's start), and those of a rollout within them.

In: modules of libraries as they are imported (data/phase_functions.csv). Out: each function's work is one phase of this
process, whatever forwards run in it; nothing where the process has no watch.
"""

import contextlib
import csv
import functools
import inspect
import os
import sys

from vramprobe_values.imports import when_imported

_DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data")
with open(os.path.join(_DATA, "phase_functions.csv"), encoding="utf-8") as _file:
    #: Functions with the phase of their work: a subclass that overrides one calls it, or another row's. What makes a
    #: step's rollout belongs to that step (``is_of_step``).
    _FUNCTIONS = list(csv.DictReader(_file))
_WITHIN_A_LOSS = ("trl.", "swift.")  # log-probabilities, which their losses compute by the same function
_ONLY_WITH_AN_ARGUMENT = ("_load_optimizer_and_scheduler",)  # called with None where nothing is resumed


def install(watches):
    """``watches``: the list of this process's own, which may be empty still."""
    for module in dict.fromkeys(row["module"] for row in _FUNCTIONS):
        when_imported(module, functools.partial(_name, watches))


def _name(watches, module):
    for row in _FUNCTIONS:
        owner = getattr(module, row["class"], None) if row["class"] else module
        run = getattr(owner, row["function"], None) if row["module"] == module.__name__ else None
        if run is not None:
            setattr(owner, row["function"], _within(watches, row["phase"], run, is_of_step=bool(row["is_of_step"])))


def _within(watches, phase, run, is_of_step):
    def scope(args, kwargs):
        phases = watches[-1].phases if watches else None
        if run.__name__ in _ONLY_WITH_AN_ARGUMENT and all(one is None for one in (*args[1:], *kwargs.values())):
            phases = None
        if phase == "generation" and not is_of_step and phases is not None and not phases.is_outside:
            phases = None  # of a step, as GRPO's: its forwards say so
        if (
            phase == "log_probs"
            and run.__module__.startswith(_WITHIN_A_LOSS)
            and sys.modules["torch"].is_grad_enabled()
        ):
            phases = None  # they are a forward
        return contextlib.nullcontext() if phases is None else phases.scope(phase, is_of_step=is_of_step)

    @functools.wraps(run)
    def within(*args, **kwargs):
        with scope(args, kwargs):
            return run(*args, **kwargs)

    @functools.wraps(run)
    async def awaited(*args, **kwargs):
        with scope(args, kwargs):
            return await run(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(run) else within
