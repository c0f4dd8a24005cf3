"""CellSpec → the RunRecord and the event trace of a run that never happened: the workload's code on fake tensors.

In: a cell. Out: a Simulation. Touches no device and computes nothing; a predictor, labelled so in the record.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from transformers.utils import is_bitsandbytes_available

from vramprobe import catalog
from vramprobe.allocator.config import AllocatorConfig, parse_alloc_conf
from vramprobe.catalog import Gpu
from vramprobe.catalog.gpus import cublas_workspace_bytes
from vramprobe.errors import VramprobeError
from vramprobe.kernels.chip import Chip
from vramprobe.log.depth import NotLinear, deepen, line_of
from vramprobe.log.log import Log, log_of
from vramprobe.log.pairing import scripts_of
from vramprobe.log.reserved import reserve
from vramprobe.measure import environment
from vramprobe.measure.observation import Observation, ledger_of, peak_of, reasons_not_to_believe, remarks_on
from vramprobe.measure.worker import load_libraries, model_facts
from vramprobe.records.record import (
    Invalid,
    ModelFacts,
    Ok,
    PhaseMemory,
    RunRecord,
    Timing,
    attempt_fields,
    new_attempt_id,
)
from vramprobe.simulate.fake import fused_loss
from vramprobe.simulate.fake.adapters import peft_on_a_card
from vramprobe.simulate.fake.quantised import bitsandbytes_on_fake_tensors, kernels
from vramprobe.simulate.fake.recorder import Recorder
from vramprobe.simulate.fake.vision import KERNELS as VISION_KERNELS
from vramprobe.simulate.fake.vision import images_on_fake_tensors
from vramprobe.simulate.instrument import SimulatedInstrument
from vramprobe.simulate.kernels import cuda
from vramprobe.simulate.kernels.cpu import KERNELS, cpu_scratch
from vramprobe.simulate.kernels.cuda import chip_of, on_cuda
from vramprobe.simulate.kernels.scratch import MADE, cuda_scratch
from vramprobe.spec import CellSpec
from vramprobe.terms.step.versions import version_notes
from vramprobe.workload.model_config import config_from_dict
from vramprobe.workload.training import set_up, train_step, watch_stack

#: Layers of the shallowest run, at least: the first and the last one, which have neighbours unlike them.
_FEW_LAYERS = 2
#: torch.get_rng_state() of the CPU's generator (aten/src/ATen/CPUGeneratorImpl.cpp).
_RNG_STATE_BYTES = 5056


class NotSimulated(VramprobeError):
    """A cell that the simulation does not cover; the message says what it does."""


@dataclass(frozen=True)
class Simulation:
    """A simulated run: its record, and every allocation and free of set-up and two steps."""

    record: RunRecord
    log: Log | None  # None for a deep model where a phase of its layers does not repeat (depth.py)


def simulate(spec: CellSpec, *, gpu: Gpu | None = None, depth: Literal["auto", "full"] = "auto") -> Simulation:
    """Run the cell on fake tensors. Raises NotSimulated where it is not covered or a library refuses it.

    ``gpu`` decides which kernels a cuda cell meets; an A100's where none is named. A deep model is made of three
    shallow ones where its layers repeat (depth.py); ``full`` runs every layer. The third and later steps are the
    second's, which must end where the first ended.
    """
    alloc_conf = _check(spec)
    chip = None if spec.device == "cpu" else chip_of(gpu)
    on_cpu = spec.model_copy(update={"device": "cpu"})  # where all fake tensors are; the chip says how they behave
    with _quiet(), _no_collection():
        _load_libraries(spec)
        began, started_at = time.perf_counter(), datetime.now(UTC)
        try:
            run = _deep(on_cpu, chip) if depth == "auto" else None
            run = run or _run(on_cpu, chip)
        except (VramprobeError, AssertionError):
            raise
        except Exception as error:
            raise _refusal(spec, error) from error
    observation = run.observation
    observation.phases.extend(_later_steps(observation.phases, spec.steps))
    remarks = remarks_on(run.facts, spec)
    with suppress(VramprobeError):
        remarks += version_notes(spec)
    if chip is not None and run.log is not None:
        reserved = reserve(observation.phases, run.log, alloc_conf)
        observation = replace(observation, phases=reserved.phases, num_alloc_retries=reserved.num_alloc_retries)
    elif chip is not None:
        remarks.append("a phase of the layers does not repeat: reserved memory is not known, sizes are not rounded")
    ledger = ledger_of(observation)
    doubts = reasons_not_to_believe(observation, ledger)
    record = RunRecord(
        **attempt_fields(spec, new_attempt_id(), started_at, "simulated"),
        spec=spec,
        environment=environment.capture(spec, "spawn", with_torch=False),
        outcome=Invalid(reasons=doubts) if doubts else Ok(),
        peak=peak_of(observation),
        ledger=ledger,
        phases=observation.phases,
        facts=run.facts,
        timing=Timing(total_seconds=time.perf_counter() - began),
        num_alloc_retries=observation.num_alloc_retries,
        warnings=["simulated: a prediction on fake tensors, no measurement", *remarks],
    )
    return Simulation(record, run.log)


def _load_libraries(spec: CellSpec) -> None:
    """Some modules make small tensors as they load; those must be real."""
    with _compile_at_first_call():
        load_libraries(spec)
        if spec.method != "full" and is_bitsandbytes_available():  # peft looks for its layers, whatever the method
            import peft.tuners.lora.bnb  # noqa: F401


@contextmanager
def _compile_at_first_call() -> Iterator[None]:
    """Compile functions at their first call: bitsandbytes compiles four as it is imported (1 s), and none runs here."""
    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = cache(lambda: compile_now(model, **options))
        return wraps(model)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with patch.object(torch, "compile", compile_later):
        yield


@dataclass(frozen=True)
class _Run:
    """Two steps, as they were seen or put together."""

    observation: Observation
    facts: ModelFacts
    log: Log | None


def _run(spec: CellSpec, chip: Chip | None) -> _Run:
    with session(spec, chip) as recorder:
        instrument = SimulatedInstrument(recorder)
        work = set_up(spec, instrument)
        instrument.settle()
        with watch_stack(work.model) as stack:
            train_step(work, instrument, 1)
        train_step(work, instrument, 2)
        facts = model_facts(work, stack)
    return _Run(instrument.finish(), facts, log_of(recorder.events, instrument.marks, instrument.owned))


def _deep(spec: CellSpec, chip: Chip | None) -> _Run | None:
    """The cell from three shallow runs; None where it is not deep or its layers do not repeat."""
    config = spec.architecture
    num_layers, period = catalog.depth_of(config), _period(config)
    if num_layers is None or period is None or config.get("is_encoder_decoder"):
        return None
    shallowest = num_layers % period + -(-_FEW_LAYERS // period) * period
    depths = [shallowest + more * period for more in range(3)]
    if num_layers < sum(depths):
        return None
    runs = [_run(spec.model_copy(update={"architecture": catalog.cut_depth(config, depth)}), chip) for depth in depths]
    times = (num_layers - shallowest) // period
    try:
        scripts = tuple(scripts_of([run.log for run in runs]))
        deep = deepen(runs[0].log.marks, scripts, times)
        held_bytes = line_of(tuple(run.observation.held_bytes for run in runs), times)
        facts = ModelFacts(**line_of(tuple(run.facts.model_dump() for run in runs), times))
    except NotLinear:
        return None
    top = peak_of(Observation(deep.phases, held_bytes))
    at_peak = next(
        alive
        for phase, alive in zip(deep.phases, deep.at_peak, strict=True)
        if phase.step == top.step and phase.allocated_peak_bytes == top.allocated_bytes
    )
    return _Run(Observation(deep.phases, held_bytes, at_peak), facts, deep.log)


def _period(architecture: dict[str, Any]) -> int | None:
    """Layers after which the pattern of layers begins again; None where it does not, or it is not known to."""
    config = config_from_dict(architecture).get_text_config()  # it knows its family's pattern where the file does not
    if getattr(config, "first_k_dense_replace", 0) or getattr(config, "use_sliding_window", False):
        return None
    lists = [getattr(config, name, None) for name in ("layer_types", "mlp_layer_types", "no_rope_layers")]
    kinds = list(zip(*[one for one in lists if isinstance(one, list) and one], strict=False)) or [None] * 2
    repeats = (size for size in range(1, len(kinds)) if kinds[:-size] == kinds[size:])
    return next(repeats, None)


def _refusal(spec: CellSpec, error: Exception) -> NotSimulated:
    """Whatever a library raised; only where torch or this simulation did can fake tensors be the reason."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if package in ("torch", "vramprobe", ""):
        why = "tensors without values may be the reason: try vramprobe measure, which runs real ones"
    else:
        why = f"{package} refuses it, and would in a real run, too; change what it names"
    return NotSimulated(f"{spec.cell_id} cannot be simulated ({said}); {why}")


