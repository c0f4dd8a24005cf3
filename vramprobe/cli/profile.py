"""``vramprobe profile -- COMMAND``: where a command's memory goes.

In: a command's words. Out: the command's own output, then the profile on stdout, or JSON. The exit status is the
command's own; 1 where it is over a limit (``--max-allocated``, ``--max-growth``).
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.diff import MaxGrowth, ProfileLimits, Summary
from vramprobe.cli.emulate import say
from vramprobe.cli.modes import require_read
from vramprobe.cli.options import Json, Tokens

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord

#: What the hub's libraries say of what they do not have, in the words of several releases.
_NOT_THERE = re.compile(
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|RepositoryNotFoundError|GatedRepoError|DatasetNotFoundError|"
    r"couldn't connect to 'https://huggingface|not a valid model identifier|no file named \S*(model|safetensors)|"
    r"Couldn't (reach|find cache)|(couldn't|can't|cannot) (load|find) .*tokenizer|Max retries exceeded|ConnectError"
)


#: What a run is shown by that has ended.
_OF_A_FOLDER = (
    "from_folder", "gpus", "host_memory", "replay_steps", "timeline", "max_allocated", "baseline", "max_growth",
    "max_slowdown", "summary", "save", "json_output",
)  # fmt: skip


#: What the verb itself reads; all else is api.profiled's.
_OF_THE_VERB = ("command", "max_allocated", "baseline", "max_growth", "max_slowdown", "summary", "probe", "json_output")


def profile(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command to profile, after --: python train.py …", metavar="-- COMMAND"),
    ] = None,
    emulate: Annotated[
        str | None, typer.Option(metavar="GPU", help="Run it on this emulated GPU: RTX-4090, 'H100-SXM x2'.")
    ] = None,
    empty_weights: Annotated[
        bool, typer.Option("--empty-weights", help="Replace missing weights, tokenizers and datasets with empty ones.")
    ] = False,
    seq_len: Annotated[
        int | None,
        typer.Option(**Tokens, help="Tokens per row of a replaced dataset (default 2048); with --empty-weights."),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHxHEIGHT",
            help="Pixels of a replaced dataset's images (default 640x480); with --empty-weights.",
        ),
    ] = None,
    video_size: Annotated[
        str | None,
        typer.Option(
            metavar="FRAMESxWIDTHxHEIGHT",
            help="Frames, after sampling, and pixels of a replaced dataset's videos (default 16x640x480); with "
            "--empty-weights.",
        ),
    ] = None,
    audio_seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds of sound in a replaced dataset's rows (default 30); with --empty-weights."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop after this many steps, once two in a row allocate the same bytes (default 3 if emulated)."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Run the command to its end on an emulated GPU as well.")
    ] = False,
    steps_only: Annotated[
        bool, typer.Option("--steps-only", help="Emulated only: leave out evaluation, save and what follows the steps.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            help="all | step | none: which allocations are recorded (default: all if emulated, else one step)."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Emulated only: repeat steps with other tensor values and compare their allocations."
        ),
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Emulated only: count the work of step 2, and predict its time.")
    ] = True,
    only_rank: Annotated[int | None, typer.Option(help="Emulated only: run this one rank of --world-size.")] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks, with --only-rank (default: N of --emulate 'GPU xN').")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Memory, time and cost on these GPUs: all, or names (or sizes such as 12GiB) separated by commas."
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERxPROMPTxCOMPLETION",
            help="Requests to the server that the command starts, in tokens, before it is ended (default 1x32x8).",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Emulated only: would the ranks' CPU tensors and pinned memory fit a host of 128GiB?"),
    ] = None,
    replay_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Play so many steps of the data's batches through the allocator, under several settings (default: "
            "those of an epoch, under the run's own).",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="FILE.html: live memory by cause; FILE.json: the counted step as a Chrome trace, for ui.perfetto.dev."
        ),
    ] = None,
    max_allocated: Annotated[
        str | None, typer.Option(help="Exit with 1 if a GPU allocates more than this, for example 22GiB.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Compare with the last profile of this .jsonl file (--save).")
    ] = None,
    max_growth: MaxGrowth = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(help="Exit with 1 if a step takes more than so many times the baseline's step time, e.g. 1.5."),
    ] = None,
    summary: Summary = None,
    save: Annotated[Path | None, typer.Option(help="Append the profile to this .jsonl file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the raw files of all processes in this new folder.")] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="With --folder, emulated only: run it once more on other shapes of its batch, for predict --from.",
        ),
    ] = True,
    from_folder: Annotated[
        Path | None, typer.Option("--from", help="Run nothing; show what an earlier run left in its --folder.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Run any training command and show where its GPU memory goes, by phase, rank and cause."""
    options = dict(locals())
    if from_folder is not None and not command:
        require_read(profile, options, _OF_A_FOLDER, "--from", {"a command": inspect.signature(profile).parameters})
    from vramprobe import api
    from vramprobe.cli import display, display_profile
    from vramprobe.profile.command import NoProfile

    limits = ProfileLimits(max_allocated, max_growth, baseline, max_slowdown)
    try:
        done = api.profiled(
            command or [],
            **{name: value for name, value in options.items() if name not in _OF_THE_VERB},
            say=say,
            replaying=display.working(f"replaying {replay_steps:,} steps") if replay_steps else None,
        )
    except NoProfile as error:
        say(str(error))
        raise typer.Exit(error.exit_status or 1) from None
    record, failed, status = done.record, done.failed, done.exit_status
    if json_output:
        print(record.to_json_line())
    else:
        display_profile.print_profile(record)
    for error in failed:
        say(str(error))
    if probe and folder is not None and emulate is not None:
        from vramprobe.profile.probing import keep_recipe

        keep_recipe(command or [], done.folder, done.options, record, emulate=emulate, say=say)
    status = status or int(bool(failed))
    if emulate is not None and not empty_weights and _misses_something(record):
        say("it seems to miss a model or a dataset: with --empty-weights an emulated card needs neither")
    exceeded = limits.exceeded_by(record, summary)
    raise typer.Exit(status or int(exceeded))


def _misses_something(record: ProfileRecord) -> bool:
    """By the command's last words, where it ended with an error."""
    return record.outcome.kind == "error" and any(_NOT_THERE.search(line) for line in record.outcome.last_lines)
