"""Engine: the page's arithmetic, as JavaScript, and the data it counts with.

In: the installed package: its own source, catalog and shipped fits. Out: the text of the script that makes the global
``vramprobe``, and its data as plain JSON. Never imports torch. What the page counts is the source of terms/ and
predict/, translated (translation/), and the defaults of a cell are spec.py's own.
"""

from __future__ import annotations

import ast
from dataclasses import asdict
from importlib import resources
from typing import Any, get_args

import vramprobe
from vramprobe import catalog, spec
from vramprobe.catalog.models import BOOKKEEPING_KEYS
from vramprobe.choices import CpRotation, Offload, Sharding
from vramprobe.errors import UnknownName
from vramprobe.model import memory_model
from vramprobe.options import ADAPTER_OPTIONS
from vramprobe.predict.stack import versions_of
from vramprobe.predict.uncertainty import basis_of
from vramprobe.recommend.prices import shipped_offers
from vramprobe.report.page.translation import Module, translate
from vramprobe.rules.sharding import HYBRID, SHARDINGS
from vramprobe.speed.rates import kernel_tables, shipped_speed
from vramprobe.techniques.registry import known_changes
from vramprobe.terms.meanings import MEANINGS

#: The packages whose modules the page counts with, whole.
_PACKAGES = ("terms.models", "terms.sharding.zero", "terms.sharding.zero3", "terms.sharding")
#: The other modules that it counts with; the names that it needs of them (null: all).
_MODULES: dict[str, set[str] | None] = {
    "choices": {"Sharding", "TENSOR_PARALLEL", "DEVICE_MAP", "Offload"},
    "units": {
        "GIB", "MIB", "KIB", "format_bytes", "format_hours", "spread_of_hours", "_unit_of_hours", "few_digits",
        "format_usd",
    },
    "catalog.depth": None,
    "catalog.gpus": {"Gpu", "cublas_workspace_bytes"},
    "architecture.parts": None,
    "architecture.config": None,
    "architecture.families": None,
    "architecture.relatives": None,
    "architecture.variants": None,
    "architecture.releases": None,
    "architecture.llama4": None,
    "architecture.mixtures": None,
    "architecture.vision": None,
    "architecture": None,
    "optimizers": {"Optimizer", "_ROWS", "OPTIMIZERS"},
    "trainers": None,
    "rules.cell": None,
    "rules.sharding": {
        "SHARD_SIZE", "DTENSOR_OPTIMIZERS", "CPU_ADAM", "ROW_WISE", "_NO_RING", "ShardingRules", "_4_BIT", "_NO_INT8",
        "_FSDP1", "_FSDP2", "_ZERO", "SHARDINGS", "ONE_GPU", "HYBRID", "FSDP2", "ONE_GROUP", "rules_of",
        "sharing_ranks", "with_group_size", "cannot_shard", "cannot_rotate", "cannot_group", "cannot_step",
        "cannot_quantize", "cannot_divide_layers", "cannot_share_sequences", "_near", "_has_grouped_heads",
        "_partial_attention", "cannot_offload",
    },
    "spec": {
        "CellSpec", "with_defaults", "_LEARNED_POSITIONS",
    },
    "kernels.chip": None,
    "kernels.attention": None,
    "kernels.reductions": None,
    "terms.tape.graph": None,
    "terms.tape.lifetimes": {"OutlivedStep"},
    "terms.tape.tape": None,
    "terms.tape.account": None,
    "terms.tape.layout": None,
    "terms.cell.parameters": None,
    "terms.cell.optimizer": None,
    "terms.cell.setup": None,
    "terms.step.walk": None,
    "terms.cell.remainders": None,
    "terms.step.moments": {
        "batch_bytes", "_OPTIMIZER", "Moment", "_idle_terms", "_gradients_bytes", "_in_order",
    },
    "terms": None,
    "terms.step.versions": None,
    "terms.tape.scratch": None,
    "terms.cell.loading": {
        "load", "batch_names", "packed_number", "_TILE_BYTES", "_SHIFTED", "_load_whole", "_load_quantised",
        "_quantise", "_add_buffers", "_add_adapters", "_cast", "_loaded_bytes",
    },
    "terms.tape.request_log": {
        "SAMPLED", "STREAM", "_END", "_TEMPLATE", "Chunk", "chunks_of", "NotAlike",
        "_Inner", "unrolled", "_source", "_starts", "_turn", "_require_alike", "_spread", "events",
    },
    "terms.tape.micro_steps": None,
    "terms.step.requests": None,
    "allocator.ledger": {"_TOP_ADDRESS", "Device", "Usage", "SegmentEvent", "OutOfMemory", "Ledger"},
    "allocator.config": {
        "MIN_BLOCK", "SMALL_SIZE", "SMALL_BUFFER", "MIN_LARGE_ALLOC", "ROUND_LARGE", "LARGE_SEGMENT", "_INTERVALS",
        "AllocatorConfig",
    },
    "allocator.blocks": None,
    "allocator.expandable": None,
    "allocator.allocator": None,
    "model.memory_model": {
        "FORMAT", "CHOICES", "IntervalWidth", "LARGEST_HALF_WIDTH", "MemoryModel", "BLAS_WORKSPACE_BYTES",
        "constant_name", "half_width", "noise_share", "peak_moment", "unsure_share", "workspaces_bytes",
        "with_workspaces",
    },
    "terms.sharding.ranks": {
        "_KINDS", "COUNTED_WITH_TRL", "_require_known", "rank_moments", "host_bytes",
        "whole_packed_bytes", "rank_course", "_key", "is_logged", "run_class",
    },
    "model.replayed": {"Replayed", "chip_of", "play"},
    "predict.prediction": {"ALONE", "Frozen", "Interval", "Within", "FitProvenance", "CardPeak", "Prediction"},
    "predict.uncertainty": {
        "ARITHMETIC_SPREAD", "MIN_HALF_WIDTH", "FAR", "LIMIT_NAMES", "WIDENING", "FOURTH_WIDENING",
        "interval_around", "times", "outside", "basis_of", "widening_of", "unseen_choices", "bounds", "device_tier",
        "provenance",
    },
    "predict.verdict": {
        "CONTEXT_ALLOWANCE_BYTES", "NCCL_ALLOWANCE_BYTES", "HOST_ALLOWANCE_BYTES", "TIGHT_SHARE", "Verdict", "verdict",
        "_judged", "usable_bytes",
    },
    "predict.replay": None,
    "predict.one_gpu": None,
    "predict.reasons": None,
    "predict.host_memory": {"of_rank_bytes", "loaded_bytes", "in_words"},
    "predict.ranks": None,
    "predict.tensor_parallel": None,
    "predict.device_map": None,
    "predict.predict": None,
    "predict.stack": {"under_versions"},
    "predict.changes": {"LEAST_SHARE", "candidates", "_others"},
    "predict.largest": {
        "_TRAINED_LENGTH", "Judged", "Answer", "Largest", "largest_count", "largest_replayed", "_answer", "_last",
        "_between", "_near", "_bounds", "_start_of_range", "_made_for", "_nothing_fits", "_once", "_over_tight",
        "_over_fits", "_refuse", "_found",
    },
    "speed.rates": {"Rates", "SpeedFit", "SHORT_TOKENS", "GPUS_PER_MACHINE"},
    "speed.shapes": {
        "LARGE_MESSAGE", "_PCIE_5_GB_S", "_BACKWARD", "_PYTORCH", "_NARROW_WIDTH", "_NARROW", "stand_in", "_reached",
        "product_share", "_product_share", "attention_share", "_attention_share", "sent_bytes_per_second",
        "_linked_alike", "_between",
    },
    "speed.elementwise": None,
    "speed.tower": None,
    "speed.work": None,
    "speed.step": None,
    "recommend.prices": {"Offer"},
    "recommend.recipes": None,
    "recommend.options": None,
    "recommend.answer": {
        "Answer", "what_it_lacks", "answers_of", "judged", "_cost", "_time", "_in_time", "_doubt", "_why_not",
    },
    "recommend.words": None,
}  # fmt: skip
#: Members of classes that the page does not ask for.
_UNWANTED = {
    "spec": frozenset(
        {"fingerprint", "limit_vram_bytes", "needs_bitsandbytes", "num_params", "is_divided", "is_spread", "image"}
    ),
    "recommend.prices": frozenset({"is_old"}),
}
#: Modules that never hold a value of a tape, but names and sizes.
_WITHOUT_VALUES = frozenset(
    {
        "kernels.chip",
        "kernels.attention",
        "kernels.reductions",
        "terms.tape.scratch",
        "terms.cell.loading",
        "terms.sharding.zero3.gather",
        "allocator.ledger",
        "allocator.config",
        "allocator.blocks",
        "allocator.expandable",
        "allocator.allocator",
    }
)
#: What runtime.js and builtins.js have in place of what the modules import.
_GIVEN = {
    "vramprobe.choices": "$choices",
    "vramprobe.errors.VramprobeError": "$Error",
    "vramprobe.errors.SpecError": "$Error",
    "vramprobe.errors.OutOfRange": "$OutOfRange",
    "vramprobe.terms.tape.sizes.open_sizes": "$sizes.open_sizes",
    "vramprobe.terms.tape.sizes.monomials": "$sizes.monomials",
    "math.prod": "$math.prod",
    "math.log2": "$math.log2",
    "math.floor": "$math.floor",
    "math.ceil": "Math.ceil",
    "math.gcd": "$math.gcd",
    "math.sqrt": "Math.sqrt",
    "math.hypot": "Math.hypot",
    "math.exp": "Math.exp",
    "typing.get_args": "(($values) => $values)",
    "vramprobe.architecture.architecture": "$archOf",
    "vramprobe.terms.step.moments.moments": "$moments",
    "vramprobe.terms.cell.remainders.share_of": "$shareOf",
    "vramprobe.terms.step.moments.course_of": "$courseOf",
    "vramprobe.spec.resolve": "$resolved",
    "vramprobe.options.ADAPTER_OPTIONS": "$adapterOptions",
    "vramprobe.techniques.registry.known_changes": "$knownChanges",
    "vramprobe.catalog.libraries.pinned_libraries": "$pinnedLibraries",
    "vramprobe.recommend.memory.predict_on": "$predictOn",
    "vramprobe.recommend.memory.fit_name": "$fitName",
    "vramprobe.speed.rates.shipped_speed": "$shippedSpeed",
    "vramprobe.speed.rates.kernel_tables": "$kernelTables",
    "vramprobe.catalog.find_gpu": "$findGpu",
    "math.log": "Math.log",
    "dataclasses.replace": "$replace",
    "collections.Counter": "$counter",
    "itertools.groupby": "$groupby",
    "bisect.bisect_left": "$bisect.bisect_left",
    "bisect.insort": "$bisect.insort",
    "vramprobe.allocator.config.parse_alloc_conf": "$allocConf",
    "vramprobe.model.replayed.replayed": "$replayed",
    "vramprobe.model.replayed.num_alloc_retries": "$numAllocRetries",
    "threading.get_ident": "(() => 0)",
    "operator.ge": "((one, other) => one >= other)",
}
#: The options of a cell that the page offers beside model, batch and length, and where their allowed values stand.
CHOICES = {
    "method": spec.Method,
    "quant": spec.Quant,
    "kbit_prep": spec.KbitPrep,
    "dtype": spec.Dtype,
    "autocast": spec.Autocast,
    "lora_dtype": spec.Dtype,
    "optim": spec.Optim,
    "attn": spec.Attention,
    "device": spec.Device,
    "sharding": Sharding,
    "offload": Offload,
    "cp_rotation": CpRotation,
}

