"""The options that several verbs share: those of a cell, in the spec's own words (choices.py), and those of a sweep.

In: a command that takes a cell or a job as one mapping. Out: the same with every option in its signature, for typer.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.errors import SpecError
from vramprobe.options import OPTIONS
from vramprobe.units import parse_length, parse_share

if TYPE_CHECKING:
    from vramprobe.lengths.batches import Sampler

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of text.")]
Fit = Annotated[Path | None, typer.Option("--fit", help="A fit from `vramprobe fit`.")]
PredictFit = Annotated[
    Path | None, typer.Option("--fit", help="A fit of your GPU's own records, from `vramprobe fit`.")
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Write nothing; list each file of -o that is missing or different, and exit with 1."),
]
#: Exit code of a verdict; of any other, as tight, it is UNCERTAIN.
EXIT_CODES, UNCERTAIN = {"fits": 0, "does not fit": 3}, 4
ANSWERED = (*EXIT_CODES.values(), UNCERTAIN)
ExitZero = Annotated[
    bool,
    typer.Option("--exit-zero", help="Exit with 0 whatever the verdict (else: 3 does not fit, 4 tight or unknown)."),
]
_GPU_HELP = "A GPU of `vramprobe gpus`, or a size such as 12GiB"
Gpu = Annotated[str, typer.Option(help=f"{_GPU_HELP}.")]
AnyGpu = Annotated[str | None, typer.Option("--gpu", help=f"{_GPU_HELP}: does it fit?")]
Timeout = Annotated[float | None, typer.Option(help="Time limit for one cell, in seconds (default 900).")]

SweepDevice = Annotated[str, typer.Option(help="auto | cuda | cpu")]
Emulate = Annotated[
    str | None,
    typer.Option(help="Run real CUDA software on an emulated GPU: a name of `vramprobe gpus`, or 'NAME x4' for four."),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Emulated only: repeat a step with other tensor values and compare its allocations."),
]
#: The lengths of a data set, and how they become batches.
_LENGTHS_FORMS = (
    "a file with one per line, FILE.csv:column, FILE.jsonl:column, a CSV with length,count, "
    "'p50=600 p99=3000 max=8192', or azure-chat, which ships."
)
_SAMPLER_HELP = "How --lengths become batches: random | sequential | group_by_length | packing."
_PAD_HELP = "Pad each batch of --lengths to a multiple of so many tokens."
Lengths = Annotated[
    str | None, typer.Option(help=f"The data's lengths in tokens, truncated to --seq-len: {_LENGTHS_FORMS}")
]
BatchSampler = Annotated[str, typer.Option(help=_SAMPLER_HELP)]
PadToMultipleOf = Annotated[int, typer.Option(min=1, help=_PAD_HELP)]


#: The options that are lengths in tokens, in whichever verb.
LENGTH_OPTIONS = (
    "seq_len", "max_model_len", "max_num_batched_tokens", "max_prompt_length", "max_completion_length"
)  # fmt: skip


def length(text: str | int, least: int | None = None) -> int:
    """Tokens as they are typed: ``2048`` or ``2k``; a default is a number. Raises wrong usage."""
    try:
        found = parse_length(str(text))
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    if least is not None and found < least:
        raise typer.BadParameter(f"{text} given; must be at least {least}")
    return found


#: Of an option that counts tokens and is not a cell's.
Tokens: Any = {"parser": functools.partial(length, least=1), "metavar": "TOKENS"}


def option(name: str, *flags: str, **more: Any) -> Any:
    """typer's option of this name: one that is a length takes ``2k``."""
    if name in LENGTH_OPTIONS:
        return typer.Option(*flags, parser=length, metavar="TOKENS", **more)
    return typer.Option(*flags, **more)


def exit_with(verdict: str | None, *, exit_zero: bool) -> None:
    """End with the exit code of a verdict, so that a shell can go on with ``&&`` where a run fits; None: no verdict."""
    raise typer.Exit(0 if exit_zero or verdict is None else EXIT_CODES.get(verdict, UNCERTAIN))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show(found: Any, text: Callable[[Any], None], *, as_json: bool) -> None:
    """Print an answer for people by ``text``, or all of its fields as JSON."""
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        text(found)


