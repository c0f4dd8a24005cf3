"""Settings: a card and a number of them -> the best of those in which a cell can run there.

In: a cell, how many sequences an optimizer step takes, a card. Out: a Setting with predict's verdict and the estimate
of its speed. Settings are tried from the fastest on until one fits; recorded steps are shared by all cards that share
recipes. Loads no torch.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ConfigDict

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.errors import VramprobeError
from vramprobe.predict.at_hand import NotAtHand, recorded_card
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recipe_replay import Replay
from vramprobe.predict.recorded import predict_replay
from vramprobe.predict.shares import near
from vramprobe.predict.unknowns import unknowns, wide_verdict
from vramprobe.predict.verdict import Verdict, usable_bytes, verdict
from vramprobe.recipe.book import MOST_MICRO_STEPS
from vramprobe.recommend.recorded import RecordedStep, find_step, one_gpu, record_step
from vramprobe.records.frozen import FrozenModel
from vramprobe.resolve import resolve
from vramprobe.rules.not_sharded import cannot_shard
from vramprobe.rules.sharding import SHARDINGS
from vramprobe.spec import CellSpec
from vramprobe.speed.counted import Count
from vramprobe.speed.measured import Measured, with_measured
from vramprobe.speed.scaled import Estimate, estimate, whole_step

Words = dict[str, Any]


class Candidate(NamedTuple):
    """Open settings of a cell: the micro-batch of one GPU, how many make a step, checkpointing, sharding."""

    batch_size: int
    grad_accum: int
    gradient_checkpointing: bool
    sharding: Sharding | None


class Setting(FrozenModel):
    """One way to run the cell on ``num_gpus``; its memory and speed are predicted, not measured."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

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

    @property
    def condition(self) -> str:
        """Condition of the speed model's interval."""
        return self.estimate.condition

    def words(self) -> Words:
        """Options of predict that it sets."""
        found: Words = {"batch_size": self.batch_size, "gradient_checkpointing": self.gradient_checkpointing}
        if self.grad_accum > 1:
            found["grad_accum"] = self.grad_accum
        if self.sharding is not None:
            found |= {"sharding": self.sharding, "num_gpus": self.num_gpus}
        return found