#: Older libraries that the page offers to predict under, as predict --stack has them; it takes others that were read.
STACKS = (
    "transformers-4.57",
    "transformers-4.53",
    "transformers-4.48",
    "transformers-4.48,bitsandbytes-0.45",
    "transformers-4.45,bitsandbytes-0.44",
    "transformers-4.42,bitsandbytes-0.43.1",
)


def javascript() -> str:
    """The script that makes the global ``vramprobe`` from the data of :func:`data`."""
    here = resources.files("vramprobe").joinpath("report", "page")
    modules = [
        Module(
            f"vramprobe.{name}",
            _source(name),
            None if wanted is None else frozenset(wanted),
            _UNWANTED.get(name, frozenset()),
            counts=name not in _WITHOUT_VALUES,
        )
        for name, wanted in _in_order().items()
    ]
    parts = [
        here.joinpath("runtime.js").read_text(),
        here.joinpath("builtins.js").read_text(),
        translate(modules, _GIVEN),
        here.joinpath("calculator.js").read_text(),
        here.joinpath("recommender.js").read_text(),
    ]
    return "(() => {\n" + "\n".join(parts) + "\n})();\n"


def predictor() -> str:
    """Describe the basis of the page's predictions in a few words."""
    fits = [model for model in memory_model.shipped_fits() if model.device == "cuda"]
    version = f"vramprobe {vramprobe.__version__}"
    if not fits:
        return f"arithmetic of {version} alone; no GPU has been measured yet"
    said = [
        f"by the caching allocator's replay, fitted to {model.num_records} emulated runs on {model.device_name}"
        f"{basis_of(model)}"
        if len(model.cards) > 1
        else _of_one(model)
        for model in fits
    ]
    is_said = any(model.basis or not model.is_emulated for model in fits)
    rest = "" if is_said else "; no GPU has been measured yet"
    others = "one of several by the replay where its requests are known, all else by arithmetic alone"
    return f"{version}, {'; '.join(said)}; {others}{rest}"


