"""One call per stage, from doctor to report.

The command line calls nothing else. A cell is named by the words of :func:`vramprobe.resolve.option_names`:
``measure(model="gpt2", method="lora", batch_size=1, seq_len=512)``. Importing this loads no torch; measuring loads it
in the worker's process only. What a stage needs a module of its own for stands in its room.
"""

from __future__ import annotations

import importlib
import io
import shlex
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.catalog import list_gpus as gpus
from vramprobe.catalog import list_models as models
from vramprobe.errors import require_extra
from vramprobe.interop.questions import changes, predict, recommend, techniques
from vramprobe.predict.questions import cell, given_fit

if TYPE_CHECKING:
    from vramprobe.check import check
    from vramprobe.check.contribute import contribute
    from vramprobe.check.merge import merge
    from vramprobe.explain.failure import Report
    from vramprobe.literature.calibrate import Calibration
    from vramprobe.literature.claims import Judgement
    from vramprobe.measure.doctor import doctor
    from vramprobe.model.card_fit import CardFit
    from vramprobe.predict.evaluate import Evaluation, LeaveOut
    from vramprobe.predict.from_run import largest_of_run, predict_run, run_on_gpus
    from vramprobe.predict.frontier import frontier, frontier_of_run
    from vramprobe.predict.grpo import grpo
    from vramprobe.predict.serve import serve
    from vramprobe.predict.what_fits import (
        largest_model,
        max_batch_size,
        max_seq_len,
        min_gpus,
        min_gpus_by_sharding,
    )
    from vramprobe.profile.command import profile, profiled
    from vramprobe.profile.diff import diff
    from vramprobe.recipe.sharing import export_recipes, list_recipes, merge_recipes
    from vramprobe.records.parquet import export
    from vramprobe.report.card_truth import card_truth, card_truth_gpu
    from vramprobe.report.receipt import receipts
    from vramprobe.report.recorded_timeline import timeline
    from vramprobe.sweep.jobs import default_results
    from vramprobe.sweep.launch import launch_tasks
    from vramprobe.sweep.launch_command import launch_command
    from vramprobe.sweep.questions import campaign, measure, plan, plan_campaign, run

__all__ = [
    "calibrate", "campaign", "card_truth", "card_truth_gpu", "cell", "changes", "check", "claims", "contribute",
    "dataset", "default_results", "diff", "doctor", "evaluate", "explain", "export", "export_recipes", "fit",
    "frontier", "frontier_of_run", "gpus", "grpo", "largest_model", "largest_of_run", "launch_command", "launch_tasks",
    "list_recipes", "max_batch_size", "max_seq_len", "measure", "merge", "merge_recipes", "min_gpus",
    "min_gpus_by_sharding", "models", "plan", "plan_campaign", "predict", "predict_run", "profile", "profiled",
    "receipts", "recommend", "report", "run", "run_on_gpus", "serve", "techniques", "timeline",
]  # fmt: skip


