"""``vramprobe explain FILE``: why a run ran out of memory, from its log, its memory snapshot or an nvidia-smi log.

In: a file's name, or - for stdin. Out: about ten lines on stdout, or JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.options import Json, Tokens
from vramprobe.errors import VramprobeError
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.explain.causes import Explanation
    from vramprobe.explain.messages import OutOfMemory
    from vramprobe.explain.phases import Phase
    from vramprobe.explain.report import Report

_PHASES = {
    "load": "loading the model",
    "to_device": "moving the model to the GPU",
    "prepare": "preparing the model or its sharding",
    "optimizer_step": "optimizer step",
    "save": "saving a checkpoint",
    "merge": "merging the adapter",
    "load_best": "loading the best checkpoint at the end",
    "resume": "resuming from a checkpoint",
    "startup": "starting",
    "compile": "compiling",
    "data": "loading data",
    "unknown": "unknown phase",
}
#: What was full, by the cause or the device; else a GPU.
_WHERE = {"host": "the host", "shared memory": "the host's shared memory (/dev/shm)"}
_WHERE |= {"kernel": "the GPU's on-chip shared memory", "HPU": "the accelerator"}
_WHERE |= {"MPS": "the Mac's GPU", "Metal": "the Mac's GPU", "TPU": "the TPU"}


def explain(
    file: Annotated[
        Path, typer.Argument(help="A log, a memory snapshot or an nvidia-smi log; without it, or with -, stdin.")
    ] = Path("-"),
    model: Annotated[str | None, typer.Option(help="The model, to name the tensor of the request's size.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per micro-batch (default: as the log says).")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(**Tokens, help="Tokens per sequence (default: as the log says).")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share the model (default: as the log says).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Explain an out-of-memory error: what was full, in which phase, why, and what would make the run fit.

    Reads the error's text or a whole log of any size, of PyTorch and of about thirty other programs (engines,
    containers, schedulers, drivers), a memory_summary() table, a file of torch.cuda.memory._dump_snapshot (no code in
    it is run), or an nvidia-smi log. Nothing is uploaded; paths and command lines of the input are not repeated.
    """
    from vramprobe.explain.report import report_of

    if str(file) == "-" and sys.stdin.isatty():
        raise VramprobeError("no log was given: vramprobe explain FILE, or pipe one in (vramprobe explain < FILE)")
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as opened:
            report = report_of(opened, model=model, batch_size=batch_size, seq_len=seq_len, num_gpus=num_gpus)
    except OSError as error:
        raise VramprobeError(f"{file} cannot be read: {error.strerror}") from error
    print(json.dumps(as_json(report)) if json_output else "\n".join(in_words(report)))


def as_json(report: Report) -> dict[str, object]:
    """Plain values; bytes are whole numbers, unknown ones null."""
    from dataclasses import asdict

    fields = asdict(report)
    if report.oom is not None:
        fields["oom"] |= {name: getattr(report.oom, name) for name in ("reserved", "outside", "neighbors")}
    return fields


def in_words(report: Report) -> list[str]:
    """The report as lines."""
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


def _headline(report: Report, oom: OutOfMemory, explanation: Explanation) -> str:
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


def _budget(oom: OutOfMemory) -> list[str]:
    outside = (
        f"{oom.backend} context and libraries"
        if oom.process is not None
        else f"outside PyTorch: {oom.backend} context, libraries, others"
    )
    is_host = oom.owner == "host"
    rows = {
        f"allocated by {'PyTorch' if oom.owner == 'engine' else oom.program}": oom.allocated,
        "  of it in private pools (CUDA graphs)": oom.private_pools,
        "reserved but unused": oom.unused,
        "Metal memory outside PyTorch's allocator": oom.outside_allocator,
        f"{outside} (about)": oom.outside if oom.outside_allocator is None else None,
        "other processes (about)": oom.neighbors or None,
        "allowed for this process": oom.allowed if oom.owner == "device allocator" else None,
        "in use on the host": oom.used,
        "held by the killed process": oom.process if is_host else None,
    }
    return [f"  {format_bytes(size):>12}  {name}" for name, size in rows.items() if size is not None]


def _in_words(phase: Phase) -> str:
    detail = f", {phase.detail}" if phase.detail else ""
    at = f" ({'; '.join(phase.at)})" if phase.at else ""
    return f"{_PHASES.get(phase.name, phase.name)}{detail}{at}"
