"""Predict: a spec (and a fit) -> the peak of a cell that nobody ran, with an interval, its terms and its phase.

In: a CellSpec and a MemoryModel, or no fit for the arithmetic alone. Out: a frozen Prediction, and a verdict per GPU.
Outside the range of the fit the interval widens and says so; far outside it refuses, and hands over the untrusted
number on the exception. Never imports torch, numpy or scipy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import architecture
from vramprobe.choices import PhaseName
from vramprobe.errors import OutOfRange, VramprobeError
from vramprobe.model.memory_model import (
    CHOICES,
    DecidesMemory,
    MemoryModel,
    Spread,
    half_width,
    peak_moment,
    with_workspaces,
    workspaces_bytes,
)
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, moments
from vramprobe.terms.versions import is_fourth, libraries_of, taken_notes, version_notes
from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    from vramprobe.records.record import RunRecord

#: (low, high) of measured / predicted without a fit. CPU: the spread over this project's own cells. CUDA: rounding to
#: 512 bytes and most kernels' scratch are not in the arithmetic, so it may read low.
ARITHMETIC_SPREAD = {"cpu": (0.98, 1.02), "cuda": (0.95, 1.10)}
#: (low, high) of measured / simulated. CPU: far beyond the worst phase of 210 cells (benchmarks/simulate_cpu.csv).
#: CUDA: an allowance until a GPU has been measured; others' five rows were within 0.3 % once what their older libraries
#: did otherwise was added, up to 10 % above without (benchmarks/published.csv).
ALLOCATED_SPREAD = {"cpu": (0.99, 1.01), "cuda": (0.95, 1.06)}
#: The replay of the caching allocator has not been held against a real one's snapshot yet.
RESERVED_SPREAD = (0.95, 1.08)
#: No fit is trusted to less than this, relative to the value: what the caching allocator does not split off depends on
#: all that ran before. The CPU's allocator hands out what was asked for.
MIN_HALF_WIDTH = {"cpu": 0.0, "cuda": 0.005}
#: A number beyond the fitted range by this factor is refused.
FAR = 30.0
#: The numbers that are refused so far out; others only widen.
LIMIT_NAMES = ("num_params", "num_tokens")
#: Each choice never seen widens the interval by this much of the value.
WIDENING = 0.02
#: Nor is a cell under transformers 4, of which no fit is made; emulated runs were within 0.3 %.
FOURTH_WIDENING = 0.005
#: CUDA context (0.1 to 0.6 GiB by GPU and driver) and libraries' workspaces, where no fit has measured them.
CONTEXT_ALLOWANCE_BYTES = 1 * GIB
#: NCCL's buffers on each rank of several. Published runs on 2 and 4 A100s leave 1.6 to 2.5 GiB between nvidia-smi and
#: what torch reserves, the context within (benchmarks/reproduce.md); more ranks have not been seen.
NCCL_ALLOWANCE_BYTES = 3 * GIB // 2
#: Of what rests on no run.
ALONE = "arithmetic alone: no fit was given"
#: Beyond this the intervals leave the range of floats, and nobody's computer is near it.
LARGEST_BYTES = 10**300
#: A prediction above this share of the usable memory is tight: fragmentation and a longer batch need room.
TIGHT_SHARE = 0.95


#: Closed forms in milliseconds, or the simulation (trace_engine.py) in seconds, which knows any architecture.
Engine = Literal["formula", "trace"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Interval(_Frozen):
    """Bytes: the best value, and where the truth should lie."""

    value: int
    low: int
    high: int


class Within(_Frozen):
    """How a run whose reserved memory would go beyond its card gets along: cached blocks go back, which takes time."""

    limit_bytes: int  # what segments may take together
    num_alloc_retries: int  # over the load and the steps


class FitProvenance(_Frozen):
    """Which fit a prediction rests on."""

    data_fingerprint: str
    num_records: int
    models: list[str]
    instrument: str
    device_name: str
    mean_absolute_error: float | None  # on models left out of the fit; null where there was only one, and by a replay
    vramprobe_version: str


class CardPeak(_Frozen):
    """One of the cards that one process has its layers on."""

    card: int
    parts: str  # what lies there, in words
    num_layers: int
    peak_allocated_bytes: int
    peak_phase: PhaseName


class Prediction(_Frozen):
    """The peak of one cell; ``terms`` (bytes at the peak moment) and ``constant_bytes`` add up to the value.

    ``constant_bytes``: what the fit found beside the terms.
    """

    cell_id: str
    engine: Engine = "formula"
    peak_allocated_bytes: Interval
    peak_phase: PhaseName
    peak_label: str
    terms: dict[str, int]
    constant_bytes: int
    reserved_bytes: Interval | None = None  # null where the fit has not seen the caching allocator
    device_bytes: Interval | None = None  # null where the fit has not seen NVML
    within: Within | None = None  # null where there is room enough, it runs out even so, or nobody asked (with_retries)
    fit: FitProvenance | None = None  # null: arithmetic alone
    warnings: list[str] = []
    libraries: dict[str, str] = {}  # package → version: what it holds for
    num_gpus: int = 1  # more: of one rank, by arithmetic (sharding.py)
    sharding: str | None = None
    host_bytes: int | None = None  # tensors of one rank in host memory, where something is offloaded
    cards: list[CardPeak] | None = None  # under device-map, of which the fullest is the prediction's


class HasMemory(Protocol):
    """A GPU, as the catalog describes it."""

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int | None: ...


class HasKernels(DecidesMemory, HasMemory, Protocol):
    """A GPU, as far as attention's kernels depend on it, its name and its size."""


