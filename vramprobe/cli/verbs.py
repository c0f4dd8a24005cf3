"""The command line: words in, text or JSON out. The only module that prints and exits.

Every verb that takes a cell or a sweep takes the same options (options.py). Exit codes: 0 done, 1 a user's
error, a cell that failed or records that break a rule, 2 wrong usage, 128 + signal interrupted (130 and 143; 129 when
the terminal went). Long because every verb stands here, a function each: options, the stage it calls, exit code.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import signal
import sys
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

import vramprobe
from vramprobe.catalog.sweeps import list_sweeps
from vramprobe.choices import HYBRID, SHARD_SIZE, CpRotation, Offload, Sharding
from vramprobe.cli import emulate as emulate_verbs
from vramprobe.cli import profile as profile_verbs
from vramprobe.cli import recommend as recommend_verb
from vramprobe.cli.options import RANK_OPTIONS, Json, takes_a_cell, takes_a_sweep
from vramprobe.emulate.enter import enter, leaving
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.sweep.signals import signals_that_end
from vramprobe.units import parse_duration

if TYPE_CHECKING:
    from vramprobe.predict.changes import Change
    from vramprobe.predict.prediction import Prediction
    from vramprobe.predict.sharding import MinGpus
    from vramprobe.sweep.plan import Plan

app = typer.Typer(
    name="vramprobe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much GPU memory does this fine-tuning run need, and why? Measured, fitted, predicted, published.",
)

app.add_typer(emulate_verbs.app)
app.command()(profile_verbs.profile)
app.command()(profile_verbs.diff)

Fit = Annotated[Path | None, typer.Option("--fit", help="A fit from `vramprobe fit`; without one, arithmetic alone.")]
PredictFit = Annotated[
    Path | None, typer.Option("--fit", help="A fit from `vramprobe fit`, or none (what ships for the device, if any).")
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Write nothing; exit code 1 naming each file of -o that is missing or different."),
]
Timeout = Annotated[float | None, typer.Option(help="Seconds that one cell may take (900 unless told).")]

SweepFile = Annotated[
    str, typer.Argument(help=f"A sweep file, or one that ships, by name: {', '.join(list_sweeps())}.")
]
SweepDevice = Annotated[str, typer.Option(help="auto | cuda | cpu")]
Emulate = Annotated[
    str | None,
    typer.Option(help="Run the real CUDA software on an emulated card: a GPU of `vramprobe gpus`, or 'GPU x4'."),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Emulated alone: repeat a step under other values and compare what it allocates."),
]


@app.command()
def doctor(device: SweepDevice = "auto", emulate: Emulate = None, json_output: Json = False) -> None:
    """Check whether this machine can measure, and say what to do where it cannot; exit code 1 then."""
    from vramprobe import api
    from vramprobe.cli import display

    _enter(emulate, device)
    with display.working("looking at this machine"):
        diagnosis = api.doctor(device=device)
    if json_output:
        _print_json(diagnosis.as_json())
    else:
        display.print_doctor(diagnosis)
    raise typer.Exit(0 if diagnosis.ready else 1)


@app.command()
def models(json_output: Json = False) -> None:
    """List the architectures that ship with vramprobe."""
    from vramprobe import api
    from vramprobe.cli import display

    entries = api.models()
    if json_output:
        _print_json(
            [
                {"slug": entry.name, "hf_id": entry.hf_id, "model_type": entry.model_type, "num_params": entry.n_params}
                for entry in entries
            ]
        )
    else:
        display.print_models(entries)


@app.command()
def gpus(json_output: Json = False) -> None:
    """List the GPUs that ship with vramprobe, with the memory they report and what renting one costs."""
    from vramprobe import api
    from vramprobe.cli import display

    listed = api.gpus()
    if json_output:
        _print_json(
            [
                {"gpu": gpu.name, "short_name": gpu.short_name, "arch": gpu.arch, "total_bytes": gpu.total_bytes}
                for gpu in listed
            ]
        )
    else:
        display.print_gpus(listed)


@app.command()
@takes_a_cell
def measure(
    cell: dict[str, Any],
    timeout: Timeout = None,
    save: Annotated[Path | None, typer.Option(help="Append the record to this .jsonl file.")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write one step's history for PyTorch's memory_viz: FILE.pickle (GPU alone).")
    ] = None,
    emulate: Emulate = None,
    verify: Verify = False,
    json_output: Json = False,
) -> None:
    """Run one cell for a few steps in its own process and show where its memory went."""
    from vramprobe import api
    from vramprobe.cli import display

    _enter(emulate, cell.get("device"), num_cards=_num_cards(cell))
    with display.working("measuring in a worker process"):
        record = api.measure(timeout_seconds=timeout, save=save, snapshot=snapshot, verify=verify, **cell)
    if json_output:
        print(record.to_json_line())
    else:
        display.print_record(record)
        display.print_snapshot(record, snapshot)
    raise typer.Exit(0 if record.outcome.kind in ("ok", "oom") else 1)


@app.command()
@takes_a_cell(without=RANK_OPTIONS)
def simulate(
    cell: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help="A GPU of `vramprobe gpus`: does the cell fit it?")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the steady step's live memory by cause: FILE.html or FILE.png.")
    ] = None,
    depth: Annotated[str, typer.Option(help="auto | full: run each layer, or a few where they repeat.")] = "auto",
    save: Annotated[Path | None, typer.Option(help="Append the record to this .jsonl file.")] = None,
    json_output: Json = False,
) -> None:
    """Run one cell on fake tensors, any size on any machine: predicted memory, phase by phase, nothing measured."""
    from vramprobe.catalog import find_gpu
    from vramprobe.simulate.early_torch import load_library

    card = find_gpu(gpu) if gpu is not None else None
    library = load_library()
    from vramprobe import api
    from vramprobe.cli import display
    from vramprobe.predict.prediction import verdict_on_simulated
    from vramprobe.simulate.late_imports import put_off

    with display.working("simulating on fake tensors"):
        gc.disable()  # this process imports, simulates and ends
        put_off(ranks_too=True)
        library.join()
        record = api.simulate(gpu=gpu, timeline=timeline, depth=depth, save=save, forks=True, **cell)
    ended = record.outcome.kind in ("ok", "oom")
    judged = verdict_on_simulated(record, card) if card and ended else None
    if json_output and judged:
        print(json.dumps(record.model_dump(mode="json") | {"verdict": judged.model_dump(mode="json")}))
    elif json_output:
        print(record.to_json_line())
    else:
        display.print_simulation(record, judged, timeline)
    raise typer.Exit(0 if ended else 1)


@app.command()
@takes_a_sweep
def plan(
    sweep: SweepFile,
    job: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU of `vramprobe gpus`, wherever you are.")] = None,
    emulate: Emulate = None,
    json_output: Json = False,
) -> None:
    """Show what a sweep will do before it costs anything: cells, predicted peaks, what fits, minutes, dollars."""
    from vramprobe import api

    if emulate is not None and gpu is not None:
        raise SpecError(f"--emulate {emulate} and --gpu {gpu} both name the GPU to plan for; drop one of them")
    _enter(emulate, job["device"])
    _show_plan(api.plan(sweep, gpu=gpu, **job), as_json=json_output)


def _show_plan(planned: Plan, *, as_json: bool) -> None:
    from vramprobe.cli import display_plan

    if as_json:
        _print_json(display_plan.plan_as_json(planned, with_cells=True))
    else:
        display_plan.print_plan(planned)


@app.command()
@takes_a_sweep
def run(
    sweep: SweepFile,
    job: dict[str, Any],
    timeout: Timeout = None,
    max_time: Annotated[str | None, typer.Option(help="Stop before this is over, e.g. 9m; the rest stays.")] = None,
    budget: Annotated[float | None, typer.Option(help="Stop before more dollars than this are spent.")] = None,
    limit: Annotated[int | None, typer.Option(help="Run so many cells at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan only: the same as `vramprobe plan`.")] = False,
    emulate: Emulate = None,
    json_output: Json = False,
) -> None:
    """Run a sweep's cells, each in its own process; run it again to go on where it stopped."""
    from vramprobe import api
    from vramprobe.cli import live

    _enter(emulate, job["device"])
    from vramprobe.sweep.limits import limits as check_limits

    limits = {
        "timeout_seconds": timeout, "max_seconds": math.inf if max_time is None else parse_duration(max_time),
        "max_dollars": budget, "max_cells": limit,
    }  # fmt: skip
    if dry_run:
        planned = api.plan(sweep, **job)
        check_limits(planned.rate, **limits)
        _show_plan(planned, as_json=json_output)
        return
    with live.sweep_progress(as_json=json_output) as on_event:
        summary = api.run(sweep, **job, **limits, on_event=on_event)
    live.print_summary(summary, as_json=json_output)
    if summary.stopped_by in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[summary.stopped_by])
    raise typer.Exit(1 if summary.failed() else 0)


