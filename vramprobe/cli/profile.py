"""``vramprobe profile -- COMMAND``: where a command's memory goes.

In: a command's words. Out: the command's own output, then the profile on stdout, or JSON. The exit status is the
command's own; 1 where it is over a limit (``--max-allocated``, ``--max-growth``).
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.diff import MaxGrowth, ProfileLimits, Summary
from vramprobe.cli.emulate import say
from vramprobe.cli.modes import require_read
from vramprobe.cli.options import Json, Tokens
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.units import parse_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord

_TRACES = ("all", "step", "none")
_MAX_RANKS = 960  # of the emulated NCCL
_MOST_AT_ONCE = 64  # profiles whose folders have a path that the next run takes again
_SEVERAL_MACHINES = ("--nnodes", "--num-machines", "--num-nodes")
#: What the hub's libraries say of what they do not have, in the words of several releases.
_NOT_THERE = re.compile(
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|RepositoryNotFoundError|GatedRepoError|DatasetNotFoundError|"
    r"couldn't connect to 'https://huggingface|not a valid model identifier|no file named \S*(model|safetensors)|"
    r"Couldn't (reach|find cache)|(couldn't|can't|cannot) (load|find) .*tokenizer|Max retries exceeded|ConnectError"
)


#: What a run is shown by that has ended.
_OF_A_FOLDER = (
    "from_folder",
    "gpus",
    "host_memory",
    "replay_steps",
    "timeline",
    "max_allocated",
    "baseline",
    "max_growth",
    "max_slowdown",
    "summary",
    "save",
    "json_output",
)


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
            min=1,
            help="Stop after this many steps, once two in a row allocate the same bytes (default 3 if emulated).",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Run the command to its end on an emulated GPU as well.")
    ] = False,
    steps_only: Annotated[
        bool,
        typer.Option("--steps-only", help="Emulated only: leave out evaluation, save and what follows the steps."),
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
        bool,
        typer.Option("--speed/--no-speed", help="Emulated only: count the work of step 2, and predict its time."),
    ] = True,
    only_rank: Annotated[int | None, typer.Option(help="Emulated only: run this one rank of --world-size.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks, with --only-rank.")] = None,
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
    from_folder: Annotated[
        Path | None, typer.Option("--from", help="Run nothing; show what an earlier run left in its --folder.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Run any training command and show where its GPU memory goes, by phase, rank and cause."""
    if from_folder is not None and not command:
        require_read(profile, locals(), _OF_A_FOLDER, "--from", {"a command": inspect.signature(profile).parameters})
    from vramprobe.cli import display, display_profile
    from vramprobe.profile import launch
    from vramprobe.profile.requests import requests_of
    from vramprobe.profile.stand_ins import stand_ins

    if trace is not None and trace not in _TRACES:
        raise SpecError(f"--trace {trace}: one of {', '.join(_TRACES)}")
    if empty_weights and emulate is None:
        raise SpecError(
            "--empty-weights is for an emulated card, where nothing is computed: add --emulate GPU, or drop it"
        )
    for option, value, what in (
        ("--seq-len", seq_len, "how long the rows are"),
        ("--image-size", image_size, "how large the images are"),
        ("--video-size", video_size, "how large the videos are"),
        ("--audio-seconds", audio_seconds and f"{audio_seconds:g}", "how long the sound is"),
    ):
        if value is not None and not empty_weights:
            raise SpecError(f"{option} {value} is {what} that --empty-weights makes: add it, or drop this")
    host_memory_bytes = None if host_memory is None else parse_bytes(host_memory)
    if host_memory is not None and emulate is None and from_folder is None:
        raise SpecError(f"--host-memory {host_memory}: only an emulated GPU's driver counts it; add --emulate GPU")
    if replay_steps is not None and from_folder is None and (emulate is None or whole or steps_only or trace):
        raise SpecError(
            f"--replay-steps {replay_steps}: only an emulated run asks its data for all batches and records what each "
            "step requests: add --emulate GPU, without --whole, --steps-only and --trace"
        )
    if timeline is not None:
        from vramprobe.report.timeline_file import require_writable

        require_writable(timeline, also=(".json",))
    limits = ProfileLimits(max_allocated, max_growth, baseline, max_slowdown)
    if verify and (emulate is None or (whole and steps is None)):
        raise SpecError(
            "--verify runs more steps of the command under other values: give --emulate GPU, and no --whole"
        )
    if steps_only and (emulate is None or whole):
        raise SpecError("--steps-only shortens what --emulate GPU runs: add --emulate, and no --whole")
    options = launch.Options(
        trace=trace or ("all" if emulate else "step"),
        steps=steps if steps is not None else 3 if emulate and not whole else None,
        verify=verify,
        phases=emulate is not None and not (steps_only or verify),
        speed=speed,
        one_rank=_one_rank(command or [], emulate, only_rank, world_size),
        stand_ins=stand_ins(seq_len, image_size, video_size, audio_seconds) if empty_weights else None,
        requests=None if whole and requests is None else requests_of(requests, command or []),
    )
    if bool(command) == (from_folder is not None):
        raise SpecError("give a command after --, as in vramprobe profile -- python train.py, or --from a folder")
    names = named_gpus(gpus)  # before the command runs, whose profile would be lost
    with _home(folder, from_folder) as home:
        status = launch.run(command, home, options, emulate=emulate, say=say).exit_status if command else 0
        try:
            with display.working(f"replaying {replay_steps:,} steps") if replay_steps else nullcontext():
                record, failed = analysed(home, names, timeline, save, host_memory_bytes, replay_steps)
        except VramprobeError as error:
            say(str(error))
            raise typer.Exit(status or 1) from None
    if json_output:
        print(record.to_json_line())
    else:
        display_profile.print_profile(record)
    for error in failed:
        say(str(error))
    status = status or int(bool(failed))
    if emulate is not None and not empty_weights and _misses_something(record):
        say("it seems to miss a model or a dataset: with --empty-weights an emulated card needs neither")
    exceeded = limits.exceeded_by(record, summary)
    raise typer.Exit(status or int(exceeded))


