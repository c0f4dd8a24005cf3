"""Find the program's variables that hold tensors of many steps: a list of losses, a dict of outputs.

In: the stack of the training loop, at a step of a run whose memory grows. Out: name, file, function and the number of a
collection's tensors on a card. Parameters are left out; nothing but builtin collections and one level of attributes is
looked into.
"""

import sys
from collections import deque

import torch

from .journal import hook_folders

_COLLECTIONS = (list, tuple, set, deque, dict)
_MAX_ENTRIES = 10_000  # of one collection
_LIBRARIES = ("/site-packages/", "/dist-packages/")


def kept_lists(num_least):
    """Collections with at least ``num_least`` tensors on a card, the ones with the most first."""
    found, seen = [], set()
    for frame in _frames_of_the_program():
        code = frame.f_code
        scopes = [frame.f_locals] + ([frame.f_globals] if frame.f_globals.get("__name__") == "__main__" else [])
        for name, value in (named for scope in scopes for named in _named(scope)):
            if id(value) in seen:
                continue
            seen.add(id(value))
            tensors = [one for one in _tensors(value) if one.is_cuda and not isinstance(one, torch.nn.Parameter)]
            if len(tensors) >= num_least:
                found.append(
                    {
                        "name": name,
                        "file": code.co_filename,
                        "function": code.co_name,
                        "num_tensors": len(tensors),
                        "num_with_graph": sum(one.grad_fn is not None for one in tensors),
                    }
                )
    return sorted(found, key=lambda one: -one["num_tensors"])


def _frames_of_the_program():
    frame, hooks = sys._getframe(1), hook_folders()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(hooks) and not any(folder in file for folder in _LIBRARIES):
            yield frame
        frame = frame.f_back


def _named(scope):
    """Collections by name: variables, and the attributes of a variable's object."""
    for name, value in list(scope.items()):
        if isinstance(value, _COLLECTIONS):
            yield name, value
        elif _may_keep(value) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            for own, inner in list(attributes.items()):
                if isinstance(inner, _COLLECTIONS) and not own.startswith("_"):
                    yield f"{name}.{own}", inner


def _may_keep(value):
    """Return True if it is an object of the program's, not a module or one of torch's own, as an optimizer with its
    state.
    """
    return not isinstance(value, type(sys)) and type(value).__module__.partition(".")[0] != "torch"


def _tensors(value):
    """Those of a collection and of the collections in it."""
    entries = list(value.values() if isinstance(value, dict) else value)[-_MAX_ENTRIES:]
    for one in entries:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, _COLLECTIONS):
            inner = one.values() if isinstance(one, dict) else one
            yield from (entry for entry in list(inner)[:_MAX_ENTRIES] if isinstance(entry, torch.Tensor))
