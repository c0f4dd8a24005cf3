"""An error's figures and its phase → what was full, why, and the changes that would help, with bytes where known.

In: an OutOfMemory and a Phase. Out: an Explanation. A number is the message's own or a difference of two of them; where
the message lacks one, the sentence does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vramprobe.explain.messages import OutOfMemory
from vramprobe.explain.phases import Phase
from vramprobe.units import GIB, MIB, format_bytes

Cause = Literal["size", "fragmentation", "neighbor", "ranks on one GPU", "limit", "host", "unknown"]
#: Of a process outside the allocator, without that another process is suspected: CUDA context, cuBLAS, NCCL.
_MUCH_OUTSIDE = 3 * GIB
_NEIGHBOR = 300 * MIB  # of other processes: a desktop takes less
#: Below this share of the reserved memory, unused bytes would only delay the end: benchmarks/truth/oom.md.
_FRAGMENTED = 0.1
_EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF since PyTorch 2.9)"


@dataclass(frozen=True)
class Change:
    """Something to do; ``num_bytes``: what it frees at most, where the input says so."""

    text: str
    num_bytes: int | None = None


@dataclass(frozen=True)
class Explanation:
    """Why it failed, in a sentence, and what would make it fit, the most effective first."""

    cause: Cause
    why: str
    changes: tuple[Change, ...]


def explain(oom: OutOfMemory, phase: Phase, *, is_expandable: bool = False) -> Explanation:
    """Judge one error. ``is_expandable``: the allocator's segments are known to be expandable."""
    if oom.backend == "host":
        return _host(oom, phase)
    if not oom.has_figures:
        why = (
            "the GPU's driver or a library (cuBLAS, cuDNN, NCCL) found no memory; it does not say how much was in use. "
            "PyTorch's own allocator may hold nearly all of the GPU"
        )
        return Explanation(
            "unknown", why, (Change("leave memory to libraries: a smaller batch, or fewer bytes reserved"), *_of(phase))
        )
    if oom.requested is None and oom.free is None:  # a snapshot of a run that has not failed
        return Explanation("unknown", "no failed request is recorded", ())
    cause, why = _cause(oom, is_expandable)
    changes = list(_of(phase))
    if cause == "fragmentation":
        changes.insert(0, Change(_EXPANDABLE, oom.unused))
    elif cause in ("neighbor", "ranks on one GPU"):
        changes.insert(0, _of_neighbors(oom, cause))
    elif cause == "limit":
        changes.insert(0, Change("raise or remove set_per_process_memory_fraction"))
    if cause == "size" and not is_expandable and (_fits_in_unused(oom) or (oom.unused or 0) >= _NEIGHBOR):
        at = 1 if _fits_in_unused(oom) else len(changes)
        changes.insert(at, Change(f"{_EXPANDABLE}; alone it is hardly enough", oom.unused))
    return Explanation(cause, why, tuple(changes[:3]))


def _cause(oom: OutOfMemory, is_expandable: bool) -> tuple[Cause, str]:
    asked, free, unused = oom.requested, oom.free, oom.unused
    if asked is None:
        return "unknown", "no failed request is recorded; these are the bytes at the snapshot or where the message ends"
    if oom.allowed is not None and oom.reserved is not None and oom.reserved + asked > oom.allowed:
        return (
            "limit",
            f"the process may reserve {format_bytes(oom.allowed)} and has reserved {format_bytes(oom.reserved)}",
        )
    others = [size for size in oom.others if size >= _NEIGHBOR]
    mine = oom.process or oom.reserved
    if mine and len(others) >= 2 and all(mine / 3 < size < 3 * mine for size in others):
        return (
            "ranks on one GPU",
            f"{len(others) + 1} processes of similar size use this one GPU: ranks that share it by mistake",
        )
    if (oom.neighbors or 0) >= max(_NEIGHBOR, asked):
        size = format_bytes(oom.neighbors)
        return "neighbor", f"other processes hold {size} of this GPU, more than the request"
    if oom.process is None and not oom.others and (oom.outside or 0) >= _MUCH_OUTSIDE:
        size = format_bytes(oom.outside)
        return "neighbor", f"about {size} are in use outside this process's PyTorch: probably another process, or NCCL"
    if (fits := _fits_in_unused(oom)) and not is_expandable:
        assert unused is not None
        assert oom.reserved is not None
        if unused >= _FRAGMENTED * oom.reserved:
            return "fragmentation", fits
        share = 100 * (1 - unused / oom.reserved)
        return (
            "size",
            f"{share:.0f} % of the reserved memory is allocated, so that defragmenting would gain little; {fits}",
        )
    if free is not None and free >= asked:
        return "unknown", "the free memory would hold the request: other processes or ranks changed it meanwhile"
    if free is not None and unused is not None:
        return "size", f"even with all unused memory the request lacks {format_bytes(asked - free - unused)}"
    return (
        "size" if free is not None else "unknown",
        "the request is larger than the free memory"
        if free is not None
        else ("the message has no figure of the free memory"),
    )


