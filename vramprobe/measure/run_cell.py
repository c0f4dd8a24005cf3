"""Run one cell in this process: set up, train the traced steps, then the timed ones, under an instrument.

In: a CellSpec, and where to leave a log or a snapshot. Out: its RunRecord; what fails is an outcome, not an exception.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vramprobe import catalog
from vramprobe.errors import MissingDependency, VramprobeError
from vramprobe.log.file import write_log
from vramprobe.measure import environment
from vramprobe.measure.observation import Observation, ledger_of, peak_of, reasons_not_to_believe, remarks_on
from vramprobe.measure.ranks import Seat, rank_of
from vramprobe.records.outcomes import Error, Invalid, Ok, Oom, OomHost, Outcome
from vramprobe.records.record import Isolation, ModelFacts, RunRecord, Timing, attempt_fields, new_attempt_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vramprobe.choices import PhaseName
    from vramprobe.spec import CellSpec
    from vramprobe.workload.stepper import Stepper
    from vramprobe.workload.training import StackFacts, Workload

#: What a device out of memory says, in its many coats; the allocator's own observer is asked first.
_DEVICE_OOM = (
    "CUDA out of memory",
    "OutOfMemoryError",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
    "CUDA error: out of memory",
    "NVML_SUCCESS == ",  # the allocator, asking who else is on the card before it says that it is full
)


def run_cell(
    spec: CellSpec,
    *,
    isolation: Isolation,
    isolation_reason: str | None = None,
    attempt_id: str | None = None,
    status: Path | None = None,
    snapshot: Path | None = None,
    recording: Path | None = None,
    verify: bool = False,
    seat: Seat | None = None,
) -> RunRecord:
    """Run one cell in this process and describe it. Never raises for what the cell does; failures are outcomes.

    ``seat``: this process's own, where it is one rank of the cell.

    The running phase is written to ``status`` for whoever waits, the allocator's history of a further step to
    ``snapshot``, the log of load and all steps to ``recording`` (both cuda only). ``verify``: on an emulated GPU, steps
    under other values follow.
    """
    began, started_at = time.perf_counter(), datetime.now(UTC)
    fields: dict[str, Any] = {}
    instrument = None
    try:
        instrument = instrument_for(spec, 0 if seat is None else seat.ordinal)
        load_libraries(spec)
        gc.collect()  # what a caller left behind must not be freed while the instrument watches
        instrument.start()
        fields = _train(spec, instrument, status, snapshot, recording, verify, seat)
        observation = fields.pop("observation")
        ledger = ledger_of(observation)
        doubts = reasons_not_to_believe(observation, ledger)
        fields |= {"peak": peak_of(observation), "ledger": ledger}
        fields["outcome"] = Invalid(reasons=doubts) if doubts else Ok()
    except Exception as error:
        fields["outcome"] = outcome_of(error, instrument)
        observation = instrument.finish() if instrument and instrument.last_phase() else Observation([], {})
    timing, on_host = fields.pop("timing", {}), fields.pop("on_host", {})
    modules_by_card = fields.pop("modules_by_card", None)
    record = RunRecord(
        **attempt_fields(spec, attempt_id or new_attempt_id(), started_at, environment.instrument_for(spec)),
        spec=spec,
        environment=environment.capture(spec, isolation, isolation_reason, with_torch=True),
        warnings=[*getattr(instrument, "warnings", []), *remarks_on(fields.get("facts"), spec)],
        phases=observation.phases,
        timing=Timing(**timing, total_seconds=time.perf_counter() - began),
        context_bytes=observation.context_bytes,
        num_alloc_retries=observation.num_alloc_retries,
        emulation=instrument.emulation() if hasattr(instrument, "emulation") else None,
        **fields,
    )
    if observation.cards:
        from vramprobe.measure.cards import with_cards

        return with_cards(record, observation.cards, modules_by_card)
    if seat is None:
        return record
    return record.model_copy(update={"ranks": [rank_of(record, seat, observation, on_host)]})


def instrument_for(spec: CellSpec, ordinal: int = 0) -> Any:
    """The instrument of the cell's device, its GPU ``ordinal``. Raises MissingDependency where there is none."""
    import torch

    if spec.device == "cpu":
        from vramprobe.measure.cpu import CpuInstrument

        return CpuInstrument()
    if not torch.cuda.is_available():
        raise MissingDependency(
            f"device cuda was asked for, but torch {torch.__version__} sees no CUDA GPU; "
            "use --device cpu, or install a CUDA build of torch on a machine with an NVIDIA driver"
        )
    from vramprobe.measure.cuda import CudaInstrument

    first: CudaInstrument
    if environment.instrument_for(spec) == "emulated":
        from vramprobe.measure.emulation import EmulatedInstrument

        first = EmulatedInstrument(spec.limit_vram_bytes, ordinal)
        first.verified_cards = list(range(spec.num_gpus)) if spec.is_spread else [ordinal]
    else:
        first = CudaInstrument(spec.limit_vram_bytes, ordinal)
    if not spec.is_spread:
        return first
    from vramprobe.measure.cards import CardsInstrument

    return CardsInstrument(first, [CudaInstrument(spec.limit_vram_bytes, card) for card in range(1, spec.num_gpus)])


