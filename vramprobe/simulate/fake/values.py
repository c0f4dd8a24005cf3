"""Values beside fake tensors: whole numbers and masks whose values decide what a program runs and how large it is.

In: operators on fake tensors. Out: their results, with the real values of those that follow from known ones: a model
with images counts its patches, cuts them into windows and looks for the images' tokens. Floats have no values here;
none is said to equal a number, so that no image counts as padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_WHOLE = frozenset({torch.bool, torch.int32, torch.int64, torch.uint8})
#: What makes numbers of which nobody knows anything.
_UNKNOWN = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_SIZED_BY_VALUES = torch.Tag.dynamic_output_shape
_NAME = "known_values"  # a fake tensor's attribute: the real tensor that it stands for

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor that a fake one stands for; None where nobody knows its values."""
    return tensor.__dict__.get(_NAME) if isinstance(tensor, FakeTensor) else tensor


def number_of(tensor: torch.Tensor) -> float | None:
    """The number in a fake tensor of one element; None where nobody knows it."""
    known = values_of(tensor)
    if known is None:
        return None
    with no_dispatch():
        return known.item()


def call(plain: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``plain(func, args, kwargs)``, which makes fake results, with the values of those that are known."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    are_known = all(values_of(tensor) is not None for tensor in tensors)
    if _SIZED_BY_VALUES in func.tags and (func is not _aten.index.Tensor or _has_mask(args[1])):
        return _sized(plain, func, args, kwargs, are_known=are_known)
    result = plain(func, args, kwargs)
    if func is _aten.eq.Scalar and args[0].dtype.is_floating_point:
        with no_dispatch():
            result.__dict__[_NAME] = torch.zeros((), dtype=torch.bool).expand(result.shape)
        return result
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
    if not made or any(tensor.dtype not in _WHOLE for tensor in made):
        return result
    if not are_known or func._schema.name in _UNKNOWN:
        for tensor in made:
            tensor.__dict__.pop(_NAME, None)
        return result
    real = [leaf for leaf in tree_leaves(_really(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor, value in zip(made, real, strict=True):
        tensor.__dict__[_NAME] = value
    return result


def _sized(plain: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_known: bool) -> Any:
    """A result, or several, as long as values say: those of the arguments, or of the mask that chooses among floats."""
    if not are_known and func is _aten.index.Tensor:
        with no_dispatch():
            args = (torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), *args[1:])
    real = _really(func, args, kwargs)
    return tree_map_only(torch.Tensor, _fake_like, real)


def _has_mask(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _fake_like(real: torch.Tensor) -> torch.Tensor:
    fake = torch.empty(real.shape, dtype=real.dtype)
    if real.device.type != "meta":
        fake.__dict__[_NAME] = real
    return fake


def _really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(FakeTensor, values_of, (args, kwargs))
    with no_dispatch():
        return func(*args, **kwargs)
