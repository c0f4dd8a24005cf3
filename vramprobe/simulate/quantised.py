"""bitsandbytes on fake tensors: its own layers, kernels and optimizers, with the native library taken out.

In: nothing; :func:`bitsandbytes_on_fake_tensors` is a context. Everything that allocates is bitsandbytes' own Python
code (``backends/<device>/ops.py``), run for its buffers and temporaries; only the native calls that fill them do
nothing. Quantised parameters are stand-ins, because ``Params4bit`` and ``Int8Params`` cannot wrap a fake tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


class _StandIn(type):
    """The class of a stand-in's factory: real and standing-in parameters alike are its instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance).__name__ == cls.__name__


class _Fake4bit(FakeTensor):
    """A packed 4-bit weight and its state."""

    quant_state: Any = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _FakeInt8(FakeTensor):
    """An int8 weight and its row scales, as Int8Params holds them until the first forward."""

    CB: Any = None
    SCB: Any = None
    has_fp16_weights = False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


_Fake4bit.__name__, _FakeInt8.__name__ = "Params4bit", "Int8Params"  # by which peft and the workload know them


class _Quantiser:
    """A parameter still in full precision; ``to`` quantises it, with bitsandbytes' own code and its temporaries."""

    _fake_class: type
    _made: tuple[str, ...]

    def __init__(self, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> None:
        self._options = options
        self.__dict__ |= options | {"data": data}

    def to(self, device: Any) -> nn.Parameter:
        """The quantised parameter, fake."""
        self._quantize(device)
        parameter = nn.Parameter(self.data, requires_grad=False)
        parameter.__class__ = self._fake_class
        for name in (*self._options, *self._made):
            setattr(parameter, name, getattr(self, name))
        return parameter


def _stand_in(real: type, fake: type, made: tuple[str, ...]) -> type:
    """A class that is called as ``real`` is, quantises as it does, and leaves a ``fake`` parameter."""
    body = {"_quantize": real._quantize, "_fake_class": fake, "_made": made, "has_fp16_weights": False}
    return _StandIn(real.__name__, (_Quantiser,), body)


class _NoLibrary:
    """bitsandbytes' native library with every function doing nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@contextmanager
def bitsandbytes_on_fake_tensors() -> Iterator[None]:
    """While open, bitsandbytes' layers and kernels work on fake tensors."""
    import accelerate
    import bitsandbytes as bnb
    from bitsandbytes.backends import utils as backend
    from bitsandbytes.backends.cpu import ops as cpu_ops
    from bitsandbytes.backends.default import ops as default_ops
    from transformers.integrations import bitsandbytes as integration

    for quant_type in ("nf4", "fp4"):  # tables that it makes once; made here, they are real and stay so
        default_ops._get_4bit_quantize_bounds(quant_type, torch.device("cpu"))
        backend._get_4bit_code(quant_type, torch.device("cpu"))
    maps = {"dynamic": bnb.functional.create_dynamic_map()}
    with ExitStack() as stack:
        for owner, name, value in (
            (bnb.nn, "Params4bit", _stand_in(bnb.nn.Params4bit, _Fake4bit, ("quant_state", "bnb_quantized"))),
            (bnb.nn, "Int8Params", _stand_in(bnb.nn.Int8Params, _FakeInt8, ("CB", "SCB"))),
            (cpu_ops, "lib", _NoLibrary()),
            (cpu_ops, "get_ptr", lambda tensor: None),
            (bnb.functional, "create_dynamic_map", _made_outside(bnb.functional.create_dynamic_map)),
            (bnb.functional, "name2qmap", maps),
            (accelerate, "init_empty_weights", _real_skeleton(accelerate.init_empty_weights)),
            (integration, "replace_with_bnb_linear", _with_fake_buffers(integration.replace_with_bnb_linear)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _made_outside(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` with real tensors, as its values are needed to make it, and a fake result."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            made = function(*args, **kwargs)
        return torch.empty_like(made)

    return make


def _real_skeleton(init_empty_weights: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate rebuilds each parameter from its class, which a fake one does not allow; on ``meta`` it need not be."""

    @contextmanager
    def build(**options: Any) -> Iterator[None]:
        with _disable_current_modes(), init_empty_weights(**options):
            yield

    return build


def _with_fake_buffers(replace_with_bnb_linear: Callable[..., Any]) -> Callable[..., Any]:
    """The model with bitsandbytes' layers, and with buffers that count."""

    def replace(model: nn.Module, *args: Any) -> nn.Module:
        with _disable_current_modes():
            model = replace_with_bnb_linear(model, *args)
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = torch.empty_like(buffer)
        return model

    return replace
