"""Memory figures that others measured and published: typed rows, and which of them are a cell that we can predict.

In: vramprobe/data/published.csv. Out: PublishedRow values, and the CellSpec of what was run where there is one.
Conditions come from the row, and where its columns are silent from the code that the source names; nothing is guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from vramprobe import catalog
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog.shipped import csv_rows
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.units import GIB, MIB

Metric = Literal["max_allocated", "max_reserved", "nvidia-smi", "unknown"]
#: Names of models in sources → the catalog's entry of the same architecture; the rows' n_params must agree.
_SAME_ARCHITECTURE = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "NousResearch/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
    "Llama-2-7B": "llama-2-7b",
    "Qwen2-7B-Instruct": "qwen2.5-7b",
}
#: "bfloat16 (bf16 AMP)" → the weights as loaded and autocast, as the spec's words.
_PRECISIONS = {
    "bfloat16 (bf16 AMP)": ("bf16", "bf16"),
    "float16 (fp16 AMP)": ("fp16", "fp16"),
    "bfloat16 (no AMP)": ("bf16", "none"),
    "float16 (no AMP)": ("fp16", "none"),
}
_OPTIMIZERS = {"adamw_torch (HF default)": "adamw_torch", "adamw_torch": "adamw_torch"}
#: The newest releases on PyPI on the day of a row whose source pins none. But transformers: the settled bytes of that
#: day's Llama-2-70B row (fms-acceleration 00febdc, row 58) hold rotary tables in 80 layers, which 4.41 dropped.
_NEWEST_ON = {
    "2024-06-07": {
        "torch": (2, 3, 1),
        "transformers": (4, 40, 2),
        "peft": (0, 11, 1),
        "trl": (0, 9, 3),
        "accelerate": (0, 31, 0),
        "bitsandbytes": (0, 43, 1),
    }
}
_TRL_LEAVES_ADAPTERS = (0, 9)  # trl/trainer/utils.py, peft_module_casting_to_bf16: no BaseTunerLayer branch from here
_PEFT_RAISES_ADAPTERS = (0, 12)  # peft/tuners/tuners_utils.py, autocast_adapter_dtype
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published figure. Text is as the source wrote it; null where it says nothing.

    ``memory_bytes`` is null where the source does not say which GB it means; exact where the notes hold the raw number.
    ``settled_bytes``: allocated when training had ended (weights, optimizer state and the last batch).
    """

    line: int  # of data/published.csv; the header is line 1
    source: str
    url_or_path: str
    model: str
    n_params: int | None
    method: str
    dtype: str | None
    quant: str | None
    optimizer: str | None
    batch_size: int | None
    grad_accum: int | None
    seq_len: int | None  # only where it is one fixed length
    seq_len_text: str | None
    gradient_checkpointing: bool | None
    attention: str | None
    lora_r: int | None
    lora_targets: tuple[str, ...]
    num_gpus: int | None
    sharding: str | None
    gpu: str | None
    metric: Metric
    memory_bytes: int | None
    settled_bytes: int | None
    versions: Mapping[str, Version]  # of libraries, where pinned or known by date: "peft" → (0, 13, 2)
    notes: str

    @property
    def framework_config(self) -> str | None:
        """fms-acceleration's word for how the run was accelerated: ``none``, ``accelerated-peft-bnb-foak``."""
        found = re.search(r"framework_config=([^;]+)", self.notes)
        return found[1].strip() if found else None


@cache
def list_published() -> tuple[PublishedRow, ...]:
    """Every published row, in file order."""
    return tuple(_row(line, fields) for line, fields in enumerate(csv_rows("published.csv"), start=2))


def cell_of(row: PublishedRow, *, device: str = "cuda") -> CellSpec | None:
    """The cell that was run for ``row``: one of fms-acceleration's on one GPU, without another's kernels; else null.

    On ``device`` cpu, which has no flash-attn, attention is sdpa.
    """
    words, slug = _words(row), _slug(row.model)
    known = (row.seq_len, row.batch_size, row.gradient_checkpointing, row.attention, row.versions)
    is_ours = (
        row.metric == "max_allocated"
        and (row.num_gpus, row.sharding) == (1, "none")
        and (row.optimizer or "") in _OPTIMIZERS
        and all(value not in (None, "", {}) for value in known)
        and "GaLore" not in row.notes
    )
    # transformers 5 makes a layer's experts one tensor, which bitsandbytes leaves in 16 bit
    if not is_ours or words is None or slug is None or slug.startswith("mixtral"):
        return None
    attn = "flash_attention_2" if row.attention == "flash_attention_2" else "sdpa"
    return resolve(
        model=slug,
        device=device,
        attn=attn if device == "cuda" else "sdpa",
        batch_size=row.batch_size,
        seq_len=row.seq_len,
        grad_accum=row.grad_accum or 1,
        gradient_checkpointing=row.gradient_checkpointing,
        optim=_OPTIMIZERS[row.optimizer or ""],
        **words,
    )