#: Option → (type, help). The names are resolve.option_names(); a test holds the two together.
CELL_OPTIONS: dict[str, tuple[Any, str]] = {name: (option.kind, option.help) for name, option in OPTIONS.items()}
#: Two questions that are one together: what is the longest sequence for each number of rows.
FRONTIER = {"max_batch", "max_seq_len"}
_REQUIRED = ("model", "method", "batch_size", "seq_len")

#: Option → (type, default, its flags where they are not its name, help); in the words of api.plan and api.run.
SWEEP_OPTIONS: dict[str, tuple[Any, Any, tuple[str, ...], str]] = {
    "out": (Path | None, None, ("--out", "-o"), "Results folder (default results/<device>/<sweep>)."),
    "device": (str, "auto", (), "auto | cuda | cpu"),
    "fit": (Path | None, None, (), "Fit used for predictions (default: the folder's fit.json, if there is one)."),
    "usd_per_hour": (
        float | None,
        None,
        ("--price",),
        "US dollars per GPU hour (default: the catalog's cheapest on-demand price).",
    ),
    "provider": (str | None, None, (), "Use this provider's price from the catalog."),
    "only": (list[str] | None, None, (), "Only cells whose id contains this text or matches it with * and ?."),
    "skip": (list[str] | None, None, (), "Leave out cells whose id contains this text or matches it with * and ?."),
    "shard": (str | None, None, (), "i/n: every n-th cell starting at the i-th, to split a sweep over machines."),
    "limit_vram": (str | None, None, (), "Limit the GPU's memory to 24GiB, or to that of a GPU such as RTX-4090."),
    "records": (
        bool,
        False,
        ("--record",),
        "Record cells without a recipe at hand, seconds each, to predict them.",
    ),
    "audit": (str, "5%", (), "Share of the skipped cells that are run anyway, to check the skips."),
    "no_skip": (bool, False, ("--no-skip",), "Also run cells that are certain to run out of memory."),
    "replicate": (str, "0%", (), "Share of the cells to repeat, to check reproducibility."),
    "retry_quarantined": (bool, False, ("--retry-quarantined",), "Also run cells that never ended in earlier runs."),
    "verify": (
        bool,
        False,
        ("--verify",),
        "Emulated only: repeat a step with other tensor values and compare its allocations.",
    ),
    "lengths": (
        str | None,
        None,
        (),
        f"Each cell at the longest batch of this data, its seq_len the truncation: {_LENGTHS_FORMS}",
    ),
    "sampler": (str, "random", (), _SAMPLER_HELP),
    "pad_to_multiple_of": (int, 1, (), _PAD_HELP),
}


def takes_a_cell(
    command: Callable[..., None] | None = None,
    *,
    asks: Mapping[str, str] = MappingProxyType({}),
    optional: Collection[str] = (),
    without: Collection[str] = (),
    instead: str | None = None,
) -> Callable[..., Any]:
    """Give ``command(cell, …)`` every option of a cell, as ``--batch-size`` and so on.

    ``asks``: flag of the command → the option that it asks for, which cannot be given with it. ``optional``: options
    that the command does without; ``without``: those that it does not have. ``instead``: an option of the command that
    takes a cell's place, so that none of them is needed.
    """
    if command is None:
        return functools.partial(takes_a_cell, asks=asks, optional=optional, without=without, instead=instead)

    def parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
        required = name in _REQUIRED and name not in asks.values() and name not in optional and instead is None
        if name in asks.values():
            text += f" Not with {next(flag(asking) for asking, asked in asks.items() if asked == name)}."
        annotation = _annotation(name, kind if required else kind | None, text, is_flag=kind is bool)
        default = inspect.Parameter.empty if required else None
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def gather(given: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
        has_another = instead is not None and others[instead] is not None
        if not has_another:
            needed = [name for name in _REQUIRED if name in given and name not in optional]
            _require_one_question(given, [name for name in asks if others[name]], asks, needed, gpu=others.get("gpu"))
        if given.get("trainer") == "grpo":
            raise typer.BadParameter("--trainer grpo: a step of GRPO beside its engine is `vramprobe grpo`.")
        return {name: value for name, value in given.items() if value is not None}

    own = [parameter(name, *what) for name, what in CELL_OPTIONS.items() if name not in without]
    return with_options(command, "cell", own, gather)


@functools.cache
def _annotation(name: str, kind: Any, text: str, *, is_flag: bool) -> Any:
    """An option of a cell as typer takes it; made once for all verbs that have it, as making them takes longest."""
    flags = (f"{flag(name)}/--no-{flag(name)[2:]}",) if is_flag else (flag(name),)
    return Annotated[kind, option(name, *flags, help=text, show_default=False)]


def takes_a_sweep(command: Callable[..., None]) -> Callable[..., Any]:
    """Give ``command(job, …)`` every option of a sweep; ``job`` are the keywords of api.plan and api.run."""

    def gather(given: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        from vramprobe.sweep.plan import SweepPolicy

        policy = SweepPolicy(
            skip=not given.pop("no_skip"),
            audit_share=parse_share(given.pop("audit")),
            replicate_share=parse_share(given.pop("replicate")),
            retry_quarantined=given.pop("retry_quarantined"),
            verify=given.pop("verify"),
        )
        lists = {name: given[name] or () for name in ("only", "skip")}
        data = _data_of(**{name: given.pop(name) for name in ("lengths", "sampler", "pad_to_multiple_of")})
        return given | lists | {"policy": policy, "data": data}

    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer.Option(*(flags or (flag(name),)), help=text)],
        )
        for name, (kind, default, flags, text) in SWEEP_OPTIONS.items()
    ]
    return with_options(command, "job", options, gather)


