"""The command line: words in, text or JSON out. The only module that prints and exits.

Every verb that takes a cell or a sweep takes the same options (options.py). Exit codes: 0 done, 1 a user's error, a
cell that failed or records that break a rule, 2 wrong usage, 3 and 4 a verdict (options.py), 128 + signal interrupted
(130 and 143; 129 when the terminal went). A verb with many options, or with others of its kind, has its own module.
"""

import errno
import inspect
import io
import logging
import os
import sys
from copy import copy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import vramprobe
from vramprobe.choices import meant
from vramprobe.cli.options import Emulate, Json, SweepDevice, Timeout, Verify, print_json, takes_a_cell
from vramprobe.emulate.enter import leaving
from vramprobe.errors import VramprobeError
from vramprobe.sweep.signals import exit_on_signal


class _Root(TyperGroup):
    """All verbs, in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from vramprobe.cli.help import root_help

        verbs = {name: one.get_short_help_str(200) for name, one in self.commands.items()}
        formatter.write(root_help(self.help or "", verbs) + "\n")


_HERE = typer.Typer(
    name="vramprobe",
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much GPU memory does this fine-tuning run need, and why? Measured, fitted, predicted, published.",
)

#: Verb → the module of cli/ that has its function; a group, all that it is of. One that is called is loaded alone.
_MODULES = {
    **{verb: verb for verb in ("predict", "serve", "grpo", "recommend", "techniques", "explain", "profile", "diff")},
    "mcp": "mcp",
    **dict.fromkeys(("plan", "run"), "sweeps"),
    **dict.fromkeys(("launch", "status", "collect"), "launch"),
    **dict.fromkeys(("check", "fit", "evaluate", "calibrate", "claims", "report"), "results"),
    **dict.fromkeys(("merge", "contribute", "export"), "contribute"),
    "calibrate-gpu": "calibrate_gpu",
}
_GROUPS, _OWN = ("emulate", "recipes"), ("doctor", "models", "gpus", "measure")


@_HERE.command()
def doctor(device: SweepDevice = "auto", emulate: Emulate = None, json_output: Json = False) -> None:
    """Check whether this machine can measure GPU memory; say what to fix and exit with 1 if it cannot."""
    from vramprobe import api
    from vramprobe.cli import display
    from vramprobe.cli.emulate import enter_emulated

    enter_emulated(emulate, device)
    with display.working("looking at this machine"):
        diagnosis = api.doctor(device=device)
    if json_output:
        print_json(diagnosis.as_json())
    else:
        display.print_doctor(diagnosis)
    raise typer.Exit(0 if diagnosis.ready else 1)


@_HERE.command()
def models(json_output: Json = False) -> None:
    """List the architectures that ship with vramprobe, and what can be done with each."""
    from vramprobe import api
    from vramprobe.catalog.profiled import list_profiled
    from vramprobe.cli import display

    entries, profiled = api.models(), list_profiled()
    if json_output:
        known = [
            {"slug": entry.name, "hf_id": entry.hf_id, "model_type": entry.model_type, "num_params": entry.n_params}
            for entry in entries
        ]
        others = [
            {"slug": one.name, "hf_id": one.hf_id, "kind": one.kind, "profile_only": not one.has_counted_images}
            for one in profiled
        ]
        print_json([*known, *others])
    else:
        display.print_models(entries, profiled)


@_HERE.command()
def gpus(json_output: Json = False) -> None:
    """List the GPUs that ship with vramprobe, with the memory they report and what renting one costs."""
    from vramprobe import api
    from vramprobe.cli import display

    listed = api.gpus()
    if json_output:
        others = ("short_name", "arch", "total_bytes")
        print_json([{"gpu": gpu.name} | {name: getattr(gpu, name) for name in others} for gpu in listed])
    else:
        display.print_gpus(listed)


@_HERE.command()
@takes_a_cell
def measure(
    cell: dict[str, Any],
    timeout: Timeout = None,
    save: Annotated[Path | None, typer.Option(help="Append the record to this .jsonl file.")] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write one step's memory history for PyTorch's memory_viz: FILE.pickle (GPU only)."),
    ] = None,
    emulate: Emulate = None,
    verify: Verify = False,
    json_output: Json = False,
) -> None:
    """Train one cell for a few steps in its own process and show where its memory goes."""
    from vramprobe import api
    from vramprobe.cli import display, display_record
    from vramprobe.cli.emulate import enter_emulated, num_cards

    enter_emulated(emulate, cell.get("device"), num_cards=num_cards(cell))
    with display.working("measuring in a worker process"):
        record = api.measure(timeout_seconds=timeout, save=save, snapshot=snapshot, verify=verify, **cell)
    if json_output:
        print(record.to_json_line())
    else:
        display_record.print_record(record)
        display_record.print_snapshot(record, snapshot)
    raise typer.Exit(0 if record.outcome.kind in ("ok", "oom") else 1)


class _Verb(TyperCommand):
    """A verb whose options take a word in any case and under its usual aliases (choices.py)."""

    def invoke(self, ctx: Any) -> Any:
        ctx.params = {name: meant(name, value) for name, value in ctx.params.items()}
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from vramprobe.cli.help import verb_help

        formatter.write(verb_help(ctx.command_path, self.help or "", self.get_params(ctx)) + "\n")


@cache
def _app_of(*verbs: str) -> typer.Typer:
    """The command line with these verbs alone: typer makes all options of all that it has."""
    found = copy(_HERE)
    found.registered_groups = []
    found.registered_commands = [
        one for verb, one in zip(_OWN, _HERE.registered_commands, strict=True) if verb in verbs
    ]
    for verb in verbs:
        if verb in _GROUPS:
            found.add_typer(import_module(f"vramprobe.cli.{verb}").app)
        elif verb in _MODULES:
            found.command()(getattr(import_module(f"vramprobe.cli.{_MODULES[verb]}"), verb.replace("-", "_")))
    for one in found.registered_commands:
        one.cls = _Verb
    return found


def _whole() -> typer.Typer:
    """The command line with all its verbs."""
    return _app_of(*_GROUPS, *_OWN, *_MODULES)


def _listed() -> typer.Typer:
    """The command line where no verb is called: all verbs without their options, which take longest to make."""
    found = copy(_whole())
    found.registered_commands = [copy(one) for one in found.registered_commands]
    for one in found.registered_commands:
        assert one.callback is not None
        one.name, one.help = one.callback.__name__.replace("_", "-"), inspect.getdoc(one.callback)
        one.callback = lambda: None
    return found


def __getattr__(name: str) -> Any:
    """``app``: the whole command line, for who asks for it."""
    if name != "app":
        raise AttributeError(name)
    return _whole()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vramprobe {vramprobe.__version__}")
        raise typer.Exit


def _skill(wanted: bool) -> None:
    if wanted:
        print((Path(vramprobe.__file__).parent / "data" / "SKILL.md").read_text(encoding="utf-8"), end="")
        raise typer.Exit


@_HERE.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    skill: Annotated[
        bool,
        typer.Option("--skill", callback=_skill, is_eager=True, help="Print SKILL.md: how an agent uses vramprobe."),
    ] = False,
) -> None:
    logger = logging.getLogger("vramprobe")
    logger.setLevel(logging.INFO)
    logger.handlers = [_Notes()]


class _Notes(logging.Handler):
    """Handler that prints the library's notes to stderr, a line each, and each once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            print(f"note: {text}", file=sys.stderr)


