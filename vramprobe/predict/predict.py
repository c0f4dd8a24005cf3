"""Predict: a spec (and a fit) -> the peak of a cell that nobody ran, on one GPU, with an interval.

In: a CellSpec, and a MemoryModel, or no fit for the arithmetic alone. Out: a frozen Prediction. Outside the range of
the fit the interval widens and says so; far outside it refuses, and hands over the untrusted number on the exception.
Never imports torch or numpy.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import OutOfRange, VramprobeError
from vramprobe.model.memory_model import MemoryModel, half_width, peak_moment
from vramprobe.predict.one_gpu import Counted, count_one
from vramprobe.predict.prediction import HasKernels, Interval, Prediction
from vramprobe.predict.reasons import reasons
from vramprobe.predict.replay import with_replay, with_retries
from vramprobe.predict.uncertainty import bounds, device_tier, outside, provenance
from vramprobe.spec import CellSpec
from vramprobe.terms.step.versions import libraries_of
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes
from vramprobe.units import format_bytes

#: Beyond this the intervals leave the range of floats, and nobody's computer is near it.
LARGEST_BYTES = 10**300


def predict(
    spec: CellSpec,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
    replays: bool = False,
    retries: bool = False,
) -> Prediction:
    """The peak of a steady step of ``spec``: allocated memory, and the other tiers where they are known.

    With ``gpu``'s attention kernels; without one, those of a card that runs flash attention. ``replays``: allocated and
    reserved memory by the allocator's replay, where the fit knows how far that is off; otherwise reserved memory is a
    share of allocated memory. ``retries``: also whether ``gpu`` runs the cell by giving cached blocks back.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for, several GPUs among it,
    VramprobeError beyond LARGEST_BYTES, and OutOfRange, carrying the prediction, far outside the fitted range unless
    ``allow_extrapolation``.
    """
    if spec.num_gpus > 1:
        raise UnsupportedArchitecture("arithmetic is of one GPU: a rank of several is recorded, by engine recipe")
    counted = count_one(spec, gpu)
    found = predict_moments(spec, counted, model, workspaces_bytes(spec, gpu))
    if replays:
        found = with_replay(found, spec, counted.moments, model, gpu)
    refusals = [] if model is None or allow_extrapolation else outside(spec, model)[1]
    if refusals:
        raise OutOfRange(
            f"{spec.cell_id} is far outside what the fit has seen: {'; '.join(refusals)}. The untrusted number is "
            f"{format_bytes(found.peak_allocated_bytes.value)}; allow extrapolation to get it, or measure cells nearer "
            "to this one",
            found,
        )
    return with_retries(found, spec, gpu) if retries else found


def predict_moments(
    spec: CellSpec, counted: Counted, model: MemoryModel | None = None, workspaces: int = 0
) -> Prediction:
    """The Prediction of moments that were counted, whatever the fit says of its range; ``workspaces``: cuBLAS's bytes.

    Raises VramprobeError beyond LARGEST_BYTES.
    """
    if max(moment.total_bytes for moment in counted.moments) > LARGEST_BYTES:
        raise VramprobeError(
            f"a cell of {spec.model} with this batch_size and seq_len would need more than 10^300 bytes; give sizes "
            "that a machine could hold"
        )
    coefficients = model.coefficients if model else {}
    moment = peak_moment(with_workspaces(counted.moments, workspaces), coefficients)
    constant = model.constant_of(spec.method) if model else 0
    value = moment.total_bytes + constant
    warnings, refusals, doublings, widening = outside(spec, model)
    half = half_width(model.interval, value, moment.terms, spec.method, doublings) if model else None
    low, high = bounds(spec.device, half, widening)
    allocated = Interval(value=value, low=round(value * max(low, 0.0)), high=round(value * high))
    reserved = _reserved(model, allocated)
    return Prediction(
        cell_id=spec.cell_id,
        peak_allocated_bytes=allocated,
        peak_phase=moment.phase,
        peak_label=moment.label,
        terms=moment.terms,
        constant_bytes=constant,
        reserved_bytes=reserved,
        device_bytes=device_tier(reserved, model.device_over_reserved_bytes if model else None),
        fit=provenance(model) if model else None,
        warnings=[*refusals, *warnings, *counted.notes, *reasons(spec, moment.terms)],
        libraries=libraries_of(spec),
    )


def _reserved(model: MemoryModel | None, allocated: Interval) -> Interval | None:
    """By the fit's ratio over allocated memory; null where it has none."""
    ratio = model.reserved_over_allocated if model else None
    if ratio is None:
        return None
    return Interval(
        value=round(allocated.value * ratio.value),
        low=round(allocated.low * ratio.low),
        high=round(allocated.high * ratio.high),
    )
