"""Run that repeats a published row: its stack, its command and what that reads; or the reason why none does.

In: a row of vramprobe/data/published.csv. Out: a Recipe, or NotRun. Everything comes from the row and from the code
that its source names: for fms-acceleration scripts/benchmarks/{benchmark.py, defaults.yaml, scenarios*.yaml,
accelerate.yaml} and sample-configurations/, as they were at the row's commit.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tables import read_csv
from benchmarks.truth.published_rows import PublishedRow
from vramprobe import catalog

HERE = Path(__file__).parent
CARD = "A100-80GB-SXM"
#: The second is the first with an optimizer's state, and every later one is its equal. The published runs took 100.
NUM_STEPS = 2
_DATA_STEPS = 6  # what a longer run goes through again and again
#: The commit that published a row → the stack of its libraries.
STACKS = {
    "24bdadb": "fms-2025-02",
    "733992a": "fms-2024-12",
    "fc78b55": "fms-2024-10-granite",
    "97fc3c1": "fms-2024-10",
    "00febdc": "fms-2024-06",
}
_WITHOUT_PLUGINS = {"fms-2024-06": "fms-2024-06-plain"}
#: What the results' own column lora_dropout says (refs/a100_80gb.csv); published.csv has a later scenario's.
_DROPOUT = {"00febdc": "0.0"}
_FMS = "fms-acceleration benchmark refs"
#: A published name → (a config in models/ or the catalog's entry, its tokenizer in tokenizers.json).
_MODELS = {
    "mistralai/Mistral-7B-v0.1": ("mistral-7b-v0.1", "llama"),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("mistral-7b-v0.1", "llama"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", "llama"),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": ("mixtral-8x7b", "llama"),
    "NousResearch/Llama-2-70b-hf": ("llama-2-70b", "llama"),
    "TheBloke/Llama-2-70B-GPTQ": ("llama-2-70b", "llama"),
    "meta-llama/Meta-Llama-3-8B": ("llama-3-8b", "llama-3"),
    "TechxGenus/Meta-Llama-3-8B-GPTQ": ("llama-3-8b", "llama-3"),
    "ibm/PowerLM-3b": ("powerlm-3b", "powerlm"),
    "bigcode/gpt_bigcode-santacoder": ("santacoder", "santacoder"),
}
#: Of the configs in models/.
_NUM_PARAMS = {"powerlm-3b": 3_511_000_000, "santacoder": 1_125_000_000}
#: The published checkpoints' files; which weights are loaded together leaves its traces in the allocator's blocks.
_SHARD_BYTES = {"mistral-7b-v0.1": 10**10, "llama-2-70b": 10**10}
_KERNELS = {"fast_loss": True, "fast_rms_layernorm": True, "fast_rope_embeddings": True}
_KERNELS |= {"fast_rsm_layernorm": True}  # so in the configurations; the first plugin knows no other word
_LIGER = _KERNELS | {"fast_loss": "fused_ce_liger"}
_NF4 = {"quant_type": "nf4", "no_peft_model": False}
_GPTQ = {"kernel": "triton_v2", "from_quantized": True}
#: Every source without a recipe, and why.
_REASONS = {row["source"]: row["reason"] for row in read_csv(HERE / "reasons.csv")}
#: What the sample configuration of each name says.
_PLUGINS: dict[str, dict[str, Any]] = {
    "none": {},
    "foak-fast-kernels": {"training": {"fused_ops_and_kernels": _KERNELS}},
    "foak-fast-kernels-liger": {"training": {"fused_ops_and_kernels": _LIGER}},
    "baseline-peft-bnb": {"peft": {"quantization": {"bitsandbytes": _NF4 | {"no_peft_model": True}}}},
    "accelerated-peft-bnb": {"peft": {"quantization": {"bitsandbytes": _NF4}}},
    "accelerated-peft-autogptq": {"peft": {"quantization": {"auto_gptq": _GPTQ}}},
}
for _name, _base, _quantized in (("bnb", "bitsandbytes", _NF4), ("autogptq", "auto_gptq", _GPTQ)):
    for _suffix, _kernels in (("foak", _KERNELS), ("foak-liger", _LIGER)):
        _fused = {"base_layer": _base, "fused_lora": True} | _kernels
        _PLUGINS[f"accelerated-peft-{_name}-{_suffix}"] = {
            "peft": {"quantization": {_base: _quantized, "fused_ops_and_kernels": _fused}}
        }


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run. ``words`` follow the interpreter; ``{model}``, ``{data}`` and ``{out}`` are folders and files made for it.

    ``host_bytes``: memory of this machine that it fills, where weights are loaded to the host first: all of
    one rank's that are not quantised there, GPTQ's 4 bits on every rank.
    """

    line: int
    stack: str
    cards: str
    num_ranks: int
    model: str  # of the catalog, or of models/
    tokenizer: str
    is_gptq: bool
    words: tuple[str, ...]
    num_data_rows: int
    plugins: dict[str, Any] = field(hash=False)
    host_bytes: int = 0

    @property
    def fingerprint(self) -> str:
        """Changes with all that decides what is run, but for the packages of the stack."""
        told = [
            self.stack,
            self.cards,
            config_of(self.model),
            tokenizer_of(self.tokenizer),
            self.is_gptq,
            self.words,
            self.plugins,
            shard_bytes_of(self.model),
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class NotRun:
    """Reason why a published row is not repeated."""

    reason: str


def recipe_of(row: PublishedRow, num_steps: int = NUM_STEPS) -> Recipe | NotRun:
    """The run of a row, or the first reason why there is none."""
    if row.metric == "nvidia-smi":
        return NotRun(
            "device tier: what nvidia-smi saw of a run stands beside its allocated memory, where that is published"
        )
    if row.source != _FMS:
        return NotRun(_REASONS[row.source])
    if row.seq_len is None:
        return NotRun("rows of varying length from a data set that is not at hand (orca-math)")
    commit = re.search(r"@(\w+):", row.url_or_path)
    assert commit is not None
    assert row.batch_size is not None
    assert row.num_gpus is not None
    model, tokenizer = _MODELS[row.model]
    plugins = _PLUGINS[row.framework_config or ""]
    stack = STACKS[commit[1]]
    stack = stack if plugins else _WITHOUT_PLUGINS.get(stack, stack)
    words = ["-m", "tuning.sft_trainer", *_words(row, num_steps)]
    if row.num_gpus > 1:
        launch = ["-m", "accelerate.commands.launch", "--config_file", "{fsdp}", f"--num_processes={row.num_gpus}"]
        words = [*launch, "--main_process_port={port}", *words]
    is_gptq = "autogptq" in (row.framework_config or "")
    params, loaded_to_host = _num_params(model), row.num_gpus == 1 and row.method in ("full", "lora")
    return Recipe(
        line=row.line,
        stack=stack,
        cards=CARD if row.num_gpus == 1 else f"{CARD} x{row.num_gpus}",
        num_ranks=row.num_gpus,
        model=model,
        tokenizer=tokenizer,
        is_gptq=is_gptq,
        words=tuple(words),
        num_data_rows=row.batch_size * row.num_gpus * (min(num_steps, _DATA_STEPS) + 1),
        plugins=plugins,
        host_bytes=2 * params if loaded_to_host else params // 2 * row.num_gpus if is_gptq else 0,
    )


def _words(row: PublishedRow, num_steps: int) -> list[str]:
    """Return what benchmark.py tells tuning.sft_trainer; only the number of steps is ours."""
    dtype, _, autocast = (row.dtype or "").partition(" ")
    told = {
        "model_name_or_path": "{model}",
        "use_flash_attn": "True",
        "torch_dtype": dtype,
        "response_template": "\n### Response:",
        "dataset_text_field": "output",
        "include_tokens_per_second": "True",
        "num_train_epochs": "1",
        "gradient_accumulation_steps": "1",
        "gradient_checkpointing": "True",
        "save_strategy": "no",
        "weight_decay": "0.01",
        "warmup_steps": "10",
        "adam_epsilon": "1e-4",
        "lr_scheduler_type": "linear",
        "logging_strategy": "steps",
        "logging_steps": "10",
        "max_steps": str(num_steps),
        "packing": "True",
        "max_seq_len": str(row.seq_len),
        "per_device_train_batch_size": str(row.batch_size),
        "training_data_path": "{data}",
        "output_dir": "{out}",
        "skip_memory_metrics": "False",
        "learning_rate": "2e-5" if row.method == "full" else "2e-4",
    }
    words = [word for key, value in told.items() for word in (f"--{key}", value)]
    words += {"(bf16 AMP)": ["--bf16"], "(fp16 AMP)": ["--fp16"], "(no AMP)": []}[autocast]
    if row.method != "full":
        alpha, dropout = re.search(r"lora_alpha (\d+)", row.notes), re.search(r"dropout ([\d.]*\d)", row.notes)
        assert alpha, row.notes
        assert dropout, row.notes
        words += ["--peft_method", "lora", "--r", str(row.lora_r), "--lora_alpha", alpha[1]]
        commit = re.search(r"@(\w+):", row.url_or_path)
        told_dropout = _DROPOUT.get(commit[1] if commit else "", dropout[1])
        words += ["--lora_dropout", told_dropout, "--target_modules", *row.lora_targets]
    return words


def config_of(model: str) -> dict[str, Any]:
    """A model's configuration: of models/, else of the catalog."""
    path = HERE / "models" / f"{model}.json"
    return json.loads(path.read_text()) if path.is_file() else catalog.find_model(model).config


def tokenizer_of(name: str) -> dict[str, Any]:
    """Return how many words a tokenizer has, its class and its special tokens."""
    return json.loads((HERE / "tokenizers.json").read_text())[name]


def _num_params(model: str) -> int:
    return _NUM_PARAMS.get(model) or catalog.find_model(model).n_params


def shard_bytes_of(model: str) -> int:
    """The size that a model's published checkpoint was split at: save_pretrained's of its day."""
    return _SHARD_BYTES.get(model, 5 * 10**9)


def num_params(recipe: Recipe) -> int:
    """For the order of a campaign: the smallest first."""
    return _num_params(recipe.model)


def num_params_of(published_model: str) -> int:
    """Return the number of parameters of a model by its published name."""
    return _num_params(_MODELS[published_model][0])
