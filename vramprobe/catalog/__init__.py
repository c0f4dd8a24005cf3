"""The models, GPUs, prices, claims and sweeps shipped under data/, a local config.json, or a config.json from the hub.

In: a name as users write it. Out: frozen entries, or an error that says what else there is and what to do. It stays
this side of the torch line, reads nothing at import, and touches the network only for a hub id.
"""

from vramprobe.catalog.depth import cut_depth, depth_of, text_config
from vramprobe.catalog.gpus import (
    Gpu,
    Price,
    find_gpu,
    fp32_tflops,
    gpu_or_size,
    gpu_seen,
    list_gpus,
    list_prices,
    memory_of,
)
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.catalog.models import (
    ModelEntry,
    entry_of_config,
    find_model,
    is_slug,
    list_models,
    list_vision_models,
    shipped_model,
    with_vision,
)
from vramprobe.catalog.size import num_params
from vramprobe.catalog.sweeps import list_sweeps, sweep_file

__all__ = [
    "Gpu", "ModelEntry", "Price", "cut_depth", "depth_of", "entry_of_config", "find_gpu", "find_model",
    "fp32_tflops", "gpu_or_size", "gpu_seen", "is_slug", "list_gpus", "list_models", "list_prices",
    "list_sweeps", "list_vision_models", "memory_of", "num_params", "pinned_libraries", "shipped_model", "sweep_file",
    "text_config", "with_vision",
]  # fmt: skip
