"""Adapters of peft on the tape: LoRA and DoRA.

In: the Weights, a layer's name, its input and its base's output. Out: the adapted output. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.quantized import dequantized
from vramprobe.terms.models.weights import Weights
from vramprobe.terms.tape.graph import Value


def adapted(model: Weights, name: str, value: Value, result: Value) -> Value:
    """peft's LoRA forward: ``result + B(A(dropout(x))) * scaling``; its 4-bit layer clones the result first."""
    setup, dtype, quantised = model.setup, result.dtype, model.tensors[f"{name}.weight"].quantised
    rank = model.tensors[f"{name}.lora_A"].shape[0]
    # peft's bitsandbytes layers ask torch.is_autocast_enabled() without a device, which is about CUDA: on the CPU
    # they convert to the adapter's dtype even under autocast.
    converts = not quantised or setup.device == "cpu" or setup.autocast == "none"
    if quantised and setup.quant != "int8":
        result = op.copied(result)
    given = wide = value
    if converts:
        wide = op.cast(value, setup.adapter_input or model.tensors[f"{name}.lora_A"].dtype)
        given = op.cast(wide, model.tensors[f"{name}.lora_A"].dtype)
    if setup.dora:
        result = _with_dora(model, name, given, result)
        return op.cast(result, dtype) if converts or not quantised else result
    low = model.matmul(op.dropout(given, setup.lora_dropout, model.device), f"{name}.lora_A", None, rank)
    if setup.adapter_input:  # FSDP1's own copy
        del given
    out = model.matmul(low, f"{name}.lora_B", None, model.num_out(name))
    del low
    out = op.scaled(out)
    if quantised and converts:
        out = op.cast(out, dtype)
    result = op.add(result, out)
    if not quantised:  # where the update has no name
        del out
    return op.cast(result, dtype)


def _with_dora(model: Weights, name: str, x: Value, result: Value) -> Value:
    """peft's DoraLinearLayer: ``result + (m - 1) * base + m * B(A(x)) * scaling``, ``m`` the magnitude over the
    norm of each row of the adapted weight, which is made anew in each forward, without a gradient.

    Left out: on the CPU a product of two dtypes copies the narrower operand, up to 4 bytes an element of the
    output, which shows where a recomputed bf16 layer is the peak.
    """
    setup, rank, num_out = model.setup, model.tensors[f"{name}.lora_A"].shape[0], model.num_out(name)
    x = op.dropout(x, setup.lora_dropout, model.device)
    weight, *others = _dora_weight(model, name, x.dtype)
    scale = op.divided(model.weight(f"{name}.lora_magnitude_vector"), model.tape.new(num_out, x.dtype))
    low = model.matmul(x, f"{name}.lora_A", None, rank)
    adapted = model.matmul(low, f"{name}.lora_B", None, num_out)
    if setup.lora_dropout:  # the layer's own result is of another input
        dtype = x.dtype if setup.autocast == "none" else setup.autocast
        base = op.linear(op.cast(x, dtype), op.cast(weight, dtype), None, num_out)
    else:
        has_bias = f"{name}.bias" in model.tensors
        base = op.add(result, model.weight(f"{name}.bias")) if has_bias else result
    change = op.mul(op.elementwise(scale), base)
    change = op.add(change, op.scaled(op.mul(scale, adapted)))
    del weight, others  # its variables go
    return op.add(result, change)


def _dora_weight(model: Weights, name: str, dtype: str) -> tuple[Value, ...]:
    """The base weight in ``dtype``, and what else lives as long: B(A(identity)) and what its product saves."""
    tape, tensor, adapter = model.tape, model.tensors[f"{name}.weight"], model.tensors[f"{name}.lora_A"]
    rank, num_in = adapter.shape
    given = model.autocasted(model.weight(f"{name}.lora_A")).dtype
    model.autocasted(model.weight(f"{name}.lora_B"))  # autocast keeps both
    made = tape.new(num_in**2, adapter.dtype)
    identity = op.cast(made, given)
    low, product = tape.new(num_in * rank, given), tape.new(tensor.numel, given)
    del made
    product = op.cast(product, dtype)
    base = dequantized(model, tensor, tensor.dtype)[0] if tensor.quantised else model.weight(f"{name}.weight")
    base = op.cast(base, dtype)
    scaled, total = op.value_like(product), op.value_like(product)
    del scaled, total
    return (base, product) if tape.drops_what_is_saved else (base, product, identity, low)
