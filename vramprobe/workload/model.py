"""CellSpec → a real transformers model on its device, with random or pretrained weights, quantised or not.

Random weights are made on the target device and never pass through host memory. A quantised model is made one weight at
a time, so a 70B QLoRA never holds its 16-bit weights whole. Values do not decide memory (but for int8, which
keeps outlier columns apart): weights repeat one random tile, a copy instead of a generator call per element.
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from vramprobe import catalog
from vramprobe.errors import MissingDependency
from vramprobe.rules.cell import NO_SDPA
from vramprobe.spec import CellSpec
from vramprobe.workload.model_config import config_from_dict
from vramprobe.workload.releases import DTYPE, no_init_weights, quantize_linears
from vramprobe.workload.storages import quantised_storages

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TILE_ELEMENTS = 2**20
_INIT_STD = 0.02  # transformers' usual initializer_range


def build_model(spec: CellSpec, *, on_host: Literal["filled", "empty"] | None = None) -> PreTrainedModel:
    """The base model in ``spec.dtype`` on ``spec.device``, quantised if the cell says so, without adapters.

    ``on_host``: in host memory instead, with values or with pages that nobody touches; not of a quantised model.

    Raises MissingDependency where a package or a checkpoint that the cell needs is not there, SpecError where this
    version of transformers cannot build the architecture.
    """
    if spec.weights == "pretrained":
        return _pretrained(spec)
    with no_init_weights():
        model = _random_quantised(spec) if spec.quant != "none" else _random(spec, on_host)
    return model.train()


def model_class(config: Any) -> type:
    """The auto class with a language-modelling loss: with the vision tower where there is one, sequence-to-sequence for
    encoder-decoders, causal otherwise. One of a single label scores its rows."""
    if config.num_labels == 1:
        return AutoModelForSequenceClassification
    if getattr(config, "vision_config", None) is not None:
        from transformers import AutoModelForImageTextToText  # from 4.46 on

        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM


def quantization_config(spec: CellSpec) -> BitsAndBytesConfig:
    """bitsandbytes' settings for ``spec.quant``, as a user of ``from_pretrained`` would write them."""
    if spec.quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if spec.quant == "fp4" else "nf4",
        bnb_4bit_use_double_quant=spec.quant == "nf4",
        bnb_4bit_compute_dtype=TORCH_DTYPES[spec.dtype],
        **({"bnb_4bit_quant_storage": TORCH_DTYPES[spec.dtype]} if spec.is_divided else {}),
    )


def _pretrained(spec: CellSpec) -> PreTrainedModel:
    config = config_from_dict(spec.architecture)
    options: dict[str, Any] = {DTYPE: TORCH_DTYPES[spec.dtype], "attn_implementation": _attention(spec, config)}
    if spec.quant != "none":
        options["quantization_config"] = quantization_config(spec)
    if spec.device == "cpu":
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' loader threads would escape the profiler
    try:
        model = model_class(config).from_pretrained(
            catalog.find_model(spec.model).checkpoint,
            device_map={"": spec.device},
            trust_remote_code=spec.trust_remote_code,
            **options,
        )
    except OSError as error:
        raise MissingDependency(
            f"no pretrained weights for {spec.model!r}: {error}. Name a local checkpoint directory or a hub id that "
            "this machine can reach, or use weights random: memory does not depend on the values"
        ) from error
    if spec.device == "cpu":
        _move_into_the_allocator(model)
    return model.train()


def _move_into_the_allocator(model: PreTrainedModel) -> None:
    """On the CPU a checkpoint's tensors may lie in a mapped file; a copy is an allocation that the instrument sees."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _random(spec: CellSpec, on_host: str | None) -> PreTrainedModel:
    device = spec.device if on_host is None else "cpu"
    with torch.device(device):
        model = _from_config(spec)
        fill = _filler(device) if on_host != "empty" else _leave
        kept = _kept_in_fp32(model, spec)
        for name, parameter in model.named_parameters():
            if _is_part_of(name, kept):
                parameter.data = parameter.data.float()
            fill(name, parameter.data)
    model.tie_weights()
    return model


def _random_quantised(spec: CellSpec) -> PreTrainedModel:
    """The skeleton first, then every parameter in turn."""
    model = build_skeleton(spec)
    materialise(spec, model, lambda name: spec.device)
    return model


def build_skeleton(spec: CellSpec) -> PreTrainedModel:
    """The base model with its layers as they will be quantised, parameters on ``meta``, and real buffers."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False), _beside_deepspeed(spec):
        model = _from_config(spec)
    if spec.quant != "none":
        config = quantization_config(spec)
        quantize_linears(model, config)
        # What from_pretrained leaves on a quantised model; peft chooses its layers by these.
        model.is_loaded_in_8bit, model.is_loaded_in_4bit = spec.quant == "int8", spec.quant != "int8"
        model.is_quantized, model.quantization_method = True, config.quant_method
        model.config.quantization_config = config
    model.tie_weights()
    return model


def _beside_deepspeed(spec: CellSpec) -> AbstractContextManager[Any]:
    """As ``from_pretrained`` does: a quantised model is not divided as it is made, but whole, once it is trained."""
    if spec.sharding != "zero3" or spec.quant == "none":
        return nullcontext()
    from transformers.modeling_utils import set_quantized_state

    return set_quantized_state()