@app.command()
def check(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    json_output: Json = False,
) -> None:
    """Check that records can be believed, compared and published; exit code 1 where one breaks a rule."""
    from vramprobe import api
    from vramprobe.cli import display

    found = api.check(results, strict=strict)
    if json_output:
        _print_json(found.model_dump(mode="json"))
    else:
        display.print_check(found)
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def fit(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the fit.")] = Path("fit.json"),
    json_output: Json = False,
) -> None:
    """Fit the memory model to measured records; cells that their sweep holds out stay out."""
    from vramprobe import api
    from vramprobe.cli import display
    from vramprobe.model.memory_model import save_fit

    model = api.fit(results)
    save_fit(model, out)
    if json_output:
        print(model.model_dump_json(indent=2))
    else:
        display.print_fit(model, out)


@app.command()
@takes_a_cell(
    asks={"max_batch": "batch_size", "max_seq_len": "seq_len", "largest_model": "model"}, without=RANK_OPTIONS
)
def predict(
    cell: dict[str, Any],
    fit: PredictFit = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU of `vramprobe gpus`: does the cell fit it?")] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="The largest batch that fits --gpu.")] = False,
    max_seq_len: Annotated[bool, typer.Option("--max-seq-len", help="The largest length that fits --gpu.")] = False,
    largest_model: Annotated[bool, typer.Option("--largest-model", help="The catalog's largest that fits.")] = False,
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="The fewest of --gpu, each with its batch.")] = False,
    sharding: Annotated[
        str | None,
        typer.Option(help=f"{' | '.join(get_args(Sharding))}: one rank, by arithmetic."),
    ] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs that --sharding divides the states among.")] = None,
    shard_size: Annotated[
        int | None, typer.Option(help=f"Of {' and '.join(HYBRID)}: as many GPUs, and not all ({SHARD_SIZE}).")
    ] = None,
    cp_size: Annotated[int | None, typer.Option(help="GPUs that share each sequence, under fsdp (1).")] = None,
    cp_rotation: Annotated[
        str | None,
        typer.Option(help=f"Of keys and values among those: {' | '.join(get_args(CpRotation))} (allgather)."),
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help=f"{' | '.join(get_args(Offload))}: what the ranks keep in host memory.")
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="What other options would save, also where it fits.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="formula (milliseconds) | trace (simulation) | auto: formula where it can.")
    ] = "auto",
    stack: Annotated[
        str | None, typer.Option(help="Under other releases: transformers-4.48, or with ,bitsandbytes-0.45.")
    ] = None,
    allow_extrapolation: Annotated[bool, typer.Option(help="Predict far outside what the fit has seen.")] = False,
    json_output: Json = False,
) -> None:
    """Predict the memory of a cell without running it, or ask what fits a GPU: by arithmetic, or by simulation."""
    from vramprobe import api
    from vramprobe.catalog import find_gpu
    from vramprobe.cli import display
    from vramprobe.predict.prediction import verdict

    card = find_gpu(gpu) if gpu is not None else None
    cell = {"device": "cuda"} | cell if card else cell
    cell |= {"fit": fit, "allow_extrapolation": allow_extrapolation}
    ranks = {"sharding": sharding, "num_gpus": num_gpus, "shard_size": shard_size, "cp_size": cp_size,
             "cp_rotation": cp_rotation, "offload": offload}  # fmt: skip
    question = {"--max-batch": max_batch, "--max-seq-len": max_seq_len, "--largest-model": largest_model,
                "--min-gpus": min_gpus}  # fmt: skip
    asking = [flag for flag, asked in question.items() if asked]
    if len(asking) > 1:
        raise typer.BadParameter(f"{' and '.join(asking)} are different questions; ask one at a time.")
    if asking and changes:
        raise typer.BadParameter(f"--changes is about one cell, and {asking[0]} looks for one; drop one of them.")
    if asking and gpu is None:
        raise typer.BadParameter(f"{asking[0]} asks what fits a GPU; name it: --gpu RTX-4090.")
    if stack is not None and (asking or changes):
        raise typer.BadParameter(f"--stack is of one prediction; drop it, or {(asking or ['--changes'])[0]}.")
    if asking == ["--min-gpus"]:
        if num_gpus is not None:
            raise typer.BadParameter("--min-gpus asks for the number of GPUs, so drop --num-gpus.")
        for given in ("shard_size", "cp_size", "cp_rotation"):
            if ranks[given] is not None:
                flag = f"--{given.replace('_', '-')}"
                raise typer.BadParameter(f"--min-gpus asks how many GPUs share one model, so drop {flag}.")
        _show_min_gpus(*_min_gpus(gpu, sharding, engine, cell, offload), as_json=json_output)
        return
    if asking:
        ask = api.max_batch_size if max_batch else api.max_seq_len if max_seq_len else api.largest_model
        with display.working("simulating" if engine == "trace" else "predicting"):
            largest = ask(gpu=gpu, engine=engine, **ranks, **cell)
        if json_output:
            _print_json(largest.model_dump(mode="json"))
        else:
            display.print_largest(largest)
        return
    prediction = api.predict(engine=engine, gpu=gpu, stack=stack, **ranks, **cell)
    judged = verdict(prediction, card) if card else None
    fewest, uncounted, others = [], "", None
    if changes or (judged and judged.verdict != "fits" and stack is None):
        others = _changes(gpu, prediction, ranks | cell, is_asked=changes)
    is_sole = sharding is None and stack is None and prediction.engine == "formula"
    if judged and judged.verdict == "does not fit" and is_sole:
        fewest, uncounted = _min_gpus_if_countable(gpu, engine, cell)
    if json_output:
        more = {"verdict": judged.model_dump(mode="json")} if judged else {}
        more |= {"min_gpus": [one.model_dump(mode="json") for one in fewest]} if fewest else {}
        more |= {"changes": [one.model_dump(mode="json") for one in others]} if others is not None else {}
        _print_json(prediction.model_dump(mode="json") | more)
    else:
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
        _print_json([one.model_dump(mode="json") for one in found])
    else:
        display_fewest.print_min_gpus(found, left_out)


