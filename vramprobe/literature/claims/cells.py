"""Cells: a cell's options → the facts that a claim's expression may name, each with the command that prints it.

In: options, and records where there are some. Out: a Fact (a number with its interval, its text and its Source). Loads
no torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from vramprobe import catalog
from vramprobe.architecture import architecture
from vramprobe.choices import Sharding
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.shares import near
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, verdict
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.step import Estimate, estimate_work
from vramprobe.speed.work import work_of
from vramprobe.terms import moments
from vramprobe.terms.cell import parameters

Options = Mapping[str, Any]
STATES = ("weights", "gradients", "optimizer_state")
#: What is no activation: the states, the copies that autocast makes of them, and an optimizer's working space.
NO_ACTIVATIONS = (*STATES, "cast_copies", "optimizer_temporaries")
#: Fields of a cell that do not decide the memory of its steps, or only its name.
_NO_MATTER = {"model", "steps", "timing_steps", "seed", "weights", "trust_remote_code"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A number, and the command that prints it at ``reads``, a dotted path in its JSON; alone where that is null."""

    command: str
    reads: str | None
    value: int


@dataclass(frozen=True)
class Fact:
    """Value of a name in an expression: its number as written in ``text``; the truth lies from ``low`` to ``high``.

    ``engine`` is null for what is counted or read in a data sheet.
    """

    value: Any
    text: str = ""
    low: float = math.nan
    high: float = math.nan
    engine: str | None = None
    source: Source | None = None


