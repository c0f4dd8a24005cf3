"""An error's figures, its form and its phase → what was full, why, and the changes that would help.

In: an OomMessage, the form of its message, and a Phase. Out: an Explanation. A number is the message's own or a
difference of two of them; where the message lacks one, the sentence does without.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vramprobe.catalog import list_gpus
from vramprobe.explain.advice import MAX_CHANGES, Advice, advice
from vramprobe.explain.messages import ABSURD_BYTES, Form, OomMessage
from vramprobe.explain.phases import Phase
from vramprobe.units import GIB, MIB, format_bytes

Cause = Literal[
    "size",
    "fragmentation",
    "neighbor",
    "ranks on one GPU",
    "limit",
    "setting",
    "bug",
    "kernel",
    "host",
    "shared memory",
    "unknown",
]
#: Outside the allocator, where no figure separates this process from others: less is its own context, libraries, NCCL.
_MUCH_OUTSIDE = 3 * GIB
_MUCH_OUTSIDE_SHARE = 0.25  # of the GPU
_NEIGHBOR = GIB  # of one other process: a desktop, or the CUDA context of another rank, takes less
_NEIGHBOR_SHARE = 0.05  # of the GPU
_KEPT_BY_DRIVER = 64 * MIB  # of free memory, for its own tables
_PRINTED_TO = 0.015  # of one card's total, as systems report it
_BESIDE_GRACE = ("GH200", "GB200", "GB300")
_LESS_ON_HOST = (
    "keep less on the host: files being read and weights that wait for their GPU are counted here too "
    "(device_map={'': 0} loads tensor by tensor; sysctl vm.drop_caches=3 on the host; end other programs)"
)
_END_OTHERS = "end the other processes (nvidia-smi names them) or choose another GPU by CUDA_VISIBLE_DEVICES"
_DROP_CACHES = (
    "if nvidia-smi names none: Linux keeps cached files in a Grace machine's GPU memory, too, and some drivers do not "
    "take them back (sync; echo 1 > /proc/sys/vm/drop_caches frees them)"
)
_UNUSED = 300 * MIB  # that expandable segments are worth naming for
#: Below this share of the reserved memory, unused bytes would only delay the end: benchmarks/truth/oom.md.
FRAGMENTED = 0.1
EXPANDABLE = {
    "CUDA": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF since PyTorch 2.9)",
    "HIP": "set PYTORCH_HIP_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF since PyTorch 2.9)",
    "NPU": "set PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
}
_EMPTY_CACHE = "return unused memory before this phase (torch.xpu.empty_cache, or that of your device)"
_SET_DEVICE = "give each rank its own GPU before its first CUDA call: torch.cuda.set_device(LOCAL_RANK)"
_LOADING = ("load", "to_device", "prepare")


@dataclass(frozen=True)
class Explanation:
    """Cause of a failure, in a sentence, and at most three changes that would make it fit, the most effective first."""

    cause: Cause
    why: str
    changes: tuple[Advice, ...]
    is_probable: bool = False  # memory is the likeliest reason, and the message names none


def explain(
    oom: OomMessage,
    phase: Phase,
    form: Form | None = None,
    *,
    host_copy: str = "",
    is_logits: bool = False,
    is_head: bool = False,
    is_expandable: bool = False,
) -> Explanation:
    """Judge one error. ``host_copy``: how its innermost frames take the host's memory; ``is_logits``: the request is
    logits; ``is_head``: it has an embedding's or head's size; ``is_expandable``: the allocator's segments are known
    to be expandable.
    """
    if oom.requested is not None and oom.requested >= ABSURD_BYTES:
        why = (
            f"{oom.requested / 2**60:,.2f} EiB requested: a size was computed wrong, often from a negative or "
            "overflowed number; no GPU's size is the cause"
        )
        return Explanation("bug", why, tuple(advice(["bug"])))
    if form is not None and form.why:
        return _by_form(oom, phase, form)
    if oom.owner == "driver":
        return _of_driver(oom, phase, host_copy)
    if oom.requested is None and oom.free is None and oom.allocated is not None and not oom.is_cut:
        return Explanation("unknown", "no failed request is recorded", ())  # a snapshot of a run that has not failed
    cause, why = _cause(oom, is_expandable)
    changes = advice(_keys(oom, phase, is_logits, is_head and not is_logits))
    for at, change in _of_figures(oom, cause, is_expandable):
        changes.insert(at, change)
    return Explanation(cause, why, tuple(changes[:MAX_CHANGES]))


def _by_form(oom: OomMessage, phase: Phase, form: Form) -> Explanation:
    """Explain the failure by its message alone."""
    why = next((text for one in form.why if (text := oom.filled(one)) is not None), "")
    why = why or f"{form.program} found too little memory, in a message without the figures that it has elsewhere"
    changes = [Advice(text) for one in form.changes if (text := oom.filled(one)) is not None]
    if oom.shares_host_memory and form.cause == "neighbor" and oom.total and oom.free is not None:  # an engine's share
        why = _by_host(oom.total - oom.free)
        changes.insert(0, Advice(_LESS_ON_HOST))
    keys = [form.cause, form.owner] if form.owner in ("host", "shared memory") else [form.cause, *_keys(oom, phase)]
    cause: Cause = form.cause or "unknown"  # type: ignore[assignment]
    return Explanation(cause, why, tuple((changes or advice(keys))[:MAX_CHANGES]), form.is_probable)


def _of_driver(oom: OomMessage, phase: Phase, host_copy: str) -> Explanation:
    """An error of the driver or of a library, which names no figure."""
    if host_copy:
        why = (
            f"the failing line is {host_copy}: the driver had no host memory left for it, which its error does not say"
        )
        return Explanation("host", why, tuple(advice(["pinned memory"])), is_probable=True)
    if oom.shares_host_memory:
        why = "the driver found no memory, and this GPU shares the machine's: what the host holds is missing here"
        return Explanation("unknown", why, (Advice(_LESS_ON_HOST), *advice(_phase_keys(phase))[:2]))
    if phase.name in _LOADING:
        why = (
            "the driver had no memory left while the model was still loading, and names no figure: something else may "
            "hold the GPU, or the model does not fit it"
        )
        return Explanation("unknown", why, tuple(advice(["driver: load"])))
    why = (
        "the GPU's driver or a library found no memory; it does not say how much was in use. PyTorch's own allocator "
        "may hold nearly all of the GPU"
    )
    return Explanation("unknown", why, (*advice(["driver"]), *advice(_phase_keys(phase))[:1]))


def _keys(oom: OomMessage, phase: Phase, is_logits: bool = False, is_head: bool = False) -> Iterator[str]:
    """Keys of the advice, the narrowest first."""
    if oom.backend == "MPS":
        if (oom.outside_allocator or 0) >= max(_NEIGHBOR, oom.allocated or 0):
            yield "MPS: outside"
        yield "MPS"
    if oom.requested is not None and oom.total is not None and oom.requested > oom.total:
        yield f"larger than the GPU: {phase.detail}"
        yield f"larger than the GPU: {'load' if phase.name in _LOADING else phase.name}"
        yield "larger than the GPU"
    if is_logits and phase.name in ("forward", "backward", "forward or backward"):
        yield "backward: logits"
    if is_head and phase.name in ("backward", "forward or backward", "unknown"):
        yield "backward: embedding or head"
    yield from _phase_keys(phase)


def _phase_keys(phase: Phase) -> Iterator[str]:
    name = "generation" if phase.name == "startup" else phase.name  # of an engine, whose settings are the same
    yield f"{name}: {phase.detail}"
    yield from (f"{one}: {phase.detail}" for one in ("forward", "backward") if one in phase.name and phase.detail)
    yield phase.name


def _of_figures(oom: OomMessage, cause: Cause, is_expandable: bool) -> Iterator[tuple[int, Advice]]:
    """Changes that the figures suggest, and before which others they go."""
    if cause == "fragmentation":
        yield 0, Advice(EXPANDABLE.get(oom.backend, _EMPTY_CACHE), oom.unused)
    elif cause == "ranks on one GPU":
        yield 0, Advice(f"{_SET_DEVICE}, device_map={{'': LOCAL_RANK}}", oom.neighbors)
    elif cause == "neighbor" and oom.shares_host_memory:
        yield 0, Advice(_LESS_ON_HOST, oom.neighbors or oom.outside)
    elif cause == "neighbor":
        yield 0, Advice(_END_OTHERS, oom.neighbors or None)
        if not oom.others and _is_beside_grace(oom):
            yield 1, Advice(_DROP_CACHES, oom.neighbors or None)
    elif cause == "limit":
        yield 0, Advice("raise or remove the limit of this process (set_per_process_memory_fraction)")
    if cause == "size" and len(contexts := _contexts(oom)) > 1:
        yield 1, Advice(f"{_SET_DEVICE}: {len(contexts)} others have a CUDA context here", sum(contexts))
    if cause == "size" and not is_expandable and _fits_in_unused(oom):
        yield 1, Advice(f"{EXPANDABLE.get(oom.backend, _EMPTY_CACHE)}; alone it is hardly enough", oom.unused)
    elif cause == "size" and not is_expandable and (oom.unused or 0) >= _UNUSED and oom.backend in EXPANDABLE:
        yield MAX_CHANGES, Advice(f"{EXPANDABLE[oom.backend]}; alone it is hardly enough", oom.unused)


def _contexts(oom: OomMessage) -> list[int]:
    """Bytes of other processes that are too small for more than a CUDA context: ranks that initialized this GPU."""
    return [size for size in oom.others if size < _NEIGHBOR]


def _cause(oom: OomMessage, is_expandable: bool) -> tuple[Cause, str]:
    asked, free, unused = oom.requested, oom.free, oom.unused
    if asked is None and oom.is_cut:
        return "unknown", "the message is cut: it does not say how much was requested"
    if asked is None:
        return "unknown", "no failed request is recorded; these are the bytes at the snapshot or where the message ends"
    if found := _limited(oom, asked) or _shared(oom, asked):
        return found
    if oom.total is not None and asked > oom.total:
        return "size", f"the request alone is larger than the GPU, by {format_bytes(asked - oom.total)}"
    if (fits := _fits_in_unused(oom)) and not is_expandable:
        assert unused is not None
        assert oom.reserved is not None
        if unused >= FRAGMENTED * oom.reserved:
            return "fragmentation", fits
        share = math.floor(100 * (1 - unused / oom.reserved))
        return (
            "size",
            f"{share} % of the reserved memory is allocated, so that defragmenting would gain little; {fits}",
        )
    if free is not None and asked <= free < asked + _KEPT_BY_DRIVER:
        return "size", "the free memory would hardly hold the request, and the driver keeps some of it"
    if free is not None and free >= asked:
        return "unknown", "the free memory would hold the request: other processes or ranks changed it meanwhile"
    if fits:
        return "unknown", f"{fits}, although its segments are expandable: of another stream or pool"
    if free is not None and unused is not None:
        return "size", f"even with all unused memory the request lacks {format_bytes(asked - free - unused)}"
    if free is not None:
        return "size", "the request is larger than the free memory"
    if oom.total is not None and oom.reserved is not None and oom.reserved + asked > oom.total:
        return "size", f"the {format_bytes(oom.reserved)} reserved and the request are more than the GPU has"
    return "unknown", "the message has no figure of the free memory"


def _limited(oom: OomMessage, asked: int) -> tuple[Cause, str] | None:
    """A limit below the device's size: a process's share, MPS's watermark."""
    held = oom.reserved if oom.reserved is not None else oom.allocated
    if oom.allowed is None or held is None:
        return None
    outside = oom.outside_allocator or 0
    if oom.backend == "MPS" and outside >= max(_NEIGHBOR, held):  # of the shared pool MPS refuses before its limit
        shares = f"{format_bytes(outside)} of the {format_bytes(oom.allowed)} that MPS allows"
        return "size", f"{shares} are Metal memory outside PyTorch's allocator, which holds {format_bytes(held)}"
    if held + outside + asked <= oom.allowed - 0.02 * GIB:  # printed to 0.01 GiB each
        return None
    if oom.backend == "MPS":
        parts = f"{format_bytes(held)} of PyTorch, {format_bytes(outside)} of Metal outside its allocator"
        return "size", f"{parts} and the request are more than the {format_bytes(oom.allowed)} that MPS allows"
    return "limit", f"the process may hold {format_bytes(oom.allowed)} and holds {format_bytes(held)}"


