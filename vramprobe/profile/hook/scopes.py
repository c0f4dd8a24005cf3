"""Phases of a run outside its steps: evaluation, save, load_best, resume, merge, and generation after training.

In: the modules of transformers, peft, safetensors and torch as they are imported. Out: each function's work is one
phase of this process, whatever forwards run within; nothing where the process has no watch.
"""

import contextlib
import functools

from vramprobe_values.imports import when_imported

#: (module, class or None, function, phase). A subclass that overrides a method calls it, or a function of this table.
_NAMED = (
    ("transformers.trainer", "Trainer", "evaluate", "evaluation"),
    ("transformers.trainer", "Trainer", "predict", "evaluation"),
    ("transformers.trainer", "Trainer", "_save_checkpoint", "save"),
    ("transformers.trainer", "Trainer", "save_model", "save"),
    ("transformers.trainer", "Trainer", "_load_best_model", "load_best"),
    ("transformers.trainer", "Trainer", "_load_from_checkpoint", "resume"),
    ("transformers.trainer", "Trainer", "_load_optimizer_and_scheduler", "resume"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", "save"),
    ("peft.peft_model", "PeftModel", "save_pretrained", "save"),
    ("peft.tuners.tuners_utils", "BaseTuner", "merge_and_unload", "merge"),
    ("transformers.generation.utils", "GenerationMixin", "generate", "generation"),
    ("safetensors.torch", None, "save_file", "save"),
    ("torch", None, "save", "save"),
)
_ONLY_WITH_AN_ARGUMENT = ("_load_optimizer_and_scheduler",)  # called with None where nothing is resumed


def install(watches):
    """``watches``: the list of this process's own, which may be empty still."""
    for module in dict.fromkeys(row[0] for row in _NAMED):
        when_imported(module, functools.partial(_name, watches, [row[1:] for row in _NAMED if row[0] == module]))


def _name(watches, rows, module):
    for kind, function, phase in rows:
        owner = module if kind is None else getattr(module, kind, None)
        run = getattr(owner, function, None)
        if run is not None:
            setattr(owner, function, _within(watches, phase, run))


def _within(watches, phase, run):
    @functools.wraps(run)
    def within(*args, **kwargs):
        phases = watches[-1].phases if watches else None
        if run.__name__ in _ONLY_WITH_AN_ARGUMENT and all(one is None for one in (*args[1:], *kwargs.values())):
            phases = None
        if phase == "generation" and phases is not None and not phases.is_outside:
            phases = None  # of a step, as GRPO's: its forwards say so
        with contextlib.nullcontext() if phases is None else phases.scope(phase):
            return run(*args, **kwargs)

    return within
