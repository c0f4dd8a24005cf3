"""``vramprobe explain FILE``: why a run ran out of memory, from its log, its memory snapshot or an nvidia-smi log.

In: a file's name, or - for stdin. Out: about ten lines on stdout, or JSON.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from vramprobe.cli.options import Json, Tokens
from vramprobe.errors import VramprobeError


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

    Reads the error's text or a whole log of any size, of PyTorch and of over fifty other programs (engines,
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
    print(json.dumps(report.as_json()) if json_output else report)
