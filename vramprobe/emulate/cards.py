"""Return the properties that CUDA, torch and NVML report of each NVIDIA card of the catalog.

In: a card as the command line names it, ``RTX-4090`` or ``H100-SXM x4``. Out: frozen CardProperties with their sources,
or an error that says what else there is. Reads data/gpus.csv and data/gpu_properties.csv; looks at no device.
"""

import re
from dataclasses import dataclass
from functools import cache

from vramprobe.catalog.contexts import context_of, threads_per_sm
from vramprobe.catalog.gpus import LIKE_A_SIZE, Gpu, find_gpu, gpu_or_size
from vramprobe.catalog.shipped import csv_rows
from vramprobe.errors import SpecError
from vramprobe.units import MIB

MAX_CARDS = 16  # one emulated machine; no vendor's holds more
SHARED_MEMORY_PER_BLOCK_BYTES = 48 << 10  # without opting in, on every architecture
REGISTERS_PER_SM = 65536  # of 32 bits, on every architecture since Maxwell


#: Limits of one multiprocessor by compute capability: KiB of shared memory, those that a block may opt into, blocks
#: (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_SM_LIMITS = {
    (6, 0): (64, 48, 32),
    (7, 0): (96, 96, 32),
    (7, 5): (64, 64, 16),
    (8, 0): (164, 163, 32),
    (8, 6): (100, 99, 16),
    (8, 9): (100, 99, 24),
    (9, 0): (228, 227, 32),
    (10, 0): (228, 227, 32),
    (10, 3): (228, 227, 32),
    (12, 0): (100, 99, 24),
    (12, 1): (100, 99, 24),
}


@dataclass(frozen=True, kw_only=True)
class CardProperties:
    """One card as software sees it; ``gpu`` is its entry in the catalog."""

    gpu: Gpu
    name: str  # torch.cuda.get_device_name
    compute_capability: tuple[int, int]
    total_bytes: int  # get_device_properties().total_memory, cudaMemGetInfo's total
    nvml_total_bytes: int  # nvidia-smi's total: with what the driver keeps for itself
    sm_count: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    shared_memory_per_sm_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    memory_bus_bits: int
    clock_khz: int
    memory_clock_khz: int  # such that two transfers a clock over the bus give the card's bandwidth
    integrated: int  # 1: memory is the machine's, and NVML reports none
    source: str


def parse_cards(text: str) -> tuple[CardProperties, int]:
    """``GPU`` or ``GPU xN`` → the card and how many of it. Raises UnknownName, or SpecError for another form."""
    found = re.fullmatch(r"(.*?)(?:\s+[x×]\s*(\d+))?", text.strip(), re.I)
    name, count = found[1], found[2]
    if not name:
        raise SpecError(f"{text!r} names no GPU: give one such as H100-SXM or 'H100-SXM x4'.")
    num_cards = int(count or 1)
    if not 1 <= num_cards <= MAX_CARDS:
        raise SpecError(f"{text!r}: an emulated machine has 1 to {MAX_CARDS} GPUs.")
    if other := re.fullmatch(r"(\S.*?)\s*[:,*]\s*(\d+)|(\d+)\s*[x×*]\s*(\S.*)", name):
        name, count = other[1] or other[4], other[2] or other[3]
        raise SpecError(f"{text!r}: write the number of GPUs as '{name.strip()} x{count}'.")
    find_gpu(name)  # a size has no other properties to emulate
    return card_properties(name), num_cards


def with_count(text: str, count: int) -> str:
    """``GPU`` as ``GPU xN``; what says a number already stays as it is."""
    return text if count == 1 or re.search(r"\s[x×]\s*\d+\s*$", text, re.I) else f"{text} x{count}"


def card_properties(name: str) -> CardProperties:
    """The properties of the card called ``name``, or of an A100 with so much memory for a size such as ``12GiB``.

    Raises UnknownName, or SpecError for a card that is not NVIDIA's.
    """
    gpu = gpu_or_size(name)
    if gpu.vendor != "NVIDIA":
        raise SpecError(
            f"{gpu.name} is made by {gpu.vendor}, and what is emulated is CUDA: give an NVIDIA GPU of `vramprobe gpus`."
        )
    return _properties(gpu)


def context_bytes(card: CardProperties, *, most: bool = False) -> int:
    """Bytes that a process takes of ``card`` beside what torch reserves after a step (catalog/contexts.py), the likely
    value or the upper end of its range; for an amount of memory those of the card whose kernels it has.
    """
    found = context_of(find_gpu(LIKE_A_SIZE).name if card.gpu.is_size else card.gpu.name)
    assert found is not None, f"{card.gpu.name} has no row of gpu_properties.csv"
    return found.high_bytes if most else found.value_bytes


@cache
def _rows() -> dict[str, dict[str, str]]:
    return {row["gpu"]: row for row in csv_rows("gpu_properties.csv")}


@cache
def _properties(gpu: Gpu) -> CardProperties:
    row = _rows()[gpu.name if not gpu.is_size else find_gpu(LIKE_A_SIZE).name]
    major, minor = (int(part) for part in gpu.compute_capability.split("."))
    shared_kib, optin_kib, blocks = _SM_LIMITS[major, minor]
    total_bytes = (gpu.is_size and gpu.total_bytes) or int(row["total_mib"]) * MIB
    bus_bits = int(row["memory_bus_bits"])
    return CardProperties(
        gpu=gpu,
        name=row["name"],
        compute_capability=(major, minor),
        total_bytes=total_bytes,
        nvml_total_bytes=gpu.total_bytes or total_bytes,
        sm_count=int(row["sm_count"]),
        shared_memory_per_block_bytes=SHARED_MEMORY_PER_BLOCK_BYTES,
        shared_memory_per_block_optin_bytes=optin_kib << 10,
        shared_memory_per_sm_bytes=shared_kib << 10,
        threads_per_sm=threads_per_sm((major, minor)),
        blocks_per_sm=blocks,
        registers_per_sm=REGISTERS_PER_SM,
        l2_bytes=int(row["l2_kib"]) << 10,
        memory_bus_bits=bus_bits,
        clock_khz=int(row["clock_mhz"]) * 1000,
        memory_clock_khz=round(gpu.bandwidth_gb_s * 8e6 / (2 * bus_bits)),
        integrated=int(gpu.shares_host_memory),
        source=f"total: {row['total_source']}; {row['source']}",
    )
