"""``vramprobe predict``: the memory of a cell that nobody ran, or the largest or fewest that fit a GPU.

In: a cell's options, and a question. Out: a prediction with its verdict, or the answer, as text or JSON.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.cli import lengths as lengths_option
from vramprobe.cli.modes import Mode, answer
from vramprobe.cli.options import (
    CELL_OPTIONS,
    AnyGpu,
    BatchSampler,
    ExitZero,
    Json,
    Lengths,
    PadToMultipleOf,
    PredictFit,
    exit_with,
    print_json,
    takes_a_cell,
    takes_given,
)
from vramprobe.cli.predict_cell import show_cell
from vramprobe.cli.predict_run import named_card, show_largest, show_largest_of_run, show_run
from vramprobe.options import MEASURED_OPTIONS, RANK_OPTIONS

if TYPE_CHECKING:
    from vramprobe.choices import Sharding

#: Of several GPUs, in the words of a cell.
RANKS = {name: CELL_OPTIONS[name] for name in RANK_OPTIONS}


@functools.partial(takes_given, mapping="ranks", options=RANKS)
@takes_a_cell(
    asks={"max_batch": "batch_size", "max_seq_len": "seq_len", "largest_model": "model"},
    without=(*RANK_OPTIONS, *MEASURED_OPTIONS),
    instead="from_run",
)
def predict(
    cell: dict[str, Any],
    ranks: dict[str, Any],
    fit: PredictFit = None,
    gpu: AnyGpu = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits --gpu.")] = False,
    max_seq_len: Annotated[
        bool, typer.Option("--max-seq-len", help="Find the longest sequence; with --max-batch for 1, 2, 4 … rows.")
    ] = False,
    largest_model: Annotated[
        bool, typer.Option("--largest-model", help="Find the catalog's largest model that fits --gpu.")
    ] = False,
    min_gpus: Annotated[
        bool, typer.Option("--min-gpus", help="Find the fewest --gpu that hold the run, --batch-size per rank.")
    ] = False,
    changes: Annotated[
        bool, typer.Option("--changes", help="Show what each other option would save, also if the cell fits.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of each part what it is, and its bytes as a product.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="auto | recipe: record this cell | measured: on this machine's GPU.")
    ] = "auto",
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Record with this interpreter's libraries.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Record the cell, and draw the live memory of one step by cause: FILE.html, .png or .svg."),
    ] = None,
    lengths: Lengths = None,
    sampler: BatchSampler = "random",
    pad_to_multiple_of: PadToMultipleOf = 1,
    replay_steps: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000,
            help="Play so many steps of the batches of --lengths through the allocator, under several settings.",
        ),
    ] = 0,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="In place of a model: a command's profile (profile --emulate GPU --folder RUN), at any --batch-size "
            "and --seq-len, without running it; --gpu all, or several.",
        ),
    ] = None,
    exit_zero: ExitZero = False,
    json_output: Json = False,
) -> None:
    """Predict the memory of a cell without running it, or find what fits on a GPU."""
    gpu = _limited(gpu, cell)
    answer(_MODES, predict, locals())


def _one_cell(
    *,
    cell: dict[str, Any],
    ranks: dict[str, Any],
    gpu: str | None,
    fit: Path | None,
    engine: str,
    python: Path | None,
    timeline: Path | None,
    changes: bool,
    explain: bool,
    exit_zero: bool,
    json_output: bool,
) -> None:
    from vramprobe import api
    from vramprobe.cli.emulate import say

    if python is not None and (changes or timeline is not None):
        raise typer.BadParameter("--changes and --timeline record with the usual libraries; drop them, or --python.")
    words = _words(cell, gpu, fit)
    if timeline is not None:  # of a recording, from which the prediction is made, too
        api.timeline(timeline, gpu=gpu, say=say, **ranks, **cell)
        print(f"timeline written to {timeline}", file=sys.stderr)
        engine = "recipe"
    words |= {"python": python} if python is not None else {}
    asked = {"engine": engine, "changes": changes, "explain": explain, "as_json": json_output}
    exit_with(show_cell(words, ranks, None, gpu=gpu, **asked), exit_zero=exit_zero)


def _of_data(
    *,
    cell: dict[str, Any],
    ranks: dict[str, Any],
    lengths: str,
    sampler: str,
    pad_to_multiple_of: int,
    replay_steps: int,
    gpu: str | None,
    fit: Path | None,
    engine: str,
    changes: bool,
    exit_zero: bool,
    json_output: bool,
) -> None:
    words = _words(cell, gpu, fit)
    order = {"sampler": sampler, "pad_to_multiple_of": pad_to_multiple_of}
    varied = lengths_option.of_data(lengths, order, replay_steps, words | ranks, gpu=gpu, engine=engine)
    words |= varied.worst_batch
    judged = show_cell(words, ranks, varied, gpu=gpu, engine=engine, changes=changes, as_json=json_output)
    exit_with(judged, exit_zero=exit_zero)


def _largest(
    *,
    cell: dict[str, Any],
    ranks: dict[str, Any],
    max_batch: bool,
    max_seq_len: bool,
    largest_model: bool,
    gpu: str | None,
    fit: Path | None,
    engine: str,
    json_output: bool,
) -> None:
    from vramprobe import api
    from vramprobe.cli.emulate import say

    questions = {
        "--max-batch": (max_batch, api.max_batch_size),
        "--max-seq-len": (max_seq_len, api.max_seq_len),
        "--largest-model": (largest_model, api.largest_model),
    }
    asked, ask = next((name, ask) for name, (is_asked, ask) in questions.items() if is_asked)
    ask = api.frontier if max_batch and max_seq_len else ask
    card, words = named_card(gpu, asked), _words(cell, gpu, fit)
    show_largest(lambda: ask(gpu=card, engine=engine, say=say, widen=True, **ranks, **words), as_json=json_output)


def _fewest(
    *,
    cell: dict[str, Any],
    min_gpus: bool,
    sharding: Sharding | None = None,
    offload: str | None = None,
    gpu: str | None,
    fit: Path | None,
    engine: str,
    json_output: bool,
) -> None:
    from vramprobe import api
    from vramprobe.cli import display_prediction
    from vramprobe.cli.emulate import say

    words: dict[str, Any] = {
        "gpu": named_card(gpu, "--min-gpus"),
        "offload": offload,
        "engine": engine,
        "say": say,
        "widen": True,
    }
    words |= _words(cell, gpu, fit)
    if sharding:
        found, left_out = [api.min_gpus(sharding=sharding, **words)], {}
    else:
        found, left_out = api.min_gpus_by_sharding(**words)
    if json_output:
        print_json([one.model_dump(mode="json") for one in found])
    else:
        display_prediction.print_min_gpus(found, left_out)


#: The first that is asked for answers.
_MODES = (
    Mode(
        "--from with --max-batch or --max-seq-len",
        lambda given: given["from_run"] is not None and (given["max_batch"] or given["max_seq_len"]),
        show_largest_of_run,
    ),
    Mode("--from", lambda given: given["from_run"] is not None, show_run),
    Mode("--min-gpus", lambda given: given["min_gpus"], _fewest),
    Mode(
        "--max-batch, --max-seq-len and --largest-model",
        lambda given: given["max_batch"] or given["max_seq_len"] or given["largest_model"],
        _largest,
    ),
    Mode("--lengths", lambda given: given["lengths"] is not None, _of_data),
    Mode("a prediction of one cell", lambda given: True, _one_cell),
)


def _limited(gpu: str | None, cell: Mapping[str, Any]) -> str | None:
    """The GPU that is asked about: --gpu, or the size that --limit-vram says. Raises wrong usage for both."""
    limit = cell.get("limit_vram")
    if gpu is not None and limit is not None:
        raise typer.BadParameter("--gpu and --limit-vram both say how much memory there is; drop one of them.")
    return limit if gpu is None else gpu


def _words(cell: Mapping[str, Any], gpu: str | None, fit: Path | None) -> dict[str, Any]:
    """A cell's words with what predicts it; on a GPU for CUDA."""
    from vramprobe.catalog import gpu_or_size

    if gpu is not None:
        gpu_or_size(gpu)
    device = {"device": "cuda"} if gpu is not None else {}
    return device | dict(cell) | {"fit": fit}