def _check(spec: CellSpec) -> AllocatorConfig:
    """What the cell says of the allocator, read before anything runs."""
    if spec.weights != "random":
        raise NotSimulated("weights pretrained cannot be simulated; use weights random: values do not decide memory")
    if spec.limit_vram is not None:
        raise NotSimulated("limit_vram holds a real GPU's memory; leave it out and name the card with --gpu")
    if spec.torch_compile:
        raise NotSimulated("torch_compile cannot be simulated: what a compiler fuses is not known; measure the cell")
    if spec.other_head:
        library = "TRL" if spec.uses_trl else "Cut Cross-Entropy"
        raise NotSimulated(
            f"{spec.other_head} cannot be simulated: {library}'s code takes no fake tensors; predict it with the "
            "formula engine, or measure the cell, on an emulated GPU say (--emulate)"
        )
    if spec.padding and spec.attn == "flash_attention_2":
        raise NotSimulated("flash_attention_2 takes the padding out, by values that a simulation lacks; use attn sdpa")
    alloc_conf = parse_alloc_conf(spec.alloc_conf or "")
    if alloc_conf.per_process_memory_fraction < 1:
        raise NotSimulated(
            "per_process_memory_fraction is a part of a card, and a simulation has no limit; leave it out of alloc_conf"
        )
    return alloc_conf


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries remark about a model that nobody trains is for nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _later_steps(phases: list[PhaseMemory], num_steps: int) -> list[PhaseMemory]:
    """Steps 3 and later as copies of step 2."""
    second = [phase for phase in phases if phase.step == 2]
    return [phase.model_copy(update={"step": step}) for step in range(3, num_steps + 1) for phase in second]


