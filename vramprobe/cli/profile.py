"""``vramprobe profile -- COMMAND`` and ``vramprobe diff A B``: where a command's memory goes, and what has grown.

In: a command's words. Out: the command's own output, then the profile on stdout, or JSON. The exit status is the
command's own; 1 where it is too large for ``--max-allocated``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.emulate import say
from vramprobe.cli.options import Json
from vramprobe.errors import SpecError
from vramprobe.units import parse_bytes

if TYPE_CHECKING:
    from vramprobe.records.profile import ProfileRecord

_TRACES = ("all", "step", "none")


def profile(
    command: Annotated[
        list[str], typer.Argument(help="What to run, after --: python train.py …", metavar="-- COMMAND")
    ],
    emulate: Annotated[
        str | None, typer.Option(metavar="GPU", help="Run it on this card, emulated: RTX-4090, 'H100-SXM x2'.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="End it after so many optimizer steps that repeat (3 where emulated, else never)."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Let it run to its end on an emulated card, too.")] = False,
    trace: Annotated[
        str | None,
        typer.Option(help="all | step | none: whose allocations are kept (all where emulated, else one step's)."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Emulated alone: compare what steps under other values allocate."),
    ] = False,
    gpus: Annotated[
        str | None, typer.Option(help="Would it fit these cards? all, or names with commas between them.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw live memory by cause: FILE.html.")] = None,
    max_allocated: Annotated[
        str | None, typer.Option(help="Exit with 1 where more than this is allocated on a card, e.g. 22GiB.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Append the profile to this .jsonl file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the raw files of all processes in this new folder.")] = None,
    json_output: Json = False,
) -> None:
    """Run any command and say where its GPU memory goes, by phase, rank and cause: measured, or emulated."""
    from vramprobe.cli import display_profile
    from vramprobe.profile import launch

    if trace is not None and trace not in _TRACES:
        raise SpecError(f"--trace {trace}: one of {', '.join(_TRACES)}")
    limit_bytes = None if max_allocated is None else parse_bytes(max_allocated)
    if verify and (emulate is None or (whole and steps is None)):
        raise SpecError(
            "--verify runs more steps of the command under other values: give --emulate GPU, and no --whole"
        )
    options = launch.Options(
        trace=trace or ("all" if emulate else "step"),
        steps=steps if steps is not None else 3 if emulate and not whole else None, verify=verify,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="vramprobe-profile-") as temporary:
        home = _new(folder) if folder is not None else Path(temporary)
        ended = launch.run(command, home, options, emulate=emulate, say=say)
        record = analysed(home, gpus, timeline, save)
    if json_output:
        print(record.to_json_line())
    else:
        display_profile.print_profile(record)
    status = ended.exit_status
    highest = max((rank.peak.allocated_bytes for rank in record.ranks if rank.peak), default=0)
    if limit_bytes is not None and highest > limit_bytes:
        say(f"--max-allocated {max_allocated}: {highest:,} bytes were allocated, {highest - limit_bytes:,} too many")
        status = status or 1
    raise typer.Exit(status)


def diff(
    before: Annotated[Path, typer.Argument(help="A .jsonl file of profiles; its last one is taken.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
    json_output: Json = False,
) -> None:
    """Say which cause and which line of the program grew between two profiles."""
    from vramprobe.cli import display_profile
    from vramprobe.profile.diff import compare
    from vramprobe.records.profile import last_profile

    difference = compare(last_profile(before), last_profile(after))
    if json_output:
        print(difference.model_dump_json())
    else:
        display_profile.print_difference(difference)


def analysed(home: Path, gpus: str | None, timeline: Path | None, save: Path | None) -> ProfileRecord:
    """The profile of a run's folder, kept and drawn where that is asked for."""
    from vramprobe.profile.analyse import analyse
    from vramprobe.records.profile import append_profile

    record = analyse(home, gpus=_names(gpus))
    if save is not None:
        append_profile(save, record)
    if timeline is not None:
        from vramprobe.profile.timeline import write

        write(home, record, timeline)
    return record


def _names(gpus: str | None) -> list[str] | str | None:
    return gpus if gpus in (None, "all") else [name.strip() for name in gpus.split(",") if name.strip()]


def _new(folder: Path) -> Path:
    """Raises SpecError where it is there already: what is kept there is another run's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"--folder {folder} is there already: name a new one") from None
    except OSError as error:
        raise SpecError(f"--folder {folder} cannot be made: {error.strerror}; name another") from None
    return folder.resolve()