def _of_one(model: memory_model.MemoryModel) -> str:
    word = "emulated " if model.is_emulated else ""
    return f"fitted on {word}{model.device_name} ({model.num_records} records)"


def data() -> dict[str, Any]:
    """Models, GPUs, allowed values, shipped fits and prices, as JSON has them."""
    return {
        "catalog": [_model(entry) for entry in catalog.list_models()],
        "gpus": [_gpu(gpu) for gpu in catalog.list_gpus()],
        "choices": {name: list(get_args(kind)) for name, kind in CHOICES.items()} | {"stack": list(STACKS)},
        "hybrid": list(HYBRID),
        "adapter_options": list(ADAPTER_OPTIONS),
        "technique_changes": [known_changes(one) for one in (False, True)],
        "meanings": MEANINGS,
        "one_batch": [kind for kind, rules in SHARDINGS.items() if rules.shares_batch],
        "stacks": {names: versions_of(names) for names in STACKS},
        "bookkeeping": list(BOOKKEEPING_KEYS),
        "fits": [_fit(model) for model in memory_model.shipped_fits()],
        "libraries": dict(catalog.pinned_libraries()),
        "speed": shipped_speed().model_dump(mode="json"),
        "kernels": kernel_tables().model_dump(mode="json", exclude={"source", "narrow_m", "faster", "best_source"}),
        "offers": [offer.model_dump(mode="json", exclude={"source"}) for offer in shipped_offers()],
    }


