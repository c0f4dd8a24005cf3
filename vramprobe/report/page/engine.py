"""Engine: the page's arithmetic, as JavaScript, and the data it counts with.

In: the installed package: its own source, catalog and shipped fits. Out: the text of the script that makes the global
``vramprobe``, and its data as plain JSON. Never imports torch. What the page counts is the source of terms/ and
predict/, translated (translation/), and the defaults of a cell are spec.py's own.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, get_args

import vramprobe
from vramprobe import catalog, spec
from vramprobe.errors import UnknownName
from vramprobe.model import memory_model
from vramprobe.report.page.translation import Module, translate
from vramprobe.terms.ranks import Sharding

#: The modules that the page counts with, each after those it imports; the names that it needs of them (null: all).
_MODULES: dict[str, set[str] | None] = {
    "units": {"GIB", "MIB", "KIB", "format_bytes"},
    "catalog.depth": None,
    "architecture.parts": None,
    "architecture.config": None,
    "architecture.families": None,
    "architecture.relatives": None,
    "architecture.mixtures": None,
    "architecture": None,
    "spec": {
        "CellSpec", "Q_V_TARGETS", "lora_target_names", "_impossible", "_method_rules", "_precision_rules",
        "_device_rules", "_architecture_reasons", "with_defaults", "_NO_FLASH", "_NO_SDPA", "_NO_FUSED_LOSS",
        "_LEARNED_POSITIONS", "_SHORT_OPTIM",
    },
    "terms.graph": None,
    "terms.tape": None,
    "terms.layout": None,
    "terms.operators": None,
    "terms.norms": None,
    "terms.parameters": None,
    "terms.optimizer": None,
    "terms.setup": None,
    "terms.attention": None,
    "terms.modules": None,
    "terms.llama": None,
    "terms.relatives": None,
    "terms.falcon": None,
    "terms.routing": None,
    "terms.experts": None,
    "terms.mla": None,
    "terms.gpt_oss": None,
    "terms.fused_loss": None,
    "terms.families": None,
    "terms.walk": None,
    "terms.remainders": None,
    "terms": {
        "CAUSES", "BATCH_BYTES_PER_TOKEN", "_OPTIMIZER", "Moment", "_idle_terms", "_gradients_bytes", "_in_order",
    },
    "model.memory_model": {
        "FORMAT", "CHOICES", "IntervalWidth", "LARGEST_HALF_WIDTH", "MemoryModel", "BLAS_WORKSPACE_BYTES",
        "constant_name", "half_width", "noise_share", "peak_moment", "unsure_share", "workspaces_bytes",
        "with_workspaces",
    },
    "predict.prediction": {
        "ARITHMETIC_SPREAD", "MIN_HALF_WIDTH", "FAR", "LIMIT_NAMES", "WIDENING",
        "CONTEXT_ALLOWANCE_BYTES", "NCCL_ALLOWANCE_BYTES", "LARGEST_BYTES", "TIGHT_SHARE",
        "Interval", "FitProvenance",
        "Prediction", "Verdict", "predict_moments", "_not_quantised", "without_flash", "verdict", "_judged",
        "usable_bytes", "_outside", "_basis",
        "widening_of", "unseen_choices", "bounds", "_other_tiers",
        "device_tier", "_provenance",
    },
    "terms.rank_tape": None,
    "terms.ranks": None,
    "predict.sharding": {"DTENSOR_OPTIMIZERS", "predict_rank", "_some", "_check", "cannot_shard", "_doubts"},
    "predict.changes": {"LEAST_SHARE", "candidates"},
    "predict.largest": {
        "_TRAINED_LENGTH", "Judged", "Answer", "Largest", "largest_count", "_answer", "_last", "_bounds",
        "_start_of_range", "_made_for", "_nothing_fits",
    },
}  # fmt: skip
#: Members of CellSpec that no prediction asks for.
_UNWANTED = frozenset({"fingerprint", "limit_vram_bytes", "needs_bitsandbytes", "num_params"})
#: What runtime.js and builtins.js have in place of what the modules import.
_GIVEN = {
    "vramprobe.errors.VramprobeError": "$Error",
    "vramprobe.errors.SpecError": "$Error",
    "vramprobe.errors.OutOfRange": "$OutOfRange",
    "vramprobe.terms.sizes.open_sizes": "$sizes.open_sizes",
    "vramprobe.terms.sizes.monomials": "$sizes.monomials",
    "math.prod": "$math.prod", "math.log2": "$math.log2", "math.floor": "$math.floor",
    "math.sqrt": "Math.sqrt",
    "typing.get_args": "(($values) => $values)",
    "vramprobe.architecture.architecture": "$archOf",
    "vramprobe.terms.moments": "$moments",
    "collections.Counter": "$counter",
    "operator.ge": "((one, other) => one >= other)",
}  # fmt: skip
#: The options of a cell that the page offers beside model, batch and length, and where their allowed values stand.
CHOICES = {
    "method": spec.Method, "quant": spec.Quant, "kbit_prep": spec.KbitPrep, "dtype": spec.Dtype,
    "autocast": spec.Autocast, "lora_dtype": spec.Dtype, "optim": spec.Optim, "attn": spec.Attention,
    "device": spec.Device, "sharding": Sharding,
}  # fmt: skip


def javascript() -> str:
    """The script that makes the global ``vramprobe`` from the data of :func:`data`."""
    here = resources.files("vramprobe").joinpath("report", "page")
    modules = [
        Module(
            f"vramprobe.{name}",
            _source(name),
            None if wanted is None else frozenset(wanted),
            _UNWANTED if name == "spec" else frozenset(),
        )
        for name, wanted in _MODULES.items()
    ]
    parts = [
        here.joinpath("runtime.js").read_text(),
        here.joinpath("builtins.js").read_text(),
        translate(modules, _GIVEN),
        here.joinpath("calculator.js").read_text(),
    ]
    return "(() => {\n" + "\n".join(parts) + "\n})();\n"


def predictor() -> str:
    """What the page's predictions rest on, in a few words."""
    fits = [model for model in _fits() if model.device == "cuda"]
    version = f"vramprobe {vramprobe.__version__}"
    if not fits:
        return f"arithmetic of {version} alone; no GPU has been measured yet"
    cards = ", ".join(sorted(
        f"{'emulated ' if model.is_emulated else ''}{model.device_name} ({model.num_records} records)" for model in fits
    ))  # fmt: skip
    yet = "; no GPU has been measured yet" if all(model.is_emulated for model in fits) else ""
    return f"{version}, fitted on {cards}; other GPUs by arithmetic alone{yet}"


