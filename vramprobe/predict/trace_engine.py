"""The trace engine: a spec → its Prediction by simulation, for any architecture; seconds where arithmetic takes none.

In: cells, the GPU, a fit for what lies beyond the allocator. Out: Predictions with an interval each. It loads torch,
but only once it is called; many cells go to processes of their own, so that a plan's process never loads it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from vramprobe.catalog import Gpu
from vramprobe.catalog.libraries import DECIDING
from vramprobe.errors import VramprobeError
from vramprobe.model.memory_model import MemoryModel
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.uncertainty import ALLOCATED_SPREAD, RESERVED_SPREAD, device_tier, simulated_interval
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

_MAX_PROCESSES = 4
_MANY_CELLS = 3  # from so many on, a process more costs less (5 s of imports) than it saves


def predict(spec: CellSpec, *, gpu: Gpu | None = None, model: MemoryModel | None = None) -> Prediction:
    """The peaks of ``spec`` by simulation. Raises VramprobeError where libraries are missing or cannot run the cell.

    Weights are taken as random and the card as a real one: neither decides memory. Of ``model`` only what it knows of
    the device beyond the allocator is used; its coefficients are the formula engine's.
    """
    from vramprobe.measure.isolation import require_packages

    require_packages([spec], with_device=False)
    from vramprobe.simulate.run import simulate  # loads torch

    record = simulate(spec.model_copy(update={"weights": "random", "limit_vram": None}), gpu=gpu).record
    if record.peak is None or record.outcome.kind != "ok":
        raise VramprobeError(f"{spec.cell_id} could not be simulated: {record.outcome}")
    return prediction_of(record, spec, model)


def prediction_of(record: RunRecord, spec: CellSpec, model: MemoryModel | None = None) -> Prediction:
    """A simulated record as a Prediction."""
    peak = record.peak
    assert peak is not None
    allocated = simulated_interval(peak.allocated_bytes, ALLOCATED_SPREAD[spec.device])
    reserved = None if peak.reserved_bytes is None else simulated_interval(peak.reserved_bytes, RESERVED_SPREAD)
    gap = model.device_over_reserved_bytes if model and model.device == spec.device else None
    alive = record.ledger.at_peak if record.ledger else None
    terms = {name.removesuffix("_bytes"): size for name, size in alive.parts().items()} if alive else {}
    return Prediction(
        cell_id=spec.cell_id,
        engine="trace",
        peak_allocated_bytes=allocated,
        peak_phase=peak.phase,
        peak_label=f"{peak.phase} of step {peak.step}",
        terms=terms,
        constant_bytes=peak.allocated_bytes - sum(terms.values()),
        reserved_bytes=reserved,
        device_bytes=device_tier(reserved, gap),
        warnings=["no fit's coefficients are used", *record.warnings],
        libraries={name: version for name in DECIDING if (version := record.environment.versions.get(name))},
    )


def predict_many(
    specs: Sequence[CellSpec],
    stop: Callable[[], bool] = lambda: False,
    *,
    gpu: Gpu | None = None,
    model: MemoryModel | None = None,
    max_processes: int = _MAX_PROCESSES,
) -> list[Prediction | str]:
    """One for each spec, in order; text where there is none, and why. In processes of their own, several for many.

    ``stop`` is asked between predictions; once it says yes, the rest is not predicted.
    """
    found: list[Prediction | str] = []
    if not specs:
        return found
    num_processes = min(max_processes, os.cpu_count() or 1, -(-len(specs) // _MANY_CELLS))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), initializer=_start) as pool:
        try:
            for outcome in pool.map(partial(_predict, gpu=gpu, model=model), specs):
                found.append(outcome)
                if stop():
                    break
        except BrokenProcessPool as error:
            return [*found, *[f"the simulation's process died: {error}"] * (len(specs) - len(found))]
        finally:
            if len(found) < len(specs):  # whoever stops does not wait for what is under way
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(cancel_futures=True)
    return [*found, *["not simulated: stopped before its turn"] * (len(specs) - len(found))]


def _start() -> None:
    """One thread a process, since fake tensors compute nothing; a Ctrl-C is for whoever asked."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _predict(spec: CellSpec, gpu: Gpu | None, model: MemoryModel | None) -> Prediction | str:
    try:
        return predict(spec, gpu=gpu, model=model)
    except Exception as error:  # whatever a library says of this architecture; the plan goes on without it
        return str(error) if isinstance(error, VramprobeError) else f"{type(error).__name__}: {error}"[:300]
