"""One call per stage: measure, run, check, fit, predict, report. The command line calls these and nothing else.

A cell is named by the words of :func:`vramprobe.spec.option_names`: ``measure(model="gpt2", method="lora",
batch_size=1, seq_len=512)``. Importing this loads no torch; measuring loads it in the worker's process only.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe import catalog, spec, store, sweep
from vramprobe.errors import SpecError

if TYPE_CHECKING:
    from vramprobe.check import CheckReport
    from vramprobe.measure.runner import Progress, RunSummary
    from vramprobe.memory_model import MemoryModel
    from vramprobe.predict import Prediction
    from vramprobe.record import RunRecord


def cell(*, device: str = "auto", **options: Any) -> spec.CellSpec:
    """A resolved cell from its words; ``device`` auto is CUDA where a GPU is visible, else the CPU."""
    from vramprobe.measure.environment import device_to_use

    return spec.resolve(device=device_to_use(device), **options)


def measure(*, timeout_seconds: float | None = None, save: str | Path | None = None, **options: Any) -> RunRecord:
    """Run one cell in a process of its own; the record, also appended to ``save`` where that is given."""
    from vramprobe.measure import runner

    one = cell(**options)
    if save is not None:
        store.require_writable(save)
    handle, name = tempfile.mkstemp(prefix="vramprobe-", suffix=".log")
    os.close(handle)
    log = Path(name)
    record = None
    try:
        record = runner.measure(one, log=log, timeout_seconds=_limit(timeout_seconds))
    finally:
        if record is None or record.outcome.kind == "ok":  # a failure's record names its log
            log.unlink(missing_ok=True)
    if save is not None:
        store.append(save, record)
    return record


def run(
    path: str | Path,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    timeout_seconds: float | None = None,
    max_seconds: float = math.inf,
    on_event: Callable[[Progress], None] = lambda event: None,
    **overrides: Any,
) -> RunSummary:
    """Run a sweep file's cells that ``out`` (results/<device>/<sweep> by default) has no finished record of."""
    from vramprobe.measure import runner
    from vramprobe.measure.environment import device_to_use

    device = device_to_use(device)
    loaded = sweep.load_sweep(path, device=device, overrides=overrides)
    folder = Path(out) if out is not None else default_results(loaded.name, device)
    summary = runner.run(
        loaded, folder, timeout_seconds=_limit(timeout_seconds), max_seconds=max_seconds, on_event=on_event
    )
    summary.notes[:0] = loaded.notes
    return summary


def default_results(sweep_name: str, device: str) -> Path:
    """results/<device>/<sweep>: the GPU's short name in lower case, or cpu."""
    from vramprobe.measure import nvml

    gpu = nvml.first_visible_gpu() if device == "cuda" else None
    name = device if gpu is None else gpu[1].removeprefix("NVIDIA ").lower().replace(" ", "-")
    return Path("results") / name / sweep_name


def check(results: str | Path, *, strict: bool = False) -> CheckReport:
    """What speaks against the records under ``results``; ``strict``: warnings make the report not ok, too."""
    from vramprobe.check import check as check_records

    return check_records(results, strict=strict)


def fit(results: str | Path) -> MemoryModel:
    """A memory model fitted to the records under ``results``; cells that their sweep holds out stay out."""
    from vramprobe.fit import fit as fit_records

    return fit_records(store.latest_by_fingerprint(store.read(results).records).values())


def predict(
    *,
    fit: str | Path | MemoryModel | None = None,
    device: str | None = None,
    allow_extrapolation: bool = False,
    **options: Any,
) -> Prediction:
    """The memory of a cell that nobody ran; ``fit`` is a file, a model, or None for arithmetic alone.

    The cell is for the device of the fit, or for CUDA without one, unless ``device`` says otherwise.
    """
    from vramprobe.predict import predict as predict_cell

    model = _model(fit)
    device = device or (model.device if model else "cuda")
    return predict_cell(cell(device=device, **options), model, allow_extrapolation=allow_extrapolation)


def report(results: str | Path, out: str | Path, *, fit: str | Path | MemoryModel | None = None) -> list[Path]:
    """Write tables and a plot from the records under ``results``, with predictions where a fit is given."""
    from vramprobe.report import report as write

    return write(results, out, model=_model(fit), fit_path=fit if isinstance(fit, str | Path) else None)


def models() -> list[catalog.ModelEntry]:
    """The architectures that ship with vramprobe."""
    return catalog.list_models()


def gpus() -> list[catalog.Gpu]:
    """The GPUs that ship with vramprobe."""
    return catalog.list_gpus()


def _limit(timeout_seconds: float | None) -> float:
    """The time one cell may take. Raises SpecError for what is no time."""
    from vramprobe.measure.runner import DEFAULT_TIMEOUT_SECONDS

    if timeout_seconds is None:
        return DEFAULT_TIMEOUT_SECONDS
    if not 0 < timeout_seconds < math.inf:
        raise SpecError(f"a cell's time-out must be more than 0 seconds, {timeout_seconds} given")
    return timeout_seconds


def _model(fit: str | Path | MemoryModel | None) -> MemoryModel | None:
    if isinstance(fit, str | Path):
        from vramprobe.memory_model import load_fit

        return load_fit(fit)
    return fit