app.command()(recommend_verb.recommend)


@app.command()
def evaluate(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    hold_out: Annotated[
        str | None, typer.Option(help="Fit without these and predict them: params>3e9, method==qlora and tokens>4096.")
    ] = None,
    leave_out: Annotated[str | None, typer.Option(help="model | family | length: leave each out in turn.")] = None,
    fit: Annotated[Path | None, typer.Option("--fit", help="Judge this fit by what it has not seen.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write tables and a plot into this folder.")] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Show how far predictions are from measurements that their fit has not seen."""
    from vramprobe import api
    from vramprobe.cli import display

    _require_folder(out, check=check)
    found = api.evaluate(results, hold_out=hold_out, leave_out=leave_out, fit=fit, out=out, check=check)
    if json_output:
        from vramprobe.report.evaluation import as_json as evaluation_as_json

        _print_json(evaluation_as_json(found))
    else:
        display.print_evaluation(found)


@app.command()
def calibrate(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    fit: Fit = None,
    json_output: Json = False,
) -> None:
    """Score every known formula and ours on measured records, and measure the formulas' constants."""
    from vramprobe import api
    from vramprobe.cli import display

    calibration = api.calibrate(results, fit=fit)
    if json_output:
        _print_json(calibration.model_dump(mode="json"))
    else:
        display.print_calibration(calibration)


@app.command()
def claims(
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only the claim with this id, such as L1-06.")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only claims of this topic, such as memory.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only claims that name this GPU.")] = None,
    results: Annotated[Path | None, typer.Option(help="Records that go before predictions where comparable.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write tables and JSON into this folder.")] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Give each published claim a verdict, with our figure and the command that reproduces it."""
    from vramprobe import api
    from vramprobe.cli import display

    _require_folder(out, check=check)
    judged = api.claims(ids or (), topics=topic or (), gpu=gpu, results=results, out=out, check=check)
    display.print_claims(judged, out, as_json=json_output)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for tables and plots (out/report).")] = None,
    fit: Fit = None,
    claims_file: Annotated[
        Path | None, typer.Option("--claims", help="Show these verdicts on index.html: a claims.csv of claims -o.")
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Write all records as Parquet with a card into this folder, instead or too (-o)."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Upload --dataset to NAMESPACE/NAME of the Hugging Face hub.")
    ] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Write tables (Markdown, CSV, LaTeX, HTML), plots and a page with a calculator from records, and a fit's view."""
    from vramprobe import api
    from vramprobe.cli import display

    if push is not None and (dataset is None or check):
        raise typer.BadParameter("--push uploads what --dataset writes: give --dataset DIR, and no --check.")
    written = []
    if dataset is not None:
        written += api.dataset(results, dataset, push=push, check=check)
    if out is not None or dataset is None:
        written += api.report(results, out or Path("out/report"), fit=fit, claims=claims_file, check=check)
    if json_output:
        _print_json([str(path) for path in written])
    elif check:
        print(f"fresh: {len(written)} files are what the records give")
    else:
        display.print_report(written)