def _fits_in_unused(oom: OutOfMemory) -> str:
    """How unused memory would serve the request, were it in one piece; empty if it would not."""
    asked, free, unused = oom.requested, oom.free, oom.unused
    if asked is None or unused is None or not oom.reserved:
        return ""
    if unused >= asked:
        return (
            f"{format_bytes(unused)} are reserved but unused, enough for the request, but in pieces that are too small"
        )
    if free is not None and free < asked <= free + unused:
        return f"the free {format_bytes(free)} and the {format_bytes(unused)} reserved but unused are enough together"
    return ""


def _of_neighbors(oom: OutOfMemory, cause: Cause) -> Change:
    if cause == "ranks on one GPU":
        return Change(
            "give each rank its own GPU: torch.cuda.set_device(LOCAL_RANK), device_map={'': LOCAL_RANK}", oom.neighbors
        )
    size = oom.neighbors if oom.neighbors else None
    return Change("end the other processes (nvidia-smi names them) or choose another GPU by CUDA_VISIBLE_DEVICES", size)


def _host(oom: OutOfMemory, phase: Phase) -> Explanation:
    why = "the host's memory was full, not the GPU's"
    if oom.requested is None:
        why = "a process was killed or got no host memory: the host's memory was probably full, not the GPU's"
    changes = [
        Change("load the checkpoint on one rank only, or with low_cpu_mem_usage: each rank may hold a whole copy"),
        Change("fewer dataloader workers and less pinned memory; no CPU offload of optimizer or parameters"),
        Change("request more host memory (Slurm --mem, a container's limit, /dev/shm)"),
    ]
    return Explanation("host", why, tuple(changes))


def _of(phase: Phase) -> Iterator[Change]:
    """What lowers the peak of a phase, the most effective first."""
    smaller = "halve the per-device batch size and double gradient_accumulation_steps"
    match phase.name, phase.detail:
        case "forward", "the loss":
            texts = [
                "a chunked or fused loss that never holds all logits (use_liger_kernel)",
                smaller,
                "a shorter max_length",
            ]
        case "forward", _:
            texts = ["gradient checkpointing, if it is off", smaller, "a shorter max_length"]
        case "backward", "recomputing a checkpointed layer":
            texts = [smaller, "a shorter max_length", "shard parameters and optimizer state (FSDP, ZeRO-3) or use LoRA"]
        case "backward", _:
            texts = ["gradient checkpointing, if it is off", smaller, "a chunked or fused loss (use_liger_kernel)"]
        case "optimizer_step", detail:
            texts = ["an 8-bit or paged optimizer (optim=adamw_bnb_8bit, paged_adamw_8bit)"]
            texts += ["optim=adamw_torch_fused, which needs no temporaries"] if detail.startswith("temporaries") else []
            texts += [
                "shard the optimizer state (ZeRO, FSDP) over more GPUs, or offload it",
                "train fewer parameters (LoRA)",
            ]
        case "evaluation", "gathering its logits":
            texts = [
                "eval_accumulation_steps=1 or prediction_loss_only=True: logits leave the GPU",
                "per_device_eval_batch_size=1",
            ]
        case "evaluation", _:
            texts = [
                "per_device_eval_batch_size=1 (its default is 8)",
                "prediction_loss_only=True, or eval_accumulation_steps=1",
            ]
        case "save", _:
            texts = [
                "save shards: FSDP SHARDED_STATE_DICT, DeepSpeed stage3_gather_16bit_weights_on_model_save=false",
                "gather the full state dict on the CPU (offload_to_cpu, rank 0 only)",
                "free gradients and cached memory before the save (zero_grad, torch.cuda.empty_cache)",
            ]
        case "merge", _:
            texts = ["merge on the CPU, in a process of its own, after training"]
        case "load_best", _:
            texts = ["load_best_model_at_end=False; load the checkpoint in a new process"]
        case "resume", _:
            texts = ["load the checkpoint on the CPU first (map_location='cpu')", "the same sharding as the saved run"]
        case "generation", _:
            texts = [
                "fewer or shorter completions at a time",
                "a lower gpu_memory_utilization where vLLM shares the GPU",
            ]
        case "load", _:
            texts = [
                "load in bf16 (dtype=torch.bfloat16) or quantized (load_in_4bit)",
                "shard while loading: ZeRO-3, FSDP or device_map",
            ]
        case (("prepare" | "to_device"), detail):
            texts = [
                "shard the model and its optimizer state over more GPUs (ZeRO-3, FSDP)",
                "load in bf16 or quantized",
                "CPU offload",
            ]
        case _:
            texts = [smaller, "gradient checkpointing, if it is off", "a shorter max_length"]
    yield from map(Change, texts)
