"""Training speed that others measured and published: typed rows, and which of them are a step that we can count.

In: published_speed.csv of vramprobe/data, and published_shapes.csv for models outside the catalog. Out: SpeedRow
values; for each either the SpeedCase that was run, or the one reason why there is none. Changes no row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from benchmarks.speed.rates_fit import StepObservation
from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog.shipped import csv_rows
from vramprobe.choices import Sharding
from vramprobe.spec import CellSpec, checked, with_defaults
from vramprobe.speed.elementwise import Fusion
from vramprobe.speed.step import Kernel
from vramprobe.speed.work import PACKED_BYTES, Work, work_of

#: Why a row is no case. A row that has several reasons gets the first in this order.
Reason = Literal[
    "no tokens per second",  # the source gives times of an unknown number of tokens: ratios only
    "suspect",  # the collection's own word
    "another method",  # neither full, LoRA nor QLoRA
    "shape not known",  # a mixture of experts, or a model that the source does not name
    "not 16 bit",  # FP8, FP4, or not stated
    "card not in the catalog",  # or not named, or a variant of one (other memory, a power limit)
    "conditions not stated",  # batch, length, checkpointing, or the number of GPUs
    "lengths vary",  # padded or padding-free batches of unknown length
    "parallel otherwise",  # tensor, pipeline, context or sequence parallel
    "offload",  # weights or activations in the host's memory
    "checkpoints some",  # selective: which share is recomputed is not known
]

_METHODS = {"full": "full", "pretrain": "full", "lora": "lora", "qlora": "qlora"}
_CARDS = {
    "A100-80GB": "A100-80GB-SXM",
    "A100": "A100-80GB-SXM",
    "A100-40GB": "A100-40GB-SXM",
    "H100-SXM": "H100-SXM",
    "L40S": "L40S",
    "L40": "L40",
    "RTX4090": "RTX-4090",
    "RTX3090": "RTX-3090",
    "H200": "H200",
    "B200": "B200",
    "B300": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
    "RTX6000Ada": "RTX-6000-Ada",
    "A6000": "RTX-A6000",
}
#: A source's word for how ranks share the states → ours. HSDP shards within a machine.
_SHARDINGS: dict[str, Sharding] = {
    "none": "ddp",
    "DDP": "ddp",
    "FSDP full_shard": "fsdp",
    "FSDP FULL_SHARD": "fsdp",
    "FSDP": "fsdp",
    "FSDP2": "fsdp",
    "FSDP SHARD_GRAD_OP": "fsdp-shard-grad-op",
    "HSDP": "fsdp",
    "ZeRO-2": "zero2",
    "ZeRO-3": "zero3",
    "DeepSpeed ZeRO-3": "zero3",
    "DeepSpeed ZeRO-2": "zero2",
    "multinode 2x2": "ddp",
    "zero1": "zero1",
}


#: What repeats of one run share.
_CONFIGURATION = (
    "family", "model", "method", "dtype", "quant", "batch_size", "grad_accum", "seq_len", "grad_checkpointing",
    "lora_r", "lora_targets", "n_gpus", "sharding", "gpu", "fused_kernels", "packed",
)  # fmt: skip


class SpeedRow(BaseModel):
    """One published figure, as the source wrote it; null where it says nothing. The columns are published_speed.csv's.

    ``tokens_per_s_per_gpu`` counts what the source counts: pads or not, the notes say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    line: int = Field(ge=2)  # of data/published_speed.csv; the header is line 1
    source: str = Field(min_length=1)
    url_or_path: str = Field(min_length=1)
    model: str
    n_params: int | None = Field(ge=1)
    method: str | None
    dtype: str | None
    quant: str | None
    optimizer: str | None
    batch_size: int | None = Field(alias="batch_size(micro)", ge=1)
    grad_accum: int | None = Field(ge=1)
    seq_len: int | None = Field(ge=1)
    grad_checkpointing: str | None
    attention: str | None
    lora_r: float | None = Field(ge=1)
    lora_targets: str | None
    n_gpus: int | None = Field(ge=1)
    sharding: str | None
    gpu: str | None
    library: str | None
    tokens_per_s_total: float | None = Field(gt=0)
    tokens_per_s_per_gpu: float | None = Field(gt=0)
    mfu_claimed: str | None
    fused_kernels: str | None
    packed: str | None
    notes: str

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_null(cls, value: Any, info: Any) -> Any:
        return None if value == "" and info.field_name != "notes" else value

    @property
    def family(self) -> str:
        """The source without its round or version: MLPerf's rounds are one source, and so are NVIDIA's pages."""
        return re.sub(r"-v?[\d.x]+$", "", self.source)

    @property
    def configuration(self) -> tuple[Any, ...]:
        """All but versions, dates and figures."""
        return tuple(getattr(self, name) for name in _CONFIGURATION)


