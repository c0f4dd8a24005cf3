"""Layers divided among ranks: a cell under transformers' ``tp_plan="auto"`` -> the memory of one rank, by arithmetic.

In: a spec, whose batch is that of all ranks together, how many ranks, a fit or none. Out: a Prediction of the first
rank, and the fewest that fit a GPU. What is counted is said in terms/tensor_parallel.py. No torch here.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import TYPE_CHECKING

from vramprobe.architecture import architecture
from vramprobe.choices import TENSOR_PARALLEL
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, workspaces_bytes
from vramprobe.predict.prediction import (
    HasKernels,
    Prediction,
    Verdict,
    predict,
    predict_moments,
    verdict,
    without_flash,
)  # fmt: skip
from vramprobe.predict.sharding import MinGpus
from vramprobe.spec import CellSpec, cannot_divide_layers
from vramprobe.terms.tensor_parallel import part_of

if TYPE_CHECKING:
    from vramprobe.catalog import Gpu


def predict_layers(
    spec: CellSpec,
    num_gpus: int,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
) -> Prediction:
    """The allocated peak of one of ``num_gpus`` ranks, each with its part of every layer; they have one batch.

    Raises SpecError for a number of GPUs that cannot be and for what the libraries do not divide, and what predict
    raises.
    """
    if num_gpus < 2:
        raise SpecError(f"num_gpus {num_gpus} under tp: layers are divided among 2 GPUs or more; give so many")
    _require_divided(spec, num_gpus)
    moments = part_of(spec, num_gpus, gpu is None or gpu.has_flash).moments(spec)
    note = f"one rank of {num_gpus} under tp, all with the same batch, by arithmetic, not measured"
    return predict_moments(
        spec, moments, model, allow_extrapolation=allow_extrapolation, num_gpus=num_gpus,
        notes=[note, *without_flash(spec, gpu)], sharding=TENSOR_PARALLEL, workspaces=workspaces_bytes(spec, gpu),
    )  # fmt: skip


def _require_divided(spec: CellSpec, num_gpus: int) -> None:
    ranks = spec.model_copy(update={"num_gpus": num_gpus, "sharding": TENSOR_PARALLEL})
    if reason := cannot_divide_layers(ranks):
        raise SpecError(reason)


def min_ranks(
    spec: CellSpec, gpu: Gpu, model: MemoryModel | None = None, *, allow_extrapolation: bool = False
) -> MinGpus:
    """The fewest of ``gpu`` whose ranks have the verdict ``fits``, of the numbers that divide the heads; null where the
    most do not.

    Raises what predict_layers raises.
    """
    _require_divided(spec, 1)
    arch = architecture(spec.architecture)
    heads = gcd(arch.num_heads, arch.num_kv_heads)
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}

    @cache
    def judged(num_gpus: int) -> Verdict:
        if num_gpus == 1:
            return verdict(predict(spec, model, **words), gpu)
        return verdict(predict_layers(spec, num_gpus, model, **words), gpu)

    numbers = [number for number in range(1, heads + 1) if heads % number == 0]
    fewest = next((number for number in numbers if judged(number).verdict == "fits"), None)
    tight = next((number for number in numbers if judged(number).verdict != "does not fit"), None)
    return MinGpus(
        sharding=TENSOR_PARALLEL, num_gpus=fewest, tight_num_gpus=None if tight == fewest else tight,
        verdict=judged(fewest or heads),
    )  # fmt: skip