class Verdict(_Frozen):
    """Whether a cell fits on a GPU; ``needed_bytes`` is compared with ``usable_bytes``."""

    gpu: str
    verdict: Literal["fits", "tight", "does not fit"]
    needed_bytes: Interval
    usable_bytes: int
    reason: str


def predict(
    spec: CellSpec,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
    replays: bool = False,
) -> Prediction:
    """The allocated peak of a steady step of ``spec``, and the other tiers where the fit knows them.

    With attention's kernels of ``gpu``; without one, as on a card that runs flash attention. ``replays``: both tiers by
    the allocator's replay, where the fit knows how far that is off (0.1 s for an 8B, 0.3 s for a 70B); without it
    reserved memory is a share of the allocated one.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for, VramprobeError beyond
    LARGEST_BYTES, and OutOfRange, carrying the prediction, far outside the fitted range unless ``allow_extrapolation``.
    """
    found, notes = moments(spec, gpu is None or gpu.has_flash), [*_not_quantised(spec), *without_flash(spec, gpu)]
    try:
        prediction = predict_moments(
            spec, found, model, allow_extrapolation=allow_extrapolation, notes=notes,
            workspaces=workspaces_bytes(spec, gpu),
        )  # fmt: skip
    except OutOfRange as error:
        if replays and model is not None:
            error.prediction = _with_replay(error.prediction, spec, found, model, gpu)
        raise
    return _with_replay(prediction, spec, found, model, gpu) if replays and model is not None else prediction


def _with_replay(
    prediction: Prediction, spec: CellSpec, found: Sequence[Moment], model: MemoryModel, gpu: HasKernels | None
) -> Prediction:
    """The prediction with both tiers by the allocator's replay; the terms are then the arithmetic's own, and what is
    left over is the blocks'.
    """
    ratios = model.allocated_over_replayed, model.reserved_over_replayed
    if spec.device != "cuda" or ratios[0] is None or ratios[1] is None:
        return prediction
    from vramprobe.model.replayed import replayed

    *_, doublings, widening = _outside(spec, model)
    growth, played = 1 + model.interval.growth_per_doubling * doublings, replayed(spec, gpu)
    allocated = _times(played.allocated_bytes, ratios[0], growth, widening)
    reserved = _times(played.reserved_bytes, ratios[1], growth, widening)
    moment = peak_moment(with_workspaces(found, workspaces_bytes(spec, gpu)), {})
    left = allocated.value - moment.total_bytes + moment.terms.get("block_remainders", 0)
    terms = {cause: size for cause, size in (moment.terms | {"block_remainders": max(left, 0)}).items() if size}
    return prediction.model_copy(update={
        "peak_allocated_bytes": allocated, "peak_phase": moment.phase, "peak_label": moment.label, "terms": terms,
        "constant_bytes": min(left, 0), "reserved_bytes": reserved,
        "device_bytes": device_tier(reserved, model.device_over_reserved_bytes),
        "fit": _provenance(model).model_copy(update={"mean_absolute_error": None}),  # it is of the terms alone
    })  # fmt: skip