def outcome_of(error: BaseException, instrument: Any) -> Outcome:
    """The outcome that an exception stands for."""
    text = f"{type(error).__name__}: {error}"
    name, step = (instrument and instrument.last_phase()) or (None, None)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return OomHost(phase=name, message=text[:2000])
    seen = getattr(instrument, "oom_seen", None)
    if seen is not None or any(coat in text for coat in _DEVICE_OOM):
        return Oom(phase=name or "load", step=step, message=text[:2000], **(seen or {}))
    return Error(
        phase=name,
        error_type=type(error).__name__,
        message=str(error)[:4000],
        traceback=None if isinstance(error, VramprobeError) else traceback.format_exc()[-8000:],
    )


class _Announcing:
    """The instrument, with each phase written to a file as it begins."""

    def __init__(self, instrument: Any, path: Path) -> None:
        self._instrument = instrument
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.holds = instrument.holds

    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Any:
        text = name if step is None else f"{name} {step}"
        os.pwrite(self._file, text.ljust(32).encode(), 0)
        return self._instrument.phase(name, step, micro_step)


def load_libraries(spec: CellSpec) -> None:
    """Import what the cell will use before the instrument starts: some modules make small tensors as they load."""
    import vramprobe.workload.training  # noqa: F401

    if spec.method != "full":
        import peft  # noqa: F401
    if spec.quant != "none":
        import transformers.integrations.bitsandbytes  # noqa: F401
    elif spec.needs_bitsandbytes:
        import bitsandbytes  # noqa: F401
    if spec.fused_linear_cross_entropy:
        from vramprobe.workload.fused_loss import load_liger

        load_liger()
    if spec.other_head:
        from vramprobe.workload.loss import load_library

        load_library(spec)


def _train(
    spec: CellSpec,
    instrument: Any,
    status: Path | None,
    snapshot: Path | None,
    recording: Path | None,
    verify: bool,
    seat: Seat | None,
) -> dict[str, Any]:
    """Load, train the traced steps, then the timed ones; what was seen, by the record's names."""
    from vramprobe.workload.training import NOBODY, set_up, train_step, watch_stack

    observer = instrument if status is None else _Announcing(instrument, status)
    source = None
    if recording is not None:
        from vramprobe.measure.log_source import LogSource

        observer = source = LogSource(observer, 0 if seat is None else seat.ordinal)
        source.start()
    began = time.perf_counter()
    work = set_up(spec, observer, _stepper_of(spec, seat))
    if source is not None:
        source.watch_layers(work.model, catalog.depth_of(spec.architecture))
    counted = instrument.count_launches() if source is not None and instrument.name == "emulated" else None
    count = None
    instrument.settle()
    loaded = time.perf_counter()
    with watch_stack(work.model) as stack:
        train_step(work, observer, 1)
    warm = time.perf_counter()
    if seat is not None:
        instrument.rest()
    has_speed = instrument.name != "emulated" and source is None  # there a step's time is that of launching nothing,
    # and the step under the history is one of the traced; of a log each counts: unsplit blocks add up differently
    last = spec.steps if has_speed or source is not None else max(1, spec.steps - 1)
    for step in range(2, last + 1):
        if counted is not None:
            counted(step - 1)
        train_step(work, observer, step)
        count = counted(step) if counted is not None and count is None else count
    traced = time.perf_counter()
    at_peak = None
    if source is not None:
        write_log(source.log(), recording)
        if count is not None:
            recording.with_suffix(".json").write_text(json.dumps(count))
    elif spec.device == "cuda":
        at_peak = instrument.trace_step(lambda: train_step(work, observer, last + 1), is_extra=last == spec.steps)
    told = time.perf_counter()
    observation = instrument.finish()
    if at_peak is not None:
        observation = replace(observation, at_peak=at_peak)
    facts = model_facts(work, stack)
    step_seconds = [_timed(lambda: train_step(work, NOBODY, 0), spec) for _ in range(spec.timing_steps * has_speed)]
    if verify and hasattr(instrument, "verify"):
        instrument.verify(lambda: train_step(work, NOBODY, 0))
    if snapshot is not None:
        instrument.snapshot_step(lambda: train_step(work, NOBODY, 0), snapshot)
    timing = {
        "step_seconds": step_seconds,
        "load_seconds": loaded - began,
        "first_step_seconds": warm - loaded,
        "traced_seconds": traced - loaded,
        "history_seconds": told - traced if spec.device == "cuda" else None,
    }
    work.stepper.leave()
    return {
        "observation": observation,
        "facts": facts,
        "timing": timing,
        "on_host": {name: getattr(work.stepper, name) for name in ("host_tensors_bytes", "host_pinned_bytes")},
        "modules_by_card": work.stepper.modules_by_card,
    }


def _stepper_of(spec: CellSpec, seat: Seat | None) -> Callable[[], Stepper] | None:
    """Return a function that makes the stepper of a cell on several cards; None for one card's."""
    if seat is not None:
        return lambda: seat.join(spec)
    if not spec.is_spread:
        return None
    from vramprobe.workload.sharding.device_map import SpreadStepper

    return lambda: SpreadStepper(spec)


def model_facts(work: Workload, stack: StackFacts) -> ModelFacts:
    """Count the live model's parameters and facts, adapters apart; of ranks, on the model before it was divided."""
    return ModelFacts(
        **work.stepper.counted(work.model),
        residual_dtype=stack.residual_dtype,
        attention_kernels=stack.attention_kernels,
    )


def _timed(step: Any, spec: CellSpec) -> float:
    import torch

    cards = range(spec.num_gpus) if spec.is_spread else [None] if spec.device == "cuda" else []

    def wait() -> None:
        for card in cards:
            torch.cuda.synchronize(card)

    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began
