"""The verbs that read records: check, fit, evaluate, calibrate, claims, report.

In: a results folder or file. Out: findings, a fit, errors, verdicts or files, as text or JSON.
"""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from vramprobe.cli.modes import require_read
from vramprobe.cli.options import Check, Fit, Json, print_json, show

if TYPE_CHECKING:
    from vramprobe.predict.evaluate import LeaveOut


def check(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings as well.")] = False,
    json_output: Json = False,
) -> None:
    """Check whether records are consistent and comparable; exit with 1 if one breaks a rule."""
    from vramprobe import api
    from vramprobe.cli import display

    found = api.check(results, strict=strict)
    show(found, display.print_check, as_json=json_output)
    raise typer.Exit(0 if found.ok else 1)


def fit(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the fit.")] = Path("fit.json"),
    json_output: Json = False,
) -> None:
    """Fit what a GPU adds to predictions, by its own records; cells that a sweep holds out are not used."""
    from vramprobe import api
    from vramprobe.cli import display
    from vramprobe.cli.emulate import say
    from vramprobe.model.card_fit import save_fit

    model = api.fit(results, say=say)
    save_fit(model, out)
    if json_output:
        print(model.model_dump_json(indent=2))
    else:
        display.print_fit(model, out)


def evaluate(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    hold_out: Annotated[
        str | None,
        typer.Option(help="Hold out the cells that match and predict them: params>3e9, method==qlora and tokens>4096."),
    ] = None,
    leave_out: Annotated[str | None, typer.Option(help="model | family | length: hold out each in turn.")] = None,
    fit: Annotated[Path | None, typer.Option("--fit", help="Evaluate this fit on the records it has not seen.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write tables and a plot into this folder.")] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Show the prediction error on records that the fit has not seen."""
    from vramprobe import api
    from vramprobe.cli import display
    from vramprobe.cli.emulate import say

    _require_folder(out, check=check)
    left_out = cast("LeaveOut | None", leave_out)  # evaluate refuses others
    found = api.evaluate(results, hold_out=hold_out, leave_out=left_out, fit=fit, out=out, check=check, say=say)
    if json_output:
        from vramprobe.report.evaluation import as_json as evaluation_as_json

        print_json(evaluation_as_json(found))
    else:
        display.print_evaluation(found)


def calibrate(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    fit: Fit = None,
    json_output: Json = False,
) -> None:
    """Score published memory formulas and ours on measured records, and measure the formulas' constants."""
    from vramprobe import api
    from vramprobe.cli import display

    show(api.calibrate(results, fit=fit), display.print_calibration, as_json=json_output)


def claims(
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only the claim with this id, such as L1-06.")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only claims of this topic, such as memory.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only claims that name this GPU.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Records to judge by, where they are comparable, instead of predictions.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write tables and JSON into this folder.")] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Judge each published claim, with our figure and the command that reproduces it."""
    from vramprobe import api
    from vramprobe.cli import display

    _require_folder(out, check=check)
    judged = api.claims(ids or (), topics=topic or (), gpu=gpu, results=results, out=out, check=check)
    display.print_claims(judged, out, as_json=json_output)


def report(
    results: Annotated[Path, typer.Argument(help="A results folder or .jsonl file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for tables and plots (out/report).")] = None,
    fit: Fit = None,
    claims_file: Annotated[
        Path | None,
        typer.Option(
            "--claims", help="Show these verdicts on index.html: a claims.csv written by `vramprobe claims -o`."
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Write all records as Parquet with a data card into this folder; -o may be given as well."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Upload --dataset to NAMESPACE/NAME of the Hugging Face hub.")
    ] = None,
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Write tables (Markdown, CSV, LaTeX, HTML), plots and a page with a calculator from records."""
    from vramprobe import api
    from vramprobe.cli import display

    if push is not None and (dataset is None or check):
        raise typer.BadParameter("--push uploads what --dataset writes: give --dataset DIR, and no --check.")
    if dataset is not None and out is None:
        of_tables = [name for name in inspect.signature(report).parameters if name not in ("dataset", "push")]
        of_data = [name for name in inspect.signature(report).parameters if name not in ("fit", "claims_file")]
        require_read(report, locals(), of_data, "--dataset without -o", {"tables and pages": of_tables})
    written = []
    if dataset is not None:
        written += api.dataset(results, dataset, push=push, check=check)
    if out is not None or dataset is None:
        written += api.report(results, out or Path("out/report"), fit=fit, claims=claims_file, check=check)
    if json_output:
        print_json([str(path) for path in written])
    elif check:
        print(f"fresh: {len(written)} files are what the records give")
    else:
        display.print_report(written)


def _require_folder(out: Path | None, *, check: bool) -> None:
    """Raise wrong usage where there is nothing to check."""
    if check and out is None:
        raise typer.BadParameter("--check compares the files of a folder: name it with -o.")
