"""An Axolotl or LLaMA-Factory YAML → the model, the arguments and the adapter, in transformers' and peft's words.

In: the file. Out: a TrainingFile in the fields of TrainingArguments and LoraConfig, which arguments.py and adapters.py
judge. A key that no row knows goes on to them under its own name, and is named there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError

#: The frameworks' keys → fields of TrainingArguments or SFTConfig.
_AXOLOTL_ARGUMENTS = {
    "sequence_len": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "optimizer": "optim",
    "sample_packing": "packing",
    "bf16": "bf16",
    "fp16": "fp16",
    "gradient_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "activation_offloading": "activation_offloading",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "fsdp_config": "fsdp_config",
    "torch_compile": "torch_compile",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "label_smoothing_factor": "label_smoothing_factor",
    "optim_args": "optim_args",
    "optim_target_modules": "optim_target_modules",
}
_AXOLOTL_ADAPTER = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layer_replication": "layer_replication",
    "peft_init_lora_weights": "init_lora_weights",
    "peft_trainable_token_indices": "trainable_token_indices",
    "lora_target_parameters": "target_parameters",
}
_FACTORY_ARGUMENTS = {"cutoff_len": "max_length", "enable_liger_kernel": "use_liger_kernel", "neat_packing": "packing"}
_FACTORY_ADAPTER = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
#: Keys of each that change no memory of a step: data, logging, the tokenizer.
_NO_MEMORY = frozenset(
    """
    base_model base_model_config model_type tokenizer_type tokenizer_config special_tokens tokens datasets test_datasets
    chat_template dataset_prepared_path dataset_processes shuffle_merged_datasets output_dir num_epochs max_steps
    lr_scheduler learning_rate warmup_steps warmup_ratio weight_decay logging_steps saves_per_epoch save_steps
    save_strategy save_total_limit seed wandb_project wandb_entity wandb_name wandb_watch wandb_log_model wandb_run_id
    mlflow_experiment_name hub_model_id hub_strategy strict train_on_inputs group_by_length early_stopping_patience
    resume_from_checkpoint auto_resume_from_checkpoints local_rank pad_to_sequence_len tf32 trust_remote_code
    max_grad_norm plugins adapter load_in_4bit load_in_8bit lora_target_linear bnb_config_kwargs rl reward_model
    flash_attention sdp_attention eager_attention attn_implementation fsdp_version liger_fused_linear_cross_entropy
    cut_cross_entropy val_set_size evals_per_epoch eval_steps eval_sample_packing loraplus_lr_ratio adam_beta1
    adam_beta2 adam_epsilon multipack_real_batches sample_packing_bin_size dataloader_num_workers cosine_min_lr_ratio
    lora_fan_in_fan_out remove_unused_columns debug
    model_name_or_path template dataset dataset_dir eval_dataset overwrite_cache preprocessing_num_workers stage
    do_train finetuning_type quantization_bit quantization_type quantization_method double_quantization flash_attn
    pure_bf16 disable_gradient_checkpointing max_samples plot_loss overwrite_output_dir pref_loss pref_beta val_size
    use_fast_tokenizer split_special_tokens streaming mix_strategy ignore_pad_token_for_loss train_on_prompt
    mask_history use_swanlab pissa_init pissa_iter
    pissa_convert create_new_adapter rope_scaling preprocessing_batch_size
    media_dir tokenized_path adapter_name_or_path cache_dir model_revision hf_hub_token low_cpu_mem_usage
    """.split()  # noqa: SIM905
)
#: LLaMA-Factory's methods that keep a state of their own.
_REFUSED = ("use_galore", "use_apollo", "use_badam", "use_llama_pro", "use_muon", "use_adam_mini", "mixture_of_depths")
_ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
_TRAINER_OF_STAGE = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}


@dataclass(frozen=True, kw_only=True)
class TrainingFile:
    """``arguments``: TrainingArguments' fields. ``adapter``: LoraConfig's; None trains the model itself. ``options``:
    a cell's, that neither says."""

    model: str
    arguments: dict[str, Any]
    adapter: dict[str, Any] | None
    options: dict[str, Any]


def is_training_file(given: Any) -> bool:
    """Return whether ``given`` is the name of a YAML file."""
    return str(given).endswith((".yaml", ".yml"))


def read_training_file(path: str) -> TrainingFile:
    """Return what an Axolotl or LLaMA-Factory file trains. Raises SpecError for another file, and for what no
    recording predicts."""
    import yaml

    try:
        keys = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if isinstance(keys, Mapping) and "base_model" in keys:
        return _axolotl(keys)
    if isinstance(keys, Mapping) and "model_name_or_path" in keys:
        return _factory(keys)
    raise SpecError(
        f"{path} names neither base_model (Axolotl) nor model_name_or_path (LLaMA-Factory); give such a file"
    )