#: Module → what stands there and is loaded when it is asked for: predictions need none of it.
_ROOMS = {
    "check": ("check",),
    "check.contribute": ("contribute",),
    "check.merge": ("merge",),
    "measure.doctor": ("doctor",),
    "predict.from_run": ("largest_of_run", "predict_run", "run_on_gpus"),
    "predict.frontier": ("frontier", "frontier_of_run"),
    "predict.grpo": ("grpo",),
    "predict.serve": ("serve",),
    "predict.what_fits": ("largest_model", "max_batch_size", "max_seq_len", "min_gpus", "min_gpus_by_sharding"),
    "profile.command": ("profile", "profiled"),
    "profile.diff": ("diff",),
    "recipe.sharing": ("export_recipes", "list_recipes", "merge_recipes"),
    "records.parquet": ("export",),
    "report.card_truth": ("card_truth", "card_truth_gpu"),
    "report.receipt": ("receipts",),
    "report.recorded_timeline": ("timeline",),
    "sweep.jobs": ("default_results",),
    "sweep.launch": ("launch_tasks",),
    "sweep.launch_command": ("launch_command",),
    "sweep.questions": ("campaign", "measure", "plan", "plan_campaign", "run"),
}
_MODULE_OF = {name: module for module, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A function of ``_ROOMS``."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"vramprobe.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def explain(
    failure: BaseException | str | Path,
    model: Any = None,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    num_gpus: int | None = None,
) -> Report:
    """Return why a run ran out of memory, in words by ``str``: from an exception, the text of a log, or a file's path.

    ``except torch.OutOfMemoryError as error: print(vramprobe.explain(error, model))``. ``model`` (a name, a config, a
    model, as :func:`predict` takes it), ``batch_size`` (sequences of a micro-batch) and ``seq_len`` (tokens) name the
    tensor of the request's size. Raises VramprobeError for what tells nothing or is no model.
    """
    from vramprobe.explain.report import report_of
    from vramprobe.interop.models import read_model

    if model is not None and not isinstance(model, str):
        model = read_model(model).model

    words = {"model": model, "batch_size": batch_size, "seq_len": seq_len, "num_gpus": num_gpus}
    if isinstance(failure, Path):
        with failure.open("rb") as file:
            return report_of(file, **words)
    text = failure if isinstance(failure, str) else "".join(traceback.format_exception(failure))
    return report_of(io.BytesIO(text.encode()), **words)


def fit(results: str | Path, *, say: Callable[[str], None] = lambda words: None) -> CardFit:
    """Fit how memory measured on a GPU, under ``results``, differs from what is predicted; for ``fit=`` elsewhere.

    Cells that their sweep holds out stay out. A cell without a recipe at hand is recorded, seconds each, of which
    ``say`` hears. Raises FitError for records of the CPU or of an emulated GPU alone.
    """
    from vramprobe.predict.expected import fit_records, recording
    from vramprobe.records import store
    from vramprobe.records.whole import read_whole

    return fit_records(store.latest_by_device(read_whole(results).records), recording(say))


def evaluate(
    results: str | Path,
    *,
    hold_out: str | None = None,
    leave_out: LeaveOut | None = None,
    fit: str | Path | CardFit | None = None,
    out: str | Path | None = None,
    check: bool = False,
    say: Callable[[str], None] = lambda words: None,
) -> Evaluation:
    """Compare predictions with the records under ``results`` that their fit has not seen; write a page of it to
    ``out``.

    ``hold_out`` is a condition such as ``params>3e9``; ``leave_out`` takes each model, family or length out in turn;
    ``fit`` is judged by what it has not seen. With none of them, what the sweep held out is held out. ``check``: write
    nothing, and raise StaleReport where ``out`` holds other files. ``say`` is :func:`fit`'s.
    """
    require_extra("report", "an evaluation")
    from vramprobe.predict.evaluate import evaluate as evaluate_records
    from vramprobe.predict.expected import recording
    from vramprobe.records.whole import read_whole

    held = {"hold_out": hold_out, "leave_out": leave_out, "model": given_fit(fit)}
    found = evaluate_records(read_whole(results).records, **held, expect=recording(say))
    if out is not None:
        from vramprobe.report.evaluation import evaluation_page
        from vramprobe.report.publish import publish

        words = ["vramprobe", "evaluate", str(results), "-o", str(out)]
        words += ["--hold-out", hold_out] if hold_out else []
        words += ["--leave-out", leave_out] if leave_out else []
        words += ["--fit", str(fit) if isinstance(fit, str | Path) else "FIT.json"] if fit is not None else []
        publish(Path(out), evaluation_page(found, shlex.join(words)), check=check)
    return found


def calibrate(results: str | Path, *, fit: str | Path | CardFit | None = None) -> Calibration:
    """Compare every formula and our engine with the records under ``results``, and refit the formulas' constants."""
    require_extra("report", "a table of formulas")
    from vramprobe.literature.calibrate import calibrate as calibrate_records
    from vramprobe.records.whole import read_whole

    return calibrate_records(read_whole(results).records, given_fit(fit))


def claims(
    ids: Sequence[str] = (),
    *,
    topics: Sequence[str] = (),
    gpu: str | None = None,
    results: str | Path | None = None,
    out: str | Path | None = None,
    check: bool = False,
) -> list[Judgement]:
    """The published claims with these ids, of these topics or on this GPU, judged; all 135 unless told.

    Comparable CUDA records under ``results`` go before predictions. ``out``: a folder for the tables and JSON; with
    ``check`` nothing is written, and StaleReport raised where it holds other files.
    """
    require_extra("report", "a table of claims")
    from vramprobe.literature.claims import judge_claims
    from vramprobe.records import store
    from vramprobe.records.whole import read_whole

    records = read_whole(results, allow_empty=True).records if results is not None else ()
    judged = judge_claims(ids, topics=topics, gpu=gpu, records=store.latest_by_fingerprint(records).values())
    if out is not None:
        from vramprobe.report.claims import text_files
        from vramprobe.report.publish import publish

        words = [*(f"--id {name}" for name in ids), *(f"--topic {name}" for name in topics)]
        words += [f"--gpu {gpu}"] * bool(gpu) + [f"--results {results}"] * bool(results)
        files = text_files(judged, " ".join(["vramprobe claims", *words, f"-o {out}"]))
        publish(Path(out), files, check=check)
    return judged


def report(
    results: str | Path,
    out: str | Path,
    *,
    fit: str | Path | CardFit | None = None,
    claims: str | Path | None = None,
    check: bool = False,
) -> list[Path]:
    """Write tables, plots and a page from the records under ``results``, with predictions by recipes at hand.

    The page, index.html, shows the claims.csv that ``claims`` names, as :func:`claims` writes it.
    With ``check`` nothing is written: raises StaleReport, naming each file of ``out`` that is missing or different.
    """
    require_extra("report", "a report")
    from vramprobe.report.publish import build, publish

    named = fit if isinstance(fit, str | Path) else None
    files = build(results, out, model=given_fit(fit), fit_path=named, claims_path=claims)
    return publish(Path(out), files, check=check)


def techniques_report(out: str | Path, *, check: bool = False) -> list[Path]:
    """Write what each technique saved and costs as tables, a plot and a page; ``check`` is :func:`report`'s."""
    require_extra("report", "a report")
    from vramprobe.report.publish import publish
    from vramprobe.report.techniques import build

    return publish(Path(out), build(shlex.join(["vramprobe", "techniques", "-o", str(out)])), check=check)


def dataset(results: str | Path, out: str | Path, *, push: str | None = None, check: bool = False) -> list[Path]:
    """Write all records under ``results`` as Parquet with a card, and ``push`` both to this data set of the hub.

    ``check`` is :func:`report`'s. Raises MissingDependency for pushing without a token, VramprobeError where the hub
    refuses; what was written stays.
    """
    from vramprobe.report import dataset as data_set
    from vramprobe.report.dataset import push as hub
    from vramprobe.report.publish import publish

    if push is not None:
        hub.require_name(push)
    files = data_set.build(results, out)
    written = publish(Path(out), files, check=check)
    if push is not None:
        hub.push(files, push)
    return written
