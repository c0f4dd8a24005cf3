"""An Axolotl or LLaMA-Factory YAML → the model, the arguments and the adapter, in transformers' and peft's words.

In: the file. Out: a TrainingFile in the fields of TrainingArguments and LoraConfig, which arguments.py and adapters.py
judge. A key that no row knows goes on to them under its own name, and is named there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError
from vramprobe.interop.arguments import FIELDS

#: The frameworks' keys → fields of TrainingArguments or SFTConfig, and of LoraConfig.
_AXOLOTL, _FACTORY = FIELDS["axolotl"], FIELDS["llamafactory"]
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
    adapter = _renamed(keys, _AXOLOTL["adapter"]) | {"peft_type": "LORA"} if kind else None
    if adapter is not None and keys.get("lora_target_linear"):
        adapter["target_modules"] = "all-linear"
    arguments = _arguments(keys, _AXOLOTL)
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
    if refused := [name for name in _FACTORY["refused"].split() if keys.get(name)]:
        raise SpecError(
            f"{', '.join(refused)}: not predicted; `vramprobe profile --emulate GPU -- llamafactory-cli train FILE` "
            "runs it"
        )
    adapter: dict[str, Any] = {}
    if kind == "lora":
        adapter = {"r": 8, "peft_type": "LORA", **_renamed(keys, _FACTORY["adapter"])}
        adapter.setdefault("lora_alpha", 2 * adapter["r"])
        targets: Any = adapter.get("target_modules") or "all"
        adapter["target_modules"] = "all-linear" if targets == "all" else [one.strip() for one in targets.split(",")]
    arguments = {"max_length": 2048} | _arguments(keys, _FACTORY)
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


def _arguments(keys: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a framework's file, and every key that no row knows, under its own name."""
    known = {*own["arguments"], *own["adapter"], *own.get("refused", "").split(), *FIELDS["files"]["harmless"].split()}
    return _renamed(keys, own["arguments"]) | {name: value for name, value in keys.items() if name not in known}
