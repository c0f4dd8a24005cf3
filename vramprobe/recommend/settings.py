"""Settings: a card and a number of them -> the best of those in which a cell can run there.

In: a cell, how many sequences an optimizer step takes, a card. Out: a Setting with predict's verdict and the estimate
of its speed. Settings are tried from the fastest on until one fits; predictions and counts are made once and shared by
all cards whose kernels are alike. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.kernels.chip import chip_like
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.recommend.memory import fit_name, judged_on, predict_on, replayed_on
from vramprobe.rules.arithmetic import counted_architecture
from vramprobe.rules.not_sharded import cannot_shard
from vramprobe.rules.sharding import SHARDINGS
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.measured import Measured
from vramprobe.speed.rates import SpeedFit
from vramprobe.speed.step import Estimate, estimate_work, tokens_per_second
from vramprobe.speed.work import Work, work_of

Words = dict[str, Any]


class Candidate(NamedTuple):
    """Open settings of a cell: the micro-batch of one GPU, how many make a step, checkpointing, sharding."""

    batch_size: int
    grad_accum: int
    gradient_checkpointing: bool
    sharding: Sharding | None


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

    @property
    def candidate(self) -> Candidate:
        """Open settings of the cell, as they are set."""
        return Candidate(self.batch_size, self.grad_accum, self.gradient_checkpointing, self.sharding)

    def words(self) -> Words:
        """Options of predict that it sets."""
        found: Words = {"batch_size": self.batch_size, "gradient_checkpointing": self.gradient_checkpointing}
        if self.grad_accum > 1:
            found["grad_accum"] = self.grad_accum
        if self.sharding is not None:
            found |= {"sharding": self.sharding, "num_gpus": self.num_gpus}
        return found


class SettingsSearch:
    """A cell's words, and every prediction and count that was made of it; one for each question."""

    def __init__(
        self,
        words: Words,
        *,
        global_batch: int,
        sharding: Sharding | None,
        fit: SpeedFit,
        measured: Mapping[str, Measured] | None = None,
    ) -> None:
        self._words, self._global_batch, self._sharding = words, global_batch, sharding
        self._fit, self._measured = fit, measured or {}
        self._specs: dict[tuple[Any, ...], CellSpec] = {}
        self._works: dict[tuple[Any, ...], Work] = {}
        self._predictions: dict[tuple[Any, ...], Prediction] = {}
        self._replayed: dict[tuple[Candidate, str, int], Prediction] = {}

    def best(self, gpu: Gpu, num_gpus: int) -> Setting | None:
        """The fastest setting that fits, else the fastest that is tight, else the one that lacks least; None where the
        cell runs under no kind of sharding.

        Raises what predict raises where the model or an option has no arithmetic.
        """
        tried = []
        for candidate in self.fastest_first(gpu, num_gpus):
            prediction = self._prediction(candidate, gpu, num_gpus)
            if prediction is None:
                continue
            judged = self._judged(candidate, prediction, gpu, num_gpus)
            if judged.verdict == "fits":
                return self._setting(candidate, gpu, num_gpus, judged, prediction.warnings)
            tried.append((candidate, judged, prediction.warnings))
        tight = [one for one in tried if one[1].verdict == "tight"]
        found = tight[0] if tight else min(tried, key=lambda one: one[1].needed_bytes.value, default=None)
        return None if found is None else self._setting(found[0], gpu, num_gpus, found[1], found[2])

    def fastest_first(self, gpu: Gpu, num_gpus: int) -> list[Candidate]:
        """Order them by the best value of their tokens per second: an interval's factor is the same for all."""
        rates = self._fit.rates
        found = [
            (-tokens_per_second(self._work(one, gpu), one.grad_accum, gpu, num_gpus, one.sharding or "ddp", rates), one)
            for one in self.candidates(num_gpus)
            if cannot_shard(self.on_ranks(one, gpu, num_gpus)) is None
        ]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def candidates(self, num_gpus: int) -> list[Candidate]:
        """All that are tried on so many; what the words give stays as it is given."""
        each = max(1, round(self._global_batch / num_gpus))  # sequences of one GPU in an optimizer step
        given, accum = self._words.get("batch_size"), self._words.get("grad_accum")
        fixed = self._words.get("gradient_checkpointing")
        sizes = [given] if given else [size for size in range(each, 0, -1) if each % size == 0]
        return [
            Candidate(size, accum or max(1, round(each / size)), checkpointing, sharding)
            for sharding in self._shardings(num_gpus)
            for checkpointing in ((False, True) if fixed is None else (fixed,))
            for size in sizes
        ]

    def _shardings(self, num_gpus: int) -> list[Sharding | None]:
        if num_gpus == 1:
            return [None]
        if self._sharding is not None:
            return [self._sharding]
        return [kind for kind, rules in SHARDINGS.items() if self._words["method"] in rules.recommended_for]

    def setting(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> Setting | None:
        """The cell in this way on so many of the card; None where nothing is known of a rank of it."""
        prediction = self._prediction(candidate, gpu, num_gpus)
        if prediction is None:
            return None
        judged = self._judged(candidate, prediction, gpu, num_gpus)
        return self._setting(candidate, gpu, num_gpus, judged, prediction.warnings)

    def _judged(self, candidate: Candidate, prediction: Prediction, gpu: Gpu, num_gpus: int) -> Verdict:
        """Judge as predict does where that has answered, else by the interval alone."""
        if (candidate, gpu.short_name, num_gpus) in self._replayed:
            return judged_on(self.on_ranks(candidate, gpu, num_gpus), gpu, prediction)
        return verdict(prediction, gpu)

    def _setting(self, candidate: Candidate, gpu: Gpu, num_gpus: int, judged: Verdict, warnings: list[str]) -> Setting:
        return Setting(
            num_gpus=num_gpus,
            sharding=candidate.sharding,
            batch_size=candidate.batch_size,
            grad_accum=candidate.grad_accum,
            gradient_checkpointing=candidate.gradient_checkpointing,
            verdict=judged,
            estimate=self.estimate(self._work(candidate, gpu), candidate.grad_accum, gpu, num_gpus, candidate.sharding),
            warnings=warnings,
        )

    def estimate(self, work: Work, grad_accum: int, gpu: Gpu, num_gpus: int, sharding: Sharding | None) -> Estimate:
        """The speed of a step, by records of the card where there are some."""
        known = self._measured.get(gpu.short_name)
        return estimate_work(
            work,
            grad_accum,
            gpu,
            num_gpus=num_gpus,
            sharding=sharding or "ddp",
            fit=self._fit,
            faster=1.0 if known is None else known.factor,
            half_width=None if known is None else known.half_width,
        )

    def spec_of(self, candidate: Candidate, gpu: Gpu) -> CellSpec:
        """The cell in this way; a card before Ampere is used in fp16, where no precision was asked for."""
        key = _key(candidate, gpu)
        if key not in self._specs:
            own = without_bf16(self._words) if gpu.bf16_dense_tflops is None else {}
            own = own | {
                "batch_size": candidate.batch_size,
                "grad_accum": candidate.grad_accum,
                "gradient_checkpointing": candidate.gradient_checkpointing,
            }
            self._specs[key] = resolve(**{"device": "cuda", **self._words, **own})
        return self._specs[key]

    def on_ranks(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> CellSpec:
        """Return the candidate's cell on so many of the card."""
        ranks = {"num_gpus": num_gpus, "sharding": candidate.sharding}
        return self.spec_of(candidate, gpu).model_copy(update=ranks)

    def _work(self, candidate: Candidate, gpu: Gpu) -> Work:
        key = _key(candidate, gpu)
        if key not in self._works:
            spec = self.spec_of(candidate, gpu)
            counted_architecture(spec)
            self._works[key] = work_of(spec)
        return self._works[key]

    def replay(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> bool:
        """Judge this way of running it by the allocator's replay from here on; False where it is so already, and of
        several GPUs, of which nothing is replayed.
        """
        key = candidate, gpu.short_name, num_gpus
        if num_gpus > 1 or key in self._replayed:
            return False
        self._replayed[key] = replayed_on(self.on_ranks(candidate, gpu, num_gpus), gpu)
        return True

    def _prediction(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> Prediction | None:
        if (candidate, gpu.short_name, num_gpus) in self._replayed:
            return self._replayed[candidate, gpu.short_name, num_gpus]
        spec = self.on_ranks(candidate, gpu, num_gpus)
        kernels = chip_like(gpu), gpu.blas_workspace_bytes, fit_name(spec, gpu)
        key = (*_key(candidate, gpu), num_gpus, candidate.sharding, *kernels)
        if key not in self._predictions:
            if candidate.sharding is None:
                self._predictions[key] = predict_on(spec, gpu)
            else:
                self._predictions[key] = None
                with suppress(UnsupportedArchitecture):
                    self._predictions[key] = predict_on(spec, gpu)
        return self._predictions[key]


def _key(candidate: Candidate, gpu: Gpu) -> tuple[Any, ...]:
    return gpu.bf16_dense_tflops is None, candidate.batch_size, candidate.grad_accum, candidate.gradient_checkpointing


def without_bf16(words: Words) -> Words:
    """The precision that a card before Ampere is used in, where none was asked for."""
    if any(words.get(name) is not None for name in ("dtype", "autocast", "recipe")):
        return {}
    return {"dtype": "fp32" if words["method"] == "full" else "fp16", "autocast": "fp16"}
