"""Checkpoints that are quantised already: the tensors that each format keeps in the place of a linear layer's weight.

In: the tensors of a model, a config's ``quantization_config``. Out: the tensors of the checkpoint, by name. Shapes as
the formats' own packages save them: AutoAWQ's and GPTQModel's packed int32, compressed-tensors, the fp8 of DeepSeek and
Qwen, bitsandbytes' 4-bit state, gpt-oss's MXFP4.
"""

import json
import math
import re

_NAMES = ("embed", "lm_head", "wte", "wpe", "router", "mlp.gate.weight", "shared_expert_gate")  # linear only by shape


def why_not(config):
    """Return why there are no empty files for a quantization_config, in one line; None where there are."""
    try:
        _format(config)
    except UnknownFormat as error:
        return str(error)
    return None


class UnknownFormat(Exception):
    """A format that this module has no shapes for."""


def packed(tensors, config, dtype):
    """``tensors`` as the checkpoint has them: name → tensor without memory, or the bytes of one that must be right."""
    import torch

    layout, found = _format(config) if config else None, {}
    kept, skipped = getattr(torch, dtype), _skipped(config)
    for name, tensor in tensors.items():
        if layout is None or not _is_quantised(name, tensor, skipped, config["quant_method"]):
            found[name] = tensor.to(kept) if tensor.is_floating_point() else tensor
            continue
        base = name.removesuffix("weight")
        found.update({base + end: one for end, one in layout(tensor, config, kept).items()})
    return found


def _skipped(config):
    """The layers that a config leaves as they are: names, ends of names, patterns after "re:"."""
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules"):
        if config.get(key):
            return config[key]
    return []


def _is_quantised(name, tensor, skipped, method):
    if method == "mxfp4":
        return tensor.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))
    if tensor.dim() != 2 or not name.endswith(".weight") or any(part in name for part in _NAMES):
        return False
    module = name.removesuffix(".weight")
    return not any(
        re.match(one[3:], module) if one.startswith("re:") else one == module or f".{one}." in f".{module}."
        for one in skipped
    )


def _format(config):
    """The function from a weight to what a format keeps of it. Raises UnknownFormat."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        form = config.get("format")
        layouts = {
            "int-quantized": _compressed, "float-quantized": _compressed, "naive-quantized": _compressed,
            "pack-quantized": _compressed_packed, "nvfp4-pack-quantized": _compressed_nvfp4,
        }  # fmt: skip
        if form not in layouts or len(config.get("config_groups", {})) != 1:
            raise UnknownFormat(f"compressed-tensors, format {form!r} in {len(config.get('config_groups', {}))} groups")
        return layouts[form]
    if method == "bitsandbytes" and not config.get("load_in_4bit"):
        raise UnknownFormat("bitsandbytes in 8 bits")
    layouts = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4}
    if method not in layouts:
        raise UnknownFormat(str(method or "quantised"))
    return layouts[method]


def _empty(dtype, *shape):
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device="meta")


def _groups(inputs, config):
    size = config.get("group_size", config.get("q_group_size", 128))
    return 1 if size in (-1, None) else math.ceil(inputs / size)


def _blocks(weight, block):
    return math.ceil(weight.shape[0] / block[0]), math.ceil(weight.shape[1] / block[1])


def _awq(weight, config, kept):
    outputs, inputs = weight.shape
    words, groups = outputs * config.get("bits", config.get("w_bit", 4)) // 32, _groups(inputs, config)
    return {
        "qweight": _empty("int32", inputs, words),
        "qzeros": _empty("int32", groups, words),
        "scales": _empty("float16", groups, outputs),
    }


def _gptq(weight, config, kept):
    outputs, inputs = weight.shape
    bits, groups = config["bits"], _groups(inputs, config)
    return {
        "qweight": _empty("int32", inputs * bits // 32, outputs),
        "qzeros": _empty("int32", groups, outputs * bits // 32),
        "scales": _empty("float16", groups, outputs),
        "g_idx": _empty("int32", inputs),
    }


def _fp8(weight, config, kept):
    outputs, inputs = weight.shape
    block = config.get("weight_block_size")
    found = {"weight": _empty("float8_e4m3fn", outputs, inputs)}
    if block:
        return {**found, "weight_scale_inv": _empty("float32", *_blocks(weight, block))}
    found["weight_scale"] = _empty("float32")
    return {**found, "input_scale": _empty("float32")} if config.get("activation_scheme") == "static" else found


def _compressed(weight, config, kept):
    outputs, inputs = weight.shape
    (group,) = config["config_groups"].values()
    scheme = group["weights"]
    rows = {"channel": (outputs, 1), "tensor": (1,)}.get(scheme["strategy"])
    if scheme["strategy"] == "block":
        rows = _blocks(weight, scheme["block_structure"])
    found = {
        "weight": _empty("int8" if scheme["type"] == "int" else "float8_e4m3fn", outputs, inputs),
        "weight_scale": _empty(kept, *(rows or (outputs, _groups(inputs, scheme)))),
    }
    activations = group.get("input_activations")
    return {**found, "input_scale": _empty(kept, 1)} if activations and not activations.get("dynamic") else found


def _compressed_packed(weight, config, kept):
    outputs, inputs = weight.shape
    (group,) = config["config_groups"].values()
    scheme = group["weights"]
    return {
        "weight_packed": _empty("int32", outputs, math.ceil(inputs * scheme["num_bits"] / 32)),
        "weight_scale": _empty(kept, outputs, 1 if scheme["strategy"] == "channel" else _groups(inputs, scheme)),
        "weight_shape": _empty("int64", 2),
    }


def _compressed_nvfp4(weight, config, kept):
    outputs, inputs = weight.shape
    return {
        "weight_packed": _empty("uint8", outputs, inputs // 2),
        "weight_scale": _empty("float8_e4m3fn", outputs, inputs // 16),
        "weight_global_scale": _empty("float32", 1),
        "input_global_scale": _empty("float32", 1),
    }


def _bitsandbytes(weight, config, kept):
    """Blocks of 64 values; with double quantization their scales in blocks of 256."""
    kind, blocks = config.get("bnb_4bit_quant_type", "fp4"), math.ceil(weight.numel() / 64)
    state = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": str(kept).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    found = {"weight": _empty("uint8", math.ceil(weight.numel() / 2), 1), "weight.quant_map": _empty("float32", 16)}
    if config.get("bnb_4bit_use_double_quant"):
        state.update(nested_blocksize=256, nested_dtype="float32", nested_offset=0.0)
        found["weight.absmax"] = _empty("uint8", blocks)
        found["weight.nested_absmax"] = _empty("float32", math.ceil(blocks / 256))
        found["weight.nested_quant_map"] = _empty("float32", 256)
    else:
        found["weight.absmax"] = _empty("float32", blocks)
    return {**found, f"weight.quant_state.bitsandbytes__{kind}": json.dumps(state).encode()}


def _mxfp4(weight, config, kept):
    """Experts as gpt-oss has them: 32 values in 16 bytes, a scale each; ``weight`` is (experts, in, out)."""
    experts, inputs, outputs = weight.shape
    return {
        "_blocks": _empty("uint8", experts, outputs, inputs // 32, 16),
        "_scales": _empty("uint8", experts, outputs, inputs // 32),
    }