def _axolotl(keys: Mapping[str, Any]) -> TrainingFile:
    kind = keys.get("adapter")
    if kind not in (None, "", "lora", "qlora"):
        raise SpecError(f"adapter: {kind!r} is not predicted; allowed: lora, qlora, or none")
    adapter = _renamed(keys, _AXOLOTL_ADAPTER) | {"peft_type": "LORA"} if kind else None
    if adapter is not None and keys.get("lora_target_linear"):
        adapter["target_modules"] = "all-linear"
    arguments = _arguments(keys, _AXOLOTL_ARGUMENTS, {*_AXOLOTL_ADAPTER})
    is_full = keys.get("bf16") == "full"
    arguments["bf16"] = arguments.get("bf16") in (True, "auto", "true")
    if arguments.get("gradient_checkpointing") == "offload":
        arguments |= {"gradient_checkpointing": True, "activation_offloading": True}
    if keys.get("fsdp_version") or keys.get("fsdp_config"):
        arguments["fsdp"] = arguments.get("fsdp") or True
        arguments["fsdp_config"] = {"version": keys.get("fsdp_version", 1), **(keys.get("fsdp_config") or {})}
    options: dict[str, Any] = {"dtype": "fp32" if arguments["bf16"] and not kind else "bf16"}
    if is_full:
        options |= {"dtype": "bf16", "autocast": "none"}
    options |= _quantized(keys.get("load_in_4bit"), keys.get("load_in_8bit"), keys.get("bnb_config_kwargs") or {})
    attention = keys.get("attn_implementation") or next(
        (
            word
            for key, word in (("flash_attention", "flash_attention_2"), ("eager_attention", "eager"))
            if keys.get(key)
        ),
        None,
    )
    options |= {"attn": attention} if attention else {}
    if keys.get("liger_fused_linear_cross_entropy"):
        options["fused_linear_cross_entropy"] = True
    if keys.get("cut_cross_entropy") or any("cut_cross_entropy" in str(one) for one in keys.get("plugins") or ()):
        options["loss"] = "cut_cross_entropy"
    trainer = keys.get("rl") or ("reward" if keys.get("reward_model") else "sft")
    return TrainingFile(
        model=str(keys["base_model"]), arguments=arguments, adapter=adapter, options=options | _trainer(trainer)
    )


def _factory(keys: Mapping[str, Any]) -> TrainingFile:
    kind, stage = keys.get("finetuning_type", "lora"), keys.get("stage", "sft")
    if kind not in ("lora", "full"):
        raise SpecError(f"finetuning_type: {kind!r} is not predicted; allowed: lora, full")
    if stage not in _TRAINER_OF_STAGE:
        raise SpecError(f"stage: {stage!r} is not predicted; allowed: {', '.join(_TRAINER_OF_STAGE)}")
    if refused := [name for name in _REFUSED if keys.get(name)]:
        raise SpecError(
            f"{', '.join(refused)}: not predicted; `vramprobe profile --emulate GPU -- llamafactory-cli train FILE` "
            "runs it"
        )
    adapter: dict[str, Any] = {}
    if kind == "lora":
        adapter = {"r": 8, "peft_type": "LORA", **_renamed(keys, _FACTORY_ADAPTER)}
        adapter.setdefault("lora_alpha", 2 * adapter["r"])
        targets: Any = adapter.get("target_modules") or "all"
        adapter["target_modules"] = "all-linear" if targets == "all" else [one.strip() for one in targets.split(",")]
    arguments = {"max_length": 2048} | _arguments(keys, _FACTORY_ARGUMENTS, {*_FACTORY_ADAPTER, *_REFUSED})
    arguments["gradient_checkpointing"] = not keys.get("disable_gradient_checkpointing", False)
    has_masters = kind == "full" and (arguments.get("bf16") or arguments.get("fp16")) and not keys.get("pure_bf16")
    options: dict[str, Any] = {"dtype": "fp32" if has_masters else "fp16" if arguments.get("fp16") else "bf16"}
    if keys.get("pure_bf16"):
        options |= {"autocast": "none"}
        arguments["bf16"] = False
    bits, method = keys.get("quantization_bit"), keys.get("quantization_method", "bnb")
    if bits not in (None, 4, 8) or (bits and method not in ("bnb", "bitsandbytes")):
        raise SpecError(f"quantization_bit {bits} by {method} is not predicted; allowed: 4 and 8 by bnb")
    double = {"bnb_4bit_use_double_quant": keys.get("double_quantization", True)}
    options |= _quantized(bits == 4, bits == 8, {"bnb_4bit_quant_type": keys.get("quantization_type", "nf4")} | double)
    if attention := _ATTENTION.get(str(keys.get("flash_attn"))):
        options["attn"] = attention
    trainer = keys["pref_loss"] if keys.get("pref_loss") == "orpo" else _TRAINER_OF_STAGE[stage]
    return TrainingFile(
        model=str(keys["model_name_or_path"]),
        arguments=arguments,
        adapter=adapter or None,
        options=options | _trainer(trainer),
    )


def _trainer(name: str) -> dict[str, Any]:
    if name not in (*_TRAINER_OF_STAGE.values(), "orpo"):
        raise SpecError(f"{name} is not predicted; allowed: sft, dpo, kto, orpo, reward. GRPO: vramprobe grpo")
    return {} if name == "sft" else {"trainer": name}


def _quantized(is_4bit: Any, is_8bit: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """A quantized base: both frameworks leave its other weights in 16 bits, and quantize its scales again."""
    if not is_4bit and not is_8bit:
        return {}
    if is_8bit:
        return {"quant": "int8", "kbit_prep": "none"}
    kind = more.get("bnb_4bit_quant_type", "nf4")
    quant = kind if kind == "fp4" or more.get("bnb_4bit_use_double_quant", True) else f"{kind}-single"
    return {"quant": quant, "kbit_prep": "none"}


def _renamed(keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[key]: value for key, value in keys.items() if key in names and value is not None}


def _arguments(keys: Mapping[str, Any], names: Mapping[str, str], also_read: set[str]) -> dict[str, Any]:
    """The arguments, and every key that no row knows, under its own name."""
    return _renamed(keys, names) | {
        key: value for key, value in keys.items() if key not in names and key not in also_read | _NO_MEMORY
    }
