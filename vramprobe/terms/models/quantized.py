"""Linear layers of bitsandbytes on the tape, in 4 and in 8 bits.

In: the Weights, a layer's name, its input, its weight. Out: the layer's output, and a backward that makes the weight
whole once more. Never imports torch.
"""

from __future__ import annotations

from vramprobe.bounds.tensors import DOUBLE_QUANTISED, NF4_BLOCK, Tensor
from vramprobe.terms.models import operators as op
from vramprobe.terms.models.weights import Weights
from vramprobe.terms.tape.graph import Value


def linear(model: Weights, name: str, value: Value, tensor: Tensor) -> Value:
    """bitsandbytes: dequantise the whole weight, multiply, save nothing for 4 bit and the input for 8 bit."""
    tape, eight_bit, autocast = model.tape, model.setup.quant == "int8", model.setup.autocast
    if eight_bit and model.device == "cuda":
        return _in_8_bit(model, name, value, tensor)
    model.weight(f"{name}.weight")  # is in use
    given = value if eight_bit else op.cast(value, tensor.dtype)
    num_out, numel, before = model.num_out(name), given.numel, given.dtype
    whole = dequantized(model, tensor, given.dtype, is_forward=True)
    # The product is an F.linear within bitsandbytes' own: autocast casts what is wider, the whole weight included.
    out_dtype = autocast if autocast != "none" else given.dtype
    narrow = _cast_operands(model, name, numel, tensor.numel, given.dtype, out_dtype)
    out = tape.new(numel // (tensor.numel // num_out) * num_out, out_dtype)
    tape.multiplied()
    del whole, narrow

    def backward(grads: list[Value]) -> list[Value | None]:
        weight = dequantized(model, tensor, grads[0].dtype)[0]  # here the scales go before the product
        made = tape.new(numel, grads[0].dtype)
        tape.multiplied()
        del weight
        return [op.cast(made, before)]

    # MatMul8bitFp and MatMul8bitLt keep the input as an attribute of ctx, not by save_for_backward: a checkpoint
    # cannot drop it, nor does its own backward.
    tape.record([given], [out], [], backward, kept=[given] if eight_bit else [])
    return out if eight_bit else op.cast(out, value.dtype)


def _in_8_bit(model: Weights, name: str, value: Value, tensor: Tensor) -> Value:
    """bitsandbytes' MatMul8bitLt, in integers: the input in 8 bits, its outliers looked for, the product in int32,
    then fp16, then the input's dtype. Its backward makes the weight whole in that. Left out: outliers' own product.
    """
    tape, numel, dtype = model.tape, value.numel, value.dtype
    num_rows = numel // (tensor.numel // model.num_out(name))
    num_results = num_rows * model.num_out(name)
    narrow = None if dtype == "fp16" else tape.new(numel, "fp16")
    scales, codes = tape.new(num_rows, "fp32"), tape.new(numel, "int8")
    magnitudes = tape.new(numel, "fp16")
    outliers = tape.new(numel, "bool")
    del magnitudes
    del outliers, narrow
    sums = tape.new(num_results, "int32")
    out = tape.new(num_results, "fp16")
    out = out if dtype == "fp16" else tape.new(num_results, dtype)
    del sums, scales, codes

    def backward(grads: list[Value]) -> list[Value | None]:
        weight = tape.new(tensor.numel, dtype, "dequantisation")
        made = tape.new(numel, dtype)
        tape.multiplied()
        del weight
        return [made]

    tape.record([value], [out], [], backward, kept=[value])  # an attribute of ctx, which no checkpoint drops
    return out


def _cast_operands(
    model: Weights, name: str, num_in: int, num_weight: int, before: str, after: str
) -> tuple[Value, ...]:
    """Autocast's copies of input, dequantised weight and bias, alive for the product alone."""
    if before == after:
        return ()
    bias = model.tensors.get(f"{name}.bias")
    sizes = [*([bias.numel] if bias is not None else []), num_weight, num_in]  # as g++ evaluates arguments
    return tuple([model.tape.new(size, after, "dequantisation") for size in sizes])


def dequantized(model: Weights, tensor: Tensor, dtype: str, *, is_forward: bool = False) -> tuple[Value, ...]:
    """The whole weight in this dtype; under double quantisation its fp32 scales are rebuilt first.

    4 bit: ``dequantize_4bit(B, state).to(dtype)``, by way of the dtype that the weight was quantised from. On CUDA
    forward has ``gemm_4bit``, which adds the offset to a copy of the scales and holds both (bitsandbytes 0.50,
    backends/cuda/ops.py, ``_dequant_linear_fallback``; left out: the fused kernel that takes few tokens).
    """
    tape, cause = model.tape, "dequantisation"
    if model.setup.quant != "int8" and dtype != tensor.dtype:
        whole = dequantized(model, tensor, tensor.dtype)[0]
        copy = tape.new(tensor.numel, dtype, cause)
        del whole
        return (copy,)
    if model.setup.quant not in DOUBLE_QUANTISED:
        return (tape.new(tensor.numel, dtype, cause),)
    num_scales = -(-tensor.numel // NF4_BLOCK)
    scales = tape.new(num_scales, "fp32", cause)
    if model.device == "cpu":
        scales = tape.new(num_scales, "fp32", cause)  # plus the offset, which CUDA's adds in place in backward
    shifted = tape.new(num_scales, "fp32", cause) if is_forward and model.device == "cuda" else None
    whole = tape.new(tensor.numel, dtype, cause)
    return (whole, scales) if shifted is None else (whole, scales, shifted)