@contextmanager
def session(spec: CellSpec, chip: Chip | None) -> Iterator[Recorder]:
    """While open, tensors are fake, a Recorder sees them, and what depends on the device goes as on ``chip``.

    None: as on the CPU. Either way the tensors say that they are on the CPU; ``spec.device`` must.
    """
    own_kernels = KERNELS | (kernels(chip) if spec.needs_bitsandbytes else {})
    own_kernels |= fused_loss.KERNELS if spec.fused_linear_cross_entropy else {}
    if chip is None:
        recorder, rng_state = Recorder(cpu_scratch, own_kernels, knows_values=spec.images > 0), _rng_state
    else:
        on_host = frozenset({torch.ops.aten.lift_fresh.default})  # torch.tensor(number), such as an optimizer's step
        own_kernels = cuda.KERNELS | own_kernels | (VISION_KERNELS if spec.images else {})
        workspace = cublas_workspace_bytes(chip.capability[0])
        scratch = partial(cuda_scratch, chip=chip)
        recorder = Recorder(scratch, own_kernels, workspace, on_host, MADE, knows_values=spec.images > 0)
        state = _rng_state()  # a real tensor: both generators keep their state in the host's memory
        rng_state = lambda: state  # noqa: E731
    set_autocast_enabled, rand = torch.set_autocast_enabled, torch.rand

    def set_and_tell(device: str, enabled: bool) -> None:
        set_autocast_enabled(device, enabled)
        recorder.autocast = torch.is_autocast_enabled("cpu")
        if chip is not None:  # peft asks without naming a device, which means this one
            set_autocast_enabled("cuda", recorder.autocast)

    def no_layer_dropped(*size: Any, **options: Any) -> Any:
        """transformers 5.17, and no more 5.23, asks of each layer of an OPT whether ``rand([]) < layerdrop``: never."""
        return 1.0 if size == ([],) else rand(*size, **options)

    with (
        # A mask's values are not looked at: without padding there is none, and with it none may be left out.
        patch.object(masking_utils, "is_tracing", lambda tensor=None: spec.padding),
        patch.object(torch.utils, "swap_tensors", _set_data),
        patch.object(torch, "rand", no_layer_dropped),
        patch.object(torch, "get_rng_state", rng_state),
        patch.object(torch, "set_rng_state", lambda state: None),
        patch.object(torch, "set_autocast_enabled", set_and_tell),
        bitsandbytes_on_fake_tensors(chip, recorder.hide) if spec.needs_bitsandbytes else nullcontext(),
        on_cuda(chip) if chip is not None else nullcontext(),
        peft_on_a_card(recorder) if chip is not None and spec.method != "full" else nullcontext(),
        fused_loss.liger_on_fake_tensors(chip) if spec.fused_linear_cross_entropy else nullcontext(),
        images_on_fake_tensors(recorder, spec.model_type) if spec.images else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        yield recorder


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave cycles alone: they hold no tensor of a step, and to search all that is imported takes half a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rng_state() -> torch.Tensor:
    """The CPU generator's state, which every checkpoint keeps."""
    return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8)


def _set_data(old: torch.Tensor, new: torch.Tensor) -> None:
    """What ``Module.to`` does with real parameters; with fake ones it wants to swap the objects, which fails."""
    if old is not new:
        old.data = new.data
