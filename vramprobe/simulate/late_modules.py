"""Modules that run when something is asked of them: what stands in ``sys.modules`` until then, and how it is loaded.

In: a module's name, and stand-ins for the names that may be asked of it without loading it. Out: a module that loads
itself, whole and in place, at the first other name. What is put off, and why: late_imports.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_loading = threading.RLock()


class LateModule(ModuleType):
    """A module in ``sys.modules`` that has not run yet."""

    _light: tuple[str, ...]  # submodules that can be imported without it
    _stand_ins: dict[str, Any]
    _when_loaded: list[Callable[[], Any]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # asked by who walks over sys.modules; no module's own
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load(self)
        return getattr(self, name)


class _ParentFirst:
    """A finder before all others: to import a part of a late package is to load the package, but for light parts."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, part = name.rpartition(".")
        package = sys.modules.get(parent)
        if not is_late(package) or part in package._light:
            return None
        _load(package)
        return _as_it_is(sys.modules[name]) if name in sys.modules else None


class _Loaded:
    """The loader of what its package has loaded meanwhile: else the import under way would load it a second time."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _as_it_is(module: ModuleType) -> ModuleSpec:
    """A spec that leaves the module alone; for now its own, too, as importlib prefers that (``_find_spec``)."""
    module.__spec__ = ModuleSpec(module.__name__, _Loaded(module), origin=module.__spec__.origin)
    return module.__spec__


def is_late(module: ModuleType | None) -> bool:
    """Whether it has not been loaded yet."""
    return type(module) is LateModule


def put_off_module(name: str, stand_ins: Callable[[LateModule], dict[str, Any]], light: tuple[str, ...] = ()) -> bool:
    """Whether there is a late module for ``name`` now; not where it is loaded already, or not there.

    ``stand_ins``: names that can be asked of it without loading it, which must mean the same. ``light``: its parts that
    can be imported without loading it.
    """
    if name in sys.modules:
        return False
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # nor is its parent there
        return False
    if spec is None:
        return False
    late = module_from_spec(spec)
    late.__class__ = LateModule
    late.__dict__.update({"_light": light, "_when_loaded": []})
    late._stand_ins = stand_ins(late)
    late.__dict__.update(late._stand_ins)
    sys.modules[name] = late
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, late)
    if _ParentFirst not in sys.meta_path:
        sys.meta_path.insert(0, _ParentFirst)
    return True


def _load(late: LateModule) -> None:
    """Run the module's own code in it, its package's first."""
    with _loading, _real_tensors():
        package = sys.modules.get(late.__name__.rpartition(".")[0])
        if is_late(package):
            _load(package)
        if is_late(late):  # its package may have asked for it
            late.__class__ = ModuleType
            for part in (late, *_late_parts(late)):  # its own code must not meet stand-ins
                for name in part._stand_ins:
                    part.__dict__.pop(name, None)
            late.__spec__.loader.exec_module(late)
            for act in late._when_loaded:
                act()


def _late_parts(package: ModuleType) -> list[LateModule]:
    return [part for name, part in sys.modules.items() if name.startswith(f"{package.__name__}.") and is_late(part)]


def _real_tensors() -> AbstractContextManager[None]:
    """In a simulation too: a module may make tensors as it loads, which are nobody's that is simulated."""
    if "torch" not in sys.modules:
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def late_function(late: LateModule, name: str, known: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``late.name``, which loads the module when it is called.

    ``known`` answers without it, or returns NotImplemented.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if known is not None and is_late(late):
            answer = known(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        _load(late)
        return getattr(late, name)(*args, **kwargs)

    call.__name__ = name
    return call


def late_class(late: LateModule, name: str) -> type:
    """``late.name`` for ``isinstance`` alone: while the module is late there is no instance."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return not is_late(late) and isinstance(instance, getattr(late, name))

    return Kind(name, (), {})


def late_object(late: LateModule, name: str) -> type:
    """``late.name`` for objects that are made and handed on: the true one is made when it is asked for something."""

    class Made:
        def __init__(self, *args: Any) -> None:
            self._args = args

        def __getattr__(self, asked: str) -> Any:
            if "_true" not in self.__dict__:
                _load(late)
                self._true = getattr(late, name)(*self._args)
            return getattr(self._true, asked)

    return Made
