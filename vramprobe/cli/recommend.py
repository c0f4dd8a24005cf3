"""``vramprobe recommend``: which GPU, how many, how long, how much; or the most that a budget or a deadline pays for.

In: a cell's options or a command, tokens, limits. Out: the answers, the cards and what would change, as text or JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.cli.emulate import say
from vramprobe.cli.modes import Mode, answer
from vramprobe.cli.options import BatchSampler, ExitZero, Json, Lengths, PadToMultipleOf, exit_with, flag, takes_a_cell
from vramprobe.cli.recommend_command import of_command, of_folder
from vramprobe.errors import SpecError
from vramprobe.options import MEASURED_OPTIONS, RANK_OPTIONS
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.units import parse_count, short_count

if TYPE_CHECKING:
    from vramprobe.lengths.batches import Sampler
    from vramprobe.recommend.answer import Recommendation
    from vramprobe.recommend.inverse import Most


@takes_a_cell(
    optional=("model", "method", "batch_size", "seq_len"), without=(*RANK_OPTIONS, *MEASURED_OPTIONS, "steps", "loop")
)
def recommend(
    cell: dict[str, Any],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="In place of a model, your training command, after --.", metavar="-- COMMAND"),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Training tokens, all epochs together: 50M, 1.5B.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Of a command: optimizer steps of the run (default: by its Trainer's arguments)."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(min=0.001, help="Of a command: epochs over its dataset, in place of its own.")
    ] = None,
    emulate: Annotated[
        str | None, typer.Option(metavar="GPU", help="Of a command: the GPU to emulate it on (default H200).")
    ] = None,
    from_folder: Annotated[
        Path | None, typer.Option("--from", help="Of a command: run nothing; read what profile left in its --folder.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Time limit: 12h, 90m, 2d.")] = None,
    budget: Annotated[float | None, typer.Option(help="Budget in US dollars.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only this GPU, with or without a price; may be repeated.")
    ] = None,
    max_gpus: Annotated[int, typer.Option(min=1, max=8, help="Try 1, 2, 4 … GPUs up to this number.")] = 8,
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step, on all GPUs together.")] = 16,
    sharding: Annotated[
        str | None, typer.Option(help=f"{' | '.join(ONE_GROUP)} (default: the fastest that fits).")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="Only this provider's prices.")] = None,
    region: Annotated[str | None, typer.Option(help="Only regions whose name contains this text.")] = None,
    terms: Annotated[str, typer.Option(help="on-demand | spot | reserved.")] = "on-demand",
    prices: Annotated[
        str | None, typer.Option(help="A CSV file of prices, or skypilot for the installed SkyPilot's catalog.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Your measured records: their step times calibrate the estimates for their GPU.")
    ] = None,
    lengths: Lengths = None,
    sampler: BatchSampler = "random",
    pad_to_multiple_of: PadToMultipleOf = 1,
    longest: Annotated[bool, typer.Option("--longest", help="Find the longest sequences within the limits.")] = False,
    largest_model: Annotated[
        bool, typer.Option("--largest-model", help="Find the largest model within the limits.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every GPU and every number of GPUs, not only the best of each.")
    ] = False,
    exit_zero: ExitZero = False,
    json_output: Json = False,
) -> None:
    """Say which GPU to rent, how many, for how long and for how much; or how many tokens the limits allow."""
    if command and from_folder is not None:
        raise SpecError("give a command after --, or --from a folder, not both")
    answer(_MODES, recommend, locals())


#: What is asked of the offers, whatever is to run.
_LIMITS = ("deadline", "budget", "gpu", "max_gpus")
_OFFERS = ("provider", "region", "terms", "prices")
_OF_A_RUN = ("every", "exit_zero", "json_output", "steps", "tokens", "epochs", *_LIMITS, *_OFFERS)
_OF_A_MODEL = (
    "cell", "tokens", *_LIMITS, "global_batch", "sharding", *_OFFERS, "records", "lengths", "sampler",
    "pad_to_multiple_of", "longest", "largest_model", "every", "exit_zero", "json_output",
)  # fmt: skip


def _of_command(*, command: list[str], every: bool, exit_zero: bool, json_output: bool, **asked: Any) -> None:
    _print(of_command(command, **asked), every=every, exit_zero=exit_zero, json_output=json_output)


def _of_folder(*, from_folder: Path, every: bool, exit_zero: bool, json_output: bool, **asked: Any) -> None:
    _print(of_folder(from_folder, **asked), every=every, exit_zero=exit_zero, json_output=json_output)


def _of_model(
    *,
    cell: dict[str, Any],
    tokens: str | None,
    gpu: list[str] | None,
    lengths: str | None,
    sampler: Sampler,
    pad_to_multiple_of: int,
    longest: bool,
    largest_model: bool,
    every: bool,
    exit_zero: bool,
    json_output: bool,
    **asked: Any,
) -> None:
    from vramprobe import api

    if longest and largest_model:
        raise typer.BadParameter("--longest and --largest-model are different questions; ask one at a time.")
    if lengths is not None:
        if longest or largest_model:
            raise typer.BadParameter("--lengths says how long the rows are; drop --longest and --largest-model.")
        cell, tokens = _on_data(lengths, cell, tokens, sampler, pad_to_multiple_of)
    elif sampler != "random" or pad_to_multiple_of != 1:
        raise typer.BadParameter("--sampler and --pad-to-multiple-of need --lengths.")
    most = "seq_len" if longest else "model" if largest_model else "tokens" if tokens is None else None
    if most == "tokens" and asked["budget"] is None and asked["deadline"] is None:
        missing = ", ".join([*(flag(name) for name in ("model", "seq_len") if name not in cell), "--tokens"])
        raise typer.BadParameter(f"Missing {missing}; or ask how many tokens a --budget or a --deadline pays for.")
    if most is not None and every:
        raise typer.BadParameter("--all lists GPUs for a run of --tokens, and this looks for the most of one; drop it.")
    found = api.recommend(tokens=tokens, gpus=gpu or (), most=most, say=say, **asked, **cell)
    _print(found, every=every, exit_zero=exit_zero, json_output=json_output)


_MODES = (
    Mode("--from", lambda given: given["from_folder"] is not None, _of_folder, ("from_folder", *_OF_A_RUN)),
    Mode("a command", lambda given: bool(given["command"]), _of_command, ("command", "seq_len", "emulate", *_OF_A_RUN)),
    Mode("a model", lambda given: True, _of_model, _OF_A_MODEL),
)


def _on_data(
    text: str, cell: dict[str, Any], tokens: str | None, sampler: Sampler, multiple_of: int
) -> tuple[dict[str, Any], str]:
    """The cell at the data's longest batch, and the tokens of the run with padding: of one epoch unless given."""
    from vramprobe.lengths.padding import padded_data
    from vramprobe.lengths.reading import read_lengths

    batch_size, seq_len = cell.get("batch_size"), cell.get("seq_len")
    if batch_size is None or seq_len is None:
        raise typer.BadParameter(
            "--lengths needs --batch-size (how much padding there is depends on it) and --seq-len, the truncation."
        )
    data = padded_data(
        read_lengths(text), batch_size=batch_size, max_length=seq_len, sampler=sampler, pad_to_multiple_of=multiple_of
    )
    of_data = data.num_tokens if tokens is None else parse_count(tokens)
    padded = data.padded(of_data)
    say(
        f"{data.num_rows:,} rows, {short_count(of_data)} tokens of the data are {short_count(padded)} with "
        f"{100 * data.padding_share:.1f} % padding; memory and speed are those of the longest batch, {batch_size} rows "
        f"of {data.longest:,} tokens"
    )
    return cell | {"seq_len": data.longest}, str(padded)


def _print(found: Recommendation | Most, *, every: bool, exit_zero: bool, json_output: bool) -> None:
    from vramprobe.cli import display_recommend
    from vramprobe.recommend.inverse import Most

    if json_output:
        print(found.model_dump_json(indent=2))
    elif isinstance(found, Most):
        display_recommend.print_most(found)
    else:
        display_recommend.print_recommendation(found, every=every)
    exit_with(None if isinstance(found, Most) else found.verdict, exit_zero=exit_zero)