#: Sources whose attention is FlashAttention's first version or its Triton twin. FlashAttention-2 is about twice as fast
#: (its paper, arXiv 2307.08691), so theirs has the operations of so many of it.
FIRST_FLASH, FIRST_FLASH_SLOWER = ("llm-foundry",), 2.0
#: Sources on transformers' Trainer of 2023 to 2025, whose checkpoints repeat a layer whole.
_REENTRANT = ("fms-acceleration", "qwen-readme")
#: AutoGPTQ of 2023 unpacks a weight by operators of torch (shift 0.5→4, cast 4→1, mask 1→1, less zeros 1→1, scaled 1→2:
#: 16.5 bytes; as transformers' norms, which are casts and broadcasts too, 1.4 times as slow as simple kernels), in the
#: forward and its repeat; backward finds it in 16 bit.
_UNPACKS_BY_TORCH, _UNPACKING_BYTES = ("qwen-readme",), 23.0
#: Training engines, with kernels of their own, whose master weights are fp32 and cast when gathered.
_ENGINES = ("llm-foundry", "fms-fsdp", "tinyllama", "internevo")
#: A source's word for an optimizer whose step is torch's foreach, many kernels; torchtune's AdamW is fused.
_FOREACH = ("adamw_torch(HF default)", "adamw", "AdamW")


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """The step that was run for a row: its cell (the batch is one GPU's), on which cards, by which kernels."""

    spec: CellSpec
    gpu: catalog.Gpu
    num_gpus: int
    sharding: Sharding
    fused: Fusion
    kernel: Kernel
    tokens_per_second: float  # of one GPU

    @property
    def is_well_conditioned(self) -> bool:
        """Long and full steps of a large model in one machine: where a rule of thumb should hold."""
        return (
            1024 <= self.spec.seq_len <= 8192
            and self.spec.num_tokens >= 4096
            and self.num_gpus <= 8
            and self.spec.num_params >= 2.6e9
        )


@dataclass(frozen=True)
class NoCase:
    """Why a row's step is not counted."""

    reason: Reason


@cache
def list_published_speed() -> tuple[SpeedRow, ...]:
    """Every published row, in file order."""
    return tuple(
        SpeedRow.model_validate({"line": line, **fields})
        for line, fields in enumerate(csv_rows("published_speed.csv"), start=2)
    )


def case_of(row: SpeedRow) -> SpeedCase | NoCase:
    """The step that was run for ``row``, or the first reason why it cannot be counted."""
    if found := next(_reasons(row), None):
        return found
    batch, length = _batch(row)
    config = _config(row.model)
    assert config is not None
    return SpeedCase(
        spec=_spec(row, config, batch, length),
        gpu=catalog.find_gpu(_CARDS[row.gpu or ""]),
        num_gpus=row.n_gpus or 1,
        sharding=_sharding(row.sharding or "none") or "ddp",
        fused=_fused(row),
        kernel="gptq" if "gptq" in (row.quant or "") else "bitsandbytes",
        tokens_per_second=row.tokens_per_s_per_gpu or 0.0,
    )