def analysed(
    home: Path,
    gpus: Sequence[str] | str | None,
    timeline: Path | None,
    save: Path | None,
    host_memory_bytes: int | None = None,
    replay_steps: int | None = None,
) -> tuple[ProfileRecord, list[VramprobeError]]:
    """The profile of a run's folder, kept and drawn where that is asked for; and why it could not be, as it is to be
    shown all the same."""
    from vramprobe.profile.analyse import analyse

    record = analyse(home, gpus=gpus, host_memory_bytes=host_memory_bytes, replay_steps=replay_steps)
    failed: list[VramprobeError] = []
    if save is not None:
        from vramprobe.records.profile import append_profile

        try:
            append_profile(save, record)
        except VramprobeError as error:
            failed.append(error)
    if timeline is not None:
        from vramprobe.profile.timeline import write

        try:
            write(home, record, timeline)
        except VramprobeError as error:
            failed.append(error)
    return record, failed


@contextmanager
def _home(folder: Path | None, from_folder: Path | None) -> Iterator[Path]:
    """Yield the folder to which the processes write: a new one, a temporary one, or an earlier run's. A temporary one
    stays if no profile could be made from it.
    """
    if folder is not None or from_folder is not None:
        yield from_folder if folder is None else _new(folder)
        return
    home = _temporary()
    try:
        yield home
    except BaseException:
        if any(home.glob("*.jsonl")):
            say(f"what the processes said stays in {home}: vramprobe profile --from {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
        raise
    shutil.rmtree(home, ignore_errors=True)


def _temporary() -> Path:
    """A new folder at the first free of a few paths, so that the next run has the same path again: vLLM finds what it
    has compiled by the path of its model, which may be an empty one in here."""
    for number in range(_MOST_AT_ONCE):
        home = Path(tempfile.gettempdir(), f"vramprobe-profile-{os.getuid()}-{number}")
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
            return home
    return Path(tempfile.mkdtemp(prefix="vramprobe-profile-"))


def _one_rank(
    command: list[str], emulate: str | None, rank: int | None, world_size: int | None
) -> tuple[int, int] | None:
    """Raises SpecError for what is no rank of a world, and for a launcher that waits for other machines."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None or emulate is None:
        raise SpecError("--only-rank R and --world-size N go together, and with --emulate GPU")
    if not 0 <= rank < world_size <= _MAX_RANKS:
        raise SpecError(f"--only-rank {rank} --world-size {world_size}: 1 to {_MAX_RANKS} ranks, numbered from 0")
    for option, value in pairwise([part for word in command for part in word.split("=", 1)]):
        if option.replace("_", "-") in _SEVERAL_MACHINES and value not in ("1", "1:1"):
            raise SpecError(
                f"{option} {value}: the launcher would wait for other machines; leave it out, --world-size says how "
                "many ranks there are"
            )
    return rank, world_size


def _misses_something(record: ProfileRecord) -> bool:
    """By the command's last words, where it ended with an error."""
    return record.outcome.kind == "error" and any(_NOT_THERE.search(line) for line in record.outcome.last_lines)


def named_gpus(gpus: str | None) -> list[str] | str | None:
    """Parse ``--gpus``: None, "all", or the catalog's names. Raises UnknownName."""
    if gpus is None or gpus == "all":
        return gpus
    from vramprobe.catalog import gpu_or_size

    return [gpu_or_size(name.strip()).short_name for name in gpus.split(",") if name.strip()]


def _new(folder: Path) -> Path:
    """Raises SpecError where it is there already: what is kept there is another run's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"--folder {folder} is there already: name a new one") from None
    except OSError as error:
        raise SpecError(f"--folder {folder} cannot be made: {error.strerror}; name another") from None
    return folder.resolve()
