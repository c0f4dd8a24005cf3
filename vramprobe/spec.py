"""CellSpec: one configuration to run, frozen, checked, with everything resolved.

In: the words a user types (CLI options, YAML keys; the same ones everywhere). Out: a CellSpec that holds the whole
architecture and every default, or a SpecError that says which combination cannot be and why.
Never touches torch, a GPU or the network (the catalog does that, on request). Long because every rule about a cell
stands in this one place.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from vramprobe import catalog
from vramprobe.choices import (
    DEVICE_MAP,
    FSDP1,
    FSDP2,
    HYBRID,
    RECIPES,
    SHARD_SIZE,
    TENSOR_PARALLEL,
    ZERO,
    Attention,
    Autocast,
    CpRotation,
    Device,
    Dtype,
    KbitPrep,
    Method,
    Offload,
    Optim,
    Quant,
    Sharding,
    Weights,
)
from vramprobe.errors import SpecError, UnknownName
from vramprobe.units import parse_bytes, short_bytes

#: transformers' second names for the same optimizer.
OPTIM_ALIASES = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"}

#: What ``--lora-targets q_v`` means per model type: the LoRA paper's query and value projections, as peft maps them;
#: where a family fuses the projections, the fused one.
Q_V_TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",), "bloom": ("query_key_value",), "falcon": ("query_key_value",),
    "phi3": ("qkv_proj",),
    "t5": ("q", "v"),
    "deepseek_v2": ("q_proj", "kv_b_proj"),
    "deepseek_v3": ("q_b_proj", "kv_b_proj"), "glm4_moe_lite": ("q_b_proj", "kv_b_proj"),
}  # fmt: skip

_LEARNED_POSITIONS = {"gpt2": "n_positions", "opt": "max_position_embeddings"}
#: Families that transformers gives no SDPA attention; it loads them eager by default, and so do we.
_NO_SDPA = ("bloom", "gemma2", "gpt_oss")
#: Families that transformers gives no flash_attention_2.
_NO_FLASH = ("bloom", "gpt_oss", "llama4_text")
#: Families that Liger has no fused loss for; the rest of the catalog it has (0.8.5).
_NO_FUSED_LOSS = (
    "apertus", "arcee", "bloom", "cohere", "ernie4_5", "ernie4_5_moe", "falcon", "gemma3n_text", "glm",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granitemoehybrid", "helium", "internlm3", "lfm2",
    "minimax_m2", "ministral3", "nemotron_h", "olmoe", "opt", "seed_oss", "t5",
)  # fmt: skip
#: Families whose attention transformers does not call ``self_attn``, where alone accelerate takes the mask away that
#: ring attention has no place for: all ranks but the last of a sequence ended in torch's error.
_NO_RING = ("bloom", "falcon", "gpt2", "gpt_neox", "t5")
_SHORT_OPTIM = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw-fused"}
_VERSION_OF_IDENTITY = 1
#: As many as the emulated NCCL has room for.
MAX_RANKS = 960
#: The optimizers that stepped on fully_shard's DTensors here (torch 2.13); adafactor and bitsandbytes' own raised.
DTENSOR_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
#: Those that accelerate hands DeepSpeed's CPUAdam for, with the same arithmetic; for most others it does so, too.
CPU_ADAM = ("adamw_torch", "adamw_torch_fused")
#: Layers that transformers' plans divide by their inputs, by the last word of their names.
ROW_WISE = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")
Model = TypeVar("Model", bound=BaseModel)


class CellSpec(BaseModel):
    """One cell: everything that decides its memory, resolved. Build it with :func:`resolve`, not by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    architecture: dict[str, Any]  # the model's config.json, after the depth cut
    num_layers: int | None = None  # set when the depth was cut; None is the model's own depth
    weights: Weights = "random"
    trust_remote_code: bool = False

    method: Method
    quant: Quant
    kbit_prep: KbitPrep
    dtype: Dtype
    autocast: Autocast

    lora_r: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    lora_targets: str | tuple[str, ...] | None = None
    lora_dtype: Dtype | None = None
    dora: bool = False

    optim: Optim
    batch_size: int
    seq_len: int
    grad_accum: int = 1
    gradient_checkpointing: bool = False
    attn: Attention = "sdpa"
    padding: bool = False  # the last tokens of each sequence are padding, so that the model is passed a mask
    torch_compile: bool = False
    fused_linear_cross_entropy: bool = False  # Liger's head and loss in one, which never holds all logits

    num_gpus: int = 1  # a rank each, with the cell's batch; under device-map, cards of one process
    sharding: Sharding | None = None  # of the ranks, or of the layers; null for one GPU
    shard_size: int | None = None  # ranks that have one model among them, where several groups do; null for one group
    cp_size: int = 1  # ranks that share each sequence (context parallelism), and have the same batch
    cp_rotation: CpRotation = "allgather"  # of keys and values among them
    offload: Offload = "none"  # what the ranks keep in host memory
    only_rank: int | None = None  # this one alone is run, answered as if the others were like it; emulated only

    device: Device
    alloc_conf: str | None = None  # PYTORCH_ALLOC_CONF for the cell's process; cuda only
    limit_vram: str | None = None  # the rest of the card is held, as if it had only this much: "24GiB"; cuda only
    steps: int = 3
    timing_steps: int = 2
    seed: int = 0

    @field_validator("batch_size", "seq_len", "grad_accum", "num_gpus", "cp_size")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 1:
            raise ValueError("must be at least 1")
        return value

    @field_validator("steps")
    @classmethod
    def _enough_steps(cls, value: int) -> int:
        if value < 3:
            raise ValueError(
                "must be at least 3: the first step creates the optimizer's state, the next two must repeat"
            )
        return value

    @field_validator("timing_steps")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("must be 0 (no timing) or more")
        return value

    @field_validator("seed")
    @classmethod
    def _a_seed(cls, value: int) -> int:
        if not 0 <= value < 2**63:
            raise ValueError("must be from 0 to 2^63 - 1, which is what torch takes")
        return value

    @field_validator("architecture")
    @classmethod
    def _names_its_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise ValueError("must name its model_type, as a config.json does")
        return value

    @field_validator("lora_targets")
    @classmethod
    def _targets_text(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(value, str) and value not in ("all-linear", "q_v"):
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        if value == ():
            raise ValueError("names no module; use all-linear, q_v, or names such as q_proj,v_proj")
        if isinstance(value, tuple) and not all(re.fullmatch(r"[\w.]+", name) for name in value):
            raise ValueError("module names have letters, digits, _ and . only, such as q_proj,v_proj")
        return value

    @field_validator("limit_vram")
    @classmethod
    def _vram_text(cls, value: str | None) -> str | None:
        return None if value is None else short_bytes(_vram_bytes(value))

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if reasons := _impossible(self) + [reason for broken, reason in _rank_rules(self) if broken]:
            raise ValueError("; ".join(reasons))
        return self

    @property
    def model_type(self) -> str:
        """transformers' ``model_type`` of the architecture, e.g. ``llama``."""
        return self.architecture["model_type"]

    @property
    def num_tokens(self) -> int:
        """Tokens of one micro-batch: batch × length."""
        return self.batch_size * self.seq_len

    @property
    def model_label(self) -> str:
        """The model's name without its folders or organisation, and its depth when that was cut: ``gpt2@2layers``."""
        name = self.model.rstrip("/").split("/")[-1].removesuffix(".json")
        return name if self.num_layers is None else f"{name}@{self.num_layers}layers"

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence that the model has an embedding for; None where positions are computed."""
        key = _LEARNED_POSITIONS.get(self.model_type)
        longest = self.architecture.get(key) if key else None
        return longest if isinstance(longest, int) else None

    @property
    def num_params(self) -> int:
        """Parameters of the model at the cell's depth, tied ones once (see :func:`vramprobe.catalog.num_params`)."""
        return catalog.num_params(self.model, self.architecture)

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether its layers or its optimizers run: all of those, and they alone, say how many bits their state has."""
        return self.quant != "none" or self.optim.endswith(("_8bit", "_32bit"))

    @property
    def limit_vram_bytes(self) -> int | None:
        """What the GPU's memory is limited to; None for all of it."""
        return None if self.limit_vram is None else parse_bytes(self.limit_vram)

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold shards of the weights, which 4-bit ones must then be stored as floats for."""
        return self.sharding is not None and self.sharding not in ("ddp", "zero1", "zero2", TENSOR_PARALLEL, DEVICE_MAP)

    @property
    def is_spread(self) -> bool:
        """Whether one process has the layers on several cards."""
        return self.sharding == DEVICE_MAP

    @property
    def cell_id(self) -> str:
        """A readable name; two different cells of one sweep may share it only if their fingerprints differ too."""
        method = self.method if self.method != "qlora" else f"qlora-{self.quant}-{self.kbit_prep}"
        if self.method != "full":
            method += f"-r{self.lora_r}-{'+'.join(lora_target_names(self) or ['all'])}"
            method += "-dora" if self.dora else ""
        precision = self.dtype if self.autocast == "none" else f"{self.dtype}+{self.autocast}"
        parts = [
            self.model_label,
            method,
            precision,
            _SHORT_OPTIM.get(self.optim, self.optim),
            f"b{self.batch_size}s{self.seq_len}",
        ]
        parts += [f"ga{self.grad_accum}"] if self.grad_accum > 1 else []
        parts += ["ckpt"] if self.gradient_checkpointing else []
        parts += [self.attn] if self.attn != "sdpa" else []
        parts += ["padded"] if self.padding else []
        parts += ["compiled"] if self.torch_compile else []
        parts += ["fused-loss"] if self.fused_linear_cross_entropy else []
        parts += [f"on{self.limit_vram}"] if self.limit_vram else []
        groups = "" if self.shard_size is None else f"{self.shard_size}"
        parts += [f"{self.sharding}{groups}-x{self.num_gpus}"] if self.sharding else []
        parts += [f"cp{self.cp_size}"] if self.cp_size > 1 else []
        parts += [self.cp_rotation] if self.cp_rotation != "allgather" else []
        parts += [f"offload-{self.offload}"] if self.offload != "none" else []
        parts += [f"rank{self.only_rank}"] if self.only_rank is not None else []
        return "_".join(parts)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything resolved. The model's display name counts only where it decides the weights.

        Fields at their default stay out, so that a new field leaves old fingerprints (and so resumes) as they are; the
        other side of this is that a field's default never changes.
        """
        resolved = self.model_dump(mode="json", exclude_defaults=True)
        if self.weights == "random":
            del resolved["model"]
        text = json.dumps({"identity": _VERSION_OF_IDENTITY, **resolved}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def lora_target_names(spec: CellSpec) -> list[str] | None:
    """Module names the adapters go on; None means every linear layer but the output head (peft's ``all-linear``)."""
    match spec.lora_targets:
        case "all-linear":
            return None
        case "q_v":
            return list(Q_V_TARGETS.get(spec.model_type, ("q_proj", "v_proj")))
        case names:
            return list(names or ())


def resolve(
    *,
    model: str,
    method: str,
    device: str,
    recipe: str | None = None,
    quant: str | None = None,
    kbit_prep: str | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    num_layers: int | None = None,
    optim: str | None = None,
    lora_r: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float | None = None,
    lora_targets: str | list[str] | None = None,
    lora_dtype: str | None = None,
    attn: str | None = None,
    **rest: Any,
) -> CellSpec:
    """A CellSpec from a user's words; what is left out gets the default that the method's users expect.

    ``model`` is a slug, a path to a ``config.json`` or checkpoint directory, or a hub id. ``recipe`` names a row of
    :data:`RECIPES`. Raises SpecError for a value or combination that cannot be, UnknownName for an unknown model.
    """
    if unknown := sorted(set(rest) - set(option_names())):
        raise SpecError(f"unknown option {', '.join(map(repr, unknown))}; allowed: {', '.join(option_names())}")
    for name, value, kind in (("model", model, str), ("num_layers", num_layers, int), ("lora_r", lora_r, int)):
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise SpecError(f"{name}: {value!r} given; must be {'text' if kind is str else 'a whole number'}")
    named = _recipe_values(recipe, dtype=dtype, autocast=autocast, lora_dtype=lora_dtype)
    entry = catalog.find_model(model, trust_remote_code=bool(rest.get("trust_remote_code", False)))
    architecture = entry.config if num_layers is None else catalog.cut_depth(entry.config, num_layers)
    words = {
        "method": method, "device": device, "optim": OPTIM_ALIASES.get(optim, optim), "quant": quant,
        "kbit_prep": kbit_prep, "attn": attn, "lora_r": lora_r, "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout, **named,
        "lora_targets": ",".join(lora_targets) if isinstance(lora_targets, list) else lora_targets,
    }  # fmt: skip
    words = with_defaults(words, architecture["model_type"])
    if rest.get("sharding") in HYBRID and rest.get("shard_size") is None:
        rest = rest | {"shard_size": SHARD_SIZE}
    made = {"model": entry.name, "architecture": architecture, "num_layers": num_layers}
    return checked(CellSpec, made | words | rest)


def with_defaults(words: dict[str, Any], model_type: str) -> dict[str, Any]:
    """A cell's words, and for each of them that is None what the method's users expect, if anything.

    The calculator of the page fills its cells with this same function, translated.
    """
    given = {name: value for name, value in words.items() if value is not None}
    method = given.get("method")
    usual = {
        "optim": "adamw_torch_fused",
        "quant": "nf4" if method == "qlora" else "none",
        "kbit_prep": "peft" if method == "qlora" else "none",
        "dtype": "bf16",
        "autocast": "none" if method == "full" else "bf16",
        "attn": "eager" if model_type in _NO_SDPA else "sdpa",
    }
    if method in ("lora", "qlora"):
        usual |= {
            "lora_r": 16,
            "lora_alpha": 2.0 * given.get("lora_r", 16),
            "lora_dropout": 0.0,
            "lora_targets": "all-linear",
            "lora_dtype": "bf16" if given.get("kbit_prep") == "trl" else "fp32",
        }
    return usual | given


def option_names() -> list[str]:
    """Every word that :func:`resolve` takes: the keys of a sweep file and, with dashes, the options of the CLI."""
    return sorted((set(CellSpec.model_fields) - {"architecture"}) | {"recipe"})


def checked(kind: type[Model], values: dict[str, Any]) -> Model:
    """``kind(**values)``, with pydantic's complaint turned into a SpecError a person can act on."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise SpecError("; ".join(_plain(problem) for problem in error.errors())) from None


def _plain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    given = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        choices = get_args(CellSpec.model_fields[where].annotation) if where in CellSpec.model_fields else ()
        near = difflib.get_close_matches(str(given).lower(), [str(choice) for choice in choices], n=1)
        message = f"allowed: {problem['ctx']['expected']}" + (f". Nearest: {near[0]}" if near else "")
    shown = "" if isinstance(given, dict | CellSpec) else f": {given!r} given"
    return f"{where}{shown}; {message}" if where else message


def _vram_bytes(text: str) -> int:
    """Bytes of ``24GiB``, ``24564MiB``, or of a GPU of the catalog as nvidia-smi reports it."""
    try:
        return parse_bytes(text)
    except SpecError as error:
        try:
            total_bytes = catalog.find_gpu(text).total_bytes
        except UnknownName as unknown:
            raise ValueError(f"{error}; nor is it a GPU: {unknown}") from None
        if total_bytes is None:
            raise ValueError(f"the memory of {text} is not known; write an amount such as 24GiB") from None
        return total_bytes


def _recipe_values(recipe: str | None, **given: str | None) -> dict[str, str | None]:
    if recipe is None:
        return given
    if recipe not in RECIPES:
        raise SpecError(f"unknown recipe {recipe!r}; allowed: {', '.join(RECIPES)}")
    for key, value in RECIPES[recipe].items():
        if given[key] not in (None, value):
            raise SpecError(
                f"recipe {recipe!r} means {key}={value}, but {key}={given[key]} was given; drop one of them"
            )
        given[key] = value
    return given


def _impossible(spec: CellSpec) -> list[str]:
    """Why this combination cannot run; empty when it can."""
    rules = _method_rules(spec) + _precision_rules(spec) + _device_rules(spec)
    return [reason for broken, reason in rules if broken] + _architecture_reasons(spec)


def _method_rules(spec: CellSpec) -> list[tuple[bool, str]]:
    adapters = [spec.lora_r, spec.lora_alpha, spec.lora_dropout, spec.lora_targets, spec.lora_dtype]
    return [
        (spec.method == "qlora" and spec.quant == "none",
         "method qlora trains adapters on a quantised base; set quant to nf4, nf4-single, fp4 or int8, or use lora"),
        (spec.method != "qlora" and spec.quant != "none",
         f"quant {spec.quant} needs method qlora: quantised weights cannot be trained, only adapters on them"),
        (spec.method != "qlora" and spec.kbit_prep != "none",
         f"kbit_prep {spec.kbit_prep} prepares a quantised model; it needs method qlora"),
        (spec.method == "full" and (spec.dora or any(value is not None for value in adapters)),
         "LoRA options (lora_*, dora) were given, but method full trains no adapters; use method lora or qlora"),
        (spec.dora and spec.quant == "int8",
         "peft's DoRA cannot start from an int8 base; use quant nf4 or fp4, or plain LoRA"),
        (spec.method != "full" and (spec.lora_r or 0) < 1, f"lora_r must be at least 1, {spec.lora_r} given"),
        (spec.fused_linear_cross_entropy and "lm_head" in (lora_target_names(spec) or ()),
         "fused_linear_cross_entropy reads the head's own weight and passes its adapter by; leave lm_head out of "
         "lora_targets"),
        (spec.lora_dropout is not None and not 0 <= spec.lora_dropout < 1,
         f"lora_dropout must be in [0, 1), {spec.lora_dropout} given"),
    ]  # fmt: skip


def _precision_rules(spec: CellSpec) -> list[tuple[bool, str]]:
    trained = spec.dtype if spec.method == "full" else spec.lora_dtype
    return [
        (trained == "fp16" and spec.autocast == "fp16",
         "fp16 autocast needs fp32 trained weights: GradScaler refuses to unscale fp16 gradients"),
        ({spec.dtype, spec.autocast} == {"bf16", "fp16"},
         f"weights in {spec.dtype} under {spec.autocast} autocast mix two 16-bit formats; use one of them"),
        (spec.kbit_prep == "trl" and spec.autocast != "bf16",
         "trl makes these casts only under bf16 autocast (its fp32 norms feed a bf16 head); set autocast bf16"),
        (spec.kbit_prep == "trl" and spec.lora_dtype not in ("bf16", "fp32"),
         f"trl casts adapters to bf16, or leaves them fp32 (0.9 to 0.13); lora_dtype {spec.lora_dtype} was given"),
        (spec.autocast == "none" and {spec.dtype, spec.lora_dtype} == {"bf16", "fp16"},
         f"{spec.lora_dtype} adapters on {spec.dtype} weights mix two 16-bit formats; use {spec.dtype} or fp32"),
        (spec.attn == "flash_attention_2" and spec.dtype == "fp32" and spec.autocast == "none",
         "flash_attention_2 has no fp32 kernel; load in bf16 or fp16, or set autocast"),
    ]  # fmt: skip


def _device_rules(spec: CellSpec) -> list[tuple[bool, str]]:
    return [
        (spec.device == "cpu" and spec.optim.startswith("paged_"),
         f"{spec.optim} pages its state between GPU and host; it needs device cuda"),
        (spec.device == "cpu" and spec.attn == "flash_attention_2", "flash_attention_2 needs device cuda"),
        (spec.device == "cpu" and spec.alloc_conf is not None,
         "alloc_conf sets the CUDA caching allocator; it needs device cuda"),
        (spec.device == "cpu" and spec.limit_vram is not None,
         "limit_vram holds a part of a GPU's memory; it needs device cuda"),
        (spec.trust_remote_code and spec.weights == "random",
         "trust_remote_code runs a checkpoint's own code; it needs weights pretrained"),
        (spec.num_layers is not None and spec.weights == "pretrained",
         "a depth cut (num_layers) keeps no checkpoint's weights; use weights random"),
    ]  # fmt: skip


def _rank_rules(spec: CellSpec) -> list[tuple[bool, str]]:
    """What cannot be of several GPUs. Not the calculator's, which predicts ranks that nobody runs."""
    several, given, alone = spec.num_gpus > 1, f"num_gpus {spec.num_gpus}", "is for several GPUs; set num_gpus to 2 or"
    rules = [
        (spec.sharding is None,
         f"{given} needs a sharding, which says how the ranks share the model: {', '.join(get_args(Sharding))}"),
        (spec.num_gpus > MAX_RANKS, f"{given}: at most {MAX_RANKS} ranks can be run"),
        (spec.is_spread and spec.only_rank is not None,
         f"only_rank {spec.only_rank} given; sharding device-map has no ranks: one process for all cards; drop it"),
        (spec.is_spread and (catalog.depth_of(spec.architecture) or spec.num_gpus) < spec.num_gpus,
         f"{given} under device-map: the model has {catalog.depth_of(spec.architecture)} layers, and no layer is "
         "divided; use as many cards at most"),
        (not spec.is_spread and spec.only_rank is not None and not 0 <= spec.only_rank < spec.num_gpus,
         f"only_rank {spec.only_rank} given; {spec.num_gpus} ranks are numbered from 0 to {spec.num_gpus - 1}"),
        (spec.sharding is not None and cannot_group(spec.sharding, spec.num_gpus, spec.shard_size) is not None,
         cannot_group(spec.sharding or "", spec.num_gpus, spec.shard_size) or ""),
        (spec.device == "cpu",
         f"{given} needs device cuda: NVIDIA GPUs that are visible here, or emulated ones, as by "
         f"--emulate 'H100-SXM x{min(spec.num_gpus, 16)}'"),
        (spec.weights == "pretrained",
         "several GPUs are given random weights alone: memory does not depend on the values; use weights random"),
        (spec.torch_compile, "torch_compile is not run on several GPUs; leave it out"),
        (spec.fused_linear_cross_entropy,
         "fused_linear_cross_entropy reads the head's weight past the module that would gather it, and is not run on "
         "several GPUs; leave it out"),
        ("fp16" in (spec.dtype, spec.autocast),
         "fp16 on several GPUs is trained under a gradient scaler, which is not run here; use bf16"),
        (spec.sharding in FSDP1 and spec.kbit_prep != "none",
         f"kbit_prep {spec.kbit_prep} raises norms to fp32, which {spec.sharding} does not flatten with {spec.dtype} "
         "weights in one unit; use kbit_prep none, or sharding fsdp"),
        (spec.sharding in FSDP2 and spec.optim not in DTENSOR_OPTIMIZERS, _no_dtensors(spec)),
        (spec.sharding is not None and cannot_shard(spec, spec.sharding) is not None,
         cannot_shard(spec, spec.sharding or "") or ""),
        (spec.sharding == TENSOR_PARALLEL and cannot_divide_layers(spec) is not None, cannot_divide_layers(spec) or ""),
        (cannot_share_sequences(spec) is not None, cannot_share_sequences(spec) or ""),
        (spec.sharding is not None and cannot_offload(spec, spec.sharding) is not None,
         cannot_offload(spec, spec.sharding or "") or ""),
    ]  # fmt: skip
    return [
        (not several and spec.offload != "none", f"offload {spec.offload} {alone} more, or leave it out"),
        (not several and spec.sharding is not None, f"sharding {spec.sharding} {alone} more, or leave it out"),
        (not several and spec.shard_size is not None, f"shard_size {spec.shard_size} {alone} more, or leave it out"),
        (not several and spec.cp_size > 1, f"cp_size {spec.cp_size} {alone} more, or leave it out"),
        (
            cannot_rotate(spec.cp_size, spec.cp_rotation) is not None,
            cannot_rotate(spec.cp_size, spec.cp_rotation) or "",
        ),
        (not several and spec.only_rank is not None, f"only_rank {spec.only_rank} {alone} more, or leave it out"),
        *((several and broken, reason) for broken, reason in rules),
    ]


def cannot_rotate(cp_size: int, cp_rotation: str) -> str | None:
    """Why nothing goes from rank to rank so, and what to do; None where it does, or the rotation is the usual one."""
    if cp_size > 1 or cp_rotation == "allgather":
        return None
    return f"cp_rotation {cp_rotation} is of ranks that share each sequence; set cp_size to 2 or more"


def cannot_group(sharding: str, num_gpus: int, shard_size: int | None) -> str | None:
    """Why so many ranks make no groups of ``shard_size``, and what to do; None where they do, or none are asked for."""
    given = f"shard_size {shard_size}"
    if sharding not in HYBRID:
        alone = f"{given}: {sharding} makes all ranks one group; use sharding {' or '.join(HYBRID)}, or leave it out"
        return alone if shard_size is not None else None
    if shard_size is None or shard_size < 2:
        return f"{given}: a group of {sharding} has at least 2 ranks, which share the model; use ddp to share nothing"
    if num_gpus % shard_size:
        return (
            f"num_gpus {num_gpus} under {sharding} is no multiple of {given}, the ranks of one group; set shard_size "
            "to a divisor of it"
        )
    if num_gpus == shard_size:
        return (
            f"{given} under {sharding} makes all {num_gpus} ranks one group, and nothing is replicated; use sharding "
            f"{sharding.removesuffix('-hybrid')}, or more GPUs"
        )
    return None


def cannot_shard(spec: CellSpec, sharding: str) -> str | None:
    """Why the libraries cannot run the cell so at all, and what to do; None where they can, or nobody knows."""
    if spec.quant == "int8" and sharding.startswith("fsdp"):
        return (
            f"quant int8 under {sharding}: FSDP takes away what bitsandbytes keeps on an int8 weight, and the first "
            "forward fails; use quant nf4, or sharding ddp, zero1 or zero2, which leave frozen weights whole"
        )
    if spec.quant != "none" and sharding == "fsdp1-shard-grad-op":
        return (
            f"quant {spec.quant} under {sharding}: torch ends it in the first backward (FSDP does not support changing "
            "the parameters between forward and backward); use sharding fsdp1, or fsdp-shard-grad-op"
        )
    return None


def _no_dtensors(spec: CellSpec) -> str:
    return (
        f"{spec.sharding} hands the optimizer DTensors, which {spec.optim} does not take; use "
        f"{', '.join(DTENSOR_OPTIMIZERS)}, or fsdp1"
    )


def cannot_divide_layers(spec: CellSpec) -> str | None:
    """What transformers 5.23 with peft 0.21 does not run by ``tp_plan="auto"``; each was seen to fail under Trainer."""
    if spec.optim not in DTENSOR_OPTIMIZERS:
        return _no_dtensors(spec)
    if spec.quant != "none":
        return (
            f"quant {spec.quant} under tp: transformers makes DTensors of the parts, and peft asks them what only "
            "bitsandbytes' own weights have ('DTensor' object has no attribute 'compress_statistics'); use method "
            "lora, or sharding fsdp"
        )
    targets = lora_target_names(spec) if spec.method != "full" else []
    if targets is None or any(one in ROW_WISE for one in targets):
        return (
            f"lora_targets {'all-linear' if targets is None else ','.join(targets)} under tp: the adapter of a layer "
            f"that is divided by its inputs ({', '.join(ROW_WISE[:2])}) is as wide as a part, and taken for the whole "
            '("shape is invalid" in the first forward); use lora_targets q_v, or sharding fsdp'
        )
    if spec.dora:
        return (
            "dora under tp: peft adds a whole B(A(x)) to a weight of which a rank has a part (got mixed torch.Tensor "
            "and DTensor, in the first forward); leave dora out, or use sharding fsdp"
        )
    heads = {name: spec.architecture.get(name) for name in ("num_attention_heads", "num_key_value_heads")}
    uneven = [f"{name} {count}" for name, count in heads.items() if isinstance(count, int) and count % spec.num_gpus]
    if uneven:
        return (
            f"num_gpus {spec.num_gpus} under tp: {' and '.join(uneven)} cannot be divided by it, and a rank has no "
            "part of a head; use a number that divides both"
        )
    return None


def cannot_share_sequences(spec: CellSpec) -> str | None:
    """What accelerate and torch do not run by context parallelism, or run as another model; None where they run it."""
    if spec.cp_size == 1:
        return None
    given, sharing = f"cp_size {spec.cp_size}", spec.shard_size or spec.num_gpus
    if spec.sharding not in FSDP2:
        return (
            f"{given} under {spec.sharding}: accelerate splits sequences beside FSDP2 alone; use sharding "
            f"{', '.join(FSDP2)}, or leave it out"
        )
    if sharing % spec.cp_size:
        name = "num_gpus" if spec.shard_size is None else "shard_size"
        return (
            f"{given}: {name} {sharing} is no multiple of it, the ranks that share each sequence; set it to a divisor"
        )
    if spec.cp_size == spec.shard_size:
        return (
            f"{given} under {spec.sharding} is all of shard_size {sharing}, and accelerate wants two batches in a "
            "group at least; use a smaller one, or sharding fsdp"
        )
    if spec.attn != "sdpa":
        return f"attn {spec.attn} with {given}: torch's ring attention stands in for sdpa's alone; use attn sdpa"
    if spec.padding:
        return (
            f"padding with {given}: accelerate drops the mask, and padding would be attended to; pack sequences to one "
            "length, and leave it out"
        )
    if spec.seq_len % (2 * spec.cp_size):
        return (
            f"seq_len {spec.seq_len} with {given}: each rank takes a part from the front and one from the back, so the "
            f"length is a multiple of {2 * spec.cp_size}; use {_near(spec.seq_len, 2 * spec.cp_size)}"
        )
    if spec.model_type in _NO_RING:
        return (
            f"{given}: accelerate takes the mask, which ring attention has no place for, from modules that are named "
            f"self_attn, and {spec.model_type} has none; leave it out"
        )
    if (spec.dtype, spec.autocast) == ("fp32", "none") and _has_grouped_heads(spec.architecture):
        return (
            f"dtype fp32 without autocast, with {given}: sdpa has no fused kernel for grouped heads in fp32, and ring "
            "attention stands in for fused ones alone; use autocast bf16"
        )
    if kinds := _partial_attention(spec.architecture):
        return (
            f"{given}: {spec.model} has {kinds}, whose mask accelerate would drop; it splits sequences of models with "
            "full causal attention alone; leave it out"
        )
    return None


def _near(length: int, unit: int) -> str:
    below = length // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _has_grouped_heads(architecture: dict[str, Any]) -> bool:
    heads = architecture.get("num_attention_heads")
    return architecture.get("num_key_value_heads", heads) != heads


def _partial_attention(architecture: dict[str, Any]) -> str:
    """The attention of a config.json that does not look at all tokens before, in words; empty where there is none."""
    kinds = set(architecture.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layers of {' and '.join(sorted(kinds))}"
    window = architecture.get("sliding_window")
    return f"a sliding window of {window}" if window and architecture.get("use_sliding_window", True) else ""


def cannot_offload(spec: CellSpec, sharding: str) -> str | None:
    """Why nothing of a rank goes to the host so, and what to do; None where it does, or nothing is asked to."""
    if spec.offload == "none":
        return None
    given = f"offload {spec.offload} under {sharding}"
    if sharding == "ddp":
        return f"{given}: DistributedDataParallel keeps all on the card; use sharding fsdp, fsdp1, zero2 or zero3"
    if sharding == TENSOR_PARALLEL:
        return f"{given}: a rank keeps its part of every layer on its card; use more of them, or sharding fsdp"
    if sharding == DEVICE_MAP:
        return f"{given}: what no card has room for is not laid on the host here; use more cards, or sharding fsdp"
    if sharding not in ZERO and spec.offload == "optimizer":
        return f"{given}: FSDP keeps parameters, gradients and state on the host, or none of them; use offload params"
    if sharding in ("zero1", "zero2") and spec.offload == "params":
        return f"{given}: DeepSpeed keeps parameters on the host under zero3 alone; use zero3, or offload optimizer"
    if sharding in ZERO and spec.optim not in CPU_ADAM:
        return f"{given}: DeepSpeed's CPUAdam steps on the host, and {spec.optim} is not that; use {CPU_ADAM[0]}"
    if spec.optim.startswith("paged_"):
        return f"{given}: {spec.optim} pages between GPU and host what is on the host alone; use adamw_torch"
    return None


def _architecture_reasons(spec: CellSpec) -> list[str]:
    reasons = []
    longest = spec.learned_positions
    if longest is not None and spec.seq_len > longest:
        reasons.append(f"seq_len {spec.seq_len} is longer than the {longest} learned positions of {spec.model}")
    if spec.attn == "sdpa" and spec.model_type in _NO_SDPA:
        reasons.append(f"transformers has no sdpa attention for {spec.model_type}; use attn eager")
    if spec.attn == "flash_attention_2" and spec.model_type in _NO_FLASH:
        other = "eager" if spec.model_type in _NO_SDPA else "sdpa"
        reasons.append(f"transformers has no flash_attention_2 for {spec.model_type}; use attn {other}")
    if spec.fused_linear_cross_entropy and spec.model_type in _NO_FUSED_LOSS:
        reasons.append(f"liger-kernel has no fused_linear_cross_entropy for {spec.model_type}; leave it out")
    return reasons


assert set(OPTIM_ALIASES.values()) <= set(get_args(Optim))
