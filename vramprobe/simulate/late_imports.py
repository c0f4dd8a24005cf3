"""What libraries import and a simulation never runs is loaded when somebody asks for it: half of a cold start.

In: nothing; :func:`put_off` and :func:`compile_late` stand before the imports. Out: modules that load themselves, whole
and in place, at the first name that is asked of them; so a process that simulates may compile and measure afterwards.
Only a simulation does this: a worker that measures imports what its libraries import. Changes nothing of what runs.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

_loading = threading.RLock()


class _Late(ModuleType):
    """A module in ``sys.modules`` that has not run yet."""

    _light: tuple[str, ...]  # submodules that can be imported without it
    _stand_ins: dict[str, Any]
    _when_loaded: list[Callable[[], Any]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever walks over sys.modules, and no module's own
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
    return type(module) is _Late


def put_off() -> None:
    """Put off PyTorch's compiler (2 s, with sympy) and scipy's optimizers (0.4 s), where they are not loaded yet.

    The compiler is imported by transformers' masks, by every optimizer's step and by fake tensors, for words that do
    nothing while nothing is compiled; scipy's by a loss for object detection.
    """
    if _put_off("torch._dynamo", _words_of_the_compiler, light=("config", "source", "_trace_wrapped_higher_order_op")):
        _put_off("torch._dynamo.source", lambda late: {
            "RandomValueSource": _late_class(late, "RandomValueSource"),
            "ConstantSource": _late_object(late, "ConstantSource"), "AttrSource": _late_object(late, "AttrSource"),
        })  # fmt: skip
    _put_off("scipy.optimize", lambda late: {"linear_sum_assignment": _late_function(late, "linear_sum_assignment")})


@contextmanager
def compile_late() -> Iterator[None]:
    """While open, a function given to ``torch.compile`` is compiled when it is first called; bitsandbytes has four."""
    import torch

    compile_now = torch.compile

    def compile_at_first_call(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))
        return functools.wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with patch.object(torch, "compile", compile_at_first_call):
        yield


def _put_off(name: str, stand_ins: Callable[[_Late], dict[str, Any]], light: tuple[str, ...] = ()) -> bool:
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
    late.__class__ = _Late
    late.__dict__.update({"_light": light, "_when_loaded": []})
    late._stand_ins = stand_ins(late)
    late.__dict__.update(late._stand_ins)
    sys.modules[name] = late
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, late)
    if _ParentFirst not in sys.meta_path:
        sys.meta_path.insert(0, _ParentFirst)
    return True


def _load(late: _Late) -> None:
    """Run the module's own code in it, its package's first."""
    with _loading, _real_tensors():
        package = sys.modules[late.__name__.rpartition(".")[0]]
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


def _late_parts(package: ModuleType) -> list[_Late]:
    return [part for name, part in sys.modules.items() if name.startswith(f"{package.__name__}.") and is_late(part)]


def _real_tensors() -> AbstractContextManager[None]:
    """In a simulation too: a module may make tensors as it loads, which are nobody's that is simulated."""
    if "torch" not in sys.modules:
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _late_function(late: _Late, name: str) -> Callable[..., Any]:
    """``late.name``, which loads the module when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _load(late)
        return getattr(late, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _late_class(late: _Late, name: str) -> type:
    """``late.name`` for ``isinstance`` alone: while the module is late there is no instance."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return not is_late(late) and isinstance(instance, getattr(late, name))

    return Kind(name, (), {})


def _late_object(late: _Late, name: str) -> type:
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


def _words_of_the_compiler(late: _Late) -> dict[str, Any]:
    """What says to ``torch.compile`` how to go about a function; until that is loaded there is nobody to tell.

    torch/_dynamo/decorators.py. The two that mark a function do so as soon as the compiler is there.
    """

    def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
        if fn is None:
            return lambda given: disable(given, *args, **options)
        disabled = functools.cache(lambda: late.disable(fn, *args, **options))

        @functools.wraps(fn)
        def call(*words: Any, **named: Any) -> Any:
            return (fn if is_late(late) else disabled())(*words, **named)

        return call

    def mark(name: str) -> Callable[[Any], Any]:
        def marked(fn: Any) -> Any:
            late._when_loaded.append(lambda: getattr(late, name)(fn))
            return fn

        return marked

    return {
        "disable": disable, "graph_break": lambda msg="": None,
        "allow_in_graph": mark("allow_in_graph"), "assume_constant_result": mark("assume_constant_result"),
    }  # fmt: skip