def _require_folder(out: Path | None, *, check: bool) -> None:
    """Raise wrong usage where there is nothing to check."""
    if check and out is None:
        raise typer.BadParameter("--check compares the files of a folder: name it with -o.")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vramprobe {vramprobe.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _leave_stdout() -> None:
    """Exit with 1 where nothing more can be said on stdout, not even the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(1)


def _num_cards(cell: dict[str, Any]) -> int:
    """The cards that the ranks of a cell see, before it is known whether there can be such a cell."""
    if "only_rank" not in cell:
        return cell.get("num_gpus", 1)
    return cell.get("shard_size", SHARD_SIZE) if cell.get("sharding") == "fsdp1-hybrid" else 1


def _enter(cards: str | None, device: str | None, *, num_cards: int = 1) -> None:
    """With ``--emulate``, go on in a process that sees these cards; it comes here again.

    ``num_cards``: where ``cards`` says no number of them.
    """
    if cards is not None:
        if device == "cpu":
            raise SpecError(f"--emulate {cards} is for device cuda, and cpu was given; drop one of them")
        from vramprobe.emulate.cards import with_count

        enter(with_count(cards, max(num_cards, 1)), sys.argv[1:], emulate_verbs.say)


def _app_for(words: list[str]) -> typer.Typer:
    """With the one verb that is called, if there is such a verb: typer makes all options of all that it has."""
    called = [one for one in app.registered_commands if one.callback and one.callback.__name__ in words]
    if not called:
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = called, []
    return alone


def _open_what_is_closed() -> None:
    """Give a closed stdin, stdout or stderr (``2>&-``) to /dev/null, before a results file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _print_what_can_be() -> None:
    """Put ? for a character that a terminal or file of an older encoding lacks: a table is worth more than its bars."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command line; a user's error is one line on stderr and exit code 1.

    SIGINT, SIGTERM and SIGHUP (but under nohup) unwind like an exit, so that workers and temporary files go with us.
    """
    _open_what_is_closed()
    _print_what_can_be()
    for signum in signals_that_end():
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    try:
        with leaving():
            _app_for(sys.argv[1:2])()
    except VramprobeError as error:
        print(f"vramprobe: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        _leave_stdout()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"vramprobe: no path is so long: {str(error.filename)[:60]}…; give a shorter one", file=sys.stderr)
            sys.exit(1)
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        print(f"vramprobe: the output could not be written: {error.strerror}", file=sys.stderr)
        _leave_stdout()