def with_retries(prediction: Prediction, spec: CellSpec, gpu: HasKernels | None) -> Prediction:
    """The replayed prediction, of a card or, with the ranks in ``spec``, of one of several, with what becomes of it
    where ``gpu`` has room for its tensors, but not for all that the allocator would keep: one more replay, on a card of
    that size.
    """
    allocated, reserved, device = prediction.peak_allocated_bytes, prediction.reserved_bytes, prediction.device_bytes
    if reserved is None or gpu is None or gpu.total_bytes is None or spec.device != "cuda":
        return prediction
    beside = device.value - reserved.value if device is not None else 0
    limit = usable_bytes(gpu, device_is_known=device is not None, num_gpus=spec.num_gpus) - beside
    if not allocated.value <= limit < reserved.value:
        return prediction
    from vramprobe.model.replayed import num_alloc_retries

    retries = num_alloc_retries(spec, gpu, limit)
    if retries is None:
        return prediction
    return prediction.model_copy(update={"within": Within(limit_bytes=limit, num_alloc_retries=retries)})


def _times(value: int, ratio: Spread, growth: float, widening: float) -> Interval:
    """An interval that is nowhere narrower than MIN_HALF_WIDTH: the ratio's own is of emulated runs alone."""
    least = MIN_HALF_WIDTH["cuda"]
    low = ratio.value - max((ratio.value - ratio.low) * growth, least) - widening
    high = ratio.value + max((ratio.high - ratio.value) * growth, least) + widening
    return Interval(value=round(value * ratio.value), low=round(value * max(low, 0.0)), high=round(value * high))


def _not_quantised(spec: CellSpec) -> list[str]:
    """What is said where quantisation reaches less than half of the parameters, as of a mixture of experts, or where
    another release's cell is asked for."""
    if is_fourth(spec):
        return version_notes(spec)
    taken = taken_notes(spec)
    if spec.quant == "none":
        return taken
    arch = architecture(spec.architecture)
    reached = sum(p.numel * arch.num_copies(p) for p in arch.parameters if p.role == "linear")
    if 2 * reached >= arch.num_params:
        return taken
    return [
        *taken,
        f"{spec.quant} reaches only {reached:,} of {arch.num_params:,} parameters: bitsandbytes takes linear layers "
        "alone, and neither embeddings nor experts in one tensor",
        *version_notes(spec),
    ]


def without_flash(spec: CellSpec, gpu: HasKernels | None) -> list[str]:
    """What is said where ``gpu`` runs another kernel than most."""
    if gpu is None or gpu.has_flash or spec.attn != "sdpa" or spec.device != "cuda":
        return []
    return [
        f"{gpu.name} has no flash attention: sdpa takes the memory-efficient kernel, and where that does not run "
        "(bf16, or query heads that share keys) holds the scores whole"
    ]


#: Warnings, reasons to refuse, doublings beyond the fitted range, widening as a share of the value.
_Outside = tuple[list[str], list[str], float, float]


def predict_moments(
    spec: CellSpec,
    found: Sequence[Moment],
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    at_most: Sequence[Moment] = (),
    notes: Sequence[str] = (),
    num_gpus: int = 1,
    sharding: str | None = None,
    workspaces: int = 0,
) -> Prediction:
    """The same from moments that were counted elsewhere; the interval reaches up to what ``at_most`` comes to.

    ``workspaces``: bytes of cuBLAS's.
    """
    if max(moment.total_bytes for moment in found) > LARGEST_BYTES:
        raise VramprobeError(
            f"a cell of {spec.model} with this batch_size and seq_len would need more than 10^300 bytes; give sizes "
            "that a machine could hold"
        )
    coefficients = model.coefficients if model else {}
    found, at_most = with_workspaces(found, workspaces), with_workspaces(at_most, workspaces)
    moment = peak_moment(found, coefficients)
    room = peak_moment(at_most, coefficients).total_bytes - moment.total_bytes if at_most else 0
    constant = model.constant_of(spec.method) if model else 0
    value = moment.total_bytes + constant
    alone: _Outside = ([ALONE], [], 0.0, 0.0)
    warnings, refusals, doublings, widening = _outside(spec, model) if model else alone
    half = half_width(model.interval, value, moment.terms, spec.method, doublings) if model else None
    low, high = bounds(spec.device, half, widening)
    allocated = Interval(value=value, low=round(value * max(low, 0.0)), high=round(value * high))
    allocated = allocated.model_copy(update={"high": allocated.high + max(room, 0)})
    reserved, device = _other_tiers(model, allocated)
    is_named = num_gpus == 1 or spec.sharding is not None
    prediction = Prediction(
        cell_id=spec.cell_id if is_named else f"{spec.cell_id}_{sharding}-x{num_gpus}",
        peak_allocated_bytes=allocated, peak_phase=moment.phase, peak_label=moment.label,
        terms=moment.terms, constant_bytes=constant, reserved_bytes=reserved, device_bytes=device,
        fit=_provenance(model) if model else None, warnings=[*refusals, *warnings, *notes],
        libraries=libraries_of(spec), num_gpus=num_gpus, sharding=sharding,
    )  # fmt: skip
    if refusals and not allow_extrapolation:
        raise OutOfRange(
            f"{spec.cell_id} is far outside what the fit has seen: {'; '.join(refusals)}. The untrusted number is "
            f"{format_bytes(value)}; allow extrapolation to get it, or measure cells nearer to this one",
            prediction,
        )
    return prediction