def _data_of(lengths: str | None, sampler: Sampler, pad_to_multiple_of: int) -> Any:
    """The rows that ``--lengths`` names; None without it. Raises wrong usage for the others of it alone."""
    from vramprobe.lengths.reading import read_lengths
    from vramprobe.sweep.on_data import Data

    if lengths is None:
        if sampler != "random" or pad_to_multiple_of != 1:
            raise typer.BadParameter("--sampler and --pad-to-multiple-of need --lengths.")
        return None
    return Data(read_lengths(lengths), sampler, pad_to_multiple_of)


def with_options(
    command: Callable[..., None],
    mapping: str,
    options: list[inspect.Parameter],
    gather: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> Callable[..., Any]:
    """``command`` with ``options`` in the place of its parameter ``mapping``; that gets what ``gather`` makes."""
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != mapping]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        command(**{mapping: gather(given, values)}, **values)

    first = [p for p in own if p.default is inspect.Parameter.empty]
    last = [p for p in own if p.default is not inspect.Parameter.empty]
    every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*first, *options, *last)]
    with_options.__dict__["__signature__"] = inspect.Signature(every)
    with_options.__annotations__ = {p.name: p.annotation for p in every}
    return with_options


def takes_given(
    command: Callable[..., None], mapping: str, options: Mapping[str, tuple[Any, str]]
) -> Callable[..., Any]:
    """``command(mapping, …)`` with these options (name → type, help): it gets those that were given."""

    def parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
        annotation = Annotated[kind | None, option(name, flag(name), help=text, show_default=False)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def gather(given: dict[str, Any], _: Any) -> dict[str, Any]:
        return {name: value for name, value in given.items() if value is not None}

    return with_options(command, mapping, [parameter(name, *what) for name, what in options.items()], gather)


def flag(name: str) -> str:
    """An option's name as it is typed: ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def _require_one_question(
    cell: dict[str, Any], asking: list[str], asks: Mapping[str, str], needed: Collection[str], *, gpu: str | None
) -> None:
    """Raise wrong usage for questions that are not one, for one whose answer is given, and for what neither gives."""
    if len(asking) > 1 and set(asking) != FRONTIER:
        raise typer.BadParameter(f"{' and '.join(map(flag, asking))} are different questions; ask one at a time.")
    for asker, name in asks.items():
        if asker in asking and cell[name] is not None:
            raise typer.BadParameter(f"{flag(asker)} asks for the {flag(name)} that fits, so drop {flag(name)}.")
    asked = [asks[one] for one in asking]
    if missing := [name for name in needed if cell[name] is None and name not in asked]:
        askers = [] if asking else [flag(one) for name in missing for one, its in asks.items() if its == name]
        missing += ["gpu"] if asking and gpu is None and cell.get("limit_vram") is None else []
        others = [f"ask for {'it' if len(askers) == 1 else 'one'}: {' or '.join(askers)} --gpu GPU"] if askers else []
        others += ["--from RUN, a command's profile"] if len(missing) > 1 or not askers else []
        raise typer.BadParameter(f"Missing {', '.join(map(flag, missing))}; or {'; or '.join(others)}.")
