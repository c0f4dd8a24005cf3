"""Data of the page's scripts beside the recipes: models, GPUs with what a run may use of them, the causes' meanings.

In: the installed package's catalog and the packed book. Out: plain JSON, and one line of what the answers rest on.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import vramprobe
from vramprobe import catalog
from vramprobe.log.meanings import MEANINGS
from vramprobe.predict.recipe_replay import ALLOCATED_RATIOS, RESERVED_RATIOS
from vramprobe.predict.verdict import TIGHT_SHARE, basis_of_verdict, usable_bytes
from vramprobe.recipe.shipped import LIKE_ALL, answers_for

#: What tools/page_parts.py makes: the allocator as WebAssembly, and the recipes that ship.
ALLOCATOR, BOOK = (Path(__file__).with_name(name) for name in ("allocator.wasm", "book.gz"))


def index_of(packed: bytes) -> dict[str, Any]:
    """Return a packed book's first line."""
    return json.loads(gzip.decompress(packed).partition(b"\n")[0])


def predictor() -> str:
    """Describe the basis of the page's predictions in a few words."""
    entries = index_of(BOOK.read_bytes())["entries"]
    models = len({entry[0] for entry in entries})
    return (
        f"vramprobe {vramprobe.__version__}, recipes of {models} models recorded on an emulated {LIKE_ALL}, replayed "
        "through torch's caching allocator"
    )


def data() -> dict[str, Any]:
    """Return models, GPUs, one for each size of workspaces, ratios of intervals, and the causes' meanings."""
    return {
        "catalog": [_model(entry) for entry in catalog.list_models()],
        "gpus": [_gpu(gpu) for gpu in catalog.list_gpus()],
        "recorded_on": catalog.find_gpu(LIKE_ALL).name,
        "like": {catalog.find_gpu(name).blas_workspace_bytes: name for name in (LIKE_ALL, "H100-SXM")},
        "ratios": {"allocated": ALLOCATED_RATIOS, "reserved": RESERVED_RATIOS, "tight": TIGHT_SHARE},
        "meanings": MEANINGS,
    }


def _model(entry: catalog.ModelEntry) -> dict[str, Any]:
    return {
        "slug": entry.name,
        "name": entry.hf_id or entry.name,
        "num_params": entry.n_params,
        "family": entry.config.get("model_type", ""),
    }


def _gpu(gpu: catalog.Gpu) -> dict[str, Any]:
    """``workspace_bytes``: of its cuBLAS; null where no recipe answers. ``basis``: of a verdict, in words."""
    cheapest = min(catalog.list_prices(gpu.short_name), key=lambda price: price.usd_per_gpu_hour, default=None)
    is_known = gpu.total_bytes is not None
    return {
        "slug": gpu.short_name,
        "name": gpu.name,
        "memory_bytes": gpu.total_bytes,
        "usable_bytes": usable_bytes(gpu, device_is_known=False) if is_known else None,
        "basis": basis_of_verdict(gpu, "reserved") if is_known else None,
        "workspace_bytes": gpu.blas_workspace_bytes if answers_for(gpu) else None,
        "is_nvidia": gpu.is_nvidia,
        "price": cheapest
        and {
            "usd_per_hour": cheapest.usd_per_gpu_hour,
            "source": f"{cheapest.provider} {cheapest.terms}, {cheapest.date}",
        },
    }
