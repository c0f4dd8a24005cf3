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
from vramprobe.options import RANK_OPTIONS

if TYPE_CHECKING:
    from vramprobe.interop.questions import JudgedPrediction
    from vramprobe.predict.changes import Change
    from vramprobe.predict.fewest import MinGpus
    from vramprobe.predict.verdict import Verdict


#: Of several GPUs, in the words of a cell.
RANKS = {name: CELL_OPTIONS[name] for name in RANK_OPTIONS}


@functools.partial(takes_given, mapping="ranks", options=RANKS)
@takes_a_cell(
    asks={"max_batch": "batch_size", "max_seq_len": "seq_len", "largest_model": "model"},
    without=RANK_OPTIONS,
    instead="from_run",
)
def predict(
    cell: dict[str, Any],
    ranks: dict[str, Any],
    fit: PredictFit = None,
    gpu: AnyGpu = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits --gpu.")] = False,
    max_seq_len: Annotated[
        bool,
        typer.Option("--max-seq-len", help="Find the longest sequence; with --max-batch for 1, 2, 4 … rows."),
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
        str,
        typer.Option(help="formula | recipe: an emulated GPU | measured: this machine's | auto."),
    ] = "auto",
    python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Record with this interpreter's libraries."),
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
    if python is not None and (changes or timeline is not None):
        raise typer.BadParameter("--changes and --timeline record with the usual libraries; drop them, or --python.")
    words = _words(cell, gpu, fit)
    if timeline is not None:
        engine = _drawn(cell, ranks, gpu, engine, timeline)
    words |= {"python": python} if python is not None else {}
    asked = {"engine": engine, "changes": changes, "explain": explain, "as_json": json_output}
    exit_with(_show(words, ranks, None, gpu=gpu, **asked), exit_zero=exit_zero)


def _drawn(cell: Mapping[str, Any], ranks: Mapping[str, Any], gpu: str | None, engine: str, timeline: Path) -> str:
    """Write the timeline of the cell's recording; the engine that then predicts from it, too."""
    from vramprobe import api
    from vramprobe.cli.emulate import say

    if engine == "formula":
        raise typer.BadParameter("--timeline draws a recording; drop --engine formula.")
    api.timeline(timeline, gpu=gpu, say=say, **ranks, **cell)
    print(f"timeline written to {timeline}", file=sys.stderr)
    return "recipe"


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
    judged = _show(words, ranks, varied, gpu=gpu, engine=engine, changes=changes, as_json=json_output)
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
    from vramprobe.cli import display
    from vramprobe.cli.emulate import say

    questions = {
        "--max-batch": (max_batch, api.max_batch_size),
        "--max-seq-len": (max_seq_len, api.max_seq_len),
        "--largest-model": (largest_model, api.largest_model),
    }
    asked, ask = next((name, ask) for name, (is_asked, ask) in questions.items() if is_asked)
    ask, show = (api.frontier, display.print_frontier) if max_batch and max_seq_len else (ask, display.print_largest)
    card, words = _card(gpu, asked), _words(cell, gpu, fit)
    with display.working("predicting"):
        found = ask(gpu=card, engine=engine, say=say, widen=True, **ranks, **words)
    if json_output:
        print_json(found.model_dump(mode="json"))
    else:
        show(found)


def _fewest(
    *,
    cell: dict[str, Any],
    min_gpus: bool,
    sharding: str | None = None,
    offload: str | None = None,
    gpu: str | None,
    fit: Path | None,
    engine: str,
    json_output: bool,
) -> None:
    card = _card(gpu, "--min-gpus")
    words = _words(cell, gpu, fit)
    _show_min_gpus(*_min_gpus(card, sharding, engine, words, offload), as_json=json_output)


def _of_run(
    *,
    from_run: Path,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpu: str | None,
    exit_zero: bool,
    json_output: bool,
) -> None:
    from vramprobe import api
    from vramprobe.catalog import gpu_or_size
    from vramprobe.cli import display, display_run
    from vramprobe.profile.command import named_gpus

    found = api.predict_run(from_run, batch_size=batch_size, seq_len=seq_len)
    names = named_gpus(gpu)
    if names is None or (names != "all" and len(names) == 1):
        prediction, judged = (found.prediction, None) if gpu is None else found.on(gpu_or_size(gpu))
        if json_output:
            more = {"verdict": judged.model_dump(mode="json")} if judged else {}
            print_json(prediction.model_dump(mode="json") | more)
        else:
            display.print_prediction(prediction, judged)
        exit_with(judged.verdict if judged else None, exit_zero=exit_zero)
        return
    cards = api.run_on_gpus(found, names)
    if json_output:
        print_json(found.prediction.model_dump(mode="json") | {"gpus": [one.model_dump(mode="json") for one in cards]})
    else:
        display.print_prediction(found.prediction, None)
        display_run.print_gpus(cards)


def _largest_of_run(
    *,
    from_run: Path,
    max_batch: bool,
    max_seq_len: bool,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpu: str | None,
    json_output: bool,
) -> None:
    from vramprobe import api
    from vramprobe.cli import display

    given = {"batch_size": batch_size, "seq_len": seq_len}
    names = [name for name, is_asked in zip(given, (max_batch, max_seq_len), strict=True) if is_asked]
    asked = "--max-batch" if max_batch else "--max-seq-len"
    for name in names:
        if given.pop(name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{asked} asks for the {option} that fits, so drop {option}.")
    card = _card(gpu, asked)
    with display.working("predicting"):
        found = (
            api.largest_of_run(from_run, names[0], gpu=card, **given)
            if given
            else api.frontier_of_run(from_run, gpu=card)
        )
    if json_output:
        print_json(found.model_dump(mode="json"))
    else:
        (display.print_largest if given else display.print_frontier)(found)


#: The first that is asked for answers.
_MODES = (
    Mode(
        "--from with --max-batch or --max-seq-len",
        lambda given: given["from_run"] is not None and (given["max_batch"] or given["max_seq_len"]),
        _largest_of_run,
    ),
    Mode("--from", lambda given: given["from_run"] is not None, _of_run),
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


def _card(gpu: str | None, asked: str) -> str:
    if gpu is None:
        raise typer.BadParameter(f"{asked} asks what fits a GPU; name it: --gpu RTX-4090.")
    return gpu


def _words(cell: Mapping[str, Any], gpu: str | None, fit: Path | None) -> dict[str, Any]:
    """A cell's words with what predicts it; on a GPU for CUDA."""
    from vramprobe.catalog import gpu_or_size

    if gpu is not None:
        gpu_or_size(gpu)
    device = {"device": "cuda"} if gpu is not None else {}
    return device | dict(cell) | {"fit": fit}


def _show(
    cell: dict[str, Any],
    ranks: dict[str, Any],
    varied: lengths_option.Varied | None,
    *,
    gpu: str | None,
    engine: str,
    changes: bool,
    as_json: bool,
    explain: bool = False,
) -> str | None:
    """Predict one cell, judge it, and look for what would make it fit; return the verdict, None without a GPU."""
    from vramprobe import api
    from vramprobe.choices import meant
    from vramprobe.cli.emulate import say

    prediction = api.predict(widen=True, engine=engine, say=say, gpu=gpu, **ranks, **cell)
    if varied is not None:  # its steps are not all like that of the worst batch
        prediction = prediction.model_copy(update={"step": None})
    judged, others, left_out = prediction.verdict, None, []
    if changes or (judged and judged.verdict != "fits" and "python" not in cell):
        others = _changes(gpu, ranks | cell, left_out, is_asked=changes)
    if as_json:
        _print_as_json(prediction, others, varied)
    else:
        if varied is not None:
            lengths_option.print_lengths(varied)
        _print_as_text(prediction, judged, others, num_left_out=len(left_out), explain=explain)
        if meant("dtype", cell.get("dtype")) == "fp16" and not {"autocast", "recipe"} & {*cell}:
            chosen = "no autocast" if cell["method"] == "full" else "autocast fp16 and fp32 adapters"
            print(f"--dtype fp16: {chosen}; --autocast says otherwise.")
        is_of_one = not {"sharding", "images", "python"} & {*ranks, *cell}
        if is_of_one and judged and judged.verdict == "does not fit":
            print("How many of it hold the run: --min-gpus (under fsdp; --sharding names another).")
    return judged.verdict if judged else None


def _print_as_json(
    prediction: JudgedPrediction, others: list[Change] | None, varied: lengths_option.Varied | None
) -> None:
    more = {"changes": [one.model_dump(mode="json") for one in others]} if others is not None else {}
    more |= varied.as_json() if varied is not None else {}
    left_out = {"options"} if prediction.verdict else {"options", "verdict", "step"}
    print_json(prediction.model_dump(mode="json", exclude=left_out) | more)


def _print_as_text(
    prediction: JudgedPrediction,
    judged: Verdict | None,
    others: list[Change] | None,
    *,
    num_left_out: int,
    explain: bool,
) -> None:
    from vramprobe.cli import display

    in_words = prediction.parts if explain else {}
    display.print_prediction(prediction, judged, prediction.unknowns, prediction.largest_part, in_words)
    if prediction.step is not None:
        from vramprobe.cli import display_step_time

        display_step_time.print_step_cost(prediction.step)
    if others is not None:
        from vramprobe.cli import display_changes

        is_near = prediction.num_gpus > 1
        display_changes.print_changes(others, is_near=is_near, num_left_out=num_left_out)


def _changes(
    gpu: str | None, cell: dict[str, Any], left_out: list[dict[str, Any]], *, is_asked: bool
) -> list[Change] | None:
    """Return the savings of other options, on several GPUs near; None where the cell itself would be recorded. Unless
    they are asked for, ``left_out`` takes the options that would be.
    """
    from vramprobe import api
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.cli.emulate import say

    try:
        return api.changes(gpu=gpu, records=is_asked, say=say, left_out=left_out, **cell)
    except UnsupportedArchitecture:
        if is_asked:
            raise
        return None


def _min_gpus(
    gpu: str, sharding: str | None, engine: str, cell: dict[str, Any], offload: str | None = None
) -> tuple[list[MinGpus], dict[str, list[str]]]:
    """(for one kind of sharding, the one that is named or the first that can do this; kinds by why not the others)."""
    from vramprobe import api
    from vramprobe.cli.emulate import say

    words = {"gpu": gpu, "offload": offload, "engine": engine, "say": say, "widen": True}
    if sharding:
        return [api.min_gpus(sharding=sharding, **words, **cell)], {}
    return api.min_gpus_by_sharding(**words, **cell)


def _show_min_gpus(found: list[MinGpus], left_out: dict[str, list[str]], *, as_json: bool) -> None:
    from vramprobe.cli import display_fewest

    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
    else:
        display_fewest.print_min_gpus(found, left_out)
