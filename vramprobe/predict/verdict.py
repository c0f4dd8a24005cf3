"""Verdict: a prediction held against a GPU: fits, tight, or does not fit.

In: a Prediction, and a GPU of the catalog. Out: a Verdict with the bytes that it compares.
"""

from collections.abc import Callable
from typing import Literal

from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.prediction import Interval, Prediction, Within
from vramprobe.records.frozen import FrozenModel
from vramprobe.units import GIB, format_bytes

#: For the CUDA context where no card is named (an amount of memory, a claim) or the catalog has none (AMD's): more
#: than the upper end of any card's.
CONTEXT_ALLOWANCE_BYTES = 1 * GIB
#: NCCL's buffers on each rank of several. Published runs on 2 and 4 A100s leave 1.6 to 2.5 GiB between nvidia-smi and
#: what torch reserves, the context within (benchmarks/truth/reproduce.md); more ranks have not been seen.
NCCL_ALLOWANCE_BYTES = 3 * GIB // 2
#: What the CPU keeps of a memory that it shares with the GPU (DGX Spark): the operating system, the page cache and the
#: command's own host memory. Public logs show 102 to 109 GiB of 121 available to CUDA.
HOST_ALLOWANCE_BYTES = 16 * GIB
#: A prediction above this share of the usable memory is tight: fragmentation and a longer batch need room.
TIGHT_SHARE = 0.95


class Verdict(FrozenModel):
    """Verdict of a cell on a GPU. ``needed_bytes`` is compared with ``usable_bytes``: allocated bytes where it is tight
    because cached blocks are freed.
    """

    gpu: str
    verdict: Literal["fits", "tight", "does not fit"]
    needed_bytes: Interval
    usable_bytes: int
    reason: str


def verdict(prediction: Prediction, gpu: Gpu) -> Verdict:
    """Judge the predicted cell on ``gpu``: by the device tier where it is known, else beside the most that the driver
    and a CUDA context take of this card (catalog/contexts.py). It is tight if it fits only because cached blocks are
    freed; a near prediction is tight wherever its interval leaves it open. Raises VramprobeError where the GPU's size
    is not known.
    """
    judged = _judged(prediction, gpu)
    if prediction.engine == "near":
        return _of_near(prediction, judged)
    within = prediction.within
    if judged.verdict != "does not fit" or within is None or within.limit_bytes > judged.usable_bytes:
        return judged
    times = "once" if within.num_alloc_retries == 1 else f"{within.num_alloc_retries} times"
    allocated = prediction.peak_allocated_bytes
    return judged.model_copy(
        update={
            "verdict": "tight",
            "needed_bytes": allocated,
            "reason": f"{format_bytes(allocated.value)} allocated of {format_bytes(judged.usable_bytes)}, though not "
            f"{judged.reason}: the allocator gives its cached blocks back {times}, which takes time",
        }
    )


def _of_near(prediction: Prediction, judged: Verdict) -> Verdict:
    """It fits where all of the reserved interval does, and does not where not even the least tensors do."""
    allocated = prediction.peak_allocated_bytes
    answer: Literal["fits", "tight", "does not fit"] = "fits" if judged.verdict == "fits" else "tight"
    if allocated.low > judged.usable_bytes:
        answer = "does not fit"
    reason = f"near, {judged.reason}, {format_bytes(allocated.value)} allocated"
    return judged.model_copy(update={"verdict": answer, "reason": reason})


def _judged(prediction: Prediction, gpu: Gpu) -> Verdict:
    device, reserved, num_gpus = prediction.device_bytes, prediction.reserved_bytes, prediction.num_gpus
    usable = usable_bytes(gpu, device_is_known=device is not None, num_gpus=num_gpus)
    needed = device or reserved or prediction.peak_allocated_bytes
    basis = basis_of_verdict(gpu, "device" if device else "reserved" if reserved else "allocated", num_gpus=num_gpus)
    answer: Literal["fits", "tight", "does not fit"] = "tight"
    if needed.value > usable:
        answer = "does not fit"
    elif needed.high <= TIGHT_SHARE * usable:
        answer = "fits"
    up_to = f" (up to {format_bytes(needed.high)})" if needed.high > needed.value else ""
    reason = f"{basis}: {format_bytes(needed.value)}{up_to} of {format_bytes(usable)}"
    return Verdict(gpu=gpu.name, verdict=answer, needed_bytes=needed, usable_bytes=usable, reason=reason)


def basis_of_verdict(gpu: Gpu, tier: Literal["device", "reserved", "allocated"], *, num_gpus: int = 1) -> str:
    """Say which memory is compared with the card, and what of the card is set aside."""
    basis = f"predicted {tier} memory" + ("" if tier == "device" else f", {set_aside(gpu)}")
    if num_gpus > 1:
        basis += f", {format_bytes(NCCL_ALLOWANCE_BYTES)} for NCCL, on each rank"
    if gpu.shares_host_memory:
        basis += f", {format_bytes(HOST_ALLOWANCE_BYTES)} for the CPU, which shares this memory"
    return basis


def set_aside(gpu: Gpu) -> str:
    """Say how much of the card is set aside for the driver and the CUDA context, and where the figure is from."""
    if gpu.context_bytes is None:
        return f"{format_bytes(CONTEXT_ALLOWANCE_BYTES)} set aside for the CUDA context, more than any known card's"
    by_driver = 0 if gpu.total_bytes is None else gpu.total_bytes - _cuda_bytes(gpu)  # unknown: no verdict follows
    aside = format_bytes(by_driver + gpu.context_bytes)
    return f"{aside} set aside for the driver and the CUDA context ({gpu.context_basis})"


def usable_bytes(gpu: Gpu, *, device_is_known: bool, num_gpus: int = 1) -> int:
    """Bytes of the card that a prediction may use: what CUDA sees, less the most that a CUDA context takes where only
    torch's memory is known, less NCCL's buffers on several GPUs, and less the host's part of a memory that it shares.

    Raises VramprobeError where the GPU's size is not known.
    """
    aside = 0 if device_is_known else CONTEXT_ALLOWANCE_BYTES if gpu.context_bytes is None else gpu.context_bytes
    aside += HOST_ALLOWANCE_BYTES if gpu.shares_host_memory else 0
    return _cuda_bytes(gpu) - aside - (NCCL_ALLOWANCE_BYTES if num_gpus > 1 else 0)


def within(found: Prediction, gpu: Gpu, retries_at: Callable[[int], int | None]) -> Prediction:
    """Return ``found`` with how often the cache goes back, where ``gpu`` holds its tensors and not all that the
    allocator would keep. ``retries_at``: that number where segments may take so many bytes; None where it runs out.
    """
    reserved, device = found.reserved_bytes, found.device_bytes
    if reserved is None or gpu.total_bytes is None:
        return found
    beside = device.value - reserved.value if device is not None else 0
    limit = usable_bytes(gpu, device_is_known=device is not None, num_gpus=found.num_gpus) - beside
    if not found.peak_allocated_bytes.value <= limit < reserved.value or (retries := retries_at(limit)) is None:
        return found
    return found.model_copy(update={"within": Within(limit_bytes=limit, num_alloc_retries=retries)})


def _cuda_bytes(gpu: Gpu) -> int:
    """Bytes that CUDA sees of the card: less than nvidia-smi reports, which counts the driver's part."""
    if gpu.total_bytes is None:
        raise VramprobeError(f"the memory of {gpu.name} is not known, so nothing can be said about what fits on it")
    return gpu.total_bytes if gpu.cuda_total_bytes is None else min(gpu.total_bytes, gpu.cuda_total_bytes)