def data() -> dict[str, Any]:
    """Models, GPUs, allowed values and shipped fits, as JSON has them."""
    return {
        "catalog": [_model(entry) for entry in catalog.list_models()],
        "gpus": [_gpu(gpu) for gpu in catalog.list_gpus()],
        "choices": {name: list(get_args(kind)) for name, kind in CHOICES.items()},
        "fits": [_fit(model) for model in _fits()],
    }


def _fits() -> list[memory_model.MemoryModel]:
    """What ships, but for the fit of several cards: its reserved memory is replayed, which the page does not."""
    return [model for model in memory_model.shipped_fits() if len(model.cards) < 2]


def _source(name: str) -> str:
    path = resources.files("vramprobe").joinpath(*name.split("."))
    file = path.joinpath("__init__.py") if path.is_dir() else path.parent.joinpath(f"{path.name}.py")
    return file.read_text()


def _model(entry: catalog.ModelEntry) -> dict[str, Any]:
    return {"slug": entry.name, "name": entry.hf_id or entry.name, "num_params": entry.n_params, "config": entry.config}


def _gpu(gpu: catalog.Gpu) -> dict[str, Any]:
    cheapest = min(catalog.list_prices(gpu.short_name), key=lambda price: price.usd_per_gpu_hour, default=None)
    price = cheapest and {
        "usd_per_hour": cheapest.usd_per_gpu_hour, "source": f"{cheapest.provider} {cheapest.terms}, {cheapest.date}"
    }  # fmt: skip
    return {"slug": gpu.short_name, "name": gpu.name, "memory_bytes": gpu.total_bytes, "has_flash": gpu.has_flash,
            "blas_workspace_bytes": gpu.blas_workspace_bytes, "is_nvidia": gpu.is_nvidia, "price": price}  # fmt: skip


def _fit(model: memory_model.MemoryModel) -> dict[str, Any]:
    try:
        gpu = catalog.find_gpu(model.device_name).short_name
    except UnknownName:
        gpu = None
    return {"gpu": gpu, "model": model.model_dump(mode="json", exclude={"fingerprints"})}