def _in_order() -> dict[str, set[str] | None]:
    """All modules, each after those that it imports."""
    listed = {name: None for package in _PACKAGES for name in _modules_of(package)} | _MODULES
    found: dict[str, set[str] | None] = {}

    def add(name: str) -> None:
        if name in found or name not in listed:
            return
        for module, imported in _imported_by(name):
            add(f"{module}.{imported}" if f"{module}.{imported}" in listed else module)
        found[name] = listed[name]

    for name in listed:
        add(name)
    return found


def _modules_of(package: str) -> list[str]:
    folder = resources.files("vramprobe").joinpath(*package.split("."))
    names = sorted(file.name for file in folder.iterdir())
    return [f"{package}.{name.removesuffix('.py')}" for name in names if name.endswith(".py") and name != "__init__.py"]


def _imported_by(name: str) -> list[tuple[str, str]]:
    """Return the names that a module imports of vramprobe at its top level: (module or package, name)."""
    nodes = [node for node in ast.parse(_source(name)).body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").startswith("vramprobe.")]
    return [(str(node.module).removeprefix("vramprobe."), alias.name) for node in ours for alias in node.names]


def _source(name: str) -> str:
    path = resources.files("vramprobe").joinpath(*name.split("."))
    file = path.joinpath("__init__.py") if path.is_dir() else path.parent.joinpath(f"{path.name}.py")
    return file.read_text()


def _model(entry: catalog.ModelEntry) -> dict[str, Any]:
    return {"slug": entry.name, "name": entry.hf_id or entry.name, "num_params": entry.n_params, "config": entry.config}


def _gpu(gpu: catalog.Gpu) -> dict[str, Any]:
    cheapest = min(catalog.list_prices(gpu.short_name), key=lambda price: price.usd_per_gpu_hour, default=None)
    price = cheapest and {
        "usd_per_hour": cheapest.usd_per_gpu_hour,
        "source": f"{cheapest.provider} {cheapest.terms}, {cheapest.date}",
    }
    card = {name: value for name, value in asdict(gpu).items() if name not in ("aliases", "source")}
    return {
        "slug": gpu.short_name,
        "name": gpu.name,
        "memory_bytes": gpu.total_bytes,
        "is_nvidia": gpu.is_nvidia,
        "card": card,
        "price": price,
    }


def _fit(model: memory_model.MemoryModel) -> dict[str, Any]:
    try:
        gpu = catalog.find_gpu(model.device_name).short_name
    except UnknownName:
        gpu = None
    return {"gpu": gpu, "model": model.model_dump(mode="json", exclude={"fingerprints"})}
