"""CUDA's view: what a GPU runs and allocates otherwise than the CPU, in one place, each with its source.

In: the chip. Out: a context in which fake CPU tensors go the way of CUDA tensors. Paths are of pytorch's sources unless
they name another package. None of it was measured on a GPU yet: each is a claim that ``against_snapshot`` can test.
Left out: the second 16-bit copy of an int8 weight while it is loaded. Which attention runs: kernels/attention.py; what
kernels allocate while they run: scratch.py.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from vramprobe.catalog import Gpu
from vramprobe.errors import SpecError
from vramprobe.kernels.attention import Kernel, chosen
from vramprobe.kernels.chip import Chip

_aten = torch.ops.aten

# -- the chip ----------------------------------------------------------------------------------------------------------


def chip_of(gpu: Gpu | None) -> Chip:
    """The catalog's GPU; an A100 where none is named. Raises SpecError for one that is not NVIDIA's."""
    if gpu is None:
        return Chip()
    if gpu.capability is None or gpu.num_sms is None:
        raise SpecError(f"{gpu.name} runs ROCm's kernels, and the simulation knows CUDA's only; name an NVIDIA GPU")
    return Chip(gpu.capability, gpu.num_sms)


# -- the context -------------------------------------------------------------------------------------------------------

#: The modules of multi-tensor optimizers, whose default is ``foreach`` on CUDA (torch/optim/optimizer.py).
_FOREACH = [
    module
    for name, module in sys.modules.items()
    if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach")
]


@contextmanager
def on_cuda(chip: Chip) -> Iterator[None]:
    """While open, torch's functions choose as on ``chip``, autocast casts as CUDA's, and flash-attn is there."""
    with ExitStack() as stack:
        for module in _FOREACH:
            stack.enter_context(patch.object(module, "_default_to_fused_or_foreach", lambda *args, **kw: (False, True)))
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", _attention_of(chip)))
        stack.enter_context(patch.object(functional, "dropout", _dropout))
        stack.enter_context(_cuda_autocast())
        stack.enter_context(_flash_attn(chip))
        if "peft" in sys.modules:
            from peft.tuners.lora import layer

            stack.enter_context(patch.object(layer.Linear, "get_delta_weight", _delta_weight))
        yield


def _delta_weight(layer: Any, adapter: str) -> torch.Tensor:
    """peft's ``Linear.get_delta_weight`` (an adapted router's), which goes by way of fp32 on the CPU alone."""
    product = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
    return (product.T if layer.fan_in_fan_out else product) * layer.scaling[adapter]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One fused kernel with a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    if not training or not 0 < p < 1:
        return input
    return torch.native_dropout(input, p, True)[0]


# -- autocast ----------------------------------------------------------------------------------------------------------

#: Run in fp32 under CUDA's autocast but not under the CPU's (aten/src/ATen/autocast_mode.h, ``AT_FORALL_FP32``).
_FP32 = (
    "exp",
    "log",
    "reciprocal",
    "rsqrt",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "logsumexp",
    "renorm",
)
#: The same, where no result's dtype was asked for (``AT_FORALL_FP32_SET_OPT_DTYPE``).
_FP32_UNLESS_TOLD = ("softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm")


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in (*_FP32, *_FP32_UNLESS_TOLD):
            library.impl(name, _in_fp32(name, unless_told=name in _FP32_UNLESS_TOLD), "AutocastCPU")
        # In fp32 under the CPU's alone; on CUDA its log_softmax stays in 16 bits, and nll_loss casts (LossNLL.cpp).
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes the place of another
            library.impl("cross_entropy_loss", torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


def _in_fp32(name: str, *, unless_told: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")
    positions = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            cast = [value.float() if is_16_bit(value) else value for value in reversed(args)]  # as g++ evaluates them
            return operator(*reversed(cast), **kwargs)

    def tell(*args: Any, **kwargs: Any) -> Any:
        kwargs = dict(zip(positions, args, strict=False)) | kwargs
        if kwargs.get("dtype") is None and is_16_bit(args[0]):
            kwargs["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(kwargs.pop("self"), **kwargs)

    return tell if unless_told else cast


def dtype_name(tensor: torch.Tensor) -> str:
    """As the table of kernels writes it."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(tensor.dtype, "fp32")


