"""``vramprobe predict``: the memory of a cell that nobody ran, or the largest or fewest that fit a GPU.

In: a cell's options, and a question. Out: a prediction with its verdict, or the answer, as text or JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from vramprobe.choices import CpRotation, Offload, Sharding
from vramprobe.cli import grpo as grpo_option
from vramprobe.cli import lengths as lengths_option
from vramprobe.cli import serve as serve_option
from vramprobe.cli.options import BatchSampler, Json, Lengths, PadToMultipleOf, PredictFit, print_json, takes_a_cell
from vramprobe.options import RANK_OPTIONS
from vramprobe.rules.sharding import HYBRID, SHARD_SIZE

if TYPE_CHECKING:
    from vramprobe.predict.changes import Change
    from vramprobe.predict.fewest import MinGpus
    from vramprobe.predict.prediction import Prediction
    from vramprobe.predict.verdict import Verdict


@grpo_option.takes_grpo
@serve_option.takes_serving
@takes_a_cell(
    asks={"max_batch": "batch_size", "max_seq_len": "seq_len", "largest_model": "model"},
    without=RANK_OPTIONS,
    freed_by=("serve", "rollouts"),
    freed_if=grpo_option.is_grpo,
)
def predict(
    cell: dict[str, Any],
    serving: dict[str, Any],
    rollouts: dict[str, Any],
    fit: PredictFit = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU of `vramprobe gpus`: does the cell fit on it?")] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits --gpu.")] = False,
    max_seq_len: Annotated[
        bool, typer.Option("--max-seq-len", help="Find the longest sequence that fits --gpu.")
    ] = False,
    largest_model: Annotated[
        bool, typer.Option("--largest-model", help="Find the catalog's largest model that fits --gpu.")
    ] = False,
    min_gpus: Annotated[
        bool, typer.Option("--min-gpus", help="Find the fewest --gpu that hold the run, --batch-size per rank.")
    ] = False,
    sharding: Annotated[
        str | None,
        typer.Option(help=f"Predict one rank under this sharding: {' | '.join(get_args(Sharding))}."),
    ] = None,
    num_gpus: Annotated[int | None, typer.Option(help="Number of GPUs for --sharding.")] = None,
    shard_size: Annotated[
        int | None, typer.Option(help=f"GPUs per shard group under {' and '.join(HYBRID)} (default {SHARD_SIZE}).")
    ] = None,
    cp_size: Annotated[
        int | None, typer.Option(help="Context parallelism: GPUs that share each sequence, under fsdp (default 1).")
    ] = None,
    cp_rotation: Annotated[
        str | None,
        typer.Option(
            help=f"How those GPUs exchange keys and values: {' | '.join(get_args(CpRotation))} (default allgather)."
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(help=f"What the ranks offload to host memory: {' | '.join(get_args(Offload))} (default none)."),
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Show what each other option would save, also if the cell fits.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="formula: arithmetic, milliseconds | trace: simulation, seconds | auto: formula where it is known."
        ),
    ] = "auto",
    stack: Annotated[
        str | None,
        typer.Option(
            help="Predict for other library versions: transformers-4.48, or transformers-4.48,bitsandbytes-0.45."
        ),
    ] = None,
    lengths: Lengths = None,
    sampler: BatchSampler = "random",
    pad_to_multiple_of: PadToMultipleOf = 1,
    replay_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Play so many steps of the batches of --lengths through the allocator, under several settings.",
        ),
    ] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Predict an inference engine (vLLM) alone on --gpu, with its own options.")
    ] = False,
    allow_extrapolation: Annotated[
        bool, typer.Option(help="Predict even far outside the range of the fit's records.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Predict the memory of a cell without running it, or find what fits on a GPU."""
    from vramprobe import api
    from vramprobe.catalog import find_gpu
    from vramprobe.cli import display
    from vramprobe.predict.verdict import verdict

    if serve or rollouts or grpo_option.is_grpo(cell):
        others = {
            "fit": fit,
            "max_batch": max_batch,
            "max_seq_len": max_seq_len,
            "largest_model": largest_model,
            "min_gpus": min_gpus,
            "sharding": sharding,
            "num_gpus": num_gpus,
            "shard_size": shard_size,
            "cp_size": cp_size,
            "cp_rotation": cp_rotation,
            "offload": offload,
            "changes": changes,
            "stack": stack,
            "lengths": lengths,
        }
        if serve:
            grpo_option.refuse(rollouts)
            serve_option.show(cell, serving, others, gpu=gpu, as_json=json_output)
        else:
            grpo_option.show(cell, rollouts, serving, others, gpu=gpu, as_json=json_output)
        return
    serve_option.refuse(serving)
    card = find_gpu(gpu) if gpu is not None else None
    cell = {"device": "cuda"} | cell if card else cell
    cell |= {"fit": fit, "allow_extrapolation": allow_extrapolation}
    ranks = {
        "sharding": sharding,
        "num_gpus": num_gpus,
        "shard_size": shard_size,
        "cp_size": cp_size,
        "cp_rotation": cp_rotation,
        "offload": offload,
    }
    question = {
        "--max-batch": max_batch,
        "--max-seq-len": max_seq_len,
        "--largest-model": largest_model,
        "--min-gpus": min_gpus,
    }
    asking = [flag for flag, asked in question.items() if asked]
    if lengths is None and (replay_steps or sampler != "random" or pad_to_multiple_of != 1):
        raise typer.BadParameter("--replay-steps, --sampler and --pad-to-multiple-of need --lengths.")
    _require_one_question(asking, gpu, stack, ranks, changes=changes, with_lengths=lengths is not None)
    if min_gpus:
        _show_min_gpus(*_min_gpus(gpu, sharding, engine, cell, offload), as_json=json_output)
        return
    if asking:
        ask = api.max_batch_size if max_batch else api.max_seq_len if max_seq_len else api.largest_model
        with display.working("simulating" if engine == "trace" else "predicting"):
            largest = ask(gpu=gpu, engine=engine, **ranks, **cell)
        if json_output:
            print_json(largest.model_dump(mode="json"))
        else:
            display.print_largest(largest)
        return
    varied = None
    if lengths is not None:
        order = {"sampler": sampler, "pad_to_multiple_of": pad_to_multiple_of}
        varied = lengths_option.of_data(lengths, order, replay_steps, cell | ranks, gpu=gpu, engine=engine, stack=stack)
        cell |= varied.worst_batch
    prediction = api.predict(engine=engine, gpu=gpu, stack=stack, **ranks, **cell)
    judged = verdict(prediction, card) if card else None
    fewest, uncounted, others = [], "", None
    if changes or (judged and judged.verdict != "fits" and stack is None):
        others = _changes(gpu, prediction, ranks | cell, is_asked=changes)
    is_sole = sharding is None and stack is None and prediction.engine == "formula"
    if judged and judged.verdict == "does not fit" and is_sole:
        fewest, uncounted = _min_gpus_if_countable(gpu, engine, cell)
    if json_output:
        _print_as_json(prediction, judged, fewest, others, varied)
    else:
        if varied is not None:
            lengths_option.print_lengths(varied)
        _print_as_text(prediction, judged, fewest, others, uncounted)


