"""This process as the journal's first line presents it: program, rank, card, libraries.

In: nothing. Out: the line's fields.
"""

import os
import platform
import sys
import time
from importlib import metadata

import torch

_LIBRARIES = (
    "transformers", "peft", "trl", "accelerate", "bitsandbytes", "deepspeed", "unsloth", "axolotl", "llamafactory",
    "torchtune", "litgpt", "lightning", "torchao", "liger-kernel", "flash-attn", "vllm",
)  # fmt: skip


def rank():
    """Rank, local rank and number of ranks, as launchers say them; None where they do not."""

    def number(*names):
        return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)

    return {
        "rank": number("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        "local_rank": number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
        "world_size": number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    }


def described(emulated):
    """The fields of the line ``process``."""
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "argv": list(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **rank(),
        "device_index": device,
        "device_name": properties.name,
        "device_total_bytes": properties.total_memory,
        "device_uuid": _uuid(device),
        "device_uuids": list(map(_uuid, range(torch.cuda.device_count()))),
        "capability": [properties.major, properties.minor],
        "emulated": emulated,
        "versions": _versions(),
        "started_ns": time.time_ns(),
    }


def _uuid(device):
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None


def _versions():
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