def is_16_bit(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention_of(chip: Chip) -> Callable[..., torch.Tensor]:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """aten/src/ATen/native/transformers/attention.cpp, ``scaled_dot_product_attention``."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
            value, key, query = value.to(dtype), key.to(dtype), query.to(dtype)  # as g++ evaluates arguments
            # The math path's own products are not cast again (aten/src/ATen/autocast_mode.h, ``WrapFunction_``).
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        kernel = backend(chip, query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # ``convert_boolean_attn_mask``
            attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
        match kernel:
            case "cudnn":
                bias = None if attn_mask is None else _bias_of(attn_mask, query)
                return _aten._scaled_dot_product_cudnn_attention(
                    query, key, value, bias, True, dropout_p, is_causal, scale=scale
                )[0]
            case "flash":
                return _flash(query, key, value, dropout_p, is_causal, scale)
            case "efficient":
                bias = None if attn_mask is None else _bias_of(attn_mask, query)
                return _aten._scaled_dot_product_efficient_attention(
                    query, key, value, bias, True, dropout_p, is_causal, scale=scale
                )[0]
            case _:
                return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """torch's own steps; the Recorder knows by this frame that the mask is added in place, but never under a mode."""
    return torch._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def backend(
    chip: Chip,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    *,
    enable_gqa: bool = True,
) -> Kernel:
    """The kernel that torch chooses (kernels/attention.py).

    Without ``enable_gqa`` none but the math path takes fewer heads of keys than of queries: Falcon's one.
    """
    is_grouped = query.shape[-3] != key.shape[-3]
    if is_grouped and not enable_gqa:
        return "math"
    return chosen(
        chip,
        query.shape[-1],
        value.shape[-1],
        dtype_name(query),
        is_grouped=is_grouped,
        has_mask=mask is not None,
        dropout=dropout,
        learns_mask=mask is not None and mask.requires_grad,
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash with heads padded to a multiple of 8 (attention.cpp, ``pad_last_dim``)."""
    size = query.shape[-1]
    missing = -size % 8
    if missing:
        query, key, value = (functional.pad(tensor, [0, missing]) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=size**-0.5 if scale is None else scale
    )[0]
    return out[..., :size] if missing else out


def _bias_of(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask as it is added: rows padded to 16 elements, one for all heads (attention.cpp)."""
    if missing := -mask.shape[-1] % 16:
        mask = functional.pad(mask, [0, missing])[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``_safe_softmax`` of attention.cpp, which fake tensors take for one kernel: rows that are masked whole are 0."""
    out = torch.softmax(input, dim, dtype=dtype)
    masked = input == float("-inf")
    masked_rows = torch.all(masked, dim, keepdim=True)
    return torch.where(masked_rows, torch.scalar_tensor(0.0, dtype=out.dtype), out, out=out)


def native_layer_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``layer_norm_cuda`` (cuda/layer_norm_kernel.cu): mean and deviation are of the accumulation's dtype, fp32."""
    kept = input.dim() - len(normalized_shape)
    shape = [*input.shape[:kept], *[1] * len(normalized_shape)]
    whole = input.contiguous()  # a copy of patches as a convolution leaves them, which goes with this call
    out = torch.empty_like(whole)
    statistics = [torch.empty(shape, dtype=torch.float32 if is_16_bit(input) else input.dtype) for _ in range(2)]
    return (out, *statistics)


#: Operators that do otherwise on a GPU than fake CPU tensors say, as Python.
KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_safe_softmax": safe_softmax,
    "aten::native_layer_norm": native_layer_norm,
}


@contextmanager
def _flash_attn(chip: Chip) -> Iterator[None]:
    """The flash-attn package for transformers: its kernels are torch's, but take tokens before heads.

    Asked for where it would not run, it raises SpecError.
    """
    from transformers import modeling_flash_attention_utils as utils
    from transformers import modeling_utils

    def can_dispatch(model: Any, *args: Any, **kwargs: Any) -> bool:
        """``_flash_attn_can_dispatch`` less its search for the package and a device."""
        if not model._supports_flash_attn:
            raise SpecError(f"no flash_attention_2 for {model.config.model_type}; use attn sdpa or eager")
        if chip.capability < (8, 0):
            raise SpecError("flash_attention_2 needs an Ampere GPU or a newer one; use attn sdpa or eager")
        return True

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> torch.Tensor:
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return _flash(*heads_first, dropout_p, causal, softmax_scale).transpose(1, 2)

    def padded(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a cell has no padding")

    functions = (flash_attn_func, flash_attn_func, None, padded, padded)
    with (
        patch.object(modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch),
        patch.object(utils, "_lazy_imports", lambda *args, **kwargs: functions),
        patch.object(utils, "_loaded_implementation", None),
        patch.object(utils, "_is_packed_sequence", lambda *args, **kwargs: False),
    ):
        yield
