"""TrainingArguments, or a configuration of TRL's that extends them → a cell's options, and notes.

In: the object, or its fields as a dict. Out: Words. Each field is read, changes no memory, is named in a note, or is
refused; one that no table knows is named where it is not at its default.
"""

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vramprobe.catalog.shipped import data_file
from vramprobe.errors import SpecError
from vramprobe.interop import Words

#: TRL's configurations, and the trainer of each.
TRAINER_OF = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "RewardConfig": "reward",
}
#: Each field of a configuration, of peft's and of the frameworks' files in one of its places; that file says which.
FIELDS: dict[str, dict[str, Any]] = tomllib.loads(data_file("trainer_fields.toml").read_text(encoding="utf-8"))
_OWN = FIELDS["arguments"]
OPTION_OF, NAMED, REFUSED = _OWN["option_of"], _OWN["named"], _OWN["refused"]
READ, HARMLESS = _OWN["read"].split(), _OWN["harmless"].split()
#: The note of rows whose own length nobody gives: args only bound it.
AT_MAX_LENGTH = "rows are predicted at args.max_length; give seq_len if your longest row is shorter"
_NOTHING = (None, False, 0, "", "no", [], {})
_ACCELERATOR_DEFAULTS = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")
_ANY_RUN = "`vramprobe profile --emulate GPU -- COMMAND` runs it as it is"


def read_arguments(args: Any, *, is_name: bool = False) -> Words:
    """Return the options that ``args`` give: an object with ``to_dict()``, or a dict of TrainingArguments' fields.

    ``is_name``: the model is given by its name, so that TRL loads it, in fp32 unless ``model_init_kwargs`` say
    otherwise. Raises SpecError for what is no such object, and for fields whose memory is not counted.
    """
    trainer, fields = trainer_and_fields(args)
    options = {option: fields[name] for name, option in OPTION_OF.items() if fields.get(name) is not None}
    options |= _precision(fields) | {"gradient_checkpointing": _checkpoints(fields)}
    if trainer is not None:
        options |= _of_trl(trainer, fields, is_name=is_name)
    options |= _liger(trainer, fields) | _sharding(fields)
    refused = [f"args.{name} {why}" for name, why in REFUSED.items() if fields.get(name) not in _NOTHING]
    if refused:
        raise SpecError(f"{'; '.join(refused)}: not predicted; leave it out, or {_ANY_RUN}")
    defaults = {one.name: one.default for one in dataclasses.fields(args)} if dataclasses.is_dataclass(args) else {}
    return Words(options, tuple(dict.fromkeys(_notes(trainer, fields, defaults))))


def trainer_and_fields(args: Any) -> tuple[str | None, dict[str, Any]]:
    """(TRL's trainer, or None for plain TrainingArguments; the fields). Raises SpecError for another object."""
    if isinstance(args, Mapping):
        return None, dict(args)
    names = [kind.__name__ for kind in type(args).__mro__]
    if "TrainingArguments" not in names or not callable(getattr(args, "to_dict", None)):
        raise SpecError(
            f"args: {type(args).__name__} given; give TrainingArguments, {', '.join(TRAINER_OF)}, or a dict of their "
            "fields"
        )
    trainer = next((TRAINER_OF[name] for name in names if name in TRAINER_OF), None)
    of_trl = [one.__name__ for one in type(args).__mro__ if one.__module__.split(".")[0] == "trl"]
    if trainer is None and (kind := next((name for name in of_trl if not name.startswith("_")), None)):
        instead = "vramprobe.api.grpo predicts it" if "GRPO" in kind else _ANY_RUN
        raise SpecError(f"args: {kind} is not read; allowed: {', '.join(TRAINER_OF)}; {instead}")
    return trainer, args.to_dict()


def _precision(fields: Mapping[str, Any]) -> dict[str, Any]:
    words = [word for word in ("bf16", "fp16") if fields.get(word) in (True, "true", "auto", "pure")]
    if len(words) > 1:
        raise SpecError("args.bf16 and args.fp16 are both set; keep one of them")
    return {"autocast": words[0] if words else "none"}


def _checkpoints(fields: Mapping[str, Any]) -> bool:
    fsdp = _parsed("fsdp_config", fields.get("fsdp_config")) if fields.get("fsdp") else {}
    given = (fields.get("gradient_checkpointing"), fields.get("activation_checkpointing"))
    return bool(any(given) or fsdp.get("activation_checkpointing") or fsdp.get("fsdp_activation_checkpointing"))


def _of_trl(trainer: str, fields: Mapping[str, Any], *, is_name: bool) -> dict[str, Any]:
    """The trainer, its loss, and the dtype in which it loads a model by name."""
    options: dict[str, Any] = {"trainer": trainer}
    loss = fields.get("loss_type")
    if trainer == "sft" and (loss == "chunked_nll" or (loss in (None, "nll") and _trl_tiles_logits())):
        options["loss"] = "chunked_nll"
    elif trainer == "sft" and loss not in (None, "nll"):
        raise SpecError(f"args.loss_type {loss!r} is not predicted; use nll, or {_ANY_RUN}")
    given = fields.get("model_init_kwargs") or {}
    if not is_name:
        return options
    options["dtype"] = str(given.get("dtype") or given.get("torch_dtype") or "fp32").removeprefix("torch.")
    if options["dtype"] == "auto":
        del options["dtype"]
    if attention := given.get("attn_implementation"):
        options["attn"] = attention
    return options | quantization(given.get("quantization_config"))