def verdict(prediction: Prediction, gpu: HasMemory) -> Verdict:
    """Whether the predicted cell fits on ``gpu``: by the device tier where it is known, else with an allowance for the
    CUDA context. What fits only because cached blocks go back is tight. Raises VramprobeError where the GPU's size is
    not known.
    """
    judged = _judged(
        gpu, prediction.peak_allocated_bytes, prediction.reserved_bytes, prediction.device_bytes,
        num_gpus=prediction.num_gpus if prediction.cards is None else 1,  # a single process needs no NCCL
    )  # fmt: skip
    within = prediction.within
    if judged.verdict != "does not fit" or within is None or within.limit_bytes > judged.usable_bytes:
        return judged
    times = "once" if within.num_alloc_retries == 1 else f"{within.num_alloc_retries} times"
    return judged.model_copy(update={
        "verdict": "tight",
        "reason": f"{judged.reason}; it runs all the same, as the allocator gives its cached blocks back {times}, "
        "which takes time",
    })  # fmt: skip


def verdict_on_simulated(record: RunRecord, gpu: HasMemory) -> Verdict:
    """Whether a simulated cell fits on ``gpu``: as :func:`verdict` says of the trace engine's prediction.

    One that ran out of memory there does not. Raises VramprobeError also where the run ended otherwise.
    """
    outcome = record.outcome
    if record.peak is not None and outcome.kind == "ok":
        reserved = record.peak.reserved_bytes
        return _judged(
            gpu, simulated_interval(record.peak.allocated_bytes, ALLOCATED_SPREAD[record.spec.device]),
            None if reserved is None else simulated_interval(reserved, RESERVED_SPREAD), None,
        )  # fmt: skip
    if outcome.kind != "oom":
        raise VramprobeError(f"whether it fits on {gpu.name} is not known: the simulation ended as {outcome.kind}")
    least = (outcome.allocated_bytes or 0) + (outcome.requested_bytes or 0)
    from vramprobe.records.table import describe_outcome

    return Verdict(
        gpu=gpu.name, verdict="does not fit", needed_bytes=Interval(value=least, low=least, high=least),
        usable_bytes=usable_bytes(gpu, device_is_known=False), reason=f"it ran out {describe_outcome(outcome)}",
    )  # fmt: skip


def simulated_interval(value: int, ratios: tuple[float, float]) -> Interval:
    """Around a simulated value, with ``ratios`` (low, high) of measured / simulated."""
    return Interval(value=value, low=round(value * ratios[0]), high=round(value * ratios[1]))


def _judged(
    gpu: HasMemory, allocated: Interval, reserved: Interval | None, device: Interval | None, *, num_gpus: int = 1
) -> Verdict:
    usable = usable_bytes(gpu, device_is_known=device is not None, num_gpus=num_gpus)
    if device is not None:
        needed, basis = device, "predicted device memory"
    else:
        needed = reserved or allocated
        tier = "reserved" if reserved else "allocated"
        basis = f"predicted {tier} memory, {format_bytes(CONTEXT_ALLOWANCE_BYTES)} set aside for the CUDA context"
    if num_gpus > 1:
        basis += f", {format_bytes(NCCL_ALLOWANCE_BYTES)} for NCCL, on each rank"
    answer: Literal["fits", "tight", "does not fit"] = "tight"
    if needed.value > usable:
        answer = "does not fit"
    elif needed.high <= TIGHT_SHARE * usable:
        answer = "fits"
    up_to = f" (up to {format_bytes(needed.high)})" if needed.high > needed.value else ""
    reason = f"{basis}: {format_bytes(needed.value)}{up_to} of {format_bytes(usable)}"
    return Verdict(gpu=gpu.name, verdict=answer, needed_bytes=needed, usable_bytes=usable, reason=reason)


def usable_bytes(gpu: HasMemory, *, device_is_known: bool, num_gpus: int = 1) -> int:
    """What a prediction is held against: the card, less the CUDA context where only torch's memory is known, and less
    NCCL's buffers where several GPUs talk.

    Raises VramprobeError where the GPU's size is not known.
    """
    if gpu.total_bytes is None:
        raise VramprobeError(f"the memory of {gpu.name} is not known, so nothing can be said about what fits on it")
    aside = 0 if device_is_known else CONTEXT_ALLOWANCE_BYTES
    return gpu.total_bytes - aside - (NCCL_ALLOWANCE_BYTES if num_gpus > 1 else 0)


