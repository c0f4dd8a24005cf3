"""Predict: a spec (and a fit) -> the peak of a cell that nobody ran, on one GPU, with an interval.

In: a CellSpec, and a CardFit, or no fit for the arithmetic alone. Out: a frozen Prediction. Outside of what was fitted
the interval widens and says so (uncertainty.py). Never imports torch or numpy.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.one_gpu import Counted, count_one
from vramprobe.predict.prediction import ALONE, HasKernels, Prediction
from vramprobe.predict.reasons import reasons
from vramprobe.predict.replay import with_replay, with_retries
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD, interval_around, with_fit
from vramprobe.spec import CellSpec
from vramprobe.terms.step.workspaces import highest_moment, with_workspaces, workspaces_bytes

#: Beyond this the intervals leave the range of floats, and nobody's computer is near it.
LARGEST_BYTES = 10**300


def predict(
    spec: CellSpec,
    model: CardFit | None = None,
    *,
    gpu: HasKernels | None = None,
    replays: bool = False,
    retries: bool = False,
) -> Prediction:
    """The peak of a steady step of ``spec``: allocated memory, and the other tiers where they are known.

    With ``gpu``'s attention kernels; without one, those of a card that runs flash attention. ``replays``: allocated and
    reserved memory by the allocator's replay, where a fit says how far that is off; otherwise reserved memory is a
    share of allocated memory. ``retries``: also whether ``gpu`` runs the cell by giving cached blocks back.

    Raises UnsupportedArchitecture for what the formula engine has no arithmetic for, several GPUs among it, and
    VramprobeError beyond LARGEST_BYTES.
    """
    if spec.num_gpus > 1:
        raise UnsupportedArchitecture("arithmetic is of one GPU: a rank of several is recorded, by engine recipe")
    counted = count_one(spec, gpu)
    found = _of_moments(spec, counted, workspaces_bytes(spec, gpu))
    if replays and model is not None and model.device == spec.device == "cuda":
        found = with_replay(found, spec, counted.moments, gpu)
    if model is not None:
        num_params = architecture(spec.architecture).num_params
        found = with_fit(found, spec, model, gpu, num_params=num_params)
    return with_retries(found, spec, gpu) if retries else found


def _of_moments(spec: CellSpec, counted: Counted, workspaces: int) -> Prediction:
    """The Prediction of moments that were counted; ``workspaces``: cuBLAS's bytes. Raises VramprobeError beyond
    LARGEST_BYTES.
    """
    if max(moment.total_bytes for moment in counted.moments) > LARGEST_BYTES:
        raise VramprobeError(
            f"a cell of {spec.model} with this batch_size and seq_len would need more than 10^300 bytes; give sizes "
            "that a machine could hold"
        )
    moment = highest_moment(with_workspaces(counted.moments, workspaces))
    return Prediction(
        cell_id=spec.cell_id,
        peak_allocated_bytes=interval_around(moment.total_bytes, ARITHMETIC_SPREAD[spec.device]),
        peak_phase=moment.phase,
        peak_label=moment.label,
        terms=moment.terms,
        constant_bytes=0,
        warnings=[ALONE, *counted.notes, *reasons(spec, moment.terms)],
        libraries=dict(pinned_libraries()),
    )