def _words(row: PublishedRow) -> dict[str, Any] | None:
    """Return what fms-acceleration's benchmark ran, for :func:`resolve`; null for a configuration that was not read.

    From scripts/benchmarks/scenarios.yaml, plugins/accelerated-peft/.../framework_plugin_bnb.py (NF4 with double
    quantisation; ``no_peft_model`` leaves preparation to trl) and trl's SFTTrainer at the pinned version.
    """
    if (row.dtype or "") not in _PRECISIONS:
        return None
    dtype, autocast = _PRECISIONS[row.dtype or ""]
    words: dict[str, Any] = {"method": row.method, "dtype": dtype, "autocast": autocast}
    if row.method == "full":
        return words if row.framework_config == "none" else None
    alpha, dropout = re.search(r"lora_alpha (\d+)", row.notes), re.search(r"dropout ([\d.]+)", row.notes)
    if not (alpha and dropout):
        return None
    words |= {
        "lora_r": row.lora_r,
        "lora_alpha": float(alpha[1]),
        "lora_dropout": float(dropout[1].rstrip(".")),
        "lora_targets": _targets(row),
        "lora_dtype": "fp32",
    }
    match row.method, row.framework_config:
        case "lora", "none":
            raised = row.versions.get("peft", ()) >= _PEFT_RAISES_ADAPTERS
            return words | {"lora_dtype": "fp32" if raised else dtype}
        case "qlora", "accelerated-peft-bnb":
            return words | {"quant": "nf4", "kbit_prep": "none"}
        case "qlora", "baseline-peft-bnb" if autocast == "bf16":
            leaves = row.versions.get("trl", ()) >= _TRL_LEAVES_ADAPTERS
            return words | {"quant": "nf4", "kbit_prep": "trl", "lora_dtype": "fp32" if leaves else "bf16"}
        case "qlora", "baseline-peft-bnb":
            return words | {"quant": "nf4", "kbit_prep": "peft"}
    return None


def _targets(row: PublishedRow) -> list[str]:
    """The row's LoRA targets that the model has; peft passes over a name that matches no module."""
    slug = _slug(row.model)
    if slug is None:
        return list(row.lora_targets)
    try:
        linears = {linear.name.rpartition(".")[2] for linear in architecture(catalog.find_model(slug).config).linears}
    except UnsupportedArchitecture:
        return list(row.lora_targets)
    return [name for name in row.lora_targets if name in linears]


@cache
def _slug(model: str) -> str | None:
    """The catalog's entry for a model's published name; null where the catalog has none."""
    wanted = _SAME_ARCHITECTURE.get(model, model).lower()
    return next((e.name for e in catalog.list_models() if wanted in (e.name.lower(), (e.hf_id or "").lower())), None)


def _row(line: int, fields: dict[str, str]) -> PublishedRow:
    length = fields["seq_len"].removesuffix(" packed")
    return PublishedRow(
        line=line,
        source=fields["source"],
        url_or_path=fields["url_or_path"],
        model=fields["model"],
        n_params=_int(fields["n_params"]) if "B" not in fields["n_params"] else None,
        method=fields["method"],
        dtype=fields["dtype"] or None,
        quant=fields["quant"] or None,
        optimizer=fields["optimizer"] or None,
        batch_size=_int(fields["batch_size"]),
        grad_accum=_int(fields["grad_accum"]),
        seq_len=_int(length) if length.isdecimal() else None,
        seq_len_text=fields["seq_len"] or None,
        gradient_checkpointing={"true": True, "false": False}.get(fields["grad_checkpointing"]),
        attention=fields["attention"] or None,
        lora_r=_int(fields["lora_r"]),
        lora_targets=tuple(name for name in fields["lora_targets"].split(",") if name),
        num_gpus=_int(fields["n_gpus"]),
        sharding=fields["sharding"] or None,
        gpu=fields["gpu"] or None,
        metric=fields["metric"],
        memory_bytes=_memory_bytes(fields),
        settled_bytes=_int((re.search(r"after-train alloc (\d+)", fields["notes"]) or [None, ""])[1] or ""),
        versions=_versions(fields),
        notes=fields["notes"],
    )


def _memory_bytes(fields: dict[str, str]) -> int | None:
    """The raw number where the notes have it (``raw 15193274880 bytes``, ``raw 18102 MiB``), else ``memory_gb``."""
    raw = re.search(r"\braw ([\d.]+) (bytes|MiB|GiB)\b", fields["notes"])
    if raw:
        return round(float(raw[1]) * {"bytes": 1, "MiB": MIB, "GiB": GIB}[raw[2]])
    unit = {"GiB": GIB, "GB": 10**9}.get(fields["gb_is"])
    return None if unit is None else round(float(fields["memory_gb"]) * unit)


def _versions(fields: dict[str, str]) -> dict[str, Version]:
    pinned = re.findall(r"([A-Za-z][\w-]*) (\d+(?:\.\d+)+)", fields["library"])
    if pinned:
        return {name.lower().replace("_", "-"): tuple(map(int, version.split("."))) for name, version in pinned}
    date = re.search(r"row first published (\d{4}-\d\d-\d\d)", fields["notes"])
    return dict(_NEWEST_ON.get(date[1], {})) if date else {}


def _int(text: str) -> int | None:
    return int(text) if text else None