def _outside(spec: CellSpec, model: MemoryModel) -> _Outside:
    """For what lies outside the fitted range."""
    warnings, refusals, doublings, widening = [], [], 0.0, 0.0
    numbers = {
        "num_params": architecture(spec.architecture).num_params, "num_tokens": spec.num_tokens,
        "seq_len": spec.seq_len, "batch_size": spec.batch_size,
    }  # fmt: skip
    for name, value in numbers.items():
        low, high = getattr(model.ranges, name)
        factor = max(low / value, value / high)
        if factor > 1:
            text = f"{name} {value:,} is outside the fitted range {low:,} to {high:,}"
            (refusals if factor > FAR and name in LIMIT_NAMES else warnings).append(text)
            doublings += math.log2(factor)
    if model.is_emulated:
        warnings.append(f"fitted to emulated runs{basis_of(model)}")
    unseen, refused = unseen_choices(spec, model)
    for name, text in unseen.items():
        (refusals if refused and name == "method" else warnings).append(text)
        widening += widening_of(name, model)
    if is_fourth(spec):
        warnings.append(
            "under transformers 4 by arithmetic: the fit is of transformers 5, and emulated runs were within 0.3 % "
            "(benchmarks/versions.md)"
        )
        widening += FOURTH_WIDENING
    if spec.device != model.device:
        warnings.append(f"the fit comes from {model.device} ({model.device_name}), the cell is for {spec.device}")
        widening += ARITHMETIC_SPREAD[spec.device][1] - 1
    return warnings, refusals, doublings, widening


def basis_of(model: MemoryModel) -> str:
    """What is known of the runs of an emulated fit, after a comma."""
    return f", {model.basis}" if model.basis else f": {model.device_name} itself was not measured"


def widening_of(choice: str, model: MemoryModel) -> float:
    """What a value of ``choice`` that the fit has not seen adds to the half-width, as a share of the value."""
    return model.interval.unseen_family if choice == "model_type" else WIDENING


def unseen_choices(spec: CellSpec, model: MemoryModel) -> tuple[dict[str, str], bool]:
    """(choice → what to say of it, for each that the fit has not seen; whether predict refuses over them)."""
    found = {}
    for name in CHOICES:
        value, seen = str(getattr(spec, name)), model.ranges.choices.get(name, [])
        if value not in seen:
            found[name] = f"{name} {value} was never seen; the fit knows {', '.join(seen)}"
    return found, "method" in found


def bounds(device: str, half_width: Any, widening: float, larger: Callable[..., Any] = max) -> tuple[Any, Any]:
    """(low, high) of measured / predicted; of arrays with ``larger`` NumPy's maximum. Without a fit ``half_width`` is
    None, and ARITHMETIC_SPREAD holds; ``widening`` is a share of the value.
    """
    if half_width is None:
        low, high = ARITHMETIC_SPREAD[device]
        return low - widening, high + widening
    half = larger(half_width, MIN_HALF_WIDTH[device]) + widening
    return 1 - half, 1 + half


def _other_tiers(model: MemoryModel | None, allocated: Interval) -> tuple[Interval | None, Interval | None]:
    """(reserved, device): a ratio over allocated, then a constant over reserved."""
    ratio = model.reserved_over_allocated if model else None
    if model is None or ratio is None:
        return None, None
    reserved = Interval(
        value=round(allocated.value * ratio.value), low=round(allocated.low * ratio.low),
        high=round(allocated.high * ratio.high),
    )  # fmt: skip
    return reserved, device_tier(reserved, model.device_over_reserved_bytes)


def device_tier(reserved: Interval | None, gap: Spread | None) -> Interval | None:
    """What NVML would show: reserved memory and a fit's constant over it; None where one of them is not known."""
    if reserved is None or gap is None:
        return None
    return Interval(
        value=reserved.value + round(gap.value), low=reserved.low + round(gap.low), high=reserved.high + round(gap.high)
    )


def _provenance(model: MemoryModel) -> FitProvenance:
    held_out = model.leave_one_model_out
    return FitProvenance(
        data_fingerprint=model.data_fingerprint, num_records=model.num_records, models=model.models,
        instrument=model.instrument, device_name=model.device_name,
        mean_absolute_error=held_out.overall.mean_absolute if held_out else None,
        vramprobe_version=model.vramprobe_version,
    )  # fmt: skip
