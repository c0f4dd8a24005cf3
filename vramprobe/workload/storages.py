"""The tensors that stay: their storages, each once, by address.

In: a live model or optimizer. Out: ``{data_ptr: bytes}``, and each one's card. This is the tensors' own account, to be
held against the allocator's; it never asks the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


class Storages(dict[int, int]):
    """Bytes of each distinct storage by its address; ``cards``: which card each is on, where they are on several."""

    def __init__(self, sizes: Mapping[int, int] | None = None) -> None:
        super().__init__(sizes or {})
        self.cards: dict[int, int] = {}

    def on_card(self, card: int) -> Storages:
        """Those on one card, by the number that torch gives it."""
        return Storages({address: size for address, size in self.items() if self.cards.get(address) == card})

    def __or__(self, other: Any) -> Storages:
        both = Storages({**self, **other})
        both.cards = {**self.cards, **other.cards}
        return both


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """Bytes of each distinct storage behind ``tensors``, by its address; empty ones are left out."""
    found = Storages()
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes():
            address = storage.data_ptr()
            found[address] = storage.nbytes()
            if storage.device.index is not None:
                found.cards[address] = storage.device.index
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor has only this rank's part."""
    return getattr(tensor, "_local_tensor", tensor)


def weight_storages(model: nn.Module) -> Storages:
    """Parameters, buffers, and what bitsandbytes keeps beside a quantised weight (scales, codes, offsets)."""
    return storages_of(weight_tensors(model))


def quantised_storages(model: nn.Module) -> Storages:
    """The part of :func:`weight_storages` that belongs to quantised weights: packed values and their state."""
    return storages_of(tensor for parameter, module in _quantised(model) for tensor in _with_state(parameter, module))


def gradient_storages(model: nn.Module) -> Storages:
    """Every ``.grad`` alive now."""
    return storages_of(gradient_tensors(model))


def gradient_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those of :func:`gradient_storages`, wherever they are."""
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def storages_on(kind: str, tensors: Iterable[torch.Tensor]) -> Storages:
    """Those of ``tensors`` that are on the host (``cpu``) or on the card (``cuda``)."""
    return storages_of(tensor for tensor in map(_local, tensors) if tensor.device.type == kind)


def optimizer_storages(optimizer: torch.optim.Optimizer) -> Storages:
    """Every tensor of the optimizer's state on its parameters' kind of device; empty before its first step.

    Step counters on the host and paged state (managed memory, to torch a CPU tensor) are not the device allocator's.
    """
    kind = optimizer.param_groups[0]["params"][0].device.type
    return storages_of(tensor for tensor in state_tensors(optimizer) if tensor.device.type == kind)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor of the optimizer's state, wherever it is."""
    return _tensors_in(dict(optimizer.state))


def weight_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those of :func:`weight_storages`, wherever they are."""
    yield from model.parameters()
    yield from model.buffers()
    for parameter, module in _quantised(model):
        yield from _with_state(parameter, module)


def _quantised(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Module]]:
    for module in model.modules():
        for parameter in module._parameters.values():  # parameters(recurse=False) takes ten times as long
            if type(parameter).__name__ in ("Params4bit", "Int8Params") or _has_state(parameter, module):
                yield parameter, module


def _has_state(parameter: torch.Tensor, module: nn.Module) -> bool:
    return module.__dict__.get("quant_state") is not None and parameter is module._parameters.get("weight")


def _with_state(parameter: nn.Parameter, module: nn.Module) -> Iterator[torch.Tensor]:
    yield parameter
    # bitsandbytes: Params4bit.quant_state; Int8Params.CB/SCB until the first forward, Linear8bitLt.state afterwards.
    # A layer has the state of its 4-bit weight, too, which is all that knows it once the weight is a shard.
    for owner, names in ((parameter, ("quant_state", "CB", "SCB")), (module, ("state", "quant_state"))):
        yield from _tensors_in([getattr(owner, name, None) for name in names])


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Tensors inside dicts, lists and state objects (bitsandbytes' QuantState, MatmulLtState), each object once."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner, seen)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner, seen)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None), seen)
    elif type(value).__module__.startswith("bitsandbytes"):
        yield from _tensors_in(vars(value), seen)
