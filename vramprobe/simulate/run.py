"""CellSpec → the RunRecord and the event trace of a run that never happened: the workload's code on fake tensors.

In: a cell. Out: a Simulation. Touches no device and computes nothing; a predictor, labelled so in the record.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from vramprobe.measure import environment
from vramprobe.measure.observation import ledger_of, peak_of
from vramprobe.measure.trace import Event
from vramprobe.record import Ok, RunRecord, Timing, attempt_fields, new_attempt_id
from vramprobe.simulate.instrument import PhaseMark, SimulatedInstrument
from vramprobe.simulate.kernels import cpu_scratch
from vramprobe.simulate.quantised import bitsandbytes_on_fake_tensors, kernels
from vramprobe.simulate.recorder import Kernels, Recorder, Scratch
from vramprobe.spec import CellSpec
from vramprobe.workload.training import set_up, train_step


_RNG_STATE_BYTES = 5056


@dataclass(frozen=True)
class Simulation:
    """A simulated run: its record, and every allocation and free, with the phases by position."""

    record: RunRecord
    events: list[Event]
    marks: list[PhaseMark]


@contextmanager
def session(spec: CellSpec, make_recorder: Callable[[Scratch, Kernels], Recorder] = Recorder) -> Iterator[Recorder]:
    """While open, tensors are fake and a Recorder sees them."""
    with_bitsandbytes = spec.quant != "none" or any(word in spec.optim for word in ("bnb", "paged", "lion"))
    libraries = {"bitsandbytes": kernels("cpu")} if with_bitsandbytes else {}
    with (
        patch.object(masking_utils, "is_tracing", lambda tensor=None: False),
        patch.object(torch.utils, "swap_tensors", _set_data),
        patch.object(torch, "get_rng_state", _rng_state),
        patch.object(torch, "set_rng_state", lambda state: None),
        bitsandbytes_on_fake_tensors() if with_bitsandbytes else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
        make_recorder(cpu_scratch, libraries) as recorder,
    ):
        yield recorder


def _rng_state() -> torch.Tensor:
    """The CPU generator's state, which every checkpoint keeps (aten/src/ATen/CPUGeneratorImpl.cpp)."""
    return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8)


def _set_data(old: torch.Tensor, new: torch.Tensor) -> None:
    """What ``Module.to`` does with real parameters; with fake ones it wants to swap the objects, which fails."""
    if old is not new:
        old.data = new.data


def simulate(spec: CellSpec) -> Simulation:
    """Run the cell on fake tensors."""
    began, started_at = time.perf_counter(), datetime.now(UTC)
    gc.collect()
    with session(spec) as recorder:
        instrument = SimulatedInstrument(recorder)
        work = set_up(spec, instrument)
        instrument.settle()
        for step in range(1, spec.steps + 1):
            train_step(work, instrument, step)
    observation = instrument.finish()
    record = RunRecord(
        **(attempt_fields(spec, new_attempt_id(), started_at) | {"instrument": "simulated"}),
        spec=spec,
        environment=environment.capture(spec, "spawn", with_torch=False),
        outcome=Ok(),
        peak=peak_of(observation),
        ledger=ledger_of(observation),
        phases=observation.phases,
        timing=Timing(total_seconds=time.perf_counter() - began),
    )
    return Simulation(record, recorder.events, instrument.marks)
