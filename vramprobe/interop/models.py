"""The model that a user holds → a cell's ``model``, what is known of how it was loaded, its adapters.

In: a hub id, a slug, a path, a config (object or dict), a module (with or without peft's adapters). Out: GivenModel.
Modules are read by their parameters' names, sizes and dtypes; nothing is computed.
"""

import json
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vramprobe.errors import SpecError

_ADAPTER_CONFIG = "adapter_config.json"
_FORMS = (
    "a hub id, a slug of `vramprobe models`, a path (config.json, adapter_config.json, an Axolotl or LLaMA-Factory "
    "YAML), a PretrainedConfig, its dict, or a model"
)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class GivenModel(NamedTuple):
    """``model``: a name, or the config.json as a dict. ``options``: how it was loaded. ``adapter``: its LoraConfig."""

    model: str | dict[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    adapter: Any = None
    notes: tuple[str, ...] = ()


def is_training_file(given: Any) -> bool:
    """Return whether ``given`` is the name of an Axolotl or LLaMA-Factory YAML (training_file.py)."""
    return str(given).endswith((".yaml", ".yml"))


def read_model(given: Any) -> GivenModel:
    """Return what ``given`` says of the model. Raises SpecError for another object."""
    if isinstance(given, str | PathLike):
        return _named(str(given))
    if isinstance(given, Mapping):
        return _of_dict(given)
    if callable(getattr(given, "named_parameters", None)):
        return _of_module(given)
    if not isinstance(given, type) and hasattr(given, "model_type") and callable(getattr(given, "to_dict", None)):
        return _of_config(given)
    raise SpecError(f"model: {type(given).__name__} given; give {_FORMS}")


def _named(name: str) -> GivenModel:
    path = Path(name).expanduser()
    file = path / _ADAPTER_CONFIG if path.is_dir() and not (path / "config.json").exists() else path
    if file.name != _ADAPTER_CONFIG or not file.exists():
        return GivenModel(model=name)
    try:
        adapter = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{file} cannot be read as JSON: {error}") from None
    return GivenModel(model=str(file), adapter=adapter)


def _of_dict(given: Mapping[str, Any]) -> GivenModel:
    if "peft_type" in given:
        base = given.get("base_model_name_or_path")
        if not base:
            raise SpecError("model: the dict of an adapter names no base_model_name_or_path; give the model beside it")
        return GivenModel(model=base, adapter=given)
    if not isinstance(given.get("model_type"), str):
        raise SpecError("model: the dict has no model_type, as a config.json has; give that, or a model's name")
    return GivenModel(model=_architecture(given), options=_loaded_as(given))


def _of_config(config: Any) -> GivenModel:
    """Return the config.json that ``save_pretrained`` writes of a PretrainedConfig, as a dict."""
    written = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else _as_json(config.to_dict())
    return GivenModel(model=_architecture(written | {"model_type": config.model_type}), options=_loaded_as(written))


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its quantization, which is an option of the cell."""
    return {name: value for name, value in _as_json(config).items() if name != "quantization_config"}


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(config, default=str)))


def _loaded_as(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype that ``from_config`` gives its parameters, and a quantization of bitsandbytes'."""
    from vramprobe.interop.arguments import quantization

    dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
    return ({"dtype": dtype} if dtype else {}) | quantization(config.get("quantization_config"))


def _of_module(module: Any) -> GivenModel:
    config = getattr(module, "config", None)
    if config is None or not callable(getattr(config, "to_dict", None)):
        raise SpecError(
            f"model: {type(module).__name__} has no transformers config; only such models are predicted. "
            "`vramprobe profile --emulate GPU -- COMMAND` runs any"
        )
    known = _of_config(config)
    is_peft = any(kind.__name__ == "PeftModel" for kind in type(module).__mro__)
    adapters = getattr(module, "peft_config", None) if hasattr(module, "base_model_prefix") or is_peft else None
    adapters = dict(adapters) if isinstance(adapters, Mapping) else {}
    if len(adapters) > 1:
        raise SpecError(
            f"model has {len(adapters)} adapters ({', '.join(adapters)}); one is predicted: delete the others"
        )
    own, added = Counter(), Counter()
    frozen = 0
    for name, parameter in module.named_parameters():
        dtype = _DTYPES.get(str(parameter.dtype).removeprefix("torch."))
        is_added = ".lora_" in name
        if dtype is not None:
            (added if is_added else own)[dtype] += parameter.numel()
        frozen += 0 if parameter.requires_grad or is_added else parameter.numel()
    options = dict(known.options)
    if own:
        options["dtype"] = own.most_common(1)[0][0]
    if added:
        options["lora_dtype"] = added.most_common(1)[0][0]
    attention = getattr(config, "_attn_implementation", None)
    if attention in ("sdpa", "eager", "flash_attention_2"):
        options["attn"] = attention
    checkpoints = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the newer name first, which warns not
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    if getattr(base, next((name for name in checkpoints if hasattr(type(base), name)), ""), False):
        options["gradient_checkpointing"] = True
    notes = []
    if frozen and not adapters:
        notes.append(f"{frozen:,} frozen parameters are predicted as if they were trained: an upper bound")
    return GivenModel(
        model=known.model, options=options, adapter=next(iter(adapters.values()), None), notes=tuple(notes)
    )