def _reasons(row: SpeedRow) -> Iterator[NoCase]:
    """Those of :data:`Reason` that hold, in their order."""
    batch, length = _batch(row)
    missing = None in (batch, length, row.n_gpus, row.grad_checkpointing, row.sharding)
    checkpointing, sharding = row.grad_checkpointing or "", row.sharding or "none"
    dtype = row.dtype or ("16 bit" if row.family == "fms-acceleration" else "")
    is_offloaded = any(word in row.notes for word in ("offload=True", "activation offload"))
    checks: dict[Reason, bool] = {
        "no tokens per second": row.tokens_per_s_per_gpu is None,
        "suspect": "SUSPECT" in row.notes,
        "another method": row.method not in _METHODS,
        "shape not known": _config(row.model) is None or "MoE" in row.notes,
        "not 16 bit": not re.match(r"bf|float16|fp16|amp_bf16|amp-fp16|BF16|16 bit", dtype),
        "card not in the catalog": (row.gpu or "") not in _CARDS,
        "lengths vary": length is None and row.packed in ("padding-free", "False"),
        "conditions not stated": missing,
        "parallel otherwise": _sharding(sharding) is None and "offload" not in sharding,
        "offload": "offload" in sharding or is_offloaded,
        "checkpoints some": checkpointing not in ("True", "False"),
    }
    assert checks.keys() == set(get_args(Reason))
    return (NoCase(reason) for reason, holds in checks.items() if holds)


def _sharding(text: str) -> Sharding | None:
    """Ours for a source's word; InternEvo's has the ranks that share the states after it."""
    return "zero1" if text.startswith("TP1 zero1=") else _SHARDINGS.get(text)


def _batch(row: SpeedRow) -> tuple[int | None, int | None]:
    """(sequences, tokens of each); PEFT's batches are by length, and the notes have the mean of real tokens."""
    mean = re.search(r"mean real tokens/sample=([\d.]+)", row.notes)
    if mean:
        return row.batch_size, round(float(mean[1]))
    if row.source == "torchtune" and row.packed == "False":
        return row.batch_size, None  # "baseline unpacked: real length below 4096"
    return row.batch_size, row.seq_len


def _fused(row: SpeedRow) -> Fusion:
    """By what the row says, and of training engines by what they are made of."""
    said = row.fused_kernels or ""
    if row.family in _ENGINES or any(word in said for word in ("compile", "TE", "FA2")):
        return "all"
    return "kernels" if "foak" in said or "liger" in said else "none"


def _spec(row: SpeedRow, config: dict[str, Any], batch: int | None, length: int | None) -> CellSpec:
    method = _METHODS[row.method or ""]
    if "n_positions" in config:
        config = config | {"n_positions": length}
    words: dict[str, Any] = {"method": method, "device": "cuda", "dtype": "bf16", "attn": "sdpa"}
    if row.optimizer in _FOREACH and row.family != "torchtune":
        words["optim"] = "adamw_torch"
    words["autocast"] = "bf16" if "amp" in (row.dtype or "") or method == "qlora" else "none"
    if method == "full" and row.family in _ENGINES:
        words["dtype"], words["autocast"] = "fp32", "bf16"  # fp32 master weights, cast when gathered
    if method == "qlora":
        words |= {"quant": "nf4", "kbit_prep": "peft" if "baseline-peft-bnb" in row.notes else "none"}
    if method != "full":
        words |= {"lora_r": int(row.lora_r or 16), "lora_targets": _targets(row, config)}
        if row.family == "fms-acceleration":
            words["lora_dropout"] = 0.1  # as its own commands launch it
    return checked(
        CellSpec,
        {
            "model": row.model,
            "architecture": config,
            "batch_size": batch,
            "seq_len": length,
            "grad_accum": row.grad_accum or 1,
            "gradient_checkpointing": row.grad_checkpointing == "True",
        }
        | with_defaults(words, config["model_type"]),
    )


def _targets(row: SpeedRow, config: dict[str, Any]) -> str:
    """The row's targets by the names that this architecture has for them; peft passes over what matches nothing."""
    named = set((row.lora_targets or "").split())
    if not named or {"all", "c_proj"} & named:
        return "all-linear"
    if "(qkv," in named:
        named = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if named == {"c_attn"}:
        named = {"q_proj", "k_proj", "v_proj"}
    known = {linear.name.rpartition(".")[2] for linear in architecture(config).linears}
    return ",".join(sorted(named & known)) or "all-linear"


