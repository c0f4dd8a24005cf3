"""The GPUs and prices that ship under data/.

In: a name as users, torch, nvidia-smi or price lists write it, or a size of memory. Out: a frozen Gpu, its Prices, or
an error that says what else there is.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from vramprobe.catalog.contexts import context_of
from vramprobe.catalog.gpu_hints import gpu_hint
from vramprobe.catalog.shipped import csv_rows, number, split
from vramprobe.errors import SpecError, UnknownName
from vramprobe.units import GIB, KIB, MIB, parse_bytes

LIKE_A_SIZE = "A100-80GB"  # whose kernels are recorded where no GPU is named


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``total_bytes`` is what nvidia-smi reports (CUDA, where that reports nothing), below the nominal
    (decimal) size; null where not known.
    """

    name: str
    short_name: str  # as prices and claims write it, e.g. H100-SXM
    aliases: tuple[str, ...]
    vendor: str
    arch: str
    compute_capability: str
    nominal_gb: int
    total_bytes: int | None
    memory_type: str
    bandwidth_gb_s: float
    bf16_dense_tflops: float | None  # null: no bf16 tensor cores
    fp16_dense_tflops: float | None  # with sums in fp32
    nvlink_gb_s: float | None  # both directions together, as data sheets count; 0: none
    nvlink_joins: Literal["all", "pairs", ""]  # all GPUs of a machine (switch), or two by a bridge that few have
    pcie_gb_s: float  # both directions together
    shares_host_memory: bool  # one memory for CPU and GPU, as on DGX Spark; nvidia-smi then reports none
    num_sms: int | None  # streaming multiprocessors; null: not NVIDIA's
    cuda_total_bytes: int | None  # what CUDA sees, as the driver keeps a part of total_bytes; null where not known
    context_bytes: int | None  # most that a process takes after a step beside torch's memory (contexts.py), or unknown
    context_basis: str  # where context_bytes is from: measured, published, or by its multiprocessors
    source: str
    is_size: bool = False  # no card of the catalog, but an amount of memory

    @property
    def half_dense_tflops(self) -> float | None:
        """Peak of 16-bit matrix products: in bf16, or in fp16 on a card that has no other."""
        return self.bf16_dense_tflops or self.fp16_dense_tflops

    @property
    def link_bytes_per_second(self) -> float:
        """Bytes per second that one GPU sends to its neighbors in a machine: by a switched NVLink, else by PCIe; one
        direction.
        """
        joined = self.nvlink_gb_s if self.nvlink_joins == "all" else None
        return (joined or self.pcie_gb_s) / 2 * 1e9

    @property
    def is_nvidia(self) -> bool:
        """Return True if it is NVIDIA's, whose compute capability has a dot."""
        return "." in self.compute_capability

    @property
    def blas_workspace_bytes(self) -> int:
        """Bytes of cuBLAS's workspace for each thread that calls it; 0 where the card is not NVIDIA's."""
        major, dot, _ = self.compute_capability.partition(".")
        return cublas_workspace_bytes(int(major)) if dot else 0

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability's numbers; null for one that is not NVIDIA's."""
        major, dot, minor = self.compute_capability.partition(".")
        return (int(major), int(minor)) if dot else None


def cublas_workspace_bytes(major: int) -> int:
    """For each thread that calls it, by compute capability: 32 MiB from Hopper on, 8.125 MiB before.

    aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``.
    """
    return 32 * MIB if major >= 9 else 8 * MIB + 128 * KIB


def fp32_tflops(gpu: Gpu) -> float | None:
    """Peak of fp32 outside the tensor cores: lanes of a multiprocessor × 2 operations × boost clock.

    Null where the clock is not known. Lanes: NVIDIA's CUDA programming guide, arithmetic throughput by capability.
    """
    clock = _clocks().get(gpu.name)
    if clock is None or gpu.num_sms is None:
        return None
    lanes = 64 if gpu.compute_capability in ("7.0", "7.5", "8.0") else 128
    return gpu.num_sms * lanes * 2 * clock * 1e6 / 1e12


@cache
def _clocks() -> dict[str, int]:
    """Boost clock in MHz by name."""
    return {row["gpu"]: int(row["clock_mhz"]) for row in csv_rows("gpu_properties.csv")}


@cache
def find_gpu(name: str) -> Gpu:
    """The GPU called ``name``: full or short, or as torch and nvidia-smi report it; case and separators do not count.

    A name that fits several (``A100``) is an UnknownName that lists them. As in the published prices and claims,
    ``H100`` and ``A100-80GB`` mean the SXM board, and ``A100-PCIe`` the 40 GB one. Raises SpecError for a size.
    """
    if _size_of(name) is not None:
        raise SpecError(
            f"{name} is a size of memory: it says what fits, and this needs a GPU's other properties. Give a GPU of "
            "`vramprobe gpus`."
        )
    return _gpu_called(name, "`vramprobe gpus` lists them.")


def _gpu_called(name: str, hint: str) -> Gpu:
    """The GPU of that name. Raises UnknownName, with ``hint`` where nothing is like it."""
    words = _gpu_words(name)
    if (gpu := _gpus_by_words().get("".join(words))) is not None:
        return gpu
    fitting = [gpu for gpu in _gpus() if words and any(set(words) <= set(known) for known in _known_words(gpu))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = ", ".join(f"{gpu.short_name} ({gpu.name})" for gpu in fitting)
        raise UnknownName("GPU", name, [], f"The name fits several: {several}. Give one of these.")
    if about := gpu_hint(name):
        raise UnknownName("GPU", name, [], f"{about} {hint}")
    raise UnknownName("GPU", name, [gpu.short_name for gpu in _gpus()], hint)


def gpu_or_size(name: str) -> Gpu:
    """The GPU called ``name``, or for a size such as ``12GiB`` one of that memory, with an A100's kernels: what is
    predicted where no GPU is named.
    """
    total_bytes = _size_of(name)
    if total_bytes is None:
        return _gpu_called(name, "`vramprobe gpus` lists them; a size such as 12GiB will do, too.")
    short = " ".join(name.split())
    return replace(
        find_gpu(LIKE_A_SIZE),
        name=f"GPU of {short}",
        short_name=short,
        aliases=(),
        nominal_gb=round(total_bytes / 1e9),
        total_bytes=total_bytes,
        cuda_total_bytes=None,
        context_bytes=None,
        context_basis="",
        source="the size as given",
        is_size=True,
    )


def memory_of(text: str) -> int:
    """Bytes of a size such as ``24GiB``, or of a GPU of the catalog as nvidia-smi reports it. Raises SpecError."""
    try:
        total_bytes = gpu_or_size(text).total_bytes
    except UnknownName as unknown:
        raise SpecError(f"{text!r} is neither an amount of memory, such as 24GiB, nor a GPU: {unknown}") from None
    if total_bytes is None:
        raise SpecError(f"the memory of {text} is not known; write an amount such as 24GiB")
    return total_bytes


#: Memory of a slice of an A100 or H100 (MIG), GiB by profile: the least that public logs print (nvidia-smi mig -lgip,
#: torch, CUDA.jl), and where none was found as many eighths as NVIDIA's MIG user guide gives the profile.
_MIG_GIB = {
    "1g.5gb": 4.75, "2g.10gb": 9.5, "3g.20gb": 19.0, "4g.20gb": 19.0,
    "1g.10gb": 9.62, "1g.20gb": 19.5, "2g.20gb": 19.5, "3g.40gb": 39.25, "4g.40gb": 39.25,
}  # fmt: skip


def _size_of(name: str) -> int | None:
    """Bytes, where ``name`` is an amount of memory, or a profile of MIG: ``MIG 3g.40gb``."""
    profile = name.strip().lower().removeprefix("mig").strip(" -")
    if profile in _MIG_GIB:
        return round(_MIG_GIB[profile] * GIB)
    with suppress(SpecError):
        return parse_bytes(name)
    return None


@cache
def gpu_seen(name: str) -> Gpu | None:
    """The GPU that torch or NVML calls ``name``; None for one that the catalog does not know, and for a CPU."""
    try:
        return find_gpu(name)
    except (UnknownName, SpecError):
        return None


def list_gpus() -> list[Gpu]:
    """Every GPU of the catalog, in file order."""
    return list(_gpus())


@cache
def _gpus() -> tuple[Gpu, ...]:
    names = {row["gpu"]: row for row in csv_rows("gpu_names.csv")}
    seen = {row["gpu"]: row for row in csv_rows("gpu_properties.csv")}
    return tuple(_gpu(row, names[row["gpu"]], seen.get(row["gpu"])) for row in csv_rows("gpus.csv"))


def _gpu(row: dict[str, str], names: dict[str, str], seen: dict[str, str] | None) -> Gpu:
    total_mib, context = number(row["reported_total_mib"], int), context_of(row["gpu"])
    return Gpu(
        name=row["gpu"],
        short_name=names["short_name"],
        aliases=split(names["aliases"], ";"),
        vendor=row["vendor"],
        arch=row["arch"],
        compute_capability=row["compute_capability"],
        nominal_gb=int(row["nominal_gb"]),
        total_bytes=None if total_mib is None else total_mib * MIB,
        memory_type=row["memory_type"],
        bandwidth_gb_s=float(row["bandwidth_gb_s"]),
        bf16_dense_tflops=number(row["bf16_dense_tflops"], float),
        fp16_dense_tflops=number(row["fp16_dense_tflops"], float),
        nvlink_gb_s=number(row["nvlink_gb_s"], float),
        nvlink_joins=_joins(row["nvlink_joins"]),
        pcie_gb_s=float(row["pcie_gb_s"]),
        shares_host_memory=row["memory_type"].startswith("LPDDR"),
        num_sms=None if seen is None else int(seen["sm_count"]),
        cuda_total_bytes=None if seen is None else int(seen["total_mib"]) * MIB,
        context_bytes=None if context is None else context.high_bytes,
        context_basis=context.basis if context else "",
        source=row["source"],
    )


def _joins(text: str) -> Literal["all", "pairs", ""]:
    match text:
        case "all" | "pairs" | "":
            return text
    raise AssertionError(f"gpus.csv: nvlink_joins {text!r}")


def _gpu_words(name: str) -> list[str]:
    """``NVIDIA A100-SXM4-80GB`` → a100, sxm4, 80gb; the maker's and the series' names tell no GPU from another."""
    words = [word.removeprefix("rtx") for word in re.findall(r"[a-z0-9]+", name.lower())]
    return [word for word in words if word not in ("nvidia", "amd", "geforce", "tesla", "instinct", "")]


def _known_words(gpu: Gpu) -> Iterator[list[str]]:
    for name in (gpu.name, gpu.short_name, *gpu.aliases):
        yield [*_gpu_words(name), f"{gpu.nominal_gb}gb"]


@cache
def _gpus_by_words() -> dict[str, Gpu]:
    return {"".join(_gpu_words(name)): gpu for gpu in _gpus() for name in (gpu.name, gpu.short_name, *gpu.aliases)}


class Price(NamedTuple):
    """One offer; ``usd_per_hour`` is for all ``num_gpus`` together."""

    provider: str
    date: str
    terms: str
    gpu: Gpu
    num_gpus: int
    usd_per_hour: float

    @property
    def usd_per_gpu_hour(self) -> float:
        """US dollars per hour and GPU."""
        return self.usd_per_hour / self.num_gpus


def list_prices(gpu: str | None = None) -> list[Price]:
    """The shipped prices, of one GPU when ``gpu`` names one. Raises UnknownName for an unknown GPU."""
    wanted = None if gpu is None else find_gpu(gpu)
    return [price for price in _prices() if wanted in (None, price.gpu)]


@cache
def _prices() -> tuple[Price, ...]:
    return tuple(
        Price(
            provider=row["provider"],
            date=row["date"],
            terms=row["terms"],
            gpu=find_gpu(row["gpu"]),
            num_gpus=int(row["n_gpus"]),
            usd_per_hour=float(row["usd_per_hour"]),
        )
        for row in csv_rows("prices.csv")
    )
