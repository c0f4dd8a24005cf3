"""A base model → the model as it is trained: k-bit preparation, LoRA adapters, gradient checkpointing.

The order is a trainer's: prepare, wrap, cast. Every step is the library's own; what trl does is quoted, not imported,
because trl is no dependency.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vramprobe.rules.cell import lora_target_names
from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS
from vramprobe.workload.images import freeze_vision, vision_pattern
from vramprobe.workload.model import TORCH_DTYPES
from vramprobe.workload.releases import adapters_in_fp32, enable_checkpointing


def prepare_model(spec: CellSpec, model: PreTrainedModel) -> nn.Module:
    """The model ready to train: adapters where the method has them, casts and checkpointing as the cell says."""
    if spec.kbit_prep == "peft":
        from peft import prepare_model_for_kbit_training

        # Its own checkpointing switch only calls what follows here, by a name that transformers is retiring.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if spec.gradient_checkpointing:
        enable_checkpointing(model, trains_inputs=spec.method == "full")
    if spec.method == "full":
        model.requires_grad_(True)
        if spec.freeze_vision:
            freeze_vision(model)
        return model
    adapted = _add_adapters(spec, model)
    if spec.kbit_prep == "trl":
        _cast_like_trl(adapted)
    return adapted.train()


def _add_adapters(spec: CellSpec, model: PreTrainedModel) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = lora_target_names(spec)
    config = LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules="all-linear" if names is None else names,
        use_dora=spec.dora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # gpt2's transposed linear
        task_type=_task_of(spec, model),
        **({"exclude_modules": vision_pattern()} if spec.freeze_vision else {}),  # from peft 0.14 on
    )
    adapted = get_peft_model(model, config, **adapters_in_fp32(spec.lora_dtype == "fp32"))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "modules_to_save" not in name:
            parameter.data = parameter.data.to(TORCH_DTYPES[spec.lora_dtype])
    return adapted


def _task_of(spec: CellSpec, model: PreTrainedModel) -> str:
    """peft's task, which says what it trains beside adapters: of a model that scores rows, a copy of its head."""
    if TRAINERS[spec.trainer].scores_rows:
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _cast_like_trl(model: nn.Module) -> None:
    """trl's ``peft_module_casting_to_bf16``: norms to fp32; embeddings and head to bf16.

    Adapters keep the cell's dtype, which is bf16 as trl casts them; trl 0.9 to 0.13 left them fp32.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            continue
        if isinstance(module, nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)
