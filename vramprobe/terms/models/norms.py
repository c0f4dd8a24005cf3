"""The norms on the tape, line by line as transformers and torch write them.

In: Values. Out: Values of the same size. Where the CPU's and CUDA's kernels differ, the function asks ``device`` and
says so. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models.operators import cast, copied, elementwise, mean_of_rows, mul, power, value_like
from vramprobe.terms.tape.graph import Value


def rms_norm(value: Value, weight: Value, num_rows: int) -> Value:
    """transformers' LlamaRMSNorm line by line: fp32 inside, the input's dtype outside."""
    normed, *held = _normalised(value, num_rows)
    out = mul(weight, cast(normed, value.dtype))
    del normed, held  # its variables go as it returns
    return out


def rms_norm_weighted_in_fp32(value: Value, weight: Value, num_rows: int) -> Value:
    """OLMo 2's: the weight is multiplied before the way back to the input's dtype."""
    normed, *held = _normalised(value, num_rows)
    out = cast(mul(weight, normed), value.dtype)
    del normed, held
    return out


def rms_norm_around_one(value: Value, weight: Value, num_rows: int) -> Value:
    """Gemma's: ``(x * (1 + weight.float())).type_as(x)``, the weight counted from 1."""
    hidden = _normalised(value, num_rows)[0]
    hidden = mul(hidden, copied(cast(weight, "fp32")))
    return cast(hidden, value.dtype)


def _normalised(value: Value, num_rows: int) -> tuple[Value, Value]:
    """(the rows in fp32, each over its root mean square, their mean squares)."""
    hidden = cast(value, "fp32")
    variance = mean_of_rows(power(hidden), num_rows)
    return mul(hidden, elementwise(copied(variance), saves="output"), by_row=True), variance


def layer_norm(value: Value, weight: Value, bias: Value, num_rows: int, device: str, autocast: str) -> Value:
    """``nn.LayerNorm``: saves its input, weight, bias and the rows' mean and inverse deviation.

    CUDA keeps the statistics in fp32 and, under autocast, computes and returns fp32 (autocast_mode.cpp); the CPU keeps
    them in the input's dtype, or fp32 where the weight is fp32 and the input is not (layer_norm_kernel.cpp).
    """
    if device == "cuda" and autocast != "none" and not value.dtype == weight.dtype == "fp32":
        return layer_norm(cast(value, "fp32"), cast(weight, "fp32"), cast(bias, "fp32"), num_rows, device, autocast)
    tape = value.tape
    mixed = weight.dtype != value.dtype
    stat_dtype = "fp32" if device == "cuda" or mixed else value.dtype
    out = tape.new_like(value)
    mean, deviation = tape.new(num_rows, stat_dtype), tape.new(num_rows, stat_dtype)
    needs, trained, width, weight_dtype = value.needs_grad, weight.needs_grad, weight.numel, weight.dtype

    def backward(grads: list[Value]) -> list[Value | None]:
        grad = value_like(grads[0]) if needs else None
        sides = [tape.new(width, weight_dtype) if trained else None for _ in range(2)]
        return [grad, *sides]

    tape.record([value, weight, bias], [out], [value, weight, bias, mean, deviation], backward)
    return out
