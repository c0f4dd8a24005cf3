"""bitsandbytes on fake tensors: its own layers, kernels and optimizers, with the native library taken out.

In: nothing; :func:`bitsandbytes_on_fake_tensors` is a context. Everything that allocates is bitsandbytes' own Python
code (``backends/<device>/ops.py``), run for its buffers and temporaries; only the native calls that fill them do
nothing. Quantised parameters are stand-ins, because ``Params4bit`` and ``Int8Params`` cannot wrap a fake tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from vramprobe.kernels.chip import Chip


class _StandIn(type):
    """The class of a stand-in's factory: real and standing-in parameters alike are its instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance).__name__ == cls.__name__


class _Fake4bit(FakeTensor):
    """A packed 4-bit weight and its state."""

    quant_state: Any = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: there is one device."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy with a state of its own, as ``Params4bit`` makes it."""
        parameter = nn.Parameter(self.detach().clone(), requires_grad=False)
        parameter.__class__ = _Fake4bit
        parameter.__dict__ |= self.__dict__ | {"quant_state": copy.deepcopy(self.quant_state, memo)}
        return parameter


class _FakeInt8(FakeTensor):
    """An int8 weight and its row scales, as Int8Params holds them until the first forward."""

    CB: Any = None
    SCB: Any = None
    has_fp16_weights = False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: there is one device."""
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


@cache
def kernels(chip: Chip | None) -> dict[str, Callable[..., Any]]:
    """Operator → bitsandbytes' own implementation on a GPU (None: the CPU), where all native calls do nothing.

    From a second copy of its modules, because what is registered with torch cannot be called beneath a mode.
    """
    import bitsandbytes as bnb

    found: dict[str, Callable[..., Any]] = {}

    def register_kernel(name: str, device_types: Any, func: Any = None) -> Any:
        return found.setdefault(name, func) if func else lambda given: found.__setitem__(name, given) or given

    with (
        patch.object(bnb._ops, "register_kernel", register_kernel),
        patch.object(bnb.cextension, "lib", _NoLibrary()),
        patch.object(bnb.functional, "get_ptr", lambda tensor: None),
        patch.object(bnb.functional, "_cuda_device_of", lambda tensor: nullcontext()),
        patch.object(torch, "compile", lambda function, **options: function),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: None, create=True),
    ):
        default = _copy_of("bitsandbytes.backends.default.ops")
        own = _copy_of(f"bitsandbytes.backends.{'cpu' if chip is None else 'cuda'}.ops")
    if chip is not None:
        own._gpu_dispatch_props = lambda index: (chip.num_sms, *chip.capability)
        own.CUBLAS_Context = MagicMock()
        found["bitsandbytes::int8_vectorwise_quant"] = _int8_vectorwise_quant
    for quant_type in ("nf4", "fp4"):  # tables that are made once; made here, they are real and stay so
        default._get_4bit_quantize_bounds(quant_type, torch.device("cpu"))
    return found


def _int8_vectorwise_quant(A: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """``backends/cuda/ops.py`` where no value is an outlier, as hardly one of random weights is."""
    row_stats = torch.empty(A.numel() // A.shape[-1], dtype=torch.float32)
    out_row = torch.empty(A.shape, dtype=torch.int8)
    if threshold <= 0:
        return out_row, row_stats, None
    outliers = A.abs() >= threshold
    outliers.any()
    return out_row, row_stats, torch.empty(0, dtype=torch.int64)


def _copy_of(name: str) -> ModuleType:
    spec = find_spec(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def bitsandbytes_on_fake_tensors(chip: Chip | None, hide: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While open, bitsandbytes' layers and kernels work on fake tensors; paged state is made and hidden.

    ``chip`` None: int8 layers train as on the CPU, which has a product of its own.
    """
    import accelerate
    import bitsandbytes as bnb
    from transformers.integrations import bitsandbytes as integration

    with ExitStack() as stack:
        for owner, name, value in (
            (bnb.nn, "Params4bit", _stand_in(bnb.nn.Params4bit, _Fake4bit, ("quant_state", "bnb_quantized"))),
            (bnb.nn, "Int8Params", _stand_in(bnb.nn.Int8Params, _FakeInt8, ("CB", "SCB"))),
            (bnb.functional, "create_dynamic_map", _made_outside(bnb.functional.create_dynamic_map)),
            (bnb.functional, "name2qmap", {}),
            (FakeTensor, "data_ptr", lambda self: 0),
            (bnb.optim.optimizer.Optimizer8bit, "get_state_buffer", _state_buffer(hide)),
            (accelerate, "init_empty_weights", _real_skeleton(accelerate.init_empty_weights)),
            (integration, "replace_with_bnb_linear", _with_fake_buffers(integration.replace_with_bnb_linear)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if chip is not None:
            stack.enter_context(patch.object(bnb, "matmul", _int8_matmul))
            four_bit_type = _on_the_device(bnb.functional.get_4bit_type)
            stack.enter_context(patch.object(bnb.functional, "get_4bit_type", four_bit_type))
        yield


def _int8_matmul(
    A: torch.Tensor, B: torch.Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
) -> torch.Tensor:
    """``bitsandbytes.matmul`` on a GPU, whose result has its input's dtype; asked on the CPU, it takes the CPU's."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if threshold > 0.0:
        state.threshold = threshold
    return MatMul8bitLt.apply(A, B, out, bias, state)


def _state_buffer(hide: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Optimizer8bit.get_state_buffer`` on a GPU: managed memory, which torch does not count, from 1e5 elements."""

    def buffer(self: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.zeros_like(p, dtype=dtype)
        return hide(made) if self.is_paged and p.numel() >= 1e5 else made

    return buffer


def _on_the_device(get_4bit_type: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The 16 values of a 4-bit type, copied to the device and scaled there: 64 B that each quantised weight keeps."""
    make = _made_outside(get_4bit_type)

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        values = make(*args, **kwargs)
        values.abs().max()
        return values

    return made


def _made_outside(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` with real tensors, as its values are needed to make it, and a fake result."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            made = function(*args, **kwargs)
        return torch.empty_like(made)

    return make


def _real_skeleton(init_empty_weights: Callable[..., Any]) -> Callable[..., Any]:
    """accelerate rebuilds each parameter from its class, which a fake one does not allow; on ``meta`` it can.

    Until it does, parameters are real: memory that nobody touches costs nothing, but zeros (Llama 4's experts, 2.5 GiB
    a layer) would be written.
    """

    @contextmanager
    def build(**options: Any) -> Iterator[None]:
        with _disable_current_modes(), init_empty_weights(**options), patch.object(torch, "zeros", torch.empty):
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
