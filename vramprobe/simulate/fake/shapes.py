"""A short way for an operator on fake tensors that has been seen before: the same shapes in, the same shapes out.

In: an operator and its arguments. Out: its result, made without asking torch what it would be. FakeTensorMode has
such a cache of its own, which asks far more of each call; a simulation makes the same few hundred calls over and over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CPU = torch.device("cpu")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: These change what a tensor is, or depend on values.
_NEVER = frozenset({"aten::set_", "aten::resize_", "aten::lift_fresh", "aten::lift", "aten::resize_as_", "aten::copy"})
_DEPENDS_ON_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _NotPlain(Exception):
    """An argument whose part in the result is not known."""


class ShapeCache:
    """Calls operators; remembers what came out of which shapes and, of views and in-place operators, which argument."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._allowed: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``."""
        tensors: list[FakeTensor] = []
        try:
            key = (id(func), _key(args, tensors), _key(tuple(kwargs.items()), tensors))
        except _NotPlain:
            return func(*args, **kwargs)
        plan = self._known.get(key)
        if plan is not None and tensors:
            return _rebuilt(plan, tensors)
        result = func(*args, **kwargs)
        if tensors and self._may_be_kept(func) and _key(args, []) == key[1]:
            try:
                self._known[key] = _plan(result, tensors)
            except _NotPlain:
                self._allowed[func] = False
        return result

    def _may_be_kept(self, func: Any) -> bool:
        allowed = self._allowed.get(func)
        if allowed is None:
            allowed = func._schema.name not in _NEVER and _DEPENDS_ON_VALUES.isdisjoint(func.tags)
            self._allowed[func] = allowed
        return allowed


def _key(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """What decides the shapes of a result; ``tensors`` gets the tensors in ``values``, in order."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_device != _CPU:
                raise _NotPlain
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value, tensors))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        else:
            raise _NotPlain
    return tuple(parts)


def _plan(result: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """How to make ``result`` again from other tensors of the same shapes."""
    if result is None:
        return ("none",)
    if isinstance(result, (tuple, list)):
        return ("many", type(result), [_plan(item, tensors) for item in result])
    if type(result) is not FakeTensor and not any(result is tensor for tensor in tensors):
        raise _NotPlain
    for position, tensor in enumerate(tensors):
        if result is tensor:
            return ("argument", position)
    shape = (result.shape, result.stride(), result.dtype, result.storage_offset())
    storage = result.untyped_storage()._cdata
    for position, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage:
            return ("view", position, *shape)
    if result.fake_device != _CPU or result.storage_offset():
        raise _NotPlain
    return ("new", *shape)


def _rebuilt(plan: tuple[Any, ...], tensors: list[FakeTensor]) -> Any:
    match plan:
        case ("argument", position):
            return tensors[position]
        case ("new", size, stride, dtype, _):
            with torch._C._DisableTorchDispatch():
                bare = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            return FakeTensor(tensors[0].fake_mode, bare, _CPU)
        case ("view", position, size, stride, dtype, offset):
            source = tensors[position]
            with torch._C._DisableTorchDispatch():
                bare = torch.empty(0, dtype=dtype, device="meta")
                bare.set_(source.untyped_storage(), offset, size, stride)
            return FakeTensor(source.fake_mode, bare, _CPU)
        case ("many", kind, plans):
            return kind(_rebuilt(one, tensors) for one in plans)
        case _:
            return None
