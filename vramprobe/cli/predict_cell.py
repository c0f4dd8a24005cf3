"""The prediction of one cell, as ``vramprobe predict`` shows it: its verdict, and what would make it fit.

In: a cell's words, those of its ranks, the lengths of its data. Out: text or JSON, and the verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vramprobe.cli.options import print_json

if TYPE_CHECKING:
    from vramprobe.cli.lengths import Varied
    from vramprobe.interop.questions import JudgedPrediction
    from vramprobe.predict.changes import Change


def show_cell(
    cell: dict[str, Any],
    ranks: dict[str, Any],
    varied: Varied | None,
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
    from vramprobe.cli.lengths import print_lengths

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
            print_lengths(varied)
        _print_as_text(prediction, others, num_left_out=len(left_out), explain=explain)
        if meant("dtype", cell.get("dtype")) == "fp16" and not {"autocast", "recipe"} & {*cell}:
            chosen = "no autocast" if cell["method"] == "full" else "autocast fp16 and fp32 adapters"
            print(f"--dtype fp16: {chosen}; --autocast says otherwise.")
        is_of_one = not {"sharding", "images", "python"} & {*ranks, *cell}
        if is_of_one and judged and judged.verdict == "does not fit":
            print("How many of it hold the run: --min-gpus (under fsdp; --sharding names another).")
    return judged.verdict if judged else None


def _print_as_json(prediction: JudgedPrediction, others: list[Change] | None, varied: Varied | None) -> None:
    more = {"changes": [one.model_dump(mode="json") for one in others]} if others is not None else {}
    more |= varied.as_json() if varied is not None else {}
    left_out = {"options"} if prediction.verdict else {"options", "verdict", "step"}
    print_json(prediction.model_dump(mode="json", exclude=left_out) | more)


def _print_as_text(found: JudgedPrediction, others: list[Change] | None, *, num_left_out: int, explain: bool) -> None:
    from vramprobe.cli import display_changes, display_prediction, display_step_time

    in_words = found.parts if explain else {}
    display_prediction.print_prediction(found, found.verdict, found.unknowns, found.largest_part, in_words)
    if found.step is not None:
        display_step_time.print_step_cost(found.step)
    if others is not None:
        display_changes.print_changes(others, is_near=found.sharding is not None, num_left_out=num_left_out)


def _changes(
    gpu: str | None, cell: dict[str, Any], left_out: list[dict[str, Any]], *, is_asked: bool
) -> list[Change] | None:
    """Return the savings of other options, on several GPUs near; None where the cell itself would be recorded. Unless
    they are asked for, ``left_out`` takes the options that would be.
    """
    from vramprobe import api
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.cli.emulate import say
    from vramprobe.predict.at_hand import NotAtHand

    try:
        return api.changes(gpu=gpu, records=is_asked, say=say, left_out=left_out, **cell)
    except (NotAtHand, UnsupportedArchitecture):
        if is_asked:
            raise
        return None
