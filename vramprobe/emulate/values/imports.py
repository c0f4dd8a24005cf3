"""Run an action as soon as a module is imported, by any code; put a function in the place of one of its own.

In: a module's name and an action. Out: nothing until then. Others that wait for the same module have their turn; who
only asks whether there is one (``find_spec``) does not import it.
"""

import functools
import importlib.abc
import inspect
import sys


def when_imported(name, act):
    """``act(module)`` as soon as the module ``name`` has run, at once where it has."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


def instead_of(owner, name):
    """Decorate a function that is called in the place of ``owner.name``, a function or a method, with the original
    before the arguments."""
    found = getattr(owner, name)
    original = found.__func__ if inspect.ismethod(found) else found

    def put(act):
        @functools.wraps(original)
        def instead(*args, **kwargs):
            return act(original, *args, **kwargs)

        setattr(owner, name, classmethod(instead) if inspect.ismethod(found) else instead)
        return instead

    return put


class _Waiting(importlib.abc.MetaPathFinder):
    """Before all other finders; the module's spec is theirs."""

    def __init__(self, name, act):
        self._name, self._act = name, act

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in self._later())), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run(module)
                self._act(module)

            spec.loader.exec_module = exec_module
        return spec

    def _later(self):
        return [one for one in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(one, "find_spec")]
