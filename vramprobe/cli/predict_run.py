"""``vramprobe predict --from RUN``: a profiled command at shapes that never ran, and what fits a GPU.

In: a run's folder, rows and tokens, GPUs. Out: a prediction with its verdicts, or the largest, as text or JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from vramprobe.cli.options import exit_with, flag, print_json, show

if TYPE_CHECKING:
    from vramprobe.predict.frontier import Frontier
    from vramprobe.predict.largest import Largest


def named_card(gpu: str | None, asked: str) -> str:
    if gpu is None:
        raise typer.BadParameter(f"{asked} asks what fits a GPU; name it: --gpu RTX-4090.")
    return gpu


def show_largest(ask: Callable[[], Largest | Frontier], *, as_json: bool) -> None:
    from vramprobe.cli import display, display_prediction
    from vramprobe.predict.frontier import Frontier

    with display.working("predicting"):
        found = ask()
    is_frontier = isinstance(found, Frontier)
    show(found, display_prediction.print_frontier if is_frontier else display_prediction.print_largest, as_json=as_json)


def show_run(
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
    from vramprobe.cli import display_prediction
    from vramprobe.profile.command import named_gpus

    found = api.predict_run(from_run, batch_size=batch_size, seq_len=seq_len)
    names, prediction, judged, cards = named_gpus(gpu), found.prediction, None, None
    if names is not None and (names == "all" or len(names) != 1):
        cards = api.run_on_gpus(found, names)
    elif gpu is not None:
        prediction, judged = found.on(gpu_or_size(gpu))
    if json_output:
        more: dict[str, Any] = {} if judged is None else {"verdict": judged.model_dump(mode="json")}
        more |= {} if cards is None else {"gpus": [one.model_dump(mode="json") for one in cards]}
        print_json(prediction.model_dump(mode="json") | more)
    else:
        display_prediction.print_prediction(prediction, judged)
        display_prediction.print_run_gpus(cards or ())
    exit_with(judged.verdict if judged else None, exit_zero=exit_zero)


def show_largest_of_run(
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

    given: dict[Literal["batch_size", "seq_len"], int | None] = {"batch_size": batch_size, "seq_len": seq_len}
    names = [name for name, is_asked in zip(given, (max_batch, max_seq_len), strict=True) if is_asked]
    asked = "--max-batch" if max_batch else "--max-seq-len"
    for name in names:
        if given.pop(name) is not None:
            raise typer.BadParameter(f"{asked} asks for the {flag(name)} that fits, so drop {flag(name)}.")
    card = named_card(gpu, asked)
    if given:
        show_largest(lambda: api.largest_of_run(from_run, names[0], gpu=card, **given), as_json=json_output)
    else:
        show_largest(lambda: api.frontier_of_run(from_run, gpu=card), as_json=json_output)
