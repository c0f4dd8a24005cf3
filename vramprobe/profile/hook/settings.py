"""Settings that decide a run's memory: those of its live models, and the arguments of transformers' Trainer.

In: modules that train, a TrainingArguments. Out: name → text, a library's defaults too. No path, no secret, nothing
that only says where a run logs.
"""

import enum

import torch

_NO_SETTING = ("dir", "path", "hub", "token_id", "run_name", "seed", "report", "log", "key", "url", "project")


def of_models(modules):
    """Settings of the models among ``modules``; a parameter that two of them have counts once."""
    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    parts = [part for module in modules for part in module.modules()]
    attention = {str(getattr(getattr(one, "config", None), "_attn_implementation", None)) for one in parts} - {"None"}
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    return {
        "parameters": f"{sum(one.numel() for one in parameters):,}, {trained:,} trained",
        "dtypes of parameters": ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters})),
        "layers checkpointed": str(sum(bool(getattr(one, "gradient_checkpointing", False)) for one in parts)),
        "attention": ", ".join(sorted(attention)),
    }


def left_out_of_checkpointing(modules):
    """Say how many layers LLaMA-Factory does not checkpoint, although they are set to be; None where there are none.

    It checkpoints only layers with a trained parameter (its model_utils/checkpointing.py): of a hybrid model, whose
    linear attention has no q_proj, ``lora_target: q_proj,v_proj`` leaves out three layers of four.
    """
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    layers = [one for one in parts if _checkpoints(one) == "custom_gradient_checkpointing_func"]
    left_out = [one for one in layers if not any(parameter.requires_grad for parameter in one.parameters())]
    if not left_out:
        return None
    return (
        f"gradient checkpointing leaves out {len(left_out)} of {len(layers)} modules: LLaMA-Factory checkpoints only "
        "layers in which something is trained, and keeps all activations of the others; lora_target: all trains each"
    )


def left_unquantized(modules):
    """Say how many bytes of experts bitsandbytes leaves as they are; None where it reaches most of the weights.

    It takes linear layers alone, and transformers 5 keeps the experts of a layer in one tensor.
    """
    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    reached = sum(one.numel() * (2 if one.dtype == torch.uint8 else 1) for one in parameters if _is_quantized(one))
    stacks = [one for one in parameters if one.dim() == 3 and one.is_floating_point() and not _is_quantized(one)]
    if not reached or sum(one.numel() for one in stacks) <= reached:
        return None
    held = [getattr(one, "_local_tensor", one) for one in stacks]  # this rank's part under FSDP2
    num_bytes = sum(one.numel() * one.element_size() for one in held)
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in stacks}))
    return (
        f"quantization leaves {num_bytes / 2**30:.2f} GiB of experts in {dtypes}: bitsandbytes takes linear layers "
        "alone, and a layer's experts are one tensor; Axolotl can quantize experts, too"
    )


def _is_quantized(parameter):
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def _checkpoints(module):
    """The name of the function that checkpoints a module of transformers, empty where it is not checkpointed."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    is_on = getattr(module, "gradient_checkpointing", False)
    return getattr(getattr(function, "__code__", None), "co_name", "") if is_on else ""


def of_arguments(args):
    """The arguments of a Trainer that are numbers or words."""
    found = {}
    for name, value in vars(args).items():
        value = value.value if isinstance(value, enum.Enum) else value
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        if is_plain and not name.startswith("_") and not any(word in name for word in _NO_SETTING):
            found[name] = str(value)
    return found