class SettingsSearch:
    """A cell's words, and every step and prediction that was made of it; one for each question and method.

    ``records``: False for what is at hand alone. ``left_out``: why steps were not recorded.
    """

    def __init__(
        self,
        words: Words,
        *,
        global_batch: int,
        sharding: Sharding | None,
        measured: Mapping[str, Measured] | None = None,
        records: bool = True,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._words, self._global_batch, self._sharding = words, global_batch, sharding
        self._measured, self._records, self._say = measured or {}, records, say
        self._specs: dict[tuple[Any, ...], CellSpec] = {}
        self._steps: dict[tuple[Any, ...], RecordedStep | None] = {}
        self._refused: dict[tuple[Any, ...], VramprobeError] = {}
        self._counts: dict[tuple[Any, ...], Count] = {}
        self._replays: dict[tuple[Any, ...], Replay] = {}
        self._least_bytes: dict[tuple[Any, ...], int] = {}  # of tensors at the peak, whatever the workspaces
        self._near: dict[tuple[Any, ...], Prediction | None] = {}

    def best(self, gpu: Gpu, num_gpus: int) -> Setting | None:
        """The fastest setting that fits, else the fastest that is tight, else the one that lacks least; None where the
        cell runs under no kind of sharding.

        Raises what a recording raises where there is one of no setting.
        """
        ordered = self._fastest_first(gpu, num_gpus)
        tried: dict[Candidate, Setting | None] = {}
        for candidate, made in ordered:
            if num_gpus == 1 and self._is_too_large(candidate, gpu):
                continue
            found = tried[candidate] = self._setting(candidate, made, gpu, num_gpus)
            if found is not None and found.verdict.verdict == "fits":
                return found
        if tight := [one for one in tried.values() if one is not None and one.verdict.verdict == "tight"]:
            return tight[0]
        each = (tried[one] if one in tried else self._setting(one, made, gpu, num_gpus) for one, made in ordered)
        return min(filter(None, each), key=lambda one: one.verdict.needed_bytes.value, default=None)

    def _is_too_large(self, candidate: Candidate, gpu: Gpu) -> bool:
        """Return True if tensors that a replay for another card has at its peak, workspaces aside, exceed this one."""
        least = self._least_bytes.get(_key(candidate, gpu), 0)
        return least > 0 and least > usable_bytes(gpu, device_is_known=False)

    def _setting(self, candidate: Candidate, made: Estimate, gpu: Gpu, num_gpus: int) -> Setting | None:
        """Return the candidate with its verdict; None where nothing is known of a rank."""
        prediction = self._prediction(candidate, gpu, num_gpus)
        if prediction is None:
            return None
        judged = _judged_on(self.on_ranks(candidate, gpu, num_gpus), gpu, prediction)
        return Setting(
            **candidate._asdict(), num_gpus=num_gpus, verdict=judged, estimate=made, warnings=prediction.warnings
        )

    def _fastest_first(self, gpu: Gpu, num_gpus: int) -> list[tuple[Candidate, Estimate]]:
        """Return the settings whose step is recorded, by the best value of their tokens per second."""
        found = [
            (one, made)
            for one in self.candidates(num_gpus)
            if cannot_shard(self.on_ranks(one, gpu, num_gpus)) is None
            and (made := self.estimate(one, gpu, num_gpus)) is not None
        ]
        if not found and self._refused:
            raise next(iter(self._refused.values()))
        return sorted(found, key=lambda pair: -pair[1].tokens_per_second.value)

    def candidates(self, num_gpus: int) -> list[Candidate]:
        """All that are tried on so many; what the words give stays as it is given."""
        each = max(1, round(self._global_batch / num_gpus))  # sequences of one GPU in an optimizer step
        given, accum = self._words.get("batch_size"), self._words.get("grad_accum")
        fixed = self._words.get("gradient_checkpointing")
        sizes = [given] if given else [size for size in range(each, 0, -1) if each % size == 0]
        return [
            Candidate(size, accum or max(1, round(each / size)), checkpointing, sharding)
            for sharding in self._shardings(num_gpus)
            for checkpointing in ((True, False) if fixed is None else (fixed,))
            for size in sizes
        ]

    def _shardings(self, num_gpus: int) -> list[Sharding | None]:
        if num_gpus == 1:
            return [None]
        if self._sharding is not None:
            return [self._sharding]
        return [kind for kind, rules in SHARDINGS.items() if self._words["method"] in rules.recommended_for]

    def estimate(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> Estimate | None:
        """The speed of a step, by records of the card where there are some; None where it is not recorded."""
        step = self._step(candidate, gpu)
        if step is None:
            return None
        spec, key = self.on_ranks(candidate, gpu, num_gpus), (*_key(candidate, gpu), candidate, num_gpus)
        if key not in self._counts:
            self._counts[key] = whole_step(spec, step.count, step.spec.grad_accum, step.shared())
        made = estimate(spec, self._counts[key], gpu)
        known = self._measured.get(gpu.short_name)
        return made if known is None else with_measured(made, known)

    def on_ranks(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> CellSpec:
        """Return the candidate's cell on so many of the card; one before Ampere is used in fp16, where no precision was
        asked for."""
        key = gpu.bf16_dense_tflops is None, candidate, num_gpus
        if key not in self._specs:
            own = without_bf16(self._words) if gpu.bf16_dense_tflops is None else {}
            words: Words = {"device": "cuda"} | self._words | own | candidate._asdict()
            del words["sharding"]
            ranks = {"num_gpus": num_gpus, "sharding": candidate.sharding}
            self._specs[key] = resolve(**words).model_copy(update=ranks)
        return self._specs[key]

    def _step(self, candidate: Candidate, gpu: Gpu) -> RecordedStep | None:
        """The step of one GPU of the candidate's, with two micro-steps for any number of them."""
        key = _key(candidate, gpu)
        if key not in self._steps:
            self._steps[key] = self._recorded(one_gpu(self.on_ranks(candidate, gpu, 1)), gpu)
        return self._steps[key]

    def _recorded(self, spec: CellSpec, gpu: Gpu) -> RecordedStep | None:
        over_rows = spec.batch_size > 1 and "batch_size" not in self._words
        recording = recorded_card(gpu).short_name, spec.gradient_checkpointing, over_rows
        if recording in self._refused:
            return None
        try:
            if (found := find_step(spec, gpu)) is not None:
                return found
            if not self._records:
                raise NotAtHand(f"no recipe of {spec.cell_id} is at hand")
            return record_step(spec, gpu, self._say, over_rows=over_rows)
        except VramprobeError as error:
            self._refused[recording] = error
            return None

    def _prediction(self, candidate: Candidate, gpu: Gpu, num_gpus: int) -> Prediction | None:
        """Return what predict says of one GPU; of several about that, None where nothing is known of a rank."""
        spec, key = self.on_ranks(candidate, gpu, num_gpus), _key(candidate, gpu)
        if num_gpus > 1:
            key = (*key, num_gpus, candidate.sharding, gpu.blas_workspace_bytes)
            if key not in self._near:
                self._near[key] = None
                with suppress(NotAtHand, UnsupportedArchitecture):
                    self._near[key] = near(spec, gpu)
            return self._near[key]
        own = (*key, gpu.blas_workspace_bytes)
        if own not in self._replays:
            step = self._step(candidate, gpu)
            assert step is not None
            self._replays[own] = step.replay(gpu)
            alive = self._replays[own].at_peak
            self._least_bytes[key] = sum(alive.values()) - alive.get("workspaces", 0)
        return predict_replay(self._replays[own], spec, gpu=gpu)


def _judged_on(spec: CellSpec, gpu: Gpu, found: Prediction) -> Verdict:
    """Return predict's verdict under a Trainer's loop: with room for releases of the libraries that nobody named; of
    several GPUs by the near interval alone."""
    if spec.num_gpus > 1:
        return verdict(found, gpu)
    return wide_verdict(found, unknowns(spec, found, ["loop"]), gpu)


def _key(candidate: Candidate, gpu: Gpu) -> tuple[Any, ...]:
    """Return what steps on one GPU are told apart by."""
    micro_steps = min(candidate.grad_accum, MOST_MICRO_STEPS)
    return recorded_card(gpu).short_name, candidate.batch_size, micro_steps, candidate.gradient_checkpointing


def without_bf16(words: Words) -> Words:
    """The precision that a card before Ampere is used in, where none was asked for."""
    if any(words.get(name) is not None for name in ("dtype", "autocast", "recipe")):
        return {}
    return {"dtype": "fp32" if words["method"] == "full" else "fp16", "autocast": "fp16"}