def _shared(oom: OomMessage, asked: int) -> tuple[Cause, str] | None:
    """Other processes on the GPU, where they hold more than the CUDA contexts of ranks."""
    least = max(_NEIGHBOR, asked, int(_NEIGHBOR_SHARE * (oom.total or 0)))
    others = [size for size in oom.others if size >= _NEIGHBOR]
    mine = oom.process or oom.reserved
    if mine and len(others) >= 2 and all(mine / 3 < size < 3 * mine for size in others):
        return (
            "ranks on one GPU",
            f"{len(others) + 1} processes of similar size use this one GPU: ranks that share it by mistake",
        )
    if (held := sum(others) if oom.others else oom.neighbors or 0) >= least:
        if oom.shares_host_memory:
            return "neighbor", _by_host(held)
        return "neighbor", f"other processes hold {format_bytes(held)} of this GPU, more than the request"
    outside = oom.outside or 0
    is_unseparated = oom.process is None and not oom.others and oom.outside_allocator is None
    if is_unseparated and outside >= max(_MUCH_OUTSIDE, asked, _MUCH_OUTSIDE_SHARE * (oom.total or 0)):
        if oom.shares_host_memory:
            return "neighbor", _by_host(outside)
        size = format_bytes(outside)
        return "neighbor", f"about {size} are in use outside this process's PyTorch: probably another process"
    return None


def _by_host(num_bytes: int) -> str:
    return (
        f"{format_bytes(num_bytes)} of the memory that this GPU shares with the CPU are in use beside this process's "
        "tensors: by the host, with the loader's own copy of the weights and cached files, or by other processes"
    )


def _is_beside_grace(oom: OomMessage) -> bool:
    """Return True where the total is that of a GPU whose memory Linux may use for files, too (GH200, GB200)."""
    totals = [gpu.total_bytes for gpu in list_gpus() if gpu.short_name.startswith(_BESIDE_GRACE) and gpu.total_bytes]
    return any(abs((oom.total or 0) - total) < _PRINTED_TO * total for total in totals)


def _fits_in_unused(oom: OomMessage) -> str:
    """Describe how unused memory would serve the request, were it in one piece; empty if it would not."""
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