def _leave_stdout(status: int) -> None:
    """Exit where nothing more can be said on stdout, not even the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def _app_for(words: list[str]) -> typer.Typer:
    """With the one verb that is called, if there is such a verb."""
    return _app_of(*words) if {*words} & {*_MODULES, *_GROUPS, *_OWN} else _listed()


def _open_what_is_closed() -> None:
    """Give a closed stdin, stdout or stderr (``2>&-``) to /dev/null, before a results file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _print_what_can_be() -> None:
    """Put ? for a character that a terminal or file of an older encoding lacks: a table is worth more than its bars."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not os.environ.get("COLUMNS", "80").isdecimal() or int(os.environ.get("COLUMNS", "80")) < 1:
        del os.environ["COLUMNS"]  # rich would print nothing in none


def _say_wrong_usage(error: Any) -> None:
    """Exit with 2 after one line, or the help where no word was given."""
    from typer.core import TyperGroup
    from typer.main import get_command

    from vramprobe.cli.wrong_usage import in_one_line

    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        group = get_command(_whole())
        assert isinstance(group, TyperGroup)
        print(f"vramprobe: {in_one_line(error, sys.argv[1:], group.commands)}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the command line; a user's error is one line on stderr and exit code 1.

    SIGINT, SIGTERM and SIGHUP (but under nohup) unwind like an exit, so that workers and temporary files go with us.
    """
    _open_what_is_closed()
    _print_what_can_be()
    try:
        with leaving(), exit_on_signal.caught():
            sys.exit(_app_for(sys.argv[1:2])(standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(1)
    except VramprobeError as error:
        print(f"vramprobe: {error}", file=sys.stderr)
        sys.exit(1)
    except OverflowError:
        print("vramprobe: sizes beyond 2^63 bytes, which no machine holds; give smaller ones", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        _leave_stdout(0)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _leave_stdout(0)  # typer and rich exit with 1 where a pipe's reader (head, less) has all that it wants
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"vramprobe: no path is so long: {str(error.filename)[:60]}…; give a shorter one", file=sys.stderr)
            sys.exit(1)
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        print(f"vramprobe: the output could not be written: {error.strerror}", file=sys.stderr)
        _leave_stdout(1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of click, whose copy in typer has no public name
            raise
        _say_wrong_usage(error)