def _trl_tiles_logits() -> bool:
    """Return whether the installed SFTTrainer computes ``nll`` from tiles of logits, as TRL 1.16; true without TRL."""
    try:
        from packaging.version import Version

        return Version(metadata.version("trl")) >= Version("1.16")
    except metadata.PackageNotFoundError:
        return True


def quantization(config: Any) -> dict[str, Any]:
    """Return the options of a BitsAndBytesConfig, or of its dict; empty for None. Raises SpecError for another kind."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        config = config.to_dict()
    if config.get("load_in_8bit"):
        return {"quant": "int8"}
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if not config.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        method = getattr(config.get("quant_method"), "value", config.get("quant_method"))
        raise SpecError(
            f"quantization_config of {method or 'no known kind'} is not read; give bitsandbytes, or leave it out"
        )
    return {"quant": kind if kind == "fp4" or config.get("bnb_4bit_use_double_quant") else "nf4-single"}


def _liger(trainer: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's trainers leave Liger's fused loss out: their own head replaces it."""
    if not fields.get("use_liger_kernel") or trainer is not None:
        return {}
    kernels = fields.get("liger_kernel_config") or {}
    return {"fused_linear_cross_entropy": bool(kernels.get("fused_linear_cross_entropy", True))}


def _sharding(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("deepspeed") and fields.get("fsdp"):
        raise SpecError("args.deepspeed and args.fsdp are both set; keep one of them")
    if fields.get("deepspeed"):
        return _deepspeed(_parsed("deepspeed", fields["deepspeed"]))
    return _fsdp(fields["fsdp"], _parsed("fsdp_config", fields.get("fsdp_config"))) if fields.get("fsdp") else {}


def _deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise SpecError(f"args.deepspeed: stage {stage!r} given; allowed: 0, 1, 2, 3")
    off = {name: (zero.get(f"offload_{name}") or {}).get("device") for name in ("param", "optimizer")}
    if "nvme" in off.values():
        raise SpecError("args.deepspeed offloads to nvme, which is not predicted; use cpu")
    offload = "params" if off["param"] == "cpu" else "optimizer" if off["optimizer"] == "cpu" else None
    return {"sharding": f"zero{stage}" if stage else "ddp"} | ({"offload": offload} if offload else {})


def _fsdp(given: Any, config: dict[str, Any]) -> dict[str, Any]:
    config = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    words = (
        given.split() if isinstance(given, str) else [str(word) for word in given] if isinstance(given, list) else []
    )
    reshard = str(config.get("reshard_after_forward", "true")).lower()
    kept = "shard_grad_op" in words or reshard in ("false", "shard_grad_op")
    hybrid = "hybrid_shard" in words or reshard == "hybrid_shard"
    if "no_shard" in words or reshard == "no_shard" or "hybrid_shard_zero2" in words:
        raise SpecError("args.fsdp: no_shard and hybrid_shard_zero2 are not predicted; use full_shard or shard_grad_op")
    kind = "fsdp" if int(config.get("version", 2)) == 2 else "fsdp1"
    options = {"sharding": f"{kind}{'-hybrid' if hybrid else '-shard-grad-op' if kept else ''}"}
    is_offloaded = (
        "offload" in words or str(config.get("cpu_offload", config.get("offload_params", ""))).lower() == "true"
    )
    return options | ({"offload": "params"} if is_offloaded else {})


def _parsed(name: str, value: Any) -> dict[str, Any]:
    """A dict, or the JSON file that a path names. Raises SpecError."""
    if isinstance(value, Mapping):
        return dict(value)
    if not value:
        return {}
    try:
        found = json.loads(Path(str(value)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"args.{name}: {value} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"args.{name}: {value} holds no JSON object")
    return found


def _notes(trainer: str | None, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for name, why in NAMED.items():
        value = fields.get(name)
        if name == "accelerator_config" and isinstance(value, Mapping):
            value = [one for one in _ACCELERATOR_DEFAULTS if value.get(one)]
        if value not in _NOTHING:
            yield f"args.{name}: {why}"
    if trainer not in (None, "sft") and fields.get("disable_dropout") is False:
        yield "args.disable_dropout: dropout's masks are not counted"
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if more := sorted(set(fields.get(name) or ()) - {"use_reentrant"}):
            yield f"args.{name}: {', '.join(more)} is not read: every layer is recomputed, nothing is offloaded"
    if fields.get("packing"):
        yield "args.packing: predicted as batch_size rows of max_length tokens, all of them full"
    elif fields.get("max_length"):
        yield AT_MAX_LENGTH
    if fields.get("use_liger_kernel"):
        yield "args.use_liger_kernel: only Liger's fused loss is counted, its other kernels may save more"
    if trainer not in (None, "sft") and fields.get("loss_type") not in (None, [], "sigmoid", ["sigmoid"], "kto"):
        yield f"args.loss_type: predicted as TRL's default, not as {fields['loss_type']}"
    known = {*OPTION_OF, *READ, *HARMLESS, *NAMED, *REFUSED}
    for name, value in fields.items():
        if name not in known and value not in _NOTHING and value != defaults.get(name):
            yield f"args.{name}: {value!r} is not known to vramprobe, and not counted"
