"""Engine: the page's arithmetic, as JavaScript, and the data it counts with.

In: the installed package: its own source, catalog and shipped fits. Out: the text of the script that makes the global
``vramprobe``, and its data as plain JSON. Never imports torch. What the page counts is the source of terms/ and
predict/, translated (translation/), and the defaults of a cell are spec.py's own.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from typing import Any, get_args

import vramprobe
from vramprobe import catalog, spec
from vramprobe.catalog.models import BOOKKEEPING_KEYS
from vramprobe.choices import HYBRID, CpRotation, Offload, Sharding
from vramprobe.errors import UnknownName
from vramprobe.model import memory_model
from vramprobe.predict.prediction import basis_of
from vramprobe.predict.stack import versions_of
from vramprobe.recommend.prices import shipped_offers
from vramprobe.report.page.translation import Module, translate
from vramprobe.speed.rates import shipped_speed

#: The modules that the page counts with, each after those it imports; the names that it needs of them (null: all).
_MODULES: dict[str, set[str] | None] = {
    "choices": {
        "Sharding", "FSDP1", "FSDP2", "HYBRID", "SHARD_SIZE", "ZERO", "TENSOR_PARALLEL", "DEVICE_MAP", "Offload",
    },
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
    "architecture.mixtures": None,
    "architecture": None,
    "spec": {
        "CellSpec", "Q_V_TARGETS", "lora_target_names", "_impossible", "_method_rules", "_precision_rules",
        "_device_rules", "_architecture_reasons", "with_defaults", "_NO_FLASH", "_NO_SDPA", "_NO_FUSED_LOSS",
        "_LEARNED_POSITIONS", "_SHORT_OPTIM", "DTENSOR_OPTIMIZERS", "cannot_shard", "cannot_group", "cannot_rotate",
        "cannot_offload", "cannot_share_sequences", "CPU_ADAM", "_NO_RING", "_near", "_has_grouped_heads",
        "_partial_attention", "cannot_divide_layers", "ROW_WISE", "_no_dtensors",
    },
    "terms.graph": None,
    "terms.tape": None,
    "terms.layout": None,
    "terms.operators": None,
    "terms.activations": None,
    "terms.norms": None,
    "terms.parameters": None,
    "terms.optimizer": None,
    "terms.setup": None,
    "terms.attention": None,
    "terms.modules": None,
    "terms.llama": None,
    "terms.relatives": None,
    "terms.variants": None,
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
    "terms.versions": None,
    "terms.scratch": None,
    "terms.loading": {
        "load", "packed_number", "BATCH", "_TILE_BYTES", "_SHIFTED", "_load_whole", "_load_quantised", "_quantise",
        "_add_buffers", "_add_adapters", "_cast", "_loaded_bytes",
    },
    "terms.request_log": {
        "SAMPLED", "STREAM", "_END", "_TEMPLATE", "WORKSPACE", "Chunk", "_Request", "RecordingTape", "NotAlike",
        "_Inner", "unrolled", "_source", "_starts", "_turn", "_require_alike", "_spread", "events",
    },
    "terms.micro_steps": None,
    "terms.requests": None,
    "simulate.ledger": {"_TOP_ADDRESS", "Device", "Usage", "SegmentEvent", "OutOfMemory", "Ledger"},
    "simulate.allocator_config": {
        "MIN_BLOCK", "SMALL_SIZE", "SMALL_BUFFER", "MIN_LARGE_ALLOC", "ROUND_LARGE", "LARGE_SEGMENT", "_INTERVALS",
        "AllocatorConfig",
    },
    "simulate.blocks": None,
    "simulate.expandable": None,
    "simulate.allocator": None,
    "model.memory_model": {
        "FORMAT", "CHOICES", "IntervalWidth", "LARGEST_HALF_WIDTH", "MemoryModel", "BLAS_WORKSPACE_BYTES",
        "constant_name", "half_width", "noise_share", "peak_moment", "unsure_share", "workspaces_bytes",
        "with_workspaces",
    },
    "terms.rank_tape": None,
    "terms.flat_tape": None,
    "terms.zero_tape": None,
    "terms.zero_buckets": None,
    "terms.zero_gather": None,
    "terms.rank_parts": None,
    "terms.flat_ranks": None,
    "terms.zero_ranks": None,
    "terms.ranks": None,
    "terms.rank_load": None,
    "terms.rank_log": None,
    "terms.zero_log": None,
    "terms.zero_requests": None,
    "terms.rank_requests": {
        "_BROADCAST_BYTES", "_BUCKET_BYTES", "_FIRST_BUCKET_BYTES", "RankRun", "FsdpRun", "FlatRun", "ReplicaRun",
        "_KINDS", "is_logged", "by_module", "broadcast",
    },
    "model.replayed": {"Replayed", "chip_of", "play"},
    "predict.prediction": {
        "ALONE", "ARITHMETIC_SPREAD", "MIN_HALF_WIDTH", "FAR", "LIMIT_NAMES", "WIDENING", "FOURTH_WIDENING",
        "CONTEXT_ALLOWANCE_BYTES", "NCCL_ALLOWANCE_BYTES", "LARGEST_BYTES", "TIGHT_SHARE",
        "Interval", "FitProvenance", "CardPeak",
        "Prediction", "Verdict", "predict_moments", "_not_quantised", "without_flash", "verdict", "_judged",
        "usable_bytes", "_outside", "basis_of",
        "widening_of", "unseen_choices", "bounds", "_other_tiers",
        "device_tier", "_provenance", "_with_replay", "_times", "Within", "with_retries",
        "simulated_interval",
    },
    "predict.rank_replay": None,
    "predict.host": {"in_words", "loaded_bytes"},
    "predict.sharding": {"predict_rank", "_some", "_check", "_doubts", "require_offload", "require_arithmetic"},
    "terms.ring": None,
    "predict.hybrid": None,
    "terms.device_map": None,
    "terms.cards": None,
    "terms.tensor_parallel": None,
    "predict.layers": {"predict_layers", "_require_divided"},
    "predict.cards": {"predict_several", "predict_cards", "_peak", "_parts_on", "_OUTSIDE"},
    "predict.stack": {"under_versions"},
    "predict.changes": {"LEAST_SHARE", "candidates"},
    "predict.largest": {
        "_TRAINED_LENGTH", "Judged", "Answer", "Largest", "largest_count", "largest_replayed", "_answer", "_last",
        "_between", "_near", "_bounds", "_start_of_range", "_made_for", "_nothing_fits", "_once", "_over_tight",
        "_over_fits", "_refuse", "_found",
    },
    "speed.rates": {"Rates", "SpeedFit", "SHORT_TOKENS", "GPUS_PER_MACHINE", "generation_of"},
    "speed.work": None,
    "speed.step": None,
    "recommend.prices": {"Offer"},
    "recommend.memory": {"is_refused"},
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
        {"fingerprint", "limit_vram_bytes", "needs_bitsandbytes", "num_params", "is_divided", "is_spread"}
    ),
    "recommend.prices": frozenset({"is_old"}),
}
#: Modules that never hold a value of a tape, but names and sizes.
_WITHOUT_VALUES = frozenset({
    "terms.scratch", "terms.loading", "terms.rank_load", "terms.zero_gather", "simulate.ledger",
    "simulate.allocator_config", "simulate.blocks", "simulate.expandable", "simulate.allocator",
})  # fmt: skip
#: What runtime.js and builtins.js have in place of what the modules import.
_GIVEN = {
    "vramprobe.choices": "$choices",
    "vramprobe.errors.VramprobeError": "$Error",
    "vramprobe.errors.SpecError": "$Error",
    "vramprobe.errors.OutOfRange": "$OutOfRange",
    "vramprobe.terms.sizes.open_sizes": "$sizes.open_sizes",
    "vramprobe.terms.sizes.monomials": "$sizes.monomials",
    "math.prod": "$math.prod", "math.log2": "$math.log2", "math.floor": "$math.floor",
    "math.ceil": "Math.ceil", "math.gcd": "$math.gcd",
    "math.sqrt": "Math.sqrt", "math.hypot": "Math.hypot", "math.exp": "Math.exp",
    "typing.get_args": "(($values) => $values)",
    "vramprobe.architecture.architecture": "$archOf",
    "vramprobe.terms.moments": "$moments",
    "vramprobe.terms.remainders.share_of": "$shareOf",
    "vramprobe.terms.course_of": "$courseOf",
    "vramprobe.spec.resolve": "$resolved",
    "vramprobe.catalog.libraries.pinned_libraries": "$pinnedLibraries",
    "vramprobe.recommend.memory.predict_on": "$predictOn",
    "vramprobe.recommend.memory.fit_name": "$fitName",
    "vramprobe.speed.rates.shipped_speed": "$shippedSpeed",
    "dataclasses.replace": "$replace",
    "collections.Counter": "$counter",
    "itertools.groupby": "$groupby",
    "bisect.bisect_left": "$bisect.bisect_left", "bisect.insort": "$bisect.insort",
    "vramprobe.simulate.allocator_config.parse_alloc_conf": "$allocConf",
    "vramprobe.model.replayed.replayed": "$replayed",
    "vramprobe.model.replayed.num_alloc_retries": "$numAllocRetries",
    "operator.ge": "((one, other) => one >= other)",
}  # fmt: skip
#: The options of a cell that the page offers beside model, batch and length, and where their allowed values stand.
CHOICES = {
    "method": spec.Method, "quant": spec.Quant, "kbit_prep": spec.KbitPrep, "dtype": spec.Dtype,
    "autocast": spec.Autocast, "lora_dtype": spec.Dtype, "optim": spec.Optim, "attn": spec.Attention,
    "device": spec.Device, "sharding": Sharding, "offload": Offload, "cp_rotation": CpRotation,
}  # fmt: skip

#: Older libraries that the page offers to predict under, as predict --stack has them; it takes others that were read.
STACKS = (
    "transformers-4.57", "transformers-4.53", "transformers-4.48", "transformers-4.48,bitsandbytes-0.45",
    "transformers-4.45,bitsandbytes-0.44", "transformers-4.42,bitsandbytes-0.43.1",
)  # fmt: skip


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
        for name, wanted in _MODULES.items()
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
    """What the page's predictions rest on, in a few words."""
    fits = [model for model in memory_model.shipped_fits() if model.device == "cuda"]
    version = f"vramprobe {vramprobe.__version__}"
    if not fits:
        return f"arithmetic of {version} alone; no GPU has been measured yet"
    said = [f"by the caching allocator's replay, fitted to {model.num_records} emulated runs on {model.device_name}"
            f"{basis_of(model)}" if len(model.cards) > 1 else _of_one(model) for model in fits]  # fmt: skip
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
        "stacks": {names: versions_of(names) for names in STACKS},
        "bookkeeping": list(BOOKKEEPING_KEYS),
        "fits": [_fit(model) for model in memory_model.shipped_fits()],
        "libraries": dict(catalog.pinned_libraries()),
        "speed": shipped_speed().model_dump(mode="json"),
        "offers": [offer.model_dump(mode="json", exclude={"source"}) for offer in shipped_offers()],
    }


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
    card = {name: value for name, value in asdict(gpu).items() if name not in ("aliases", "source")}
    return {"slug": gpu.short_name, "name": gpu.name, "memory_bytes": gpu.total_bytes, "is_nvidia": gpu.is_nvidia,
            "card": card, "price": price}  # fmt: skip


def _fit(model: memory_model.MemoryModel) -> dict[str, Any]:
    try:
        gpu = catalog.find_gpu(model.device_name).short_name
    except UnknownName:
        gpu = None
    return {"gpu": gpu, "model": model.model_dump(mode="json", exclude={"fingerprints"})}