#: A key of config.json for a column of published_shapes.csv, or for what its families have in common.
_SIZES = {
    "gpt2": {
        "n_embd": "hidden", "n_layer": "layers", "n_head": "heads", "n_inner": "mlp", "vocab_size": "vocab",
        "n_positions": "1024",
    },
    "falcon": {
        "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
        "ffn_hidden_size": "mlp", "vocab_size": "vocab", "bias": "bias", "multi_query": "yes", "parallel_attn": "yes",
        "new_decoder_architecture": "no", "alibi": "no",
    },
    "llama": {
        "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "intermediate_size": "mlp", "vocab_size": "vocab", "attention_bias": "bias",
    },
}  # fmt: skip


@cache
def _shapes() -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in csv_rows("published_shapes.csv")}


@cache
def _config(model: str) -> dict[str, Any] | None:
    """A config.json for a model's published name: the catalog's, or of the same widths; null where none is known."""
    slug = {"mistral-7b": "mistral-7b-v0.1", "llama-3-405b": "llama-3.1-405b"}.get(model.lower(), model.lower())
    if entry := next((e for e in catalog.list_models() if slug in (e.name.lower(), (e.hf_id or "").lower())), None):
        try:
            return None if architecture(entry.config).experts else entry.config
        except UnsupportedArchitecture:
            return None
    shape = _shapes().get(model)
    if shape is None:
        return None
    kind, sizes = shape["model_type"], _SIZES[shape["model_type"]]
    return {"model_type": kind, "tie_word_embeddings": shape["tied"] == "yes"} | {
        key: int(told) if (told := shape.get(said, said)).isdecimal() else told == "yes" for key, said in sizes.items()
    }


def has_unknown_links(row: SpeedRow, case: SpeedCase) -> bool:
    """Whether a fit to its step says nothing of links: four GPUs on two machines whose network is not known (Qwen's
    "multinode 2x2"), and FSDP on a machine whose source calls its PCIe lanes slow (fsdp_qlora's RTX 3090).
    """
    is_slow = row.family == "fsdp_qlora" and case.gpu.short_name == "RTX-3090" and case.sharding == "fsdp"
    return row.sharding == "multinode 2x2" or is_slow


def _work(row: SpeedRow, case: SpeedCase) -> Work:
    """As its source's libraries of the day do it."""
    work = work_of(case.spec, fused=case.fused, is_reentrant=row.family in _REENTRANT)
    if case.kernel == "gptq" and row.family in _UNPACKS_BY_TORCH:
        uses = 2 if case.spec.gradient_checkpointing else 1
        weights = work.dequantised_bytes / (PACKED_BYTES * (1 + uses))
        unpacked = work.stream_bytes + _UNPACKING_BYTES * uses * weights
        work = replace(work, dequantised_bytes=0.0, stream_bytes=unpacked)
    times = FIRST_FLASH_SLOWER if row.family in FIRST_FLASH else 1.0
    return replace(
        work,
        attention_flops=times * work.attention_flops,
        attention_backward_flops=times * work.attention_backward_flops,
    )


@cache
def observations() -> tuple[tuple[SpeedRow, SpeedCase, StepObservation], ...]:
    """Each configuration whose step can be counted, once: its first row and the geometric mean of its repeats."""
    repeats: dict[tuple[Any, ...], list[tuple[SpeedRow, SpeedCase]]] = {}
    for row in list_published_speed():
        if isinstance(case := case_of(row), SpeedCase):
            repeats.setdefault(row.configuration, []).append((row, case))
    found = []
    for pairs in repeats.values():
        row, case = pairs[0]
        rate = math.exp(sum(math.log(one.tokens_per_second) for _, one in pairs) / len(pairs))
        observation = StepObservation(
            source=row.family,
            work=_work(row, case),
            grad_accum=case.spec.grad_accum,
            gpu=case.gpu,
            num_gpus=case.num_gpus,
            sharding=case.sharding,
            kernel=case.kernel,
            tokens_per_second=rate,
            is_aside=has_unknown_links(row, case),
        )
        found.append((row, case, observation))
    return tuple(found)