def _require_one_question(
    asking: list[str], gpu: str | None, stack: str | None, ranks: dict[str, Any], *, changes: bool, with_lengths: bool
) -> None:
    """Raise wrong usage for two questions at once, and for options that a question does not have."""
    if len(asking) > 1:
        raise typer.BadParameter(f"{' and '.join(asking)} are different questions; ask one at a time.")
    if asking and changes:
        raise typer.BadParameter(f"--changes is about one cell, and {asking[0]} looks for one; drop one of them.")
    if asking and with_lengths:
        raise typer.BadParameter(f"--lengths says itself what fits; drop it, or {asking[0]}.")
    if asking and gpu is None:
        raise typer.BadParameter(f"{asking[0]} asks what fits a GPU; name it: --gpu RTX-4090.")
    if stack is not None and (asking or changes):
        raise typer.BadParameter(f"--stack is of one prediction; drop it, or {(asking or ['--changes'])[0]}.")
    if asking != ["--min-gpus"]:
        return
    if ranks["num_gpus"] is not None:
        raise typer.BadParameter("--min-gpus asks for the number of GPUs, so drop --num-gpus.")
    for given in ("shard_size", "cp_size", "cp_rotation"):
        if ranks[given] is not None:
            flag = f"--{given.replace('_', '-')}"
            raise typer.BadParameter(f"--min-gpus asks how many GPUs share one model, so drop {flag}.")


def _print_as_json(
    prediction: Prediction,
    judged: Verdict | None,
    fewest: list[MinGpus],
    others: list[Change] | None,
    varied: lengths_option.Varied | None,
) -> None:
    more = {"verdict": judged.model_dump(mode="json")} if judged else {}
    more |= {"min_gpus": [one.model_dump(mode="json") for one in fewest]} if fewest else {}
    more |= {"changes": [one.model_dump(mode="json") for one in others]} if others is not None else {}
    more |= varied.as_json() if varied is not None else {}
    print_json(prediction.model_dump(mode="json") | more)


def _print_as_text(
    prediction: Prediction, judged: Verdict | None, fewest: list[MinGpus], others: list[Change] | None, uncounted: str
) -> None:
    from vramprobe.cli import display

    display.print_prediction(prediction, judged)
    if others is not None:
        from vramprobe.cli import display_changes

        display_changes.print_changes(others)
    if fewest:
        from vramprobe.cli import display_fewest

        display_fewest.print_min_gpus(fewest, {})
    if uncounted:
        print(f"note: {uncounted}")


def _changes(gpu: str | None, prediction: Prediction, cell: dict[str, Any], *, is_asked: bool) -> list[Change] | None:
    """What other options would save; None for what was simulated, since each would take seconds more."""
    if prediction.engine == "formula":
        from vramprobe import api

        return api.changes(gpu=gpu, **cell)
    if is_asked:
        raise typer.BadParameter("--changes is by arithmetic, and this cell was simulated; ask for a single one.")
    return None


def _min_gpus_if_countable(gpu: str, engine: str, cell: dict[str, Any]) -> tuple[list[MinGpus], str]:
    """(the fewest for each kind of sharding, or why they are not counted): nobody asked, so the verdict stands."""
    from vramprobe.architecture import UnsupportedArchitecture

    try:
        return _min_gpus(gpu, None, engine, cell)[0], ""
    except UnsupportedArchitecture as error:
        return [], str(error)


def _min_gpus(
    gpu: str, sharding: str | None, engine: str, cell: dict[str, Any], offload: str | None = None
) -> tuple[list[MinGpus], dict[str, list[str]]]:
    """(for one kind of sharding, or for each that the libraries can do with this cell; kinds by why not the others)."""
    from vramprobe import api

    if engine == "trace":
        raise typer.BadParameter("--min-gpus is by arithmetic: the trace engine simulates one GPU, so drop it.")
    if sharding:
        return [api.min_gpus(gpu=gpu, sharding=sharding, offload=offload, **cell)], {}
    return api.min_gpus_by_sharding(gpu=gpu, offload=offload, **cell)


def _show_min_gpus(found: list[MinGpus], left_out: dict[str, list[str]], *, as_json: bool) -> None:
    from vramprobe.cli import display_fewest

    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
    else:
        display_fewest.print_min_gpus(found, left_out)
