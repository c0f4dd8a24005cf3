"""Memory: a cell on so many of a card -> what ``vramprobe predict`` says of it, or that the libraries do not run it so.

In: a CellSpec with its ranks, a Gpu. Out: a Prediction, and a Verdict of it. Of one GPU by the fit that ships for the
card, where one reaches so far, else by arithmetic alone, or as predict has it, which takes ten times as long; of
several near, by shares of one GPU's.
"""

from __future__ import annotations

from vramprobe.catalog import Gpu
from vramprobe.model.card_fit import CardFit, shipped_fit
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predicted
from vramprobe.predict.shares import near
from vramprobe.predict.unknowns import unknowns, wide_verdict
from vramprobe.predict.verdict import Verdict
from vramprobe.spec import CellSpec


def predict_on(spec: CellSpec, gpu: Gpu) -> Prediction:
    """Predict one of the cell's GPUs. Raises what predict and near raise."""
    return near(spec, gpu) if spec.num_gpus > 1 else predict(spec, _fit_of(gpu, of_one_card=True), gpu=gpu)


def replayed_on(spec: CellSpec, gpu: Gpu) -> Prediction:
    """Predict a cell of one GPU with reserved memory, to the byte as ``vramprobe predict --gpu`` does."""
    by = {"engine": "auto", "gpu": gpu, "replays": True, "retries": True, "records": False}
    return predicted(spec, _fit_of(gpu), **by)


def judged_on(spec: CellSpec, gpu: Gpu, found: Prediction) -> Verdict:
    """Return predict's verdict under a Trainer's loop: with room for releases of the libraries that nobody named."""
    return wide_verdict(found, unknowns(spec, found, gpu, ["loop"]), gpu)


def _fit_of(gpu: Gpu, *, of_one_card: bool = False) -> CardFit | None:
    return shipped_fit("cuda", gpu, of_one_card=of_one_card)


def fit_name(spec: CellSpec, gpu: Gpu) -> str:
    """Return the name that tells cards with a fit of their own apart; empty for all others, and for several GPUs."""
    return gpu.short_name if spec.num_gpus == 1 and _fit_of(gpu, of_one_card=True) else ""