class Cells:
    """Cells asked for their numbers, each worked out once; ``records`` that are comparable go before predictions.

    What was measured goes before what was emulated, and each figure says which it is.
    """

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        usable = [record for record in records if record.outcome.kind == "ok" and record.peak is not None]
        self._seen = {
            _identity(record.spec): record
            for instrument in ("emulated", "cuda")
            for record in usable
            if record.instrument == instrument
        }

    def spec(self, options: Options) -> CellSpec:
        """The cell on a GPU."""
        return _spec(tuple(sorted(options.items())))

    def fact(self, name: str, options: Options, run: Options) -> Fact:
        """A fact of the cell, on the card, the GPUs and with the kernels of ``run``. Raises KeyError for an unknown."""
        match name:
            case "params":
                return _counted(_num_params(options["model"]))
            case "linear" | "rest":
                arch = architecture(catalog.find_model(options["model"]).config)
                linear = sum(p.numel * arch.num_copies(p) for p in arch.parameters if p.role == "linear")
                return _counted(linear if name == "linear" else arch.num_params - linear)
            case "peak":
                return self.peak(options)
            case "need":  # is held against memory of which the context is set aside already
                peak = self.peak(options)
                return replace(peak, high=peak.high - CONTEXT_ALLOWANCE_BYTES)
            case "rank":
                return self.rank(options, run["num_gpus"], run["sharding"])
            case "weights" | "gradients" | "optimizer_state" | "saved_activations":
                value = self._predicted(options).terms.get(name, 0)  # 0 where it is not alive at the peak
                source = Source(command=_predict_command(options), reads=f"terms.{name}", value=value)
                return _known(source, value, value, "formula")
            case "beside_states":
                source, (low, high) = self.beside_states(options), ARITHMETIC_SPREAD["cuda"]
                return _known(source, low * source.value, high * source.value, "formula")
            case "lora_params":
                spec = self.spec(options)
                made = parameters.tensors(spec, architecture(spec.architecture))
                return _counted(sum(one.numel * one.num_copies for one in made if one.trained), "formula")
            case "num_tokens":
                number = self.spec(options).num_tokens
                return Fact(number, str(number), number, number)
            case "fits":
                spec = self.spec(options)
                return Fact(verdict(predict(spec, gpu=run["gpu"]), run["gpu"]).verdict != "does not fit")
            case "seconds":
                seconds = _step(self.spec(options), run).seconds
                return Fact(seconds, f"{seconds:.4g}", seconds, seconds, "estimate")
            case "throughput":
                rate = _step(self.spec(options), run).tokens_per_second
                return Fact(rate.value, f"{rate.value:.4g}", rate.low, rate.high, "estimate")
        raise KeyError(name)

    def peak(self, options: Options) -> Fact:
        """The peak: what tensors take, measured or emulated where a record is comparable, else by arithmetic.

        It is up to ``high``, which is what nvidia-smi may show for it.
        """
        spec = self.spec(options)
        if (record := self._seen.get(_identity(spec))) is not None:
            found = record.peak
            assert found is not None
            machine = {} if record.emulation is None else {"emulate": record.emulation.card}
            command = command_of("measure", machine | dict(options))
            source = Source(command=command, reads="peak.allocated_bytes", value=found.allocated_bytes)
            high = found.device_bytes or found.allocated_bytes + CONTEXT_ALLOWANCE_BYTES
            device = record.environment.device_name
            engine = f"emulated {device}" if record.instrument == "emulated" else f"cuda on {device}"
            return _known(source, found.allocated_bytes, high, engine)
        return self._predicted_peak(options, CONTEXT_ALLOWANCE_BYTES, "formula")

    def rank(self, options: Options, num_gpus: int, sharding: Sharding) -> Fact:
        """The allocated peak of one rank of several, near; of one GPU, which shards nothing, the predicted one."""
        if num_gpus == 1:
            return self._predicted_peak(options, 0, None)
        ranks = {"sharding": sharding, "num_gpus": num_gpus}
        found = near(self.spec(options).model_copy(update=ranks)).peak_allocated_bytes
        words = ", ".join(f"{name}={value!r}" for name, value in ({"device": "cuda"} | dict(options) | ranks).items())
        code = (
            f"from vramprobe.predict import questions, shares; cell = questions.cell_on_ranks({words}); "
            "print(shares.near(cell).peak_allocated_bytes.value)"
        )
        source = Source(command=f'python -c "{code}"', reads=None, value=found.value)
        return _known(source, found.low, found.high, None)

    def beside_states(self, options: Options) -> Source:
        """The most bytes that a moment of the step holds beside the states: no one moment's number in predict."""
        value = max(
            sum(size for name, size in moment.terms.items() if name not in NO_ACTIVATIONS)
            for moment in moments(self.spec(options))
        )
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        code = (
            f"from vramprobe import api, terms; print(max(sum(n for k, n in m.terms.items() "
            f"if k not in {NO_ACTIVATIONS}) for m in terms.moments(api.cell(device='cuda', {words}))))"
        )
        return Source(command=f'python -c "{code}"', reads=None, value=value)

    def _predicted(self, options: Options) -> Prediction:
        return _prediction(tuple(sorted(options.items())))

    def _predicted_peak(self, options: Options, aside_bytes: int, engine: str | None) -> Fact:
        predicted = self._predicted(options)
        interval = predicted.peak_allocated_bytes
        source = Source(command=_predict_command(options), reads="peak_allocated_bytes.value", value=interval.value)
        # Weights, gradients and state are counted, not estimated: only the rest may be less than predicted.
        counted = sum(predicted.terms.get(name, 0) for name in STATES)
        low = counted + round(ARITHMETIC_SPREAD["cuda"][0] * (interval.value - counted))
        return _known(source, low, interval.high + aside_bytes, engine)


@lru_cache(maxsize=4096)
def _spec(options: tuple[tuple[str, Any], ...]) -> CellSpec:
    return resolve(device="cuda", **dict(options))


@lru_cache(maxsize=4096)
def _prediction(options: tuple[tuple[str, Any], ...]) -> Prediction:
    return predict(_spec(options))


def _known(source: Source, low: float, high: float, engine: str | None) -> Fact:
    return Fact(source.value, f"{source.value:_}", low, high, engine, source)


def _counted(number: int, engine: str | None = None) -> Fact:
    return Fact(number, f"{number:_}", number, number, engine)


def _num_params(model: str) -> int:
    found = catalog.find_model(model).n_params
    assert found is not None
    return found


def _step(spec: CellSpec, run: Options) -> Estimate:
    work = work_of(spec, fused=run["fused"]) if "fused" in run else work_of(spec)
    return estimate_work(work, spec.grad_accum, run["gpu"], num_gpus=run["num_gpus"], sharding=run["sharding"])


def _predict_command(options: Options) -> str:
    """Return the command that prints these numbers: a claim is about memory by arithmetic, without a fit."""
    return command_of("predict", {**options, "fit": "none"})


def command_of(verb: str, options: Options) -> str:
    """The command line that takes these options."""
    words = ["vramprobe", verb]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join([*words, "--json"])


def _identity(spec: CellSpec) -> str:
    return spec.model_dump_json(exclude=_NO_MATTER)
