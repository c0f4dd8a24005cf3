"""Into a process at its start: wait for torch, then for CUDA, then watch; at its end, what was seen is on disk.

In: :func:`install`, called by the sitecustomize that launch.py puts before all else. Out: the files of journal.py and
history.py. ``run.json`` says what is asked for: ``trace`` (all, step or none), ``steps``, ``verify``.
"""

import atexit
import importlib.abc
import json
import os
import sys

from .journal import FOLDER_VARIABLE, Journal, complain


def install():
    """Watch as soon as torch has been imported (now, if it has been); twice is once."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        _start(folder)
    else:
        sys.meta_path.insert(0, _Finder(folder))


def _start(folder):
    try:
        import torch

        with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
            asked = json.load(file)["options"]
        torch.cuda._lazy_call(lambda: _watch(folder, asked))
    except Exception as error:  # somebody else's process goes on without
        complain(error)


def _watch(folder, asked):
    try:
        from .watch import Watch

        watch = Watch(Journal(folder), asked)
    except Exception as error:
        complain(error)
        return
    atexit.register(watch.end)
    from multiprocessing import util

    os.register_at_fork(after_in_child=watch.forked)
    util.register_after_fork(watch, lambda _: None)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits until torch is imported, then leaves; others that wait for it are asked as well, and who only asks whether
    there is one does not import it."""

    def __init__(self, folder):
        self._folder = folder

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        for finder in [one for one in sys.meta_path if one is not self]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run(module)
                _start(self._folder)

            spec.loader.exec_module = exec_module
        return spec
