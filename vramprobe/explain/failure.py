"""Report on one failed run, in data and in words.

In: a Report, which report.py makes. Out: about ten lines, or plain values for JSON. Decides nothing.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vramprobe.explain.causes import Explanation
from vramprobe.explain.messages import OomMessage
from vramprobe.explain.phases import WORDS, Phase
from vramprobe.records.shown import Shown
from vramprobe.units import format_bytes

#: What was full, by the cause or the device; else a GPU.
_WHERE = {"host": "the host", "shared memory": "the host's shared memory (/dev/shm)"}
_WHERE |= {"kernel": "the GPU's on-chip shared memory", "HPU": "the accelerator"}
_WHERE |= {"MPS": "the Mac's GPU", "Metal": "the Mac's GPU", "TPU": "the TPU"}


@dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """Facts about one failed run."""

    kind: Literal["log", "snapshot", "nvidia-smi", "memory_summary"]
    oom: OomMessage | None  # None: no error was found, only readings
    phase: Phase
    explanation: Explanation | None
    tensors: tuple[str, ...] = ()  # of the request's size
    ranks: tuple[str, ...] = ()  # that failed, where the log tells them apart
    progress: tuple[int, int] | None = None
    lines: tuple[tuple[str, int], ...] = ()  # of a snapshot: what holds the most
    notes: tuple[str, ...] = ()
    used: dict[int, int] = field(default_factory=dict)  # nvidia-smi: most in use, bytes by GPU

    def __str__(self) -> str:
        return "\n".join(in_words(self))

    def headline(self) -> str:
        """Return what was full, and by how much."""
        return in_words(self)[0] if in_words(self) else "nothing is known"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per line of the program that holds memory, in bytes; a snapshot alone has them."""
        return [{"line": line, "num_bytes": size} for line, size in self.lines]

    def remarks(self) -> list[str]:
        """Return the phase, the cause and what to try."""
        held = {f"  {format_bytes(size):>12}  {line}" for line, size in self.lines}
        return [one.strip() for one in in_words(self)[1:] if one not in held]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; bytes are whole numbers, unknown ones null."""
        fields = asdict(self)
        if self.oom is not None:
            fields["oom"] |= {name: getattr(self.oom, name) for name in ("reserved", "outside", "neighbors")}
        return fields


def in_words(report: Report) -> list[str]:
    """Return the report as lines."""
    said = []
    if report.oom is not None and report.explanation is not None:
        said += [_headline(report, report.oom, report.explanation), *_budget(report.oom)]
        if report.phase.name != "unknown" or report.oom.owner in ("device allocator", "driver"):
            said += [f"phase: {_in_words(report.phase)}"] if report.kind == "log" or report.phase.at else []
        said.append(f"cause: {report.explanation.cause}: {report.explanation.why}")
        if report.tensors:
            said.append(f"the request has the size of {'; or '.join(report.tensors)}")
        said += [f"  {format_bytes(size):>12}  {line}" for line, size in report.lines]
    said += [f"note: {note}" for note in report.notes]
    for number, change in enumerate(report.explanation.changes if report.explanation else (), 1):
        upper = f" (at most {format_bytes(change.num_bytes)})" if change.num_bytes is not None else ""
        said.append(f"{'try: ' if number == 1 else '     '}{number}. {change.text}{upper}")
    return said


def _headline(report: Report, oom: OomMessage, explanation: Explanation) -> str:
    cause = explanation.cause
    where = _WHERE.get(cause, _WHERE.get(oom.backend, "the GPU" if oom.device is None else f"GPU {oom.device}"))
    if report.kind != "log" and oom.requested is None:
        return f"{where} at the {report.kind}, which records no out-of-memory error"
    if cause == "bug":
        return f"{where} refused a request that no GPU could hold"
    asked = "" if oom.requested is None else f": {format_bytes(oom.requested)} requested"
    free = "" if oom.free is None else f"{',' if asked else ':'} {format_bytes(oom.free)} free"
    total = "" if oom.total is None else f" of {format_bytes(oom.total)}"
    ranks = f" ({len(report.ranks)} ranks failed)" if len(report.ranks) > 1 else ""
    bar = f", at {report.progress[0]}/{report.progress[1]} of the last progress bar" if report.progress else ""
    failed = "ran out of memory" if oom.owner not in ("kernel", "shared memory") else "was too small"
    failed = f"probably {failed}" if explanation.is_probable else failed
    subject = f"{oom.program} found too little memory on {where}" if oom.owner == "engine" else f"{where} {failed}"
    return f"{subject}{asked}{free}{total}{bar}{ranks}"


def _budget(oom: OomMessage) -> list[str]:
    others = "the host, other processes" if oom.shares_host_memory else "other processes"
    outside = (
        f"{oom.backend} context and libraries"
        if oom.process is not None
        else f"outside PyTorch: {oom.backend} context, libraries, {others if oom.shares_host_memory else 'others'}"
    )
    is_host = oom.owner == "host"
    rows = {
        f"allocated by {'PyTorch' if oom.owner == 'engine' else oom.program}": oom.allocated,
        "  of it in private pools (CUDA graphs)": oom.private_pools,
        "reserved but unused": oom.unused,
        "Metal memory outside PyTorch's allocator": oom.outside_allocator,
        f"{outside} (about)": oom.outside if oom.outside_allocator is None else None,
        f"{others} (about)": oom.neighbors or None,
        "allowed for this process": oom.allowed if oom.owner == "device allocator" else None,
        "in use on the host": oom.used,
        "held by the killed process": oom.process if is_host else None,
    }
    return [f"  {format_bytes(size):>12}  {name}" for name, size in rows.items() if size is not None]


def _in_words(phase: Phase) -> str:
    detail = f", {phase.detail}" if phase.detail else ""
    at = f" ({'; '.join(phase.at)})" if phase.at else ""
    return f"{WORDS.get(phase.name, phase.name)}{detail}{at}"
