"""What PyTorch asks of symbolic sizes, answered where the size is a number: without importing sympy (0.5 s).

In: the late module for ``torch.fx.experimental.symbolic_shapes``. Out: stand-ins for the functions that fake tensors
call. Each answers plain numbers, bools and tensors of plain sizes as that file does; anything else loads the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramprobe.simulate.late_modules import LateModule, late_function


def answers_to_numbers(late: LateModule) -> dict[str, Any]:
    """Stand-ins by name; what is not there loads ``late``."""
    functions = {name: late_function(late, name, answer) for name, answer in KNOWN.items()}
    # Fake tensors name it in an ``except``; while the module is late nobody has raised one.
    return functions | {"GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (RuntimeError,), {})}


def _condition(value: Any) -> Any:
    return value if type(value) is bool else NotImplemented


def _size(value: Any) -> Any:
    return value if type(value) is int else NotImplemented


def _size_or(value: Any, fallback: Any = None) -> Any:
    return _size(value)


def _no(value: Any) -> Any:
    return False if type(value) in (bool, int, float) else NotImplemented


def _yes(value: Any) -> Any:
    return True if type(value) in (bool, int, float) else NotImplemented


def _and(*conditions: Any) -> Any:
    return all(conditions) if all(type(one) is bool for one in conditions) else NotImplemented


def _or(*conditions: Any) -> Any:
    return any(conditions) if all(type(one) is bool for one in conditions) else NotImplemented


def _equal(left: Any, right: Any) -> Any:
    if type(left) is type(right) is int:
        return left == right
    if all(isinstance(side, (tuple, list)) and all(type(size) is int for size in side) for side in (left, right)):
        return tuple(left) == tuple(right)
    return NotImplemented


def _bindings(shape_env: Any, value: Any, old_value: Any = None, peek: bool = False) -> Any:
    return None if shape_env is None else NotImplemented


def _no_expressions(value: Any) -> Any:
    return iter(()) if _is_plain(value) else NotImplemented


def _no_symbols(value: Any) -> Any:
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet() if _is_plain(value) else NotImplemented


def _none_within(value: Any) -> Any:
    return False if _is_plain(value) else NotImplemented


def _is_plain(value: Any) -> bool:
    """Whether no symbol can be in it."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if value is None or type(value) in (bool, int, float, str):
        return True
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(type(size) is int for size in (*value.size(), *value.stride(), value.storage_offset()))


#: The functions of torch/fx/experimental/symbolic_shapes.py and what they answer; None: they load it when called.
KNOWN: dict[str, Callable[..., Any] | None] = {
    "_iterate_exprs": _no_expressions,
    "_iterate_nodes": None,
    "compute_unbacked_bindings": _bindings,
    "expect_true": _condition,
    "free_unbacked_symbols": _no_symbols,
    "guard_or_false": _condition,
    "guard_or_true": _condition,
    "guard_size_oblivious": _condition,
    "guarding_hint_or_throw": _size,
    "has_free_symbols": _none_within,
    "has_free_unbacked_symbols": _none_within,
    "has_guarding_hint": _yes,
    "is_nested_int": _no,
    "is_symbolic": _no,
    "optimization_hint": _size_or,
    "statically_known_true": _condition,
    "sym_and": _and,
    "sym_eq": _equal,
    "sym_or": _or,
}