def materialise(spec: CellSpec, model: PreTrainedModel, device_of: Callable[[str], str]) -> None:
    """Make every parameter of a skeleton in turn, and move its buffers, each where ``device_of`` says by its name."""
    kept = _kept_in_fp32(model, spec)
    fillers: dict[str, Any] = {}
    places = _places(model)
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                full_name = f"{module_name}.{name}"
                device = device_of(full_name)
                dtype = torch.float32 if _is_part_of(full_name, kept) else TORCH_DTYPES[spec.dtype]
                fillers[device] = fillers.get(device) or _filler(device)
                made = _materialise(full_name, parameter, dtype, device, fillers[device])
                for owner, its_name in places[id(parameter)]:  # more than one where weights are tied
                    setattr(owner, its_name, made)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device_of(f"{module_name}.{name}"))


def _from_config(spec: CellSpec) -> PreTrainedModel:
    config = config_from_dict(spec.architecture)
    try:
        model = model_class(config).from_config(
            config,
            attn_implementation=_attention(spec, config),
            trust_remote_code=False,
            **{DTYPE: TORCH_DTYPES[spec.dtype]},
        )
    except ImportError as error:
        raise MissingDependency(
            f"attn {spec.attn} is not to be had here: {error}. Install it, or use attn sdpa"
        ) from error
    _fill_buffers(model)
    return model


def _fill_buffers(model: PreTrainedModel) -> None:
    """Give every buffer that a checkpoint would bring the value that the library starts it with: made without its
    initialization, one may hold whatever lay in memory (Gemma 4's ``std_scale``)."""
    for module in model.modules():
        names = {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set
        if names and not module._parameters:
            owner = module if isinstance(module, PreTrainedModel) else model
            owner._init_weights(module)


def _attention(spec: CellSpec, config: Any) -> str | dict[str, str]:
    """The cell's attention; eager of a part that has no other, as transformers chooses by itself: a tower for sounds,
    Gemma 2 in PaliGemma 2."""
    parts = {name: getattr(config, name, None) for name in ("audio_config", "text_config")}
    without = [name for name, part in parts.items() if part and (name != "text_config" or part.model_type in NO_SDPA)]
    return {"": spec.attn} | dict.fromkeys(without, "eager") if without and spec.attn != "eager" else spec.attn


def _materialise(name: str, parameter: nn.Parameter, dtype: torch.dtype, device: str, fill: Any) -> nn.Parameter:
    """One real parameter in place of one on ``meta``, of a DTensor this rank's part; a quantised layer's weight is
    quantised at once."""
    if hasattr(parameter, "_local_tensor"):
        from transformers.distributed.sharding_utils import _dtensor_from_local_like

        part = torch.empty(parameter._local_tensor.shape, dtype=dtype, device=device)
        fill(name, part)
        return nn.Parameter(_dtensor_from_local_like(part, parameter), requires_grad=parameter.requires_grad)
    import bitsandbytes as bnb

    data = torch.empty(parameter.shape, dtype=dtype, device=device)
    fill(name, data)
    if isinstance(parameter, bnb.nn.Params4bit):
        return bnb.nn.Params4bit(data, requires_grad=False, **parameter.__dict__).to(device)
    if isinstance(parameter, bnb.nn.Int8Params):
        # Int8Params wants to come from the host, as transformers hands it over (integrations/bitsandbytes.py).
        return bnb.nn.Int8Params(data.to("cpu"), requires_grad=False, has_fp16_weights=False).to(device)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _kept_in_fp32(model: PreTrainedModel, spec: CellSpec) -> set[str]:
    """Module names that ``from_pretrained`` loads in fp32 whatever was asked (modeling_utils, ``_get_dtype_plan``)."""
    names: set[str] = set()
    if spec.dtype == "fp16":
        names |= set(model._keep_in_fp32_modules or ())
    if spec.dtype in ("fp16", "bf16"):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())  # from 4.53 on
    return names


def _is_part_of(name: str, modules: set[str]) -> bool:
    return not modules.isdisjoint(name.split("."))


def _places(model: PreTrainedModel) -> dict[int, list[tuple[nn.Module, str]]]:
    """Parameter, by identity → every module that has it and its name there; looked up once for all of them.

    Searched for one parameter at a time, this took longer than anything else in making a 70B model on a GPU.
    """
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((module, name))
    return found


def _filler(device: str) -> Any:
    """A function that fills a tensor in place: weights from one random tile, norms with 1, biases with 0."""
    tile = torch.randn(_TILE_ELEMENTS, device=device).mul_(_INIT_STD)

    def fill(name: str, tensor: torch.Tensor) -> None:
        if tensor.ndim < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        flat = tensor.view(-1)
        whole = flat.numel() // _TILE_ELEMENTS * _TILE_ELEMENTS
        flat[:whole].view(-1, _TILE_ELEMENTS).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])

    return fill


def _leave(name: str, tensor: torch.Tensor) -> None:
    """Instead of filling it."""


def counted(model: nn.Module) -> dict[str, int]:
    """Parameters by kind, adapters apart, by the names of the record's ModelFacts; of a model that no rank divided."""
    adapters = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    )
    total, quantised = num_logical_params(model)
    return {
        "num_params": total - adapters,
        "num_trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_quantised_params": quantised,
        "quantised_weights_bytes": sum(quantised_storages(model).values()),
    }


def num_logical_params(model: PreTrainedModel) -> tuple[int, int]:
    """(all, quantised) parameters; a packed 4-bit weight counts its elements, tied weights count once."""
    total = quantised = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        count = math.prod(state.shape) if state is not None else parameter.numel()
        total += count
        quantised += count if type(parameter).__name__ in ("Params4bit", "Int8Params") else 0
    return total, quantised
