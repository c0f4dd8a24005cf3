"""Recipes: a card and a number of them -> the settings under which a cell fits, and the fastest of those.

In: a cell, how many sequences an optimizer step takes, a card. Out: a Setting for each micro-batch, checkpointing and
sharding that fits, with predict's verdict and the estimate of its speed. Predictions and counts are made once and
shared by all cards whose kernels are alike. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import Gpu
from vramprobe.errors import OutOfRange
from vramprobe.model.memory_model import MemoryModel, shipped_fit
from vramprobe.predict.prediction import Prediction, Verdict, predict, verdict
from vramprobe.predict.sharding import DTENSOR_OPTIMIZERS, cannot_shard, predict_rank
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.measured import Measured
from vramprobe.speed.rates import SpeedFit
from vramprobe.speed.step import Estimate, estimate_work
from vramprobe.speed.work import Work, work_of
from vramprobe.terms.ranks import FSDP, Sharding

Words = dict[str, Any]


class Setting(BaseModel):
    """One way to run the cell on ``num_gpus``; its memory and speed are predicted, not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    num_gpus: int
    sharding: Sharding | None  # null on one GPU
    batch_size: int  # of one GPU's micro-step
    grad_accum: int
    gradient_checkpointing: bool
    verdict: Verdict
    estimate: Estimate
    warnings: list[str]

    def words(self) -> Words:
        """What it sets, as predict's options."""
        found: Words = {"batch_size": self.batch_size, "gradient_checkpointing": self.gradient_checkpointing}
        if self.grad_accum > 1:
            found["grad_accum"] = self.grad_accum
        if self.sharding is not None:
            found |= {"sharding": self.sharding, "num_gpus": self.num_gpus}
        return found


class Kitchen:
    """A cell's words, and every prediction and count that was made of it; one for each question."""

    def __init__(
        self, words: Words, *, global_batch: int, sharding: Sharding | None, fit: SpeedFit,
        measured: Mapping[str, Measured] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._words, self._global_batch, self._sharding = words, global_batch, sharding
        self._fit, self._measured = fit, measured
        self._specs: dict[tuple[Any, ...], CellSpec] = {}
        self._predictions: dict[tuple[Any, ...], Prediction] = {}
        self._works: dict[int, tuple[CellSpec, Work]] = {}  # with the spec, so that no other gets its id

    def settings(self, gpu: Gpu, num_gpus: int) -> Iterator[Setting]:
        """Every setting that is tried, whether or not it fits: from the largest micro-batch down to one that does.

        Raises what predict raises where the model or an option has no arithmetic.
        """
        fixed = self._words.get("gradient_checkpointing")
        for sharding in self._shardings(num_gpus):
            for checkpointing in (False, True) if fixed is None else (fixed,):
                if (yield from self._of_batches(gpu, num_gpus, sharding, checkpointing)) and sharding in (None, "ddp"):
                    return  # all of the batch at once, nothing recomputed, nothing gathered: none is faster

    def _shardings(self, num_gpus: int) -> list[Sharding | None]:
        if num_gpus == 1:
            return [None]
        if self._sharding is not None:
            return [self._sharding]
        # Adapters' states are small, so that dividing them alone saves nothing.
        return ["ddp", "zero2", "fsdp"] if self._words["method"] == "full" else ["ddp", "fsdp"]

    def _of_batches(self, gpu: Gpu, num_gpus: int, sharding: Sharding | None, checkpointing: bool) -> Iterator[Setting]:
        each = max(1, round(self._global_batch / num_gpus))  # sequences of one GPU in an optimizer step
        given = self._words.get("batch_size")
        sizes = [given] if given else [size for size in range(each, 0, -1) if each % size == 0]
        for size in sizes:  # a larger one is faster: fewer launches, longer products
            accum = self._words.get("grad_accum") or max(1, round(each / size))
            spec = self._spec(gpu, size, accum, checkpointing)
            if is_refused(spec, sharding):
                return False
            try:
                prediction = self._prediction(spec, gpu, num_gpus, sharding)
            except UnsupportedArchitecture:
                if sharding is None:
                    raise
                return False
            judged = verdict(prediction, gpu)
            yield Setting(
                num_gpus=num_gpus, sharding=sharding, batch_size=size, grad_accum=accum,
                gradient_checkpointing=checkpointing, verdict=judged, warnings=prediction.warnings,
                estimate=self.estimate(spec, gpu, num_gpus, sharding),
            )  # fmt: skip
            if judged.verdict == "fits":
                return size == sizes[0] and not checkpointing
        return False

    def estimate(self, spec: CellSpec, gpu: Gpu, num_gpus: int, sharding: Sharding | None) -> Estimate:
        """The speed of a cell, by records of the card where there are some."""
        known = self._measured.get(gpu.short_name)
        of_card = {} if known is None else {"faster": known.factor, "half_width": known.half_width}
        return estimate_work(self._work(spec), spec.grad_accum, gpu, num_gpus=num_gpus, sharding=sharding or "ddp",
                             fit=self._fit, **of_card)  # fmt: skip

    def _spec(self, gpu: Gpu, size: int, accum: int, checkpointing: bool) -> CellSpec:
        has_bf16 = gpu.bf16_dense_tflops is not None
        key = has_bf16, size, accum, checkpointing
        if key not in self._specs:
            own = {} if has_bf16 else without_bf16(self._words)
            own |= {"batch_size": size, "grad_accum": accum, "gradient_checkpointing": checkpointing}
            self._specs[key] = resolve(**{"device": "cuda", **self._words, **own})
        return self._specs[key]

    def _work(self, spec: CellSpec) -> Work:
        if id(spec) not in self._works:
            self._works[id(spec)] = spec, work_of(spec)
        return self._works[id(spec)][1]

    def _prediction(self, spec: CellSpec, gpu: Gpu, num_gpus: int, sharding: Sharding | None) -> Prediction:
        fit = shipped_fit("cuda", gpu, of_one_card=True) if sharding is None else None
        key = id(spec), num_gpus, sharding, gpu.has_flash, gpu.blas_workspace_bytes, gpu.name if fit else ""
        if key not in self._predictions:
            self._predictions[key] = predicted(spec, gpu, num_gpus, sharding, fit)
        return self._predictions[key]


def is_refused(spec: CellSpec, sharding: Sharding | None) -> bool:
    """Whether the libraries do not run the cell so."""
    if sharding is None:
        return False
    return cannot_shard(spec, sharding) is not None or (sharding in FSDP and spec.optim not in DTENSOR_OPTIMIZERS)


def predicted(
    spec: CellSpec, gpu: Gpu, num_gpus: int, sharding: Sharding | None, fit: MemoryModel | None
) -> Prediction:
    """As ``vramprobe predict`` says it: by the fit that ships for the card, where one reaches so far."""
    if sharding is not None:
        return predict_rank(spec, num_gpus, sharding, gpu=gpu)
    try:
        return predict(spec, fit, gpu=gpu)
    except OutOfRange:
        return predict(spec, None, gpu=gpu)


def without_bf16(words: Words) -> Words:
    """The precision that a card before Ampere is used in, where none was asked for."""
    if any(words.get(name) is not None for name in ("dtype", "autocast", "recipe")):
        return {}
    return {"dtype": "fp32" if words["method"] == "full" else "fp16", "autocast": "fp16"}


def best(settings: list[Setting]) -> Setting | None:
    """The fastest that fits, else the fastest that is tight, else the one that lacks least; None of none."""
    for wanted in ("fits", "tight"):
        if found := [one for one in settings if one.verdict.verdict == wanted]:
            return max(found, key=lambda one: one.estimate.tokens_per_second.value)
    return min(settings, key=lambda one: one.verdict.needed_bytes.value, default=None)
